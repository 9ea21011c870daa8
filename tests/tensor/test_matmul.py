"""Products in narrow arithmetic: all ways to compute one give the same bits, in every shape, layout and dtype.

What the bits are is decided in test_matmul_reference.py. Kernels are few here, since each takes a second or two to build.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import lowp
from lowp.tensor.matmul import Arithmetic, conv2d, linear, matmul
from lowp.tensor.matmul.arithmetic import name_of, named
from lowp.tensor.matmul.facts import NOTHING, Facts, facts_of
from lowp.tensor.matmul.job import MatmulJob
from lowp.tensor.matmul.keys import keys_of
from lowp.tensor.matmul.lanes import Operands, choices, cuts, steps_of
from lowp.tensor.matmul.plain import run
from lowp.tensor.noise import key_tensor

CPU = torch.device("cpu")


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of NaN."""
    equal = (x == y) & (torch.signbit(x) == torch.signbit(y))
    return x.dtype == y.dtype and x.shape == y.shape and bool((equal | (x.isnan() & y.isnan())).all())


def numbers(*shape: int, seed: int = 0, scale: float = 1.0, format: str | None = None) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))) * scale
    return x if format is None else lowp.quantize(x, format)


def both(call) -> tuple[torch.Tensor, torch.Tensor]:
    """With plain operations, and with kernels."""
    lowp.set_kernel_policy("never")
    plain = call()
    lowp.set_kernel_policy("always")
    return plain, call()


NASTY = torch.tensor(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.125,
        2.0**-149,
        -(2.0**-126),
        3e38,
        -3e38,
        torch.inf,
        -torch.inf,
        torch.nan,
        2.0**-16,
        448.0,
        5e4,
        1e-3,
    ]
)


# --- The lanes: what lanes.py proves, tried out ---------------------------------------------------------------------------


def in_lanes(job: MatmulJob, operands: Operands, which: int) -> torch.Tensor:
    """The job's result in the lanes of one choice, by plain operations (in which nothing is fused)."""
    lanes = choices(job.arithmetic)[which].lanes
    steps = steps_of(job.arithmetic, lanes)
    tables = tuple(table.tensor(CPU) for table in steps.tables)
    uniforms = cuts(job.arithmetic, operands, lanes.bins, CPU) if steps.uniforms else torch.empty(0, dtype=torch.float64)
    return run(job, steps, uniforms, tables)


@pytest.mark.parametrize("rounding", ["nearest", "nearest_away", "up"])
@pytest.mark.parametrize("accumulate", ["e5m2", "e4m3fn", "fp16", "bf16", "posit8", "fixed8.8", "e3m0", "int8"])
def test_float32_lanes_are_right_where_they_say_so(accumulate, rounding):
    """Ties with something tiny beside them are frequent among numbers of few digits and many exponents."""
    arithmetic = Arithmetic(accumulate=accumulate, rounding=rounding)
    used = set()
    for scale, inputs in ((0.02, "e5m2"), (1.0, "e5m2"), (60.0, "e5m2"), (1.0, "int8"), (1.0, "posit8")):
        a, b = numbers(16, 20, scale=scale, format=inputs), numbers(20, 16, seed=1, scale=scale, format=inputs)
        job = MatmulJob(a, b, None, arithmetic, lowp.Noise(0), 0)
        operands = job.operands()
        right = in_lanes(job, operands, -1)
        for which, choice in enumerate(choices(arithmetic)[:-1]):
            if choice.condition(operands):
                used.add(which)
                assert same(in_lanes(job, operands, which), right), (scale, choice.lanes)
    assert used or (accumulate, rounding) == ("bf16", "up")  # which overflows elsewhere than float32


def test_a_quire_is_exact_in_any_number_of_bins():
    """More bins than numbers reach up to, too."""
    arithmetic = Arithmetic(accumulate="posit16_1", quire=True)
    a = torch.tensor([[2.0**80, 1.0, -(2.0**80), 2.0**-10], [3.0, -(2.0**80), 0.125, 2.0**80]])
    job = MatmulJob(a, torch.ones(4, 1), None, arithmetic, lowp.Noise(0), 0)
    operands = job.operands()
    enough = [i for i, choice in enumerate(choices(arithmetic)) if choice.condition is None or choice.condition(operands)]
    assert len(enough) > 2
    for which in enough:
        assert in_lanes(job, operands, which).flatten().tolist() == [1 + 2.0**-10, 3.125], which


