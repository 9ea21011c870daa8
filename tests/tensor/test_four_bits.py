"""e2m1fn and e4m3fn in NVIDIA's assembly, by numpy (assembly.py), against products and limits in float64, which are exact."""

import ml_dtypes
import numpy as np
import pytest
import torch

from assembly import bits_of, floats, run
from lowp.tensor.lists import byte_codes, four_bits
from lowp.tensor.lists.tracing import Statement, Value

LIMITS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
UP = np.array([False, True, False, True, False, True, False])  # a tie goes to the even rank
ELEMENTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def text_of(operation, arguments):
    """What stands in the kernel: the assembly alone."""
    value = Value("x", torch.float32)
    module = byte_codes if operation in byte_codes.OPERATIONS else four_bits
    return module.triton_expression(Statement(operation, value, (value,) * arguments, torch.float32)).split('"')[1]


def ranks(magnitudes):
    """Of float64 numbers."""
    return (np.where(UP, magnitudes[:, None] >= LIMITS, magnitudes[:, None] > LIMITS)).sum(1)


def limits_and_more():
    """float32 magnitudes: next to limits, all of float16 and bfloat16, for each float16 number those that become it on
    the way, and any."""
    draw = np.random.default_rng(1)
    near = (LIMITS.astype(np.float32).view(np.int32)[:, None] + np.arange(-300, 301)).astype(np.int32).view(np.float32).ravel()
    every = np.arange(1 << 15, dtype=np.uint16)
    halves = every[:0x7C00].view(np.float16).astype(np.float32)
    inner = halves.astype(np.float64) * 2.0**14 / (1 + 2.0**-9)
    inner = np.concatenate([inner * (1 + t) for t in (-(2.0**-12), 0, 2.0**-12)]).astype(np.float32)
    brains = (every[:0x7F80].astype(np.uint32) << 16).view(np.float32)
    any_bits = draw.integers(0, 0x41000000, 1 << 19, dtype=np.uint32).view(np.float32)
    usual = (draw.random(1 << 19) * 12).astype(np.float32)
    found = np.concatenate([near, halves, inner, brains, any_bits, usual, np.zeros(8, np.float32)])
    return found[found < 100]


def signed(numbers):
    """As many as fill columns of eight, with signs."""
    numbers = np.resize(numbers, len(numbers) + -len(numbers) % 8)
    return numbers * np.where(np.random.default_rng(2).random(len(numbers)) < 0.5, -1, 1).astype(np.float32)


def codes_of_word(word):
    """[low 0..3, high 0..3] of four bytes."""
    bytes = word[None] >> np.arange(0, 32, 8, dtype=np.uint64)[:, None] & np.uint64(255)
    return np.concatenate([bytes & np.uint64(15), bytes >> np.uint64(4)]).astype(int)


def check_codes(x, codes, magnitudes):
    wanted = ranks(magnitudes.ravel()).reshape(x.shape) | np.where(np.signbit(x), 8, 0)
    differ = codes != wanted
    assert not differ.any(), (differ.sum(), x[differ][:4], codes[differ][:4], wanted[differ][:4])


def test_to_bytes_with_powers_of_two():
    x, draw = signed(limits_and_more()).reshape(8, -1), np.random.default_rng(3)
    exponents = draw.integers(-126, 128, x.shape)
    with np.errstate(over="ignore", under="ignore"):
        small = np.ldexp(x, -exponents)
    exact = np.isfinite(small) & (np.ldexp(small.astype(np.float64), exponents) == x)
    exponents, small = np.where(exact, exponents, 0), np.where(exact, small, x)
    unit = np.float32(four_bits.UNIT)
    factors = np.ldexp(np.float32(1), exponents).astype(np.float32) * unit
    assert (factors.astype(np.float64) == np.ldexp(four_bits.UNIT, exponents)).all()  # subnormal ones too
    word = run(text_of(four_bits.BYTES, 4), [*map(bits_of, small), *map(bits_of, factors)])
    check_codes(x, codes_of_word(word), np.abs(x.astype(np.float64)))


def test_to_bytes_of_any_number():
    more = np.random.default_rng(4).integers(0, 0x7F800001, 1 << 18, dtype=np.uint32).view(np.float32)  # infinity is the last
    x = signed(np.concatenate([limits_and_more(), more, np.full(8, np.inf, np.float32)])).reshape(8, -1)
    word = run(text_of(four_bits.ALL_BYTES, 2), [*map(bits_of, x)])
    check_codes(x, codes_of_word(word), np.abs(x.astype(np.float64)))


def test_nan_stays_where_it_is():
    x = np.ones((8, 8), np.float32)
    np.fill_diagonal(x, np.nan)
    ones = [np.full(8, bits_of(np.float32(four_bits.UNIT)))] * 8
    for word in (
        run(text_of(four_bits.BYTES, 4), [*map(bits_of, x), *ones]),
        run(text_of(four_bits.ALL_BYTES, 2), [*map(bits_of, x)]),
    ):
        codes = codes_of_word(word)
        assert np.array_equal(codes & 7, np.where(np.eye(8, dtype=bool), 7, 2))


