"""One elementwise function over many tensors: what C++ computes is what torch computes, for every operation it can print."""

import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

import lowp
from lowp.formats import format as parse_format
from lowp.tensor import kernels
from lowp.tensor.core import decode_operation
from lowp.tensor.lists import compiling
from lowp.tensor.lists.function import LIMIT, ListFunction, Lists, _build
from lowp.tensor.lists.tracing import Element, shortcut

CPU = torch.device("cpu")
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I8, I16, I32, I64 = torch.int8, torch.int16, torch.int32, torch.int64
FLOATS = [
    0.0, 1.0, 1.5, 0.5, 2.5, 3.5, 1 / 3, 0.1, 7.0, 127.0, 128.0, 65504.0, 65519.9, 65520.0, 65536.0, 2.0**-14, 2.0**-24,
    2.0**-25, 1.5 * 2.0**-25, 2.0**-126, 2.0**-127, 2.0**-149, 3.4028235e38, 3.4e38, 2.0**24 + 2, math.inf, math.nan,
]  # fmt: skip
INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    -7,
    100,
    -128,
    127,
    255,
    256,
    -32768,
    32767,
    65535,
    1 << 20,
    -(1 << 20),
    (1 << 31) - 1,
    -(1 << 31),
]


def pairs(values):
    """All pairs of numbers of both signs, in two tensors, and a tail that fills no vector."""
    values = torch.tensor([*values, *(-v for v in values)], dtype=torch.float64)
    grid = torch.cartesian_prod(values, values)
    return grid[:, 0].contiguous().to(F32), grid[:, 1].contiguous().to(F32)


def run_both(function, inputs, outputs, numbers=0, scalars=(), widths=None, tables=(), reductions=(), skip=None, own=None):
    """The same function, plain and compiled; inputs and outputs are lists of tensors, one list for each tensor of the list."""
    elements = tuple(Element(x.dtype) for x in inputs[0]) + tuple(
        Element(*o) if isinstance(o, tuple) else Element(o) for o in outputs
    )
    writes = tuple(range(len(inputs[0]), len(elements)))
    what = ListFunction(function, elements, writes, numbers, len(scalars), tables, reductions)
    numbers_of = torch.zeros((0, len(inputs)), dtype=I32) if own is None else own
    found = []
    for call in (what._plain, _build(what, CPU)):
        rows = []
        for i, row in enumerate(inputs):
            count = row[0].numel()
            blocks = 0 if widths is None or not count else count // widths[i]
            made = [torch.full((blocks if e.of_block else count,), 77, dtype=e.dtype) for e in elements[len(row) :]]
            rows.append([*row, *made])
        lists = Lists(rows, widths)
        reduced = lists.room(len(reductions))
        call(lists, numbers_of, list(scalars), skip, reduced)
        found.append(([row[len(inputs[0]) :] for row in rows], reduced))
    return found


def agree(found, floats=()):
    """Equal bits; where the result is a float (`floats`: its dtype by place), any NaN is like any other."""
    (plain, reduced), (compiled, other_reduced) = found
    for one, other in zip(plain, compiled, strict=True):
        for place, (x, y) in enumerate(zip(one, other, strict=True)):
            if place < len(floats) and floats[place] is not None:
                kind = floats[place]
                both_nan = x.view(kind).isnan() & y.view(kind).isnan()
                x, y = x.masked_fill(both_nan, 0), y.masked_fill(both_nan, 0)
            wrong = (x != y).nonzero().view(-1)
            assert not len(wrong), f"result {place}, element {wrong[0]}: plain {x[wrong[0]]}, compiled {y[wrong[0]]}"
    assert torch.equal(reduced, other_reduced)


def bits(x):
    return x.view({4: I32, 2: I16, 8: I64, 1: I8}[x.dtype.itemsize])


# Operations


def float_operations(a, b):
    return [
        a + b, a - b, a * b, a / b, torch.sqrt(a.abs().to(F64)).to(F32), -a, a.abs(), 1.5 - a, torch.rsub(a, b),
        a.clamp(-1.0, 2.0),
        a.clamp(min=0.0), a.clamp(max=-0.0), a.clamp(min=-1.0), torch.maximum(a, b), torch.minimum(a, b), a.round(), a.floor(),
        torch.where(a < b, a, b), torch.where(a == b, torch.full_like(a, 0.25), b),
        torch.where(a >= b, torch.zeros_like(a), torch.ones_like(a)),
        a * 0.1 + 2.0**-140, torch.full_like(a, math.inf) - b, torch.where(a != a, torch.full_like(a, -0.0), a),
    ]  # fmt: skip