def test_a_tie_with_something_tiny_beside_it_needs_sums_to_odd():
    """1.125 * 2^8 lies between two numbers of e5m2, and 2^-16 decides; float32 has no room for both."""
    a, b = torch.tensor([[2.0**-16, 1.125 * 2.0**4]]), torch.tensor([[1.0], [2.0**4]])
    arithmetic = Arithmetic(accumulate="e5m2")
    operands = MatmulJob(a, b, None, arithmetic, lowp.Noise(0), 0).operands()
    plain, odd = choices(arithmetic)[:2]
    assert not plain.condition(operands)
    assert odd.condition(operands)
    for result in both(lambda: matmul(a, b, accumulate="e5m2")):
        assert result.item() == 1.25 * 2.0**8


def test_facts():
    x = torch.tensor([0.0, -1.5, 2.0**-149, torch.inf, torch.nan, -6.0])
    assert facts_of(x) == Facts(top=3, low=-149, digits=2)
    assert facts_of(torch.tensor([0.0, torch.nan])) == NOTHING
    assert facts_of(torch.tensor([1 + 2.0**-23])) == Facts(1, -23, 24)
    assert facts_of(torch.tensor([3.4028234663852886e38])) == Facts(128, 104, 24)


def test_the_default_is_the_chips_own_multiply_add():
    assert [c.condition for c in choices(Arithmetic())] == [None]
    a, b = numbers(5, 33), numbers(33, 18)
    for result in both(lambda: matmul(a, b)):
        torch.testing.assert_close(result, a @ b)


# --- Kernels --------------------------------------------------------------------------------------------------------------

KERNELS = (
    {"accumulate": "e5m2"},
    {"accumulate": "fp32"},
    {"accumulate": "e4m3fn", "multiply": "e5m2", "kahan": True, "chunk": 4, "rounding": "stochastic"},
    {"accumulate": "posit8", "quire": True},
    {"accumulate": "fixed8.8", "approximate": "integer_add", "chunk": 7},
)


@pytest.mark.parametrize("options", KERNELS, ids=str)
def test_kernels_compute_what_plain_operations_do(options):
    """All tails, a batch of which one side is broadcast, a bias, numbers that lead to each of the lanes, and nasty ones."""
    shapes = [((1, 1), (1, 1)), ((3, 17), (17, 3)), ((17, 3), (3, 65)), ((65, 17), (17, 1)), ((2, 1, 3, 5), (3, 5, 33))]
    for left, right in shapes:
        a, b = numbers(*left, format="e5m2"), numbers(*right, seed=1, format="e5m2")
        assert same(*both(lambda a=a, b=b: matmul(a, b, **options))), (left, right)
    x, weight, bias = numbers(6, 9, format="e5m2"), numbers(20, 9, format="e5m2"), numbers(20)
    assert same(*both(lambda: linear(x, weight, bias, **options)))
    for a, b in ((numbers(5, 16) * 2.0**60, numbers(16, 7) * 2.0**-70), (NASTY.expand(4, 16), NASTY.outer(numbers(7)))):
        assert same(*both(lambda a=a, b=b: matmul(a, b, **options)))


def test_kernels_take_any_layout():
    a, b = numbers(40, 60, format="e5m2")[3:23:2, 5:45].mT, numbers(20, 90, format="e5m2")[::2, 1:80:3]
    plain, compiled = both(lambda: matmul(a, b, accumulate="e5m2"))
    assert same(plain, compiled)
    assert same(compiled, matmul(a.contiguous(), b.contiguous(), accumulate="e5m2"))


def test_threads_share_the_work():
    a, b = numbers(70, 64, format="e5m2"), numbers(64, 70, seed=1, format="e5m2")
    plain, compiled = both(lambda: matmul(a, b, accumulate="e5m2"))
    assert a.shape[0] * b.numel() > 1 << 16
    assert same(plain, compiled)


