"""`adaptive:<bits>`: the format against a reference that was written from its description alone; kernels against plain
operations; what it costs, what it keeps, that it is unbiased where it says so."""

import hashlib
import math

import numpy as np
import pytest
import ranks
import torch

import lowp
from lowp.tensor.kernels import building, set_kernel_policy
from lowp.tensor.noise import Domain
from lowp.wire import adaptive, adaptive_tables
from lowp.wire.codec import codec_of
from lowp.wire.codec_group import PartNoise
from lowp.wire.compressor import Compressor
from lowp.wire.messages import Messages
from lowp.wire.plan import Layer, chunks_of
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

# The reference: numpy and Python, a group at a time, from the docstring of lowp/wire/adaptive.py.

STEPS = (0, 3, 6, 9, 13, 17, 21, 25)
MINUS = [0x9E3779B97F4A7C15 >> i & 1 for i in range(64)]


def hadamard(x):
    x = list(x)
    for distance in (32, 16, 8, 4, 2, 1):
        for i in range(64):
            if not i & distance:
                x[i], x[i + distance] = x[i] + x[i + distance], x[i] - x[i + distance]
    return x


def curve(fine):
    """Seven bits for a magnitude in 1 / 4096 of the scale: straight lines between knots of an error function, every 1/4."""
    knots = [min(65535, round(65536 * math.erf((fine // 1024 + k) / 4 / (1.62 * math.sqrt(2))))) for k in (0, 1)]
    return (knots[0] + ((knots[1] - knots[0]) * (fine % 1024) >> 10)) >> 9


CURVE = [curve(fine) for fine in range(32768)]


def mean_of(width, code):
    """Of a normal number's magnitude, in 1 / 4096, within the interval of the upper `width` bits of a code without its sign."""
    inside = np.array([i + 0.5 for i in range(32768) if CURVE[i] >> (8 - width) == code])
    weights = np.exp(-((inside / 4096) ** 2) / 2)
    return round(float((inside * weights).sum() / weights.sum()))


MEANS = {(width, code): mean_of(width, code) for width in range(1, 9) for code in range(1 << (width - 1))}


def scale_of(x):
    """s, None for zeros, inf for what is not finite."""
    largest = max(abs(float(value)) for value in x)
    if not all(math.isfinite(value) for value in x):
        return math.inf
    if largest < 2.0**-149:
        return None
    shift = min(126, max(-126, math.frexp(largest)[1] - 1))
    squares = [value * value for value in x * np.float32(2.0**-shift)]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [a + b for a, b in zip(squares[:half], squares[half:], strict=True)]
    mantissa, exponent = math.frexp(float(squares[0]))
    mantissa, exponent = mantissa * 2, exponent - 1
    quarter = 2 * exponent + sum(mantissa > float(np.float32(2.0**q)) for q in (0.25, 0.75)) - 12
    s = min(4 * 126, 4 * shift + quarter)
    return s if s >= -4 * 126 else None


def grouped(part):
    filled = np.concatenate([part, np.zeros(-len(part) % 64, np.float32)])
    return filled.reshape(-1, 64)


def headers(scales):
    """A part's byte and those of its groups."""
    known = [s for s in scales if s is not None]
    if math.inf in known:
        return 255, [0] * len(scales)
    if not known:
        return 0, [0] * len(scales)
    top = math.ceil(max(known) / 4)
    return top + 127, [0 if s is None else max(0, 255 + s - 4 * top) for s in scales]


def widths_of(part_bytes, group_bytes, layers, planes):
    """By trying levels from above."""
    priorities = [
        None if byte == 0 else (byte - 255) + 3 * (part - 127) - layer.bit_length() // 2
        for part, groups, layer in zip(part_bytes, group_bytes, layers, strict=True)
        for byte in groups
    ]

    least = min(2, planes // len(priorities) - 1) if priorities else 0

    def at(level):
        return [0 if p is None else sum(k < least or p >= level + step for k, step in enumerate(STEPS)) for p in priorities]

    level = 1024
    while level > -1024 and sum(at(level - 1)) <= planes:
        level -= 1
    widths, more, left = at(level), at(level - 1), planes - sum(at(level))
    for i, (width, wider) in enumerate(zip(widths, more, strict=True)):
        if wider > width and left > 0:
            widths[i], left = width + 1, left - 1
    return widths


def lengths(sizes, bits):
    groups = sum(-(-size // 64) for size in sizes)
    payload = -(-(len(sizes) + groups) // 8) * 8
    return groups, payload, max(math.floor(bits * groups) - payload // 8, min(1, groups))


def reference_message(parts, layers, bits):
    every = [grouped(part) for part in parts]
    scales = [[scale_of(group) for group in groups] for groups in every]
    part_bytes, group_bytes = zip(*(headers(s) for s in scales), strict=True)
    _, payload, planes = lengths([len(part) for part in parts], bits)
    widths = iter(widths_of(part_bytes, group_bytes, layers, planes))
    header = bytes(part_bytes) + bytes(byte for own in group_bytes for byte in own)
    message = bytearray(header + bytes(payload - len(header)))
    for numbers, part, own in zip(every, part_bytes, group_bytes, strict=True):
        for group, byte in zip(numbers, own, strict=True):
            width = next(widths)
            if not width:
                continue
            s = byte - 255 + 4 * (part - 127)
            signed = [-v if minus else v for v, minus in zip(group * np.float32(2.0 ** -(s // 4)), MINUS, strict=True)]
            factor = np.float32(512 * 2.0 ** (-(s % 4) / 4))
            codes = []
            for value in hadamard(signed):
                scaled = value * factor
                codes.append(CURVE[min(32767, int(abs(scaled)))] | (128 if scaled < 0 else 0))
            for plane in range(width):
                bits_of_plane = sum((code >> (7 - plane) & 1) << i for i, code in enumerate(codes))
                message += bits_of_plane.to_bytes(8, "little")
    return bytes(message) + bytes(payload + 8 * planes - len(message))


def reference_numbers(message, sizes, layers, bits):
    _, payload, planes = lengths(sizes, bits)
    counts = [-(-size // 64) for size in sizes]
    part_bytes, rest, group_bytes = message[: len(sizes)], message[len(sizes) :], []
    for count in counts:
        group_bytes.append(rest[:count])
        rest = rest[count:]
    widths = iter(widths_of(part_bytes, group_bytes, layers, planes))
    place, found = payload, []
    for part, own, size in zip(part_bytes, group_bytes, sizes, strict=True):
        numbers = []
        for byte in own:
            width = next(widths)
            read = [int.from_bytes(message[place + 8 * p : place + 8 * p + 8], "little") for p in range(width)]
            place += 8 * width
            values = [0] * 64
            for i in range(64 if width else 0):
                code = 0
                for plane in read:
                    code = code << 1 | (plane >> i & 1)
                sign, code = code >> (width - 1), code & ((1 << (width - 1)) - 1)
                values[i] = -MEANS[width, code] if sign else MEANS[width, code]
            s = byte - 255 + 4 * (part - 127) if byte else 0
            unit = np.float32(2.0 ** ((s % 4) / 4) / 32768)
            for value, minus in zip(hadamard(values), MINUS, strict=True):
                numbers.append(np.float32(-value if minus else value) * unit * np.float32(2.0 ** (s // 4)))
        found.append(np.array([math.nan] * size if part == 255 else numbers[:size], np.float32))
    return found


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "one number": [1.0],
    "a group": [normal(0, 64)],
    "zeros between": [normal(1, 100), torch.zeros(70), normal(2, 3) * 1e-3],
    "energies": [normal(3, 2000) * torch.linspace(-8, 3, 2000).exp2(), normal(4, 130) * 30],
    "tails": [normal(5, 700) ** 5, torch.ones(64), torch.arange(65.0)],
    "huge": [normal(6, 128) * 1e38, normal(7, 64)],
    "tiny": [normal(8, 200) * 1e-37, torch.full((64,), 1e-41), normal(9, 64) * 1e-30],
    "not finite": [normal(10, 100), torch.tensor([1.0, math.nan, 2.0]), torch.tensor([math.inf] * 70), normal(11, 65)],
    "empty": [torch.zeros(0), normal(12, 10)],
}


@pytest.mark.parametrize("bits", [1.0, 2.5, 4.0, 7.3, 8.0])
@pytest.mark.parametrize("case", CASES)
def test_bytes_and_numbers_are_those_of_the_description(case, bits):
    parts = [torch.as_tensor(part, dtype=torch.float32).view(-1) for part in CASES[case]]
    layers = [1000 * (i + 1) for i in range(len(parts))]
    layout = adaptive.AdaptiveLayout.of([part.numel() for part in parts], layers, [bits] * len(parts), stochastic=False)
    out = torch.full((layout.length,), 77, dtype=torch.uint8)
    adaptive.encode(parts, layout, out)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference_message([part.numpy() for part in parts], layers, bits)
    assert bytes(out.tolist()) == expected
    found = [torch.full_like(part, 5.0) for part in parts]
    adaptive.decode(out, layout, found)
    with np.errstate(over="ignore"):
        numbers = reference_numbers(expected, [part.numel() for part in parts], layers, bits)
    for own, other in zip(found, numbers, strict=True):
        other = np.clip(other, -adaptive.F32_MAX, adaptive.F32_MAX)
        np.testing.assert_array_equal(own.numpy(), other)


def test_the_tables_are_those_of_the_first_version():
    """They are computed, and must be the same on every machine."""
    tables = [*adaptive_tables.curve(), adaptive.values(False).view(-1).tolist(), adaptive.values(True).view(-1).tolist()]
    tables += [adaptive.encode_factors(s).tolist() for s in (False, True)]
    tables += [adaptive.decode_units(s).view(-1).tolist() for s in (False, True)]
    digest = hashlib.sha256(repr([list(table) for table in tables]).encode()).hexdigest()
    assert digest[:16] == "44a5993284634a3c"


# Kernels.

SIZES = (1, 7, 64, 130, 1000, 0, 2049)


def mixed(count, dtype, seed):
    x = normal(seed, count) * normal(seed + 1, count).mul(4).exp()
    x[::7], x[1::11], x[2::13], x[-200:] = 0.0, -0.0, 1e-42, 0.0
    return x.clamp(-6e4, 6e4).to(dtype)


def worked(codec, x, shards, divisor=3):
    """The bytes of three ranks, their mean, their header bytes; factors of layers are taken back."""
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate(SIZES))
    (chunk,) = chunks_of(layers, shards, (1 << 20, 700))
    messages = Messages(chunk.shards, lambda part: part.codec, [shard.start for shard in chunk.shards])
    factors = torch.tensor([2.0**i for i in range(len(SIZES))])
    buffer = torch.full((3, messages.length), 99, dtype=torch.uint8)
    for rank in range(3):
        noises = PartNoise(Domain.WIRE, 7, 1, 0, 0, rank)
        messages.encode(x.roll(64 * rank), buffer[rank], factors, noises=noises)
    mean = torch.full((chunk.size,), 5.0, dtype=x.dtype)
    messages.decode(buffer.view(-1), mean, factors.reciprocal(), divisor, 3, messages.length)
    return buffer, mean, messages.peaks(buffer.view(-1), 3, messages.length)


@pytest.fixture
def compiled_kernels():
    set_kernel_policy("auto")  # conftest.py says "never"
    yield
    set_kernel_policy("never")


@pytest.mark.parametrize(
    ("rounding", "dtype"),
    [("nearest", torch.float32), ("stochastic", torch.bfloat16), ("nearest", torch.float16)],
    ids=str,
)
def test_kernels_are_the_plain_operations(rounding, dtype, compiled_kernels):
    for bits, shards, bad in ((1.5, 3, False), (2.5, 1, False), (4.0, 2, True), (8.0, 3, False)):
        codec, x = codec_of(f"adaptive:{bits}", rounding), mixed(sum(SIZES), dtype, 3)
        if bad:
            x[100], x[900] = math.nan, math.inf
        set_kernel_policy("never")
        plain = worked(codec, x, shards)
        set_kernel_policy("auto")
        with building():
            compiled = worked(codec, x, shards)
        for one, other in zip(plain, compiled, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert (plain[1] == 0).any()
        assert not (plain[1].view(torch.int16 if dtype.itemsize == 2 else torch.int32)[plain[1] == 0] != 0).any()  # no -0.0


# What it costs, and what it keeps.


def error(found, exact):
    found, exact = found.double(), exact.double()
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("bits", [1.0, 2.4, 4.4, 8.0])
def test_messages_take_the_bits_that_were_asked_for(bits, world):
    shapes = {"weight": torch.Size([400, 300]), "bias": torch.Size([300]), "head": torch.Size([10, 400])}
    sent, of_fp32 = VirtualExchange(max(2, world), shapes, f"adaptive:{bits}").bytes_sent()
    assert 0.95 * bits < 32 * sent / of_fp32 < 1.02 * bits + 0.01  # groups that are not full


@pytest.mark.parametrize(("bits", "bound"), [(1.125, 0.37), (2.125, 0.123), (3.125, 0.036), (4.125, 0.0099), (6.125, 0.00068)])
def test_normal_numbers_of_one_size_have_the_error_of_their_width(bits, bound):
    """The best quantizers of 1 to 6 bits have .363, .1175, .0345, .0095, .00064; scales cost .125 bits."""
    x = normal(0, 1 << 16)
    found = lowp.VirtualWorld(1).all_reduce([x], f"adaptive:{bits}", reduction="one_shot")
    assert 0.9 * bound < error(found, x) < bound * 1.02


def test_bits_go_where_the_energy_is():
    """Numbers whose size changes by 2^8 over the tensor: far below the error of 4 bits for all."""
    x = normal(1, 1 << 16) * torch.linspace(-4, 4, 1 << 16).exp2()
    found = lowp.VirtualWorld(1).all_reduce([x], "adaptive:4.125", reduction="one_shot")
    assert error(found, x) < 0.0095 / 4


def test_a_layer_of_small_gradients_is_not_starved():
    """Two layers, one 2^5 times larger: by energy alone the other would have an error of .24."""
    gradients = {"large": normal(2, 1 << 15), "small": normal(3, 1 << 15) * 2.0**-5}
    found = lowp.VirtualWorld(1).all_reduce([gradients], "adaptive:4.125", reduction="one_shot")
    assert error(found["large"], gradients["large"]) < 0.0007
    assert error(found["small"], gradients["small"]) < 0.15


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_powers_of_two_change_nothing(power, rounding):
    x = normal(4, 1000)
    world = lowp.VirtualWorld(1)
    one, other = (world.all_reduce([y], "adaptive:3", rounding=rounding) for y in (x, x * 2.0**power))
    assert torch.equal(one * 2.0**power, other)


def test_zeros_stay_and_huge_numbers_stay_finite():
    world = lowp.VirtualWorld(2)
    assert torch.equal(world.all_reduce([torch.zeros(100)] * 2, "adaptive:2").view(torch.int32), torch.zeros(100).int())
    assert world.all_reduce([torch.zeros(0)] * 2, "adaptive:2").numel() == 0
    huge = world.all_reduce([torch.full((64,), 3e38), torch.zeros(64)], "adaptive:2")
    assert huge.isfinite().all()


@pytest.mark.parametrize("bits", [1.25, 3.0, 6.0])
def test_stochastic_rounding_is_unbiased(bits):
    """The mean of many two_shot sums of the same numbers, over seeds and places, is the exact sum within 5 standard errors of
    each number; and along the sum itself, where the noise of single numbers averages out, it leans to no side: at 6 bits, .05 %
    would be seen."""
    seeds, rows, world = 6, 1000, 2
    own = [normal(rank, 64).abs() + 0.5 for rank in range(world)]
    exact, many = sum(own).double(), [numbers.repeat(rows) for numbers in own]
    every = torch.cat(
        [
            lowp.VirtualWorld(world).all_reduce(many, f"adaptive:{bits}", rounding="stochastic", seed=seed).view(rows, 64)
            for seed in range(seeds)
        ]
    ).double()
    deviation = every.std(0) / len(every) ** 0.5
    assert ((every.mean(0) - exact).abs() < 5 * deviation).all()
    along = (every @ exact) / (exact @ exact)
    sure = 5 * float(along.std()) / len(every) ** 0.5
    assert abs(float(along.mean()) - 1) < sure
    assert bits < 6 or sure < 0.0005


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_striped_shards_have_all_numbers_once_and_a_share_of_every_layer(shards):
    codec = codec_of("adaptive:4")
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate((1, 70, 0, 64 * 8 * 20, 100_000, 63)))
    for chunk in chunks_of(layers, shards, (60_000, 5_000)):
        chosen = torch.cat([shard.take(torch.arange(chunk.size)) for shard in chunk.shards])
        assert torch.equal(chosen.sort().values, torch.arange(chunk.size))
        sizes = [shard.size for shard in chunk.shards]
        assert max(sizes) - min(sizes) <= 64 * 3  # a group, and those that are not full
        large = [sum(part.size for part in shard.parts if part.layer == 4) for shard in chunk.shards]
        assert max(large) - min(large) <= 64 * 4
        back = torch.empty(chunk.size)
        for shard in chunk.shards:
            shard.put(shard.take(torch.arange(chunk.size)).float(), back)
        assert torch.equal(back, torch.arange(chunk.size).float())


SHAPES = {"weight": torch.Size([120, 130]), "bias": torch.Size([33]), "head": torch.Size([10, 77]), "norm": torch.Size([5])}
REAL = [
    {"format": "adaptive:3.3", "reduction": "two_shot"},
    {"format": "adaptive:4", "reduction": "ring", "rounding": "stochastic"},
    {"format": "adaptive:4", "reduction": "hierarchical(2)", "error_feedback": True, "chunk": 9000},
    {"format": "adaptive:2", "reduction": "by_size", "layers": {"head": "adaptive:6"}, "kahan": True},
]


def gradients_of(rank, step):
    return {name: normal(100 * rank + 10 * step + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def real_steps(rank):
    found = []
    set_kernel_policy("auto")
    for case in REAL:
        compressor = Compressor(SHAPES, Settings.of(**case))
        with building():
            found += [compressor.reduce(gradients_of(rank, step)) for step in range(2)]
        compressor.close()
    return found


def test_real_ranks_with_kernels_are_virtual_ones_with_plain_operations():
    everybody = ranks.run(real_steps, 3)
    for number, case in enumerate(REAL):
        exchange = VirtualExchange(3, SHAPES, Settings.of(**case))
        for step in range(2):
            virtual = exchange.reduce(lambda rank, step=step: gradients_of(rank, step))
            for real in everybody:
                for name, total in virtual.items():
                    assert torch.equal(total, real[2 * number + step][name]), (case, step, name)


def test_steps_are_the_same_after_a_resume():
    """Nothing but residuals and the number of the step is remembered."""
    shapes = {"weight": torch.Size([30, 40]), "bias": torch.Size([7])}
    settings = Settings.of("adaptive:3", rounding="stochastic", error_feedback=True)

    def gradients(step):
        return {name: normal(step, *shape) for name, shape in shapes.items()}

    def steps(compressor, numbers):
        return [compressor.reduce(gradients(step)) for step in numbers]

    with ranks.alone():
        whole, first, second = (Compressor(shapes, settings) for _ in range(3))
        expected = steps(whole, range(4))
        begun = steps(first, range(2))
        second.load_state_dict(first.state_dict())
        resumed = begun + steps(second, range(2, 4))
        for compressor in (whole, first, second):
            compressor.close()
    for one, other in zip(expected, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in shapes)


def test_it_shares_a_bucket_with_other_formats_and_scales():
    shapes = {"a": torch.Size([500]), "b": torch.Size([300]), "c": torch.Size([200]), "d": torch.Size([100])}
    layers = {"b": "adaptive:6", "c": "adaptive:8", "d": "fp32"}
    exchange = VirtualExchange(3, shapes, "e4m3fn", scale="aps", layers=layers)
    own = [{name: normal(10 * rank + i, *shape) for i, (name, shape) in enumerate(shapes.items())} for rank in range(3)]
    found = exchange.reduce(own.__getitem__, mean=False)
    errors = {name: error(found[name], sum(each[name].double() for each in own)) for name in shapes}
    assert errors["a"] < 0.004
    assert errors["b"] < 0.004
    assert errors["c"] < 0.0005
    assert errors["d"] < 1e-12


@pytest.mark.parametrize(
    ("format", "rounding", "said"),
    [
        ("adaptive", "nearest", "adaptive:<bits for each number>"),
        ("adaptive:x", "nearest", "say adaptive:4"),
        ("adaptive:-3", "nearest", "adaptive:<bits"),
        ("adaptive:0.5", "nearest", "1 to 8 bits for each number, not 0.5"),
        ("adaptive:9", "nearest", "1 to 8 bits"),
        ("adaptive:4", "up", "'nearest' or 'stochastic', not 'up'"),
        ("adaptive:1", "stochastic", "at least 1.25 bits, not 1"),
    ],
)
def test_what_cannot_be_is_refused(format, rounding, said):
    with pytest.raises(ValueError, match=said):
        Settings.of(format, rounding=rounding)


def test_it_is_written_as_it_was_asked_for():
    assert str(codec_of("adaptive:2.50")) == "adaptive:2.5"
    assert str(codec_of("adaptive:4", "stochastic")) == "adaptive:4/stochastic"
