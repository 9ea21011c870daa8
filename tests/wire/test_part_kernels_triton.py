"""Kernels over the parts of messages, printed for CUDA and run by Triton's interpreter: the bytes and numbers of the C++ ones.

The assembly of e2m1fn is run by numpy (assembly.py). For other formats a chip's own conversions and assembly are left out:
tests/gpu/test_parts_cuda.py has these.
"""

import contextlib
from functools import partial
from unittest.mock import patch

import torch

from interpreter import needs_triton, run

CASES = [
    ("e5m2", "local"), ("e4m3fn", "none"), ("e2m1fn", "block:32"), ("mxfp8_e4m3", "local"), ("mxfp4", "local"),
    ("nvfp4", "local"), ("nvfp4", "none"), ("posit8", "aps"),
]  # fmt: skip
SIZES = (37, 64, 1, 300, 5)
EVEN = (64, 320, 16, 40, 4)  # layers that begin at multiples of 4
OTHER_SCALE = "block(e2m1fn, 16, e4m3fn)"  # no power of two, and none of the whole tensor
ROWS = 8  # tiles of an item: few, so that there are several items


@contextlib.contextmanager
def as_for_cuda(with_assembly=False):
    """What is traced is what would be traced on a GPU, without instructions, which the interpreter does not know."""
    from lowp.tensor import backend

    with patch.dict(backend.PRINTED, cpu=backend.TRITON_8_BITS if with_assembly else backend.GPU_GRAPH):
        yield


taken = set()  # the operations that were printed


def interpreted(s):
    """`triton.expression`, with assembly that is run by numpy."""
    from assembly import by_numpy

    taken.add(s.operation)
    return by_numpy(EXPRESSION(s))


def read_byte(base, place, mask):
    return f"tl.load({base} + {place}{f', mask={mask}, other=0' if mask else ''})"


def write_byte(base, place, value, mask):
    return f"tl.store({base} + {place}, {value}{f', mask={mask}' if mask else ''})"


def interpret(
    function, source, target, table, numbers=None, of_layer=None, maxima=None, messages=1, message_stride=0, with_assembly=False
):
    """What `TritonPartsKernel` does, without a GPU."""
    from lowp.tensor.lists import parts_triton, triton
    from lowp.tensor.lists.parts_triton import _TritonParts, loose_columns

    with as_for_cuda(with_assembly):
        each, finish, tables = function.trace(torch.device("cpu"))
    loose = loose_columns(function, table)
    with (
        patch.object(parts_triton, "_read_byte", read_byte),
        patch.object(parts_triton, "_write_byte", write_byte),
        patch.object(parts_triton, "expression", interpreted if with_assembly else parts_triton.expression),
    ):
        text = _TritonParts(function, each, finish, len(tables), ROWS, loose, False, messages == 1).text()
    records, nothing = table.records(function.tile, ROWS), torch.zeros(1, dtype=torch.int32)
    given = [nothing if x is None else x for x in (numbers, nothing.float() if of_layer is None else of_layer)]
    layers = 0 if of_layer is None else of_layer.shape[-1]
    target = nothing if target is None else target
    kernel = triton.build("from assembly import packed\n" + text)[(records.shape[1],)]
    kernel(
        source.view(torch.uint8), target.view(torch.uint8), records, records.shape[1], table.parts, *given, layers,
        nothing if maxima is None else maxima, messages, message_stride, *tables,
    )  # fmt: skip


def both(function, table, target, *arguments, maxima=None, **more):
    """Run a function in C++ and as Triton into `target`, or for its maxima: the same bits must come out. Returns them."""
    source, *rest = arguments
    found = []
    ways = [partial(interpret, function, with_assembly=choice) for choice in ((False, True) if four_bits else (False,))]
    for way in (function.kernel(table), *ways):
        out, most = (None if x is None else x.clone() for x in (target, maxima))
        way(source, out, table, *rest, maxima=most, **more)
        found.append(
            out if most is None else most if out is None else torch.cat([out.view(torch.uint8), most.view(torch.uint8)])
        )
    for each in found[1:]:
        assert torch.equal(found[0].view(torch.uint8), each.view(torch.uint8))
    return found[0]


four_bits = False  # is it e2m1fn that is checked now, which has assembly?


def check(format, scale, sizes=SIZES, numbers_of=None):
    import test_part_kernels

    from lowp.wire import part_kernels
    from lowp.wire.codec import codec_of
    from lowp.wire.messages import Messages
    from lowp.wire.plan import Layer, chunks_of

    codec = codec_of(format, "nearest", scale)
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate(sizes))
    (chunk,) = chunks_of(layers, 1, (1 << 20, 1 << 20))
    laid = Messages(chunk.shards, lambda part: part.codec, [0])
    (group,) = laid.groups
    cpu, parts = torch.device("cpu"), len(sizes)
    numbers_of = numbers_of or test_part_kernels.numbers_of
    table, x, factors = group.table(cpu), numbers_of(sum(sizes)), torch.tensor([1.0, 0.5, 2.0, 1.0, 4.0])
    encode = part_kernels.encode_function(codec, torch.float32, known=not codec.sends_peaks)
    known = torch.zeros(max(encode.numbers, 1), parts, dtype=torch.int32)
    if any(codec.measures):
        group.measure(x, codec.measures, known)
    zeros = torch.zeros(parts, dtype=torch.int32)
    empty = torch.zeros(laid.length, dtype=torch.uint8)
    message = both(encode, table, empty, x, known, factors, maxima=zeros if encode.maxima else None)[: laid.length]
    both(part_kernels.decode_function(codec, torch.float32), table, torch.zeros_like(x), message, None, factors)
    stride = -(-laid.length // 16) * 16
    rows = torch.zeros(2, stride, dtype=torch.uint8)
    rows[:, : laid.length] = message
    fold = part_kernels.fold_function(codec)
    for messages in (1, 2):
        known, more = (
            torch.zeros(max(fold.numbers, 1), parts, dtype=torch.int32),
            {"messages": messages, "message_stride": stride},
        )
        if any(codec.measures):
            function = part_kernels.measure_sum_function(codec)
            most = torch.zeros(sum(codec.measures), parts, dtype=torch.int32)
            known[: sum(codec.measures)] = both(function, table, None, rows.view(-1), maxima=most, **more).view_as(most)
        both(fold, table, empty, rows.view(-1), known, **more)


@needs_triton
def test_what_is_printed_for_cuda():
    run(__file__)


if __name__ == "__main__":
    from test_part_kernels import next_to_ties

    from lowp.tensor.kernels import set_kernel_policy
    from lowp.tensor.lists import byte_codes, triton
    from lowp.tensor.lists import four_bits as of_four_bits

    EXPRESSION = triton.expression
    set_kernel_policy("always")
    more = [("e2m1fn", "local", SIZES), ("e5m2", "local", EVEN), ("mxfp4", "local", EVEN)]
    more += [(OTHER_SCALE, "local", SIZES)]
    ties = [(*case, SIZES, next_to_ties) for case in (("nvfp4", "local"), ("e2m1fn", "block:32"))]
    for case in [*CASES, *more, *ties]:
        print(*case[:3], flush=True)
        four_bits = case[0] in ("e2m1fn", "mxfp4", "nvfp4", OTHER_SCALE)
        check(*case)
    assert {*of_four_bits.OPERATIONS, byte_codes.ABOUT} <= taken
