"""Messages on a GPU: kernels over all parts, in Triton, give the bytes of the codec's own operations on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))
import test_part_kernels
from test_part_kernels import MORE, WITH_KERNEL, check, check_fold, next_to_ties, policy  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("format", "rounding", "scale"), WITH_KERNEL + MORE)
def test_kernels_give_the_bytes_of_a_cpu(policy, format, rounding, scale):  # noqa: F811
    check(format, rounding, scale, device="cuda")


def test_numbers_next_to_ties(policy):  # noqa: F811
    """Quotients in float32 leave some of these in doubt: they take the exact way."""
    check("nvfp4", "nearest", "local", device="cuda", numbers=next_to_ties)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["e5m2", "mxfp4"])
def test_sixteen_bit_gradients(policy, format, dtype):  # noqa: F811
    check(format, "nearest", "aps", dtype, "cuda")


@pytest.mark.parametrize(("format", "rounding", "scale"), WITH_KERNEL)
def test_a_sum_is_encoded_as_it_is_added(policy, format, rounding, scale):  # noqa: F811
    check_fold(format, rounding, scale, "cuda")


@pytest.mark.parametrize("sizes", [(6000, 4096, 10_003, 8192, 37), (6000, 4096, 10_004, 8192, 40)], ids=["loose", "even"])
@pytest.mark.parametrize(
    ("format", "scale"),
    [
        ("e5m2", "local"),
        ("e4m3fn", "none"),
        ("e2m1fn", "block:32"),
        ("mxfp8_e4m3", "local"),
        ("mxfp4", "local"),
        ("nvfp4", "local"),
    ],
)
def test_full_items(policy, format, scale, sizes, monkeypatch):  # noqa: F811
    """Large parts, of layers that begin at multiples of 4 and of others: ways without masks, several numbers at once."""
    monkeypatch.setattr(test_part_kernels, "SIZES", sizes)
    check(format, "nearest", scale, device="cuda")
    check_fold(format, "nearest", scale, "cuda")