def test_subnormal_numbers_count_whatever_the_thread_was_told():
    a, b = torch.tensor([[2.0**-140]]), torch.tensor([[2.0**20]])
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    try:
        for result in both(lambda: matmul(a, b)):
            assert result.item() == 2.0**-120
    finally:
        torch.set_flush_denormal(False)


# --- Shapes and dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *(((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 5)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5))),
        *(((2, 1, 3, 4), (5, 4, 2)), ((3, 0), (0, 2)), ((0, 3), (3, 2))),
    ],
)
def test_shapes_are_those_of_torch(left, right):
    a, b = numbers(*left), numbers(*right)
    result, expected = matmul(a, b), torch.matmul(a, b)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_computed_as_their_numbers_and_rounded_once(dtype):
    a, b = numbers(5, 9).to(dtype), numbers(9, 4).to(dtype)
    for accumulate in ("fp32", "e5m2", "posit16"):
        result = matmul(a, b, accumulate=accumulate)
        assert result.dtype == dtype
        assert same(result, matmul(a.float(), b.float(), accumulate=accumulate).to(dtype))


def test_numbers_that_float32_does_not_hold_are_rounded_to_it():
    result = matmul(torch.tensor([[2.0**100]]), torch.tensor([[2.0**100]]), accumulate="posit16_4")
    assert result.item() == torch.inf
    assert matmul(torch.tensor([2.0**-100]), torch.tensor([2.0**-45]), accumulate="posit16_4").item() == 2.0**-145


# --- Gradients ------------------------------------------------------------------------------------------------------------


def gradients(call, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in operands]
    result = call(*leaves)
    return torch.autograd.grad(result, leaves, numbers(*result.shape, seed=5).to(result.dtype))


