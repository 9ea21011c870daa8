"""AMX that is announced and cannot be configured: recognised from what the kernel says of the processor."""

import subprocess
import sys

import pytest

from lowp.processor import amx_is_broken

TEXT = "processor\t: 0\ncpuid level\t: {level}\nwp\t\t: yes\nflags\t\t: fpu avx512f {flags}\nbugs\t\t:\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("level", "flags", "broken"),
    [
        ("28", "amx_bf16 amx_tile", True),
        ("32", "amx_bf16 amx_tile", False),
        ("28", "avx512_bf16", False),
        ("", "amx_tile", False),
    ],
)
def test_amx_is_broken_without_the_leaf_of_its_tiles(tmp_path, level, flags, broken):
    file = tmp_path / "cpuinfo"
    file.write_text(TEXT.format(level=level, flags=flags))
    assert amx_is_broken(str(file)) is broken
    assert not amx_is_broken(str(tmp_path / "none"))


def test_a_product_in_bfloat16_does_not_end_the_process():
    code = "import lowp, torch; torch.nn.Linear(8, 8).bfloat16()(torch.ones(8, 8).bfloat16())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