def test_to_bytes_about():
    """Where there is no doubt, products with factors that are off by what is allowed have that rank."""
    draw, y = np.random.default_rng(5), signed(limits_and_more()).reshape(8, -1)
    factors = np.exp(draw.normal(0, 2, y.shape)).astype(np.float32)
    x = (y / factors.astype(np.float64)).astype(np.float32)
    least, most = (factors * np.float32(four_bits.UNIT * (1 + t)) for t in (-four_bits.TOLERANCE, four_bits.TOLERANCE))
    given = [*map(bits_of, x), *map(bits_of, least), *map(bits_of, most)]
    word = run(text_of(four_bits.ABOUT, 4), [*given[:8], *given[16:]])
    doubt, *others = run(text_of(four_bits.DOUBT, 6), given, outputs=4)
    assert not np.array(others).any()
    sure, codes = doubt == 0, codes_of_word(word)
    for error in (-1.5 * 2.0**-23, 0, 1.5 * 2.0**-23):
        exact = np.abs(x.astype(np.float64) * factors) * (1 + error)
        check_codes(x[:, sure], codes[:, sure], exact[:, sure])
    assert sure.mean() > 0.9
    # Elements are in no doubt.
    ones = [bits_of(np.full(8, np.float32(four_bits.UNIT * (1 + t)))) for t in (-four_bits.TOLERANCE, four_bits.TOLERANCE)]
    for numbers, doubtful in ((ELEMENTS, False), (np.append(LIMITS, 5), True)):
        columns = [bits_of(np.full(8, number, np.float32)) for number in numbers]
        for column in columns:
            found = run(text_of(four_bits.DOUBT, 6), [column] * 8 + [ones[0]] * 8 + [ones[1]] * 8, outputs=4)[0]
            assert (found != 0).all() == doubtful


def test_to_numbers():
    bytes = np.arange(256, dtype=np.uint64)
    word = (
        bytes
        | bytes[::-1] << np.uint64(8)
        | (bytes ^ np.uint64(85)) << np.uint64(16)
        | (bytes ^ np.uint64(99)) << np.uint64(24)
    )
    codes = codes_of_word(word)
    found = [
        floats(each) for operation in (four_bits.LOW, four_bits.HIGH) for each in run(text_of(operation, 1), [word], outputs=4)
    ]
    wanted = ELEMENTS[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    assert np.array_equal(np.array(found).view(np.int32), wanted.astype(np.float32).view(np.int32))


def test_a_byte_for_each_code():
    """Signs are those of other bits, of NaN too; what is not finite is the largest."""
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 7.9, -1e30], np.float32)
    x = np.concatenate([signed(limits_and_more()), special]).reshape(4, -1)
    unit = bits_of(np.full(x.shape[1], four_bits.UNIT, np.float32))
    word = run(text_of(byte_codes.FOUR, 3), [*map(bits_of, x), *[unit] * 4, *map(bits_of, x)])
    codes = word[None] >> np.arange(0, 32, 8, dtype=np.uint64)[:, None] & np.uint64(255)
    sizes = np.abs(x.astype(np.float64))
    check_codes(x, codes.astype(int), np.where(sizes < np.inf, sizes, 8))


@pytest.mark.parametrize("finite", [True, False])
def test_a_byte_for_each_code_of_e4m3fn(finite):
    draw = np.random.default_rng(7)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e9, -465], np.float32)
    x = np.concatenate([draw.integers(-(1 << 31), 1 << 31, 1 << 16).astype(np.int32).view(np.float32), special]).reshape(4, -1)
    one = bits_of(np.ones(x.shape[1], np.float32))
    operation = byte_codes.FINITE_EIGHT if finite else byte_codes.EIGHT
    word = run(text_of(operation, 3), [*map(bits_of, x), *[one] * 4, *map(bits_of, x)])
    codes = np.ascontiguousarray(word.astype(np.uint32)).view(np.uint8).reshape(-1, 4).T
    with np.errstate(invalid="ignore"):
        wanted = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) & 127
    wanted = np.where(np.isnan(x) | (np.isinf(x) & finite), 127, wanted) | np.where(np.signbit(x), 128, 0)
    assert np.array_equal(codes, wanted)


def test_scales_about():
    draw = np.random.default_rng(6)
    middles = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middles = (middles[1:] + middles[:-1]) / 2
    near = (middles.astype(np.float32).view(np.int32)[:, None] + np.arange(-40, 41)).astype(np.int32).view(np.float32).ravel()
    numbers = np.concatenate([near, np.exp(draw.normal(0, 3, 1 << 18)).astype(np.float32), np.zeros(1, np.float32)])
    found = run(text_of(byte_codes.ABOUT, 1), [bits_of(numbers)])
    sure, codes = found < 256, found & np.uint64(255)
    for error in (-(2.0**-22), 0, 2.0**-22):
        exact = np.minimum(numbers.astype(np.float64) * (1 + error), 448.0)
        wanted = (exact[:, None] > middles).sum(1)
        ties = np.isin(exact, middles)
        assert not (ties & sure).any()
        assert np.array_equal(codes[sure], wanted[sure])
    assert 0.5 < sure[: len(near)].mean() < 1
    assert sure[len(near) :].mean() > 0.999