@pytest.mark.parametrize(
    ("left", "right"), [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2))]
)
def test_gradients_are_those_of_torch(left, right):
    a, b = numbers(*left), numbers(*right)
    for ours, theirs in zip(gradients(matmul, a, b), gradients(torch.matmul, a, b), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_products_in_the_same_arithmetic():
    """Over a broadcast batch they are one sum over (batch, row)."""
    a, b, options = numbers(2, 3, 4), numbers(4, 5), {"accumulate": "e5m2", "multiply": "e4m3fn", "chunk": 2, "kahan": True}
    of_a, of_b = gradients(lambda a, b: matmul(a, b, **options), a, b)
    d = numbers(2, 3, 5, seed=5)
    assert same(of_a, matmul(d, b.T, **options))
    assert same(of_b, matmul(a.reshape(6, 4).T, d.reshape(6, 5), **options))
    x, weight, bias = numbers(6, 4), numbers(5, 4), numbers(5)
    _, _, of_bias = gradients(lambda *given: linear(*given, **options), x, weight, bias)
    ones = torch.ones(1, 6)
    assert same(of_bias, matmul(ones, numbers(6, 5, seed=5), **{**options, "multiply": None}).squeeze(0))


@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2},
        {"padding": "same", "dilation": (2, 1)},
        {"stride": 3, "padding": 1, "groups": 4},
        {"padding": "valid"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions_are_those_of_torch(geometry):
    groups = geometry.get("groups", 1)
    x, weight, bias = numbers(3, 4, 7, 6), numbers(8, 4 // groups, 3, 2), numbers(8)
    torch.testing.assert_close(conv2d(x, weight, bias, **geometry), F.conv2d(x, weight, bias, **geometry))
    torch.testing.assert_close(conv2d(x[0], weight, **geometry), F.conv2d(x[0], weight, **geometry))
    ours = gradients(lambda *given: conv2d(*given, **geometry), x, weight, bias)
    theirs = gradients(lambda *given: F.conv2d(*given, **geometry), x, weight, bias)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_pieces_of_a_convolution_are_the_whole(monkeypatch):
    """A few images or channels at a time: the same sums and the same noise."""
    from lowp.tensor.matmul import convolution

    x, weight, bias = numbers(3, 4, 5, 6), numbers(6, 2, 2, 3), numbers(6)
    call = lambda *given: conv2d(*given, groups=2, accumulate="e5m2", rounding="stochastic", seed=3)  # noqa: E731
    whole = [call(x, weight, bias), *gradients(call, x, weight, bias)]
    monkeypatch.setattr(convolution, "_PATCH_ELEMENTS", 1)
    for piecewise, expected in zip([call(x, weight, bias), *gradients(call, x, weight, bias)], whole, strict=True):
        assert same(piecewise, expected)


def test_a_convolution_of_one_pixel_is_a_linear_layer():
    x, weight, bias, options = numbers(4, 5, 3, 2), numbers(6, 5), numbers(6), {"accumulate": "e5m2", "chunk": 2}
    image = conv2d(x, weight[:, :, None, None], bias, **options)
    assert same(image.permute(0, 2, 3, 1), linear(x.permute(0, 2, 3, 1), weight, bias, **options))


# --- Noise ----------------------------------------------------------------------------------------------------------------


def test_noise_is_the_documented_draw():
    noise = lowp.Noise(3, 4, 5, 6)
    keys = keys_of(noise, 2, 9, 100, CPU)
    for r in (0, 8):
        far = lowp.Noise(3, 4, 5, ((1 << 32) + 2 * (1 << 30) + r) * (1 << 30) + 6)
        assert torch.equal(keys[r], key_tensor(far, 0, CPU))
    with_tensors = keys_of(lowp.Noise(torch.tensor(3), torch.tensor(4), 5, 6), 2, 9, 100, CPU)
    assert torch.equal(keys, with_tensors)


def test_noise_differs_between_seeds_steps_and_gradients_and_is_repeated():
    a, b = numbers(8, 30), numbers(30, 8)
    call = lambda seed: matmul(a, b, accumulate="e5m2", rounding="stochastic", seed=seed)  # noqa: E731
    results = [call(seed) for seed in (0, 1, lowp.Noise(0, 1), lowp.Noise(0, 0, 1), lowp.Noise(0, offset=1))]
    assert all(not torch.equal(x, y) for i, x in enumerate(results) for y in results[:i])
    assert torch.equal(call(lowp.Noise(0, torch.tensor(1))), results[2])
    assert torch.equal(call((1 << 64) - 1), call(-1))
    with pytest.raises(ValueError, match="2\\^30 elements"):
        call(lowp.Noise(0, offset=1 << 30))


# --- Compiled graphs ------------------------------------------------------------------------------------------------------


def test_compiled_functions_have_the_same_bits_and_one_graph_for_all_steps():
    own = lowp.format("e5m2")

    def loss(x, weight, bias, step):
        hidden = linear(x, weight, bias, accumulate=own, rounding="stochastic", seed=lowp.Noise(3, step, 7))
        image = conv2d(hidden.view(1, 1, 3, 4), weight[None, None, :2, :2], padding="same", accumulate="fp16", kahan=True)
        return image.sum() + matmul(hidden, weight, accumulate="posit8", quire=True).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for step in range(3):
        given = [numbers(3, 5, seed=step), numbers(4, 5), numbers(4)]
        leaves = [x.clone().requires_grad_() for x in given]
        with torch._dynamo.config.patch(error_on_recompile=True):
            result = compiled(*leaves, torch.tensor(step))
            found = torch.autograd.grad(result, leaves)
        other = [x.clone().requires_grad_() for x in given]
        expected = loss(*other, torch.tensor(step))
        assert same(result, expected)
        assert all(same(one, two) for one, two in zip(found, torch.autograd.grad(expected, other), strict=True))


def test_the_operations_are_registered_soundly():
    a, b, bias = (numbers(*shape).requires_grad_() for shape in ((2, 3), (3, 4), (4,)))
    rest = ("e5m2", [0, 0, 0, 0, 0], None, None)
    torch.library.opcheck(torch.ops.lowp.matmul.default, (a, b, bias, *rest, 0))
    x, weight = numbers(2, 2, 4, 5).requires_grad_(), numbers(4, 1, 2, 2).requires_grad_()
    torch.library.opcheck(torch.ops.lowp.conv2d.default, (x, weight, bias, [1, 2], [1, 1], 2, *rest))


# --- Arithmetic and mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": "fp16"}, "fp16"),
        ({"accumulate": "posit8", "quire": True}, "posit8 quire"),
        ({"accumulate": "e5m2", "multiply": "e4m3fn", "chunk": 64}, "e5m2, multiply e4m3fn, chunk 64"),
        ({"approximate": "integer_add"}, "fp32 integer_add"),
        ({"accumulate": "fixed8.8", "kahan": True, "rounding": "stochastic"}, "fixed8.8 kahan, rounding stochastic"),
    ],
)
def test_an_arithmetic_is_data_with_a_short_text(options, text):
    arithmetic = Arithmetic(**options)
    assert str(arithmetic) == text
    assert Arithmetic.parse(text) == arithmetic == Arithmetic(**arithmetic.options)
    assert hash(Arithmetic.parse(text)) == hash(arithmetic)
    assert named(name_of(arithmetic)) == arithmetic
    with pytest.raises(dataclasses.FrozenInstanceError):
        arithmetic.chunk = 2