def test_float32():
    a, b = pairs(FLOATS)
    count = len(float_operations(a, b))
    found = run_both(
        lambda x, y, *_: [bits(r) for r in float_operations(x.view(F32), y.view(F32))], [[bits(a), bits(b)]], [I32] * count
    )
    agree(found, [F32] * count)
    for place, wanted in enumerate(float_operations(a, b)):
        mine = found[1][0][0][place].view(F32)
        assert torch.equal(mine.nan_to_num(0.5), wanted.nan_to_num(0.5)), place  # (minus zero is compared above)


def test_square_roots_are_correctly_rounded():
    x = torch.rand(1 << 14, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-64, 64).repeat(128)
    ((plain,), _), ((compiled,), _) = run_both(
        lambda x, *_: [torch.sqrt(x.view(F32).to(F64)).to(F32).view(I32)], [[bits(x)]], [I32]
    )
    wanted = x.double().sqrt().float()
    assert torch.equal(plain[0].view(F32), wanted)
    assert torch.equal(compiled[0].view(F32), wanted)


def test_comparisons_and_truth():
    def function(x, y, *_):
        a, b = x.view(F32), y.view(F32)
        truths = [a == b, a != b, a < b, a <= b, a > b, a >= b]
        truths += [truths[2] & truths[1], truths[2] | truths[0], truths[2] ^ truths[3], ~truths[2]]
        truths += [
            torch.logical_and(truths[0], truths[3]),
            torch.logical_or(truths[0], truths[2]),
            torch.logical_not(truths[4]),
        ]
        truths += [a.to(torch.bool), x.to(torch.bool)]
        return [t.to(I32) for t in truths] + [truths[2].to(I64), truths[2].to(F32).view(I32), truths[2].to(I8)]

    a, b = pairs(FLOATS)
    agree(run_both(function, [[bits(a), bits(b)]], [I32] * 15 + [I64, I32, I8]))


@pytest.mark.parametrize("dtype", [I32, I64])
def test_integers(dtype):
    def function(x, y, *_):
        small = y & 15
        return [
            x + y, x - y, x * (y & 0xFF), x & y, x | y, x ^ y, ~x, -x, x.abs(), 5 - x, x << small, x >> small, x << 3, x >> 7,
            torch.maximum(x, y), torch.minimum(x, y), x.clamp(-100, 200), x.clamp(min=3), x.clamp(max=3),
            torch.where(x > y, x, y),
            torch.where(x == 7, torch.full_like(x, -1), y), (x < y).to(dtype), (x >= 100).to(dtype),
            torch.bitwise_left_shift(x, small), torch.bitwise_right_shift(x, small), x + 0x7FFFFFFF,
            x & -65536, torch.zeros_like(x) + y,
        ]  # fmt: skip

    values = torch.tensor(INTEGERS, dtype=I64)
    grid = torch.cartesian_prod(values, values)
    if dtype == I64:
        grid = grid * torch.tensor([1 << 31, 1])
    a, b = (grid[:, i].to(dtype).contiguous() for i in range(2))
    agree(run_both(function, [[a, b]], [dtype] * 28))


