"""Kernels of block formats, printed for CUDA and run by Triton's interpreter: the bits of the integers of block.py.

Assembly is run by numpy (assembly.py). Other conversions of a chip's own, which the interpreter does not have, are left out:
tests/gpu/test_block_kernels_cuda.py has these.
"""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))

from test_part_kernels_triton import as_for_cuda

from interpreter import needs_triton, run

CASES = [  # (the interpreter truncates where it should round to bfloat16)
    ("mxfp8_e4m3", torch.float32, "raise", False), ("mxfp6_e3m2", torch.float32, "saturate", True),
    ("nvfp4", torch.float32, "raise", True), ("nvfp4", torch.float16, "saturate", False),
    ("mxfp4", torch.float16, "zero", False), ("block(int8, 16, e5m2, fp32)", torch.float32, "saturate", False),
]  # fmt: skip


WITH_ASSEMBLY = [
    ("mxfp8_e4m3", torch.float32, "raise", False), ("mxfp8_e4m3", torch.float16, "raise", False, True),
    ("mxfp4", torch.float32, "saturate", False), ("mxfp4_rceil", torch.float32, "raise", False),
    ("mxfp4", torch.float16, "zero", True), ("nvfp4", torch.float32, "saturate", False), ("nvfp4", torch.float16, "zero", True),
]  # fmt: skip
taken = set()  # the operations that were printed


def interpret(operation, device, with_assembly=False):
    """What `triton_blocks.build` does, without a GPU."""
    from assembly import by_numpy
    from lowp.tensor.lists import triton, triton_blocks

    right = triton.expression

    def interpreted(s):
        taken.add(s.operation)
        return by_numpy(right(s))

    head = "from assembly import packed\n" + triton_blocks._HEAD
    with (
        as_for_cuda(with_assembly),
        patch.object(triton, "expression", interpreted),
        patch.object(triton_blocks, "_HEAD", head),
    ):
        call = triton_blocks.build(operation, device)

    def kernel(*arguments):
        call(*arguments)
        return True

    return kernel


def check_all(name, dtype, nan, pack, saturate=False):
    import lowp
    from block_cases import check, check_stochastic, numbers

    fmt, x = lowp.format(name), numbers().to(dtype)
    x = torch.cat([x[:2000], x[-3000:]])
    noise = lowp.Noise(3, 4, 5, 6)
    for y, axis in ((x, -1), (x[1:2000].view(1, 1999), -1), (x[-2400:].view(4, 3, 200), 1)):
        check(y, fmt, saturate, nan, axis, packs=(pack,))
        check_stochastic(y, fmt, saturate, nan, noise, axis, pack)


def settle_all():
    """All elements in doubt, and what few operations find is wrong."""
    import lowp
    from block_cases import check, check_stochastic, numbers
    from lowp.tensor import block_draws, block_quotients

    drawn = block_draws.drawn

    def wrong(*arguments):
        element, unsure = drawn(*arguments)
        return element * 0.0 + 1.0, (unsure | ~unsure)

    with patch.object(block_draws, "drawn", wrong):
        check_stochastic(numbers()[-3000:], lowp.format("nvfp4"), False, "zero", lowp.Noise(7))

    def wrong_of(right):
        def found(*arguments):
            result, unsure, *more = right(*arguments)
            return result * 0, (unsure | ~unsure), *more

        return found

    for name in ("scale", "code", "rounded"):  # functions of which each can be in doubt
        with patch.object(block_quotients, name, wrong_of(getattr(block_quotients, name))):
            check(numbers()[-3000:], lowp.format("block(e2m1fn, 16, e4m3fn, fp32)"), False, "zero")


@needs_triton
def test_what_is_printed_for_cuda():
    run(__file__)


if __name__ == "__main__":
    from lowp.tensor import block_kernels, block_stages
    from lowp.tensor.kernels import set_kernel_policy
    from lowp.tensor.lists import byte_codes

    set_kernel_policy("always")
    with patch.object(block_kernels, "_build", interpret):
        for case in CASES:
            print(*case, flush=True)
            check_all(*case)
        settle_all()
    block_stages.block_operation.cache_clear()  # others, with kernels of their own
    with patch.object(block_kernels, "_build", partial(interpret, with_assembly=True)):
        for case in WITH_ASSEMBLY:
            print(*case, "with assembly", flush=True)
            check_all(*case)
    assert {*byte_codes.OPERATIONS} <= taken