def test_two_codebooks_of_one_name_are_not_confused():
    for value in (0.5, 0.25):
        own = lowp.CodebookFormat("matmul_own", (-1.0, -value, 0.0, 1.0))
        if value == 0.5:
            assert matmul(torch.tensor([0.4]), torch.tensor([-1.0]), accumulate=own).item() == -0.5
        else:
            with pytest.raises(ValueError, match="two different arithmetics are both called 'matmul_own'"):
                matmul(torch.tensor([0.4]), torch.tensor([-1.0]), accumulate=own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": "e4m3fm"}, "did you mean 'e4m3fn'"),
        ({"accumulate": "mxfp8_e4m3"}, "accumulate=mxfp8_e4m3 is a block format"),
        ({"multiply": "e8m0fnu"}, "multiply=e8m0fnu has no negative numbers"),
        ({"accumulate": "e4m3_ns_nz"}, "has no zero"),
        ({"chunk": 0}, "chunk counts products"),
        ({"quire": True, "kahan": True}, "nothing for kahan to compensate"),
        ({"quire": True, "chunk": 2}, "chunk=2 has no meaning"),
        ({"rounding": "neerest"}, "did you mean 'nearest'"),
        ({"approximate": "integer-add"}, "did you mean 'integer_add'"),
    ],
)
def test_mistakes_in_the_arithmetic(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**options)
    with pytest.raises(ValueError, match=message):
        matmul(torch.ones(1), torch.ones(1), **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: matmul(torch.ones(2).double(), torch.ones(2).double()), TypeError, "not torch.float64"),
        (lambda: matmul(torch.ones(2), torch.ones(2).half()), TypeError, "one dtype"),
        (lambda: matmul(torch.ones(2), [1.0, 2.0]), TypeError, "takes tensors, not list"),
        (lambda: matmul(torch.ones(2), torch.ones(())), ValueError, "b is a single number"),
        (lambda: matmul(torch.ones(2, 3), torch.ones(2, 3)), ValueError, "3 columns meet 2 rows"),
        (lambda: matmul(torch.ones(2, 1, 3), torch.ones(3, 3, 1)), ValueError, "do not broadcast"),
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 2)), ValueError, "does not fit a weight"),
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), ValueError, "a bias of shape"),
        (lambda: conv2d(torch.ones(2, 3), torch.ones(1, 1, 1, 1)), ValueError, "takes images"),
        (lambda: conv2d(torch.ones(1, 3, 4, 4), torch.ones(2, 3, 1, 1), groups=2), ValueError, "3 channels in 2 groups"),
        (lambda: conv2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3)), ValueError, "does not fit 2"),
        (lambda: conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), stride=0), ValueError, "stride is an integer"),
        (lambda: conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), stride=2, padding="same"), ValueError, "stride of 1"),
        (lambda: conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), padding="some"), ValueError, "unknown padding"),
    ],
)  # fmt: skip
def test_mistakes_in_the_operands(call, error, message):
    with pytest.raises(error, match=message):
        call()
