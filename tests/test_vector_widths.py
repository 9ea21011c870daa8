"""Kernels have the same bits whatever the length of the processor's vectors.

The compiler chooses the length (lowp/tensor/lists/preamble.py). LOWP_MARCH makes it compile for another processor: tests of
kernels against plain operations run again in a process of their own, with vectors shorter than this processor's.
"""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lowp.tensor.lists import cpp
from lowp.tensor.lists.preamble import preamble

LANES = {"x86-64": 4, "x86-64-v3": 8, "x86-64-v4": 16}  # 32-bit numbers in a register; x86-64-v3 has AVX2, -v4 AVX-512
KERNELS = (  # of every file that prints C++ one or two
    "tensor/test_eager.py::test_kernels_have_the_bits_of_the_plain_operations[quantize-e4m3fn-torch.float16-{}]",
    "tensor/test_eager.py::test_kernels_have_the_bits_of_the_plain_operations[quantize-posit8-torch.float32-{}]",
    "tensor/test_lists.py::test_mixed_widths",
    "tensor/test_lists.py::test_float64",
    "tensor/test_lists.py::test_rounding_to_halves",
    "tensor/test_block_kernels.py::test_kernels_equal_the_integers[mxfp6_e3m2]",
    "tensor/test_block_kernels.py::test_stochastic_kernels_equal_the_integers[nvfp4]",
    "tensor/test_matmul.py::test_kernels_take_any_layout",
    "optim/test_optimizer_kernels.py::test_kernels_and_plain_operations_have_the_same_bits[adamw-default-stochastic-bfloat16-mixed]",
    "wire/test_part_kernels.py::test_kernels_give_the_same_bytes[e2m1fn-nearest-block:32]",
    "wire/test_part_kernels.py::test_a_sum_is_encoded_as_it_is_added[e3m0-stochastic-local]",
    "wire/test_adaptive.py::test_kernels_are_the_plain_operations[nearest-torch.float32]",
    "wire/test_adaptive.py::test_kernels_are_the_plain_operations[stochastic-torch.bfloat16]",
    "wire/test_top_k.py::test_the_largest_are_those_that_sorting_finds[auto-normal]",
)
MORE = (
    "tensor/test_eager.py", "tensor/test_lists.py", "tensor/test_block_kernels.py", "tensor/test_matmul.py",
    "tensor/test_small_tables.py", "optim/test_optimizer_kernels.py", "wire/test_part_kernels.py", "wire/test_adaptive.py",
    "wire/test_top_k.py",
)  # fmt: skip


def lanes_with(march: str | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many 32-bit numbers a vector has in what is compiled."""
    monkeypatch.delenv("LOWP_MARCH", raising=False)
    if march is not None:
        monkeypatch.setenv("LOWP_MARCH", march)
    text = f'{preamble()}\nextern "C" void run(int32_t* lanes) {{ *lanes = LANES; }}'
    found = ctypes.c_int32()
    cpp.build(text, [ctypes.c_void_p])(ctypes.byref(found))
    return found.value


def narrower() -> list[str]:
    """Processors with shorter vectors that this one can stand in for."""
    if platform.machine() != "x86_64":
        return []
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    return ["x86-64", "x86-64-v3"] if {"avx512f", "avx512bw"} <= {*flags} else ["x86-64"] if "avx2" in flags else []


@pytest.mark.parametrize("march", narrower())
def test_the_length_is_that_of_the_processor_compiled_for(march, monkeypatch):
    assert lanes_with(march, monkeypatch) == LANES[march] < lanes_with(None, monkeypatch)


def run(march: str, tests: tuple[str, ...], *options: str, seconds: int) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, *(str(folder / test) for test in tests)], env=os.environ | {"LOWP_MARCH": march}, cwd=folder.parent,
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("march", narrower()[-1:])  # the next shorter length; below, all of them
def test_shorter_vectors_have_the_same_bits(march):
    run(march, KERNELS, seconds=800)


@pytest.mark.slow
@pytest.mark.parametrize("march", narrower())
def test_shorter_vectors_have_the_same_bits_in_all_tests_of_kernels(march):
    run(march, MORE, "-m", "not gpu", seconds=3500)
