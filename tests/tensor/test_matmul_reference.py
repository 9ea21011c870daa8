"""Products in narrow arithmetic, bit for bit what the scalar reference says: signs of zero and NaN included.

`matmul_reference` is the definition, one exact number at a time. First it is held to figures worked out by hand and to other
implementations; then `lowp.tensor.matmul` is held to it, with plain operations and with kernels.
"""

import functools
import math
import random
from fractions import Fraction
from itertools import product as every

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lowp
from lowp.formats import format, reference
from lowp.tensor.matmul import Arithmetic, conv2d, linear, matmul
from oracle import DETERMINISTIC, same
from tensor import matmul_reference as by_definition

FORMATS = (
    *("e5m2", "e4m3fn", "e3m0", "e2m1fn", "fp16", "bf16", "tf32", "fp32"),
    *("posit8", "posit16_1", "fixed8.8", "int8", "dynamic8", "nf4"),
)
# No minus zero, no subnormals, other biases, more digits or more range than float32 has.
UNUSUAL = ("e4m3fnuz", "e3m3_ns", "e4m3b20", "e6m1b60", "e3m2b-3", "e5m23", "int24", "posit7_5", "posit10_3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INF, NAN = math.inf, math.nan


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def check(got: torch.Tensor, want: np.ndarray, dtype: str, *about) -> None:
    """A tensor holds the reference's numbers, rounded into its dtype."""
    assert got.dtype == DTYPES[dtype]
    assert tuple(got.shape) == want.shape
    want = by_definition.in_dtype(want, dtype)
    wrong = np.argwhere(~same(exact(got), want))
    if len(wrong):
        first = tuple(wrong[0])
        pytest.fail(f"{about}: {len(wrong)} of {want.size} differ; at {first} {exact(got)[first]!r}, not {want[first]!r}")


def check_gradients(call, operands: list[torch.Tensor], d: torch.Tensor, want: tuple[np.ndarray, ...], dtype: str, *about):
    leaves = [operand.clone().requires_grad_() for operand in operands]
    gradients = torch.autograd.grad(call(*leaves), leaves, d)
    for position, (gradient, expected) in enumerate(zip(gradients, want, strict=True)):
        check(gradient, expected, dtype, "gradient of operand", position, *about)


@pytest.fixture(params=["never", pytest.param("always", marks=pytest.mark.slow)])
def policy(request):
    """Plain operations; and kernels, of which each arithmetic builds its own: most of them wait for the long sweeps."""
    lowp.set_kernel_policy(request.param)


kernels_too = pytest.mark.parametrize("policy", ["never", "always"], indirect=True)


# Numbers that tell arithmetics apart


def number(draw: random.Random, fmt: str, dtype: str, kind: str) -> float:
    """A number of the dtype. Kinds: moderate for the format; edges, some at its and float32's ends; specials, some infinite."""
    form = format(fmt)
    scale = math.sqrt(min(form.max, 64.0) / 8)
    sign = draw.choice((1, -1))
    moderate = [
        lambda: draw.gauss(0, scale),  # all digits: products of 48 bits
        lambda: draw.gauss(0, scale) * 2.0 ** draw.randint(-6, 2),
        lambda: sign * draw.choice((0.5, 0.75, 1, 1.125, 1.25, 1.5, 2, 3)),  # ties
        lambda: sign * 2.0 ** draw.randint(-12, 4),
        lambda: sign * 0.0,
    ]
    edges = [
        lambda: sign * form.smallest * draw.choice((0.5, 1, 1.5)),
        lambda: sign * form.max * draw.choice((0.5, 1, 1.03)),
        lambda: sign * draw.choice((2.0**-149, 2.0**-130, 2.0**-24, 2.0**-126, 2.0**100)),
    ]
    rare = {"moderate": moderate, "edges": edges, "specials": [*edges, lambda: sign * draw.choice((INF, NAN))]}[kind]
    value = draw.choice(rare if draw.random() < 0.15 else moderate)()
    return reference.round(float(value), format(dtype))


def matrix(draw: random.Random, shape: tuple[int, ...], fmt: str, dtype: str = "fp32", kind: str = "edges") -> torch.Tensor:
    values = [number(draw, fmt, dtype, kind) for _ in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(DTYPES[dtype])


def in_float32(values: list[float]) -> list[float]:
    return [reference.round(value, format("fp32")) for value in values]


def telling_pair(seed: str, inner: int, fmt: str, dtype: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows (moderate; moderate and cancelling again and again; the same with edges; specials) and two columns."""
    draw = random.Random(seed)
    rows = [matrix(draw, (inner,), fmt, dtype, kind) for kind in ("moderate", "moderate", "edges", "specials")]
    columns = [matrix(draw, (inner,), fmt, dtype, kind) for kind in ("moderate", "edges")]
    half = inner // 2 * 2
    columns[0][1:half:2] = columns[0][0:half:2]
    rows[1][1:half:2] = -rows[1][0:half:2]
    rows[2][1:half:2] = -rows[2][0:half:2] * 1.0625  # all but a little
    return torch.stack(rows), torch.stack(columns, dim=1)


# The reference itself


@pytest.mark.parametrize(
    ("a", "b", "options", "want"),
    [
        # the signs of zero
        ([-0.0], [1.0], {}, 0.0),
        ([-0.0], [1.0], {"rounding": "down"}, -0.0),
        ([1.0, -1.0], [1.0, 1.0], {}, 0.0),
        ([1.0, -1.0], [1.0, 1.0], {"rounding": "down"}, -0.0),
        ([-(2.0**-20)], [1.0], {"accumulate": "e5m2"}, -0.0),
        ([-(2.0**-20)], [1.0], {"accumulate": "int8"}, 0.0),
        ([-0.0], [1.0], {"quire": True, "rounding": "down"}, 0.0),
        ([], [], {"rounding": "down"}, 0.0),
        ([], [], {"quire": True}, 0.0),
        # infinities and NaN
        ([INF, -INF], [1.0, 1.0], {}, NAN),
        ([INF, -INF], [1.0, 1.0], {"quire": True}, NAN),
        ([INF, 1.0], [-1.0, 1.0], {"quire": True}, -INF),
        ([INF], [0.0], {}, NAN),
        ([NAN], [1.0], {"accumulate": "int8"}, NAN),
        ([INF, 1.0], [1.0, -1.0], {"accumulate": "int8"}, 126.0),  # no infinity there: the largest value, which is a number
        ([INF], [1.0], {"accumulate": "posit8"}, NAN),
        ([INF], [1.0], {"multiply": "e2m1fn"}, 6.0),
        # overflow
        ([57344.0] * 2, [1.0] * 2, {"accumulate": "e5m2"}, INF),
        ([57344.0] * 2, [1.0] * 2, {"accumulate": "e5m2", "rounding": "toward_zero"}, 57344.0),
        ([448.0] * 2, [1.0] * 2, {"accumulate": "e4m3fn"}, NAN),
        ([6.0] * 2, [1.0] * 2, {"accumulate": "e2m1fn"}, 6.0),
        ([2.0**20] * 2, [1.0] * 2, {"accumulate": "posit8_0"}, 64.0),
        ([2.0**20], [2.0**20], {"multiply": "e5m2", "accumulate": "fp32"}, INF),
        ([2.0**100, 2.0**100], [2.0**100, -(2.0**100)], {}, INF),  # the first product overflows in the sum
        ([2.0**100, 2.0**100], [2.0**100, -(2.0**100)], {"quire": True}, 0.0),
        # one rounding of the exact sum, not two
        ([1.0, 0.125], [1.0, 1 + 2.0**-23], {"accumulate": "e5m2"}, 1.25),
        ([1.0, 0.125], [1.0, 1 - 2.0**-24], {"accumulate": "e5m2"}, 1.0),
        ([1.0, 2.0**-24 * (1 + 2.0**-23)], [1.0, 1 - 2.0**-24], {}, 1 + 2.0**-23),
        ([2.0**-70, 97.0], [2.0**-70, 172961 * 2.0**-24], {}, 1 + 2.0**-23),  # 97 * 172961 is 2^24 + 1
        ([-(2.0**-70), 97.0], [2.0**-70, 172961 * 2.0**-24], {}, 1.0),
        ([2.0**-70, 97.0], [2.0**-70, 172961 * 2.0**-24], {"multiply": "fp32"}, 1.0),  # but two where the product is rounded
        # the order
        ([1.0] * 16, [1.0] * 16, {"accumulate": "e5m2"}, 8.0),
        ([1.0] * 16, [1.0] * 16, {"accumulate": "e5m2", "chunk": 4}, 16.0),
        ([1.0] * 9, [1.0] * 9, {"accumulate": "e5m2", "chunk": 8}, 8.0),
        ([1.0] * 16, [1.0] * 16, {"accumulate": "e5m2", "kahan": True}, 16.0),
        ([1.0] * 15, [1.0] * 15, {"accumulate": "e5m2", "quire": True}, 16.0),
        ([2.0**60, 1.0, -(2.0**60)], [1.0] * 3, {}, 0.0),
        ([2.0**60, 1.0, -(2.0**60)], [1.0] * 3, {"quire": True}, 1.0),
        # products by the addition of bits
        ([1.5], [-1.5], {"approximate": "integer_add"}, -2.0),
        ([1.25], [1.25], {"approximate": "integer_add"}, 1.5),
        ([2.0**-100], [2.0**-100], {"approximate": "integer_add"}, 0.0),
        ([2.0**-127], [2.0**100], {"approximate": "integer_add"}, 0.0),
        ([2.0**100], [-(2.0**100)], {"approximate": "integer_add"}, -INF),
        ([INF], [2.0**-127], {"approximate": "integer_add"}, NAN),
        ([INF], [-1.5], {"approximate": "integer_add"}, -INF),
        ([NAN], [0.0], {"approximate": "integer_add"}, NAN),
        ([1.25], [1.25], {"approximate": "integer_add", "multiply": "e5m0"}, 2.0),
    ],
)
def test_figures_worked_out_by_hand(policy, a, b, options, want):
    arithmetic = Arithmetic(**options)
    assert same(np.array(by_definition.dot(a, b, arithmetic)), np.array(want))
    check(matmul(torch.tensor(a), torch.tensor(b), **options), np.array(want), "fp32", options)


@pytest.mark.parametrize(
    ("options", "want"),
    [({}, 0.0), ({"rounding": "down"}, -0.0), ({"quire": True, "rounding": "down"}, 0.0), ({"kahan": True}, 0.0)],
)
def test_a_bias_without_products(policy, options, want):
    x, weight, bias = torch.empty(2, 0), torch.empty(3, 0), torch.tensor([-0.0, 1 + 2.0**-10, 70000.0])
    expected = np.array([[want, 1.0, 57344.0 if "rounding" in options else INF]] * 2)
    check(linear(x, weight, bias, accumulate="e5m2", **options), expected, "fp32", options)


ELSEWHERE = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_reference_equals_loops_in_other_libraries(name):
    """Numbers of a format, rounded after every operation, plain and compensated."""
    kind = ELSEWHERE[name]
    generator = np.random.default_rng(0)
    for a, b in zip(*(generator.normal(size=(2, 3, 33)).astype(kind)), strict=True):
        s = compensated = c = kind(0)
        for x, y in zip(a, b, strict=True):
            s = s + x * y
            addend = x * y - c
            t = compensated + addend
            c, compensated = (t - compensated) - addend, t
        assert by_definition.dot(a, b, Arithmetic(multiply=name, accumulate=name)) == float(s)
        assert by_definition.dot(a, b, Arithmetic(multiply=name, accumulate=name, kahan=True)) == float(compensated)


def test_the_reference_equals_the_quire_of_softposit():
    softposit = pytest.importorskip("softposit")
    draw = random.Random(0)
    values = format("posit16_1").values
    for _ in range(20):
        a, b = ([draw.choice(values) for _ in range(9)] for _ in range(2))
        quire = softposit.quire16()
        for x, y in zip(a, b, strict=True):
            quire.qma(softposit.posit16(x), softposit.posit16(y))
        assert by_definition.dot(a, b, Arithmetic(accumulate="posit16_1", quire=True)) == float(quire.toPosit())


# Products of matrices


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "rounded products"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_rounding(policy, fmt, fused):
    a, b = telling_pair(fmt, 11, fmt)
    for rounding in DETERMINISTIC if fused else DETERMINISTIC[::2]:
        options = {"multiply": None if fused else fmt, "accumulate": fmt, "rounding": rounding.value}
        want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
        check(matmul(a, b, **options), want, "fp32", options)


@pytest.mark.parametrize("fmt", UNUSUAL)
def test_unusual_formats(policy, fmt):
    a, b = telling_pair(fmt, 7, fmt)
    for options in ({}, {"multiply": fmt, "rounding": "down"}, {"kahan": True, "rounding": "to_odd"}, {"quire": True}):
        options = {"accumulate": fmt} | options
        want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
        check(matmul(a, b, **options), want, "fp32", options)


@pytest.mark.parametrize("rounding", ["nearest", "down"])
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3fnuz", "int8", "posit8", "fp32"])
def test_signs_of_zero(policy, fmt, rounding):
    """All sums of three zeros and ones of either sign."""
    a, b = torch.tensor(list(every((0.0, -0.0, 1.0, -1.0), repeat=3))), torch.ones(3, 1)
    for options in ({}, {"multiply": fmt, "chunk": 2}, {"kahan": True}, {"quire": True}, {"approximate": "integer_add"}):
        options = {"accumulate": fmt, "rounding": rounding} | options
        want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
        check(matmul(a, b, **options), want, "fp32", options)


def beside_ties(fmt: str) -> tuple[list[float], list[float]]:
    """Sums already reached, and addends that bring them to a tie of the format, a hair above it and a hair below."""
    form = format(fmt)
    starts, addends = [], []
    for low in (1.0, 1.5, form.smallest, form.max):
        near = reference.neighbours(Fraction(reference.round(low, form, "toward_zero")), form)
        for sign in (1, -1):
            for hair in (1, 0, -1):
                starts.append(hair * form.smallest)  # so near to zero that a second rounding would lose it
                addends.append(sign * float(near.tie))
                starts.append(sign * float(near.low))
                gap = float(near.tie - near.low)
                addends.append(sign * gap * (1 + hair * 2.0**-23) if gap >= 2.0**-126 else sign * gap)
    return starts, addends


@pytest.mark.parametrize("fmt", FORMATS)
def test_ties_and_numbers_a_hair_beside_them(policy, fmt):
    starts, addends = (in_float32(values) for values in beside_ties(fmt))
    a = torch.tensor([starts, addends], dtype=torch.float32).t().contiguous()
    factor = 1 - 2.0**-24  # makes an addend of 24 digits one of 48
    b = torch.tensor([[1.0, 1.0], [1.0, factor]])
    for rounding in DETERMINISTIC:
        options = {"accumulate": fmt, "rounding": rounding.value}
        want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
        check(matmul(a, b, **options), want, "fp32", options)


def of_few_digits(draw: random.Random, shape: tuple[int, ...], digits: int, lowest: int, binades: int) -> torch.Tensor:
    """Products and sums of these are exact in float32, or just not: what a faster way may have been chosen by."""
    values = []
    for _ in range(math.prod(shape)):
        significand = draw.choice((0, 1 << digits, (1 << digits) + draw.randrange(1 << digits), (2 << digits) - 1))
        values.append(draw.choice((1, -1)) * float(significand) * 2.0 ** (lowest + draw.randint(0, binades) - digits))
    return torch.tensor(values).reshape(shape)


@pytest.mark.parametrize("fmt", ["e5m2", "e4m3fn", "fp16", "bf16", "tf32", "fp32", "e4m11", "posit8", "int8", "fixed8.8"])
def test_inputs_of_few_digits(policy, fmt):
    draw = random.Random(fmt)
    middle = round(math.log2(format(fmt).smallest)) // 2
    for options in ({}, {"rounding": "up"}, {"multiply": "e4m3fn", "kahan": True}, {"quire": True}):
        options = {"accumulate": fmt} | options
        for digits, binades in ((1, 2), (3, 8), (11, 12), (12, 30)):
            lowest = draw.choice((-3, middle, -60, 30))
            a, b = (of_few_digits(draw, shape, digits, lowest, binades) for shape in ((2, 3), (3, 2)))
            want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
            check(matmul(a, b, **options), want, "fp32", options, digits, binades, lowest)


@pytest.fixture
def flush_denormal():
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush denormals: the trap cannot be tested")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("options", [{}, {"accumulate": "bf16", "multiply": "bf16"}, {"quire": True}], ids=str)
def test_flushing_denormals_changes_nothing(policy, options, request):
    a, b = torch.tensor([[2.0**-149, 3 * 2.0**-140, -(2.0**-127)]]), torch.tensor([[1.0, 2.0**-10], [1.0, 1.0], [0.5, 1.0]])
    want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
    request.getfixturevalue("flush_denormal")
    got = matmul(a, b, **options)
    torch.set_flush_denormal(False)  # for the comparison
    check(got, want, "fp32", options)


SIDES = (
    *((1, 1, 1), (3, 1, 17), (1, 3, 65), (65, 3, 1), (17, 1, 17), (1, 17, 3)),
    *((1, 65, 1), (3, 65, 3), (17, 17, 1), (65, 1, 3), (3, 3, 17), (2, 0, 3), (0, 3, 2)),
)


@kernels_too
@pytest.mark.parametrize(("rows", "inner", "columns"), SIDES)
def test_sides(policy, rows, inner, columns):
    draw = random.Random(f"{rows} {inner} {columns}")
    for options in ({"accumulate": "e5m2"}, {"accumulate": "fp16", "chunk": 16, "multiply": "e4m3fn"}):
        a = matrix(draw, (rows, inner), options["accumulate"])
        b = matrix(draw, (inner, columns), options["accumulate"])
        want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
        check(matmul(a, b, **options), want, "fp32", options)
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
        check(matmul(a, b, **options), want, "fp32", "transposed", options)


def drawn_options(draw: random.Random) -> dict:
    """Any arithmetic that may be asked for."""
    options = {
        "multiply": draw.choice([None, None, *FORMATS, *UNUSUAL]),
        "accumulate": draw.choice([*FORMATS, *FORMATS, *UNUSUAL]),
        "rounding": draw.choice(DETERMINISTIC).value,
        "approximate": draw.choice([None, None, "integer_add"]),
    }
    kind = draw.choice(["plain", "chunk", "kahan", "both", "quire"])
    if kind in ("chunk", "both"):
        options["chunk"] = draw.choice([2, 3, 5, 16, 64, 1000])
    if kind in ("kahan", "both"):
        options["kahan"] = True
    if kind == "quire":
        options["quire"] = True
    return options


def check_drawn(seed: int) -> None:
    draw = random.Random(seed)
    options, dtype, inner = drawn_options(draw), draw.choice(list(DTYPES)), draw.choice([1, 2, 3, 17, 17, 33, 65])
    a, b = telling_pair(f"drawn {seed}", inner, options["accumulate"], dtype)
    want = by_definition.matmul(exact(a), exact(b), Arithmetic(**options))
    check(matmul(a, b, **options), want, dtype, seed, options, inner)


@pytest.mark.parametrize("tens", range(3))
def test_options_crossed(policy, tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check_drawn(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundreds", range(1, 21))
def test_options_crossed_at_length(policy, hundreds):
    for seed in range(100 * hundreds, 100 * hundreds + 100):
        check_drawn(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", ["fp32", "fp16", "bf16", "e5m2", "posit16_1", "int24"])
def test_dtypes(policy, dtype, accumulate):
    """Results are rounded once more where the dtype is narrower than the accumulator."""
    a, b = telling_pair(f"{dtype} {accumulate}", 33, "fp16", dtype)
    want = by_definition.matmul(exact(a), exact(b), Arithmetic(accumulate=accumulate))
    check(matmul(a, b, accumulate=accumulate), want, dtype)


# Batches, layers, gradients

BROADCASTS = (
    *(((7,), (7,)), ((3, 7), (7,)), ((7,), (7, 3)), ((3, 5), (5, 2))),
    *(((4, 3, 5), (5, 2)), ((3, 5), (4, 5, 2)), ((5,), (4, 5, 2)), ((4, 3, 5), (5,))),
    *(((2, 1, 3, 5), (3, 5, 2)), ((2, 3, 2, 3), (2, 1, 3, 2))),
)
GEOMETRIES = (
    ((2, 2, 4, 3), (3, 2, 3, 2), {}),
    ((1, 2, 5, 4), (2, 2, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 2, 6, 7), (2, 2, 2, 3), {"stride": (2, 3), "padding": (0, 2), "dilation": (2, 1)}),
    ((2, 4, 3, 3), (4, 2, 2, 2), {"groups": 2}),
    ((1, 3, 4, 5), (6, 1, 2, 3), {"groups": 3, "padding": "same", "dilation": (1, 2)}),
    ((1, 4, 4, 4), (2, 4, 1, 1), {"padding": "valid", "stride": 2}),
    ((1, 1, 2, 3), (2, 1, 4, 3), {"padding": (2, 1), "stride": 3}),
)
ARITHMETICS = (
    {"accumulate": "e5m2"},
    {"accumulate": "fp16", "multiply": "e4m3fn", "chunk": 4, "rounding": "down"},
    {"accumulate": "bf16", "kahan": True, "chunk": 3},
    {"accumulate": "posit8", "quire": True},
    {"accumulate": "fp32", "approximate": "integer_add"},
)


def check_matmul(draw: random.Random, shapes: tuple, options: dict) -> None:
    """Forwards and backwards; so do the next two."""
    kinds = zip(shapes, ("specials", "edges"), strict=True)
    operands = [matrix(draw, shape, options["accumulate"], kind=kind) for shape, kind in kinds]
    a, b = map(exact, operands)
    arithmetic, call = Arithmetic(**options), functools.partial(matmul, **options)
    want = by_definition.matmul(a, b, arithmetic)
    check(call(*operands), want, "fp32", options)
    d = matrix(draw, want.shape, options["accumulate"])
    check_gradients(call, operands, d, by_definition.matmul_gradients(a, b, exact(d), arithmetic), "fp32", options)


def check_linear(draw: random.Random, shape: tuple, options: dict, dtype: str = "fp32") -> None:
    operands = [matrix(draw, of, options["accumulate"], dtype) for of in (shape, (3, shape[-1]), (3,))]
    x, weight, bias = map(exact, operands)
    arithmetic, call = Arithmetic(**options), functools.partial(linear, **options)
    want = by_definition.linear(x, weight, bias, arithmetic)
    check(call(*operands), want, dtype, options)
    check(call(*operands[:2]), by_definition.linear(x, weight, None, arithmetic), dtype, options)
    d = matrix(draw, want.shape, options["accumulate"], dtype)
    check_gradients(call, operands, d, by_definition.linear_gradients(x, weight, exact(d), arithmetic), dtype, options)


def check_conv2d(draw: random.Random, image: tuple, kernel: tuple, geometry: dict, options: dict, dtype: str = "fp32") -> None:
    operands = [matrix(draw, shape, options["accumulate"], dtype) for shape in (image, kernel, kernel[:1])]
    x, weight, bias = map(exact, operands)
    arithmetic, call = Arithmetic(**options), functools.partial(conv2d, **geometry, **options)
    want = by_definition.conv2d(x, weight, bias, arithmetic, **geometry)
    check(call(*operands), want, dtype, options)
    d = matrix(draw, want.shape, options["accumulate"], dtype)
    gradients = by_definition.conv2d_gradients(x, weight, exact(d), arithmetic, **geometry)
    check_gradients(call, operands, d, gradients, dtype, options)


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_shapes_and_their_gradients(policy, shapes):
    draw = random.Random(str(shapes))
    for options in draw.sample(ARITHMETICS, 2):
        check_matmul(draw, shapes, options)


@pytest.mark.parametrize("options", ARITHMETICS, ids=str)
def test_linear(policy, options):
    for dtype, shape in zip(DTYPES, ((17,), (3, 6), (2, 4, 5)), strict=True):
        check_linear(random.Random(str(options)), shape, options, dtype)


@pytest.mark.parametrize(("image", "kernel", "geometry"), GEOMETRIES, ids=str)
def test_conv2d(policy, image, kernel, geometry):
    draw = random.Random(f"{image} {kernel} {geometry}")
    check_conv2d(draw, image, kernel, geometry, options=draw.choice(ARITHMETICS), dtype=draw.choice(list(DTYPES)))


@pytest.mark.parametrize("policy", ["always"], indirect=True)
def test_kernels_forwards_and_backwards(policy):
    """One arithmetic, whose kernel all of these share."""
    draw, options = random.Random(0), ARITHMETICS[0]
    check_matmul(draw, BROADCASTS[-2], options)
    check_linear(draw, (2, 4, 5), options)
    check_conv2d(draw, *GEOMETRIES[2], options)
    a, b = (of_few_digits(draw, shape, digits=2, lowest=-3, binades=4) for shape in ((3, 17), (17, 17)))
    check(matmul(a, b, **options), by_definition.matmul(exact(a), exact(b), Arithmetic(**options)), "fp32", options)


def test_zeros_outside_of_an_image_meet_infinite_weights(policy):
    """Padding takes part in the products, forwards and backwards: 0 * inf is NaN."""
    x, weight = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    weight[0, 0, 0, 0] = INF
    want = by_definition.conv2d(exact(x), exact(weight), None, Arithmetic(), padding=1)
    assert np.isnan(want).sum() == 5
    check(conv2d(x, weight, padding=1), want, "fp32")
    d = torch.ones(1, 1, 3, 3)
    gradients = by_definition.conv2d_gradients(exact(x), exact(weight), exact(d), Arithmetic(), padding=1)[:2]
    assert np.isnan(gradients[0]).sum() == 5
    check_gradients(lambda x, w: conv2d(x, w, padding=1), [x, weight], d, gradients, "fp32")


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, about its speed
@pytest.mark.parametrize(("image", "kernel", "geometry"), GEOMETRIES, ids=str)
def test_the_reference_convolves_as_torch_does(image, kernel, geometry):
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randint(-3, 4, shape, generator=generator).double() for shape in (image, kernel, kernel[:1])]
    x, weight, bias = (operand.requires_grad_() for operand in operands)
    y = F.conv2d(x, weight, bias, **geometry)
    arithmetic = Arithmetic(accumulate="int16", quire=True)
    assert (by_definition.conv2d(exact(x), exact(weight), exact(bias), arithmetic, **geometry) == exact(y)).all()
    d = torch.randint(-3, 4, y.shape, generator=generator).double()
    gradients = torch.autograd.grad(y, operands, d)
    for got, want in zip(
        by_definition.conv2d_gradients(exact(x), exact(weight), exact(d), arithmetic, **geometry), gradients, strict=True
    ):
        assert (got == exact(want)).all()


# Stochastic rounding: not by value, which is the noise's, but by what each step may become and by the mean

COUNT = 2048


def reachable(a: list[float], b: list[float], arithmetic: Arithmetic) -> set[float]:
    """Every number that a plain sum may end at."""
    sums = {0.0}
    for x, y in zip(a, b, strict=True):
        p = by_definition.exact_product(x, y)
        products = {p} if arithmetic.multiply is None else set(by_definition.neighbours(p, arithmetic.multiply))
        totals = {
            by_definition.add(by_definition.exact(s), by_definition.exact(p), "stochastic") for s in sums for p in products
        }
        sums = {end for t in totals for end in by_definition.neighbours(t, arithmetic.accumulate)}
    return sums


def stochastic_results(a: list[float], b: list[float], options: dict, seed: int = 3) -> np.ndarray:
    """The same sum many times, each with its own noise."""
    left, right = torch.tensor([a] * COUNT), torch.tensor(b)[:, None]
    return exact(matmul(left, right, rounding="stochastic", seed=seed, **options)).ravel()


def assert_mean(results: np.ndarray, want: float) -> None:
    assert abs(results.mean() - want) <= 5 * results.std() / math.sqrt(COUNT) + 1e-12


@pytest.mark.parametrize(
    ("accumulate", "multiply"),
    [
        *[(fmt, None) for fmt in ("e5m2", "e4m3fn", "fp16", "bf16", "fp32", "posit8", "fixed8.8", "nf4")],
        *(("e5m2", "e4m3fn"), ("bf16", "posit8"), ("fp16", "nf4")),
    ],
)
def test_stochastic_steps_go_to_neighbours_and_are_right_on_average(policy, accumulate, multiply):
    options = {"accumulate": accumulate, "multiply": multiply}
    for a, b in (([0.3], [0.7]), ([-0.123], [0.456]), ([0.3, -0.2, 0.11], [0.7, 0.6, 0.5])):
        a, b = in_float32(a), in_float32(b)
        results = stochastic_results(a, b, options)
        assert len(set(results.tolist())) > 1
        assert set(results.tolist()) <= reachable(a, b, Arithmetic(**options, rounding="stochastic"))
        assert_mean(results, math.fsum(x * y for x, y in zip(a, b, strict=True)))


def test_seeds_draw_their_own_noise(policy):
    one, again, other = (stochastic_results([0.3], [0.7], {"accumulate": "e5m2"}, seed) for seed in (3, 3, 4))
    assert (one == again).all()
    assert (one != other).any()