def test_mixed_widths():
    def function(x, y, z, w, *_):
        wide = x.to(I32) * 300 + y.to(I32)
        long = z.to(I64) * w + wide.to(I64)
        return [
            wide, long, wide.to(I8), wide.to(I16), long.to(I32), (x > 3).to(I16), torch.where(x > 3, x, x + 1),
            torch.where(y > 3, long, w), torch.where(w > 0, x, -x), torch.where(z < 5, y, y + y),
            torch.where(x > 0, z, w.to(I32)), z.to(F32).view(I32), w.to(F32).view(I32), w.to(F64).view(I64),
            z.to(F64).to(I32), x.to(F32).view(I32),
        ]  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    x, y, z, w = (
        torch.randint(torch.iinfo(d).min // 2, torch.iinfo(d).max // 2, (333,), dtype=d, generator=generator)
        for d in (I8, I16, I32, I64)
    )
    outputs = [I32, I64, I8, I16, I32, I16, I8, I64, I8, I16, I32, I32, I32, I64, I32, I32]
    agree(run_both(function, [[x, y, z, w]], outputs))


def test_every_half_and_bfloat_number():
    """To float32 and back, all 65536 codes."""

    def function(x, *_):
        half, brain = x.view(F16).to(F32), x.view(BF16).to(F32)
        return [half.view(I32), brain.view(I32), half.to(F16).view(I16), brain.to(BF16).view(I16), half.to(F64).view(I64)]

    codes = torch.arange(-(1 << 15), 1 << 15, dtype=I16)
    agree(run_both(function, [[codes]], [I32, I32, I16, I16, I64]), [F32, F32, F16, BF16, F64])


def test_rounding_to_halves():
    """Ties, subnormals, overflow, NaN: around every 64th half and bfloat number."""

    def function(x, *_):
        a = x.view(F32)
        return [a.to(F16).view(I16), a.to(BF16).view(I16), a.to(F64).view(I64), (a.to(F64) * 1.1).to(F32).view(I32)]

    codes = torch.arange(-(1 << 15), 1 << 15, 64, dtype=torch.int32).to(I16)
    halves, brains = codes.view(F16).float(), codes.view(BF16).float()
    near = [bits(x) + d for x in (halves, brains) for d in (0, 1, -1, 0x1000, 0xFFF, 0x1001, 0x8000, 0x7FFF, 0x8001)]
    a = torch.cat([*near, bits(pairs(FLOATS)[0])])
    agree(run_both(function, [[a]], [I16, I16, I64, I32]), [F16, BF16, F64, F32])


def test_float64():
    """(But for square roots: torch's own, on a CPU, are a unit off now and then.)"""

    def function(x, y, *_):
        a, b = x.view(F32).to(F64), y.view(F32).to(F64)
        results = [a + b, a * b, a / b, a - b, -a, torch.where(a < b, a, b), torch.maximum(a, b), a.clamp(-1.0, 2.0)]
        return [r.view(I64) for r in (*results, a.abs())]

    a, b = pairs(FLOATS)
    agree(run_both(function, [[bits(a), bits(b)]], [I64] * 9), [F64] * 9)


def test_numbers_to_integers():
    def function(x, *_):
        a = x.view(F32)
        return [a.to(I32), a.to(I64), (a * 2.0**20).to(I64), a.to(F64).to(I64), a.to(I64).to(F32).view(I32)]

    a = torch.randn(999, generator=torch.Generator().manual_seed(0)) * 1000
    agree(run_both(function, [[bits(a)]], [I32, I64, I64, I64, I32]))


def test_tables_numbers_scalars_and_places():
    """A decoding table, a number of each tensor's own, the call's scalars, the element's place."""
    decode = decode_operation(parse_format("dynamic8"), F32)
    inputs = [[torch.arange(-128, 128).to(I8)], [torch.arange(50).to(I8)], [torch.empty(0, dtype=I8)]]
    own = torch.tensor([[3, -4, 9], [1 << 30, 5, 7]], dtype=I32)

    def function(x, _, __, numbers, scalars, tables):
        decoded = decode(x, tables).view(F32)
        place = torch.arange(x.numel(), dtype=I32).reshape(x.shape)
        return [(decoded * scalars[1] + scalars[0]).view(I32), place * numbers[0] + numbers[1]]

    agree(run_both(function, inputs, [I32, I32], 2, (0.1, -3.0), tables=decode.tables, own=own), [F32])


# Blocks, reductions, skipping


def test_maxima_of_blocks():
    """A maximum for each block of a row, used by the block's elements; blocks that fill no vector, and long ones."""

    def function(x, _, __, *rest):
        a = x.view(F32)
        most = a.abs().amax(-1, keepdim=True)
        exponent = (most.view(I32) >> 23) - 127
        return [(a / most).view(I32), exponent.to(I8)]

    widths, counts = [1, 7, 16, 48, 4096], [5, 21, 32, 48 * 3, 8192]
    inputs = [[bits(torch.randn(n, generator=torch.Generator().manual_seed(n)))] for n in counts]
    agree(run_both(function, inputs, [I32, (I8, True)], widths=widths), [F32])


@pytest.mark.parametrize("threads", [1, 2])
def test_reductions(threads):
    """Over tensors of all sizes, so many elements that two threads share them."""
    counts = [1, 3, 0, 17, 40_000, 64, 30_001]
    generator = torch.Generator().manual_seed(1)
    inputs = [[torch.randint(0, 1 << 30, (n,), dtype=I32, generator=generator)] for n in counts]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = run_both(lambda x, *_: [x, x.to(I64) * 3, x.to(I64)], inputs, [], reductions=("max", "sum", "sum"))
    finally:
        torch.set_num_threads(before)
    agree(found)
    wanted = [[int(x.amax()) if x.numel() else 0 for (x,) in inputs], [3 * int(x.sum()) for (x,) in inputs]]
    assert found[1][1].tolist()[:2] == wanted


@pytest.mark.parametrize(("flag", "written"), [(0, True), (LIMIT - 1, True), (LIMIT, False), (LIMIT + 5, False)])
def test_skip(flag, written):
    inputs = [[torch.arange(33, dtype=I32)], [torch.arange(5, dtype=I32)]]
    found = run_both(lambda x, *_: [x + 1], inputs, [I32], skip=torch.tensor(flag))
    agree(found)
    for (x,), (y,) in zip(inputs, found[1][0], strict=True):
        assert torch.equal(y, x + 1 if written else torch.full_like(x, 77))


def test_empty_lists():
    empty = [[torch.empty(0, dtype=I32)], [torch.empty(0, dtype=I32)]]
    what = ListFunction(lambda x, *_: [x + 1, x], (Element(I32),), (0,), 0, 0, (), ("max",))
    for policy in ("never", "always"):
        lowp.set_kernel_policy(policy)
        assert what(Lists(empty), torch.zeros((0, 2), dtype=I32), []).tolist() == [[0, 0]]


def test_many_small_tensors_are_worth_a_kernel_at_once():
    """Plain operations take as long for a tensor of a few elements as for thousands: biases and norms of a model are a list."""
    for count, built in ((3, False), (20, True)):
        lowp.set_kernel_policy("auto")
        what = ListFunction(lambda x, *_: [x + 1], (Element(I32),), (0,), 0, 0)
        what(Lists([[torch.zeros(5, dtype=I32)] for _ in range(count)]), torch.zeros((0, count), dtype=I32), [])
        assert ((what, CPU) in kernels._state.kernels) is built


@pytest.mark.parametrize("offset", [0, 5, 32, 65_531, (1 << 20) + 7])
def test_noise_of_long_tensors_and_of_any_beginning(offset):
    """Indices are counted in words of 16 bits, which wrap around: between two vectors, or inside of one."""
    x = torch.linspace(-3, 3, 140_003)
    noise = lowp.Noise(1, step=7, offset=offset)
    found = []
    for policy in ("never", "always"):
        lowp.set_kernel_policy(policy)
        found.append(lowp.quantize(x, "e5m2", "stochastic", seed=noise))
    assert torch.equal(*found)


def test_gradients_in_new_places():
    """`replace` gives a column other tensors."""
    what = ListFunction(lambda x, y, *_: [x + y], (Element(I32), Element(I32)), (0,), 0, 0)
    for policy in ("never", "always"):
        lowp.set_kernel_policy(policy)
        x, first, second = torch.zeros(20, dtype=I32), torch.ones(20, dtype=I32), torch.full((20,), 5, dtype=I32)
        lists = Lists([[x, first]])
        what(lists, torch.zeros((0, 1), dtype=I32), [])
        lists.replace(1, [second], [second.data_ptr()])
        what(lists, torch.zeros((0, 1), dtype=I32), [])
        assert (x == 6).all()


# What cannot be printed


def built_or_refused(function, inputs, outputs, floats=()):
    """Either a refusal to print, or the right numbers: nothing in between."""
    try:
        found = run_both(function, inputs, outputs)
    except (NotImplementedError, TypeError, RuntimeError):
        return  # by the tracer, the printer or the compiler: plain operations serve, and a warning says why
    agree(found, floats)


@pytest.mark.parametrize("function", [
    lambda x, *_: [torch.sin(x.view(F32)).view(I32)],
    lambda x, *_: [x.cumsum(-1).to(I32)],
    lambda x, *_: [torch.remainder(x, 7)],
    lambda x, *_: [torch.exp2(x.view(F32)).view(I32)],
    lambda x, *_: [torch.where(x == 7, -1, x)],
])  # fmt: skip
def test_other_operations_are_refused(function):
    with pytest.raises(NotImplementedError, match=r"aten\.|in C\+\+"):
        run_both(function, [[torch.arange(20, dtype=I32)]], [I32])


@pytest.mark.parametrize("function", [
    lambda x, *_: [torch.add(x, x, alpha=3)],
    lambda x, *_: [torch.sub(x, 5, alpha=3)],
    lambda x, *_: [torch.rsub(x, 5, alpha=3)],
    lambda x, *_: [torch.div(x, 7, rounding_mode="floor")],
    lambda x, *_: [torch.div(x, 7, rounding_mode="trunc")],
    lambda x, *_: [torch.round(x.to(F32) * 0.37, decimals=1).view(I32)],
    lambda x, *_: [torch.logical_and(x, x >> 1).to(I32)],
    lambda x, *_: [torch.logical_not(x).to(I32)],
    lambda x, *_: [x.to(F64).round().to(I32)],
    lambda x, *_: [x.to(I64) * 3],
    lambda x, *_: [x.to(I8)],
    lambda x, *_: [x.to(F32)],
], ids=["add alpha", "sub alpha", "rsub alpha", "floor division", "truncating division", "decimals", "logical and",
        "logical not", "round float64", "wider result", "narrower result", "float result"])  # fmt: skip
def test_variants_are_refused_or_right(function):
    built_or_refused(function, [[torch.arange(-50, 51, dtype=I32)]], [I32])


@pytest.mark.parametrize("function", [
    lambda a: a + a, lambda a: a * 2.0, lambda a: -a, lambda a: a.abs(), lambda a: torch.maximum(a, a * 0),
    lambda a: a.clamp(-1, 1), lambda a: torch.where(a < 0.5, a, a), lambda a: torch.where(a > -1, torch.ones_like(a), a),
], ids=["add", "mul", "neg", "abs", "maximum", "clamp", "compare", "fill"])  # fmt: skip
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_arithmetic_in_16_bits_is_refused_or_right(function, dtype):
    """torch rounds after each operation; what is printed works on codes as integers."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, 0.1, 60000.0, -(2.0**-20), math.inf, math.nan], dtype=dtype)
    built_or_refused(lambda x, *_: [function(x.view(dtype)).view(I16)], [[bits(x)]], [I16], [dtype])


# Compilers


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """No kernels yet, no warning yet, nothing on disk."""
    monkeypatch.setenv("LOWP_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_compiled_before", False)  # the first kernel of a process does not make headers
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))
    return tmp_path


def test_a_broken_compiler_is_told_once(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    x = torch.arange(20, dtype=I32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for add in (1, 2):
            what = ListFunction(lambda x, *_, add=add: [x + add], (Element(I32),), (0,), 0, 0)
            for _ in range(2):
                what(Lists([[x]]), torch.zeros((0, 1), dtype=I32), [])
    assert torch.equal(x, torch.arange(20, dtype=I32) + 6)
    assert len(told) == 1
    assert "could not compile a kernel and goes on with plain operations" in str(told[0].message)
    assert not list(fresh.iterdir())


def test_what_was_built_is_found_again(fresh, monkeypatch):
    what = ListFunction(lambda x, *_: [x * 12345], (Element(I32),), (0,), 0, 0)
    _build(what, CPU)
    (library,) = fresh.iterdir()
    assert library.suffix == ".so"

    def nothing(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling.subprocess, "Popen", nothing)
    x = torch.arange(20, dtype=I32)
    lists = Lists([[x]])
    _build(what, CPU)(lists, torch.zeros((0, 1), dtype=I32), [], None, lists.room(0))
    assert torch.equal(x, torch.arange(20, dtype=I32) * 12345)


PROGRAM = """
import torch
from lowp.tensor.lists.function import ListFunction, Lists, _build
from lowp.tensor.lists.tracing import Element, shortcut
what = ListFunction(lambda x, *_: [x + 1], (Element(torch.int32),), (0,), 0, 0)
x = torch.arange(100, dtype=torch.int32)
lists = Lists([[x]])
_build(what, torch.device("cpu"))(lists, torch.zeros((0, 1), dtype=torch.int32), [], None, lists.room(0))
assert torch.equal(x, torch.arange(100, dtype=torch.int32) + 1)
"""


def test_two_processes_build_the_same_kernels(tmp_path):
    environment = os.environ | {"LOWP_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".so"]


def test_a_shortcut_takes_the_long_way_where_one_element_needs_it():
    """The short way is wrong on purpose where the condition holds; what the long way alone needs stands in a branch."""

    def function(x, target, numbers, scalars, tables):
        return [shortcut(lambda: x + 1, lambda: torch.where(x > 100, x * 3 + 7, x + 1), lambda: x > 100, x)]

    x = torch.arange(70, dtype=I32)
    x[37] = 1000
    (plain, _), (compiled, _) = run_both(function, [[x]], [I32])
    assert torch.equal(plain[0][0], compiled[0][0])
    assert compiled[0][0][37] == 3007
    assert compiled[0][0][36] == 37
