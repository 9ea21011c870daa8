"""Stochastic rounding: right on average, even far under the smallest value; independent draws; the same noise however cut."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import lowp
from lowp.formats import format
from lowp.tensor.carrier import F32
from lowp.tensor.noise import draw, key_tensor
from lowp.tensor.table import gap_tables, goes_up

COUNT = 1 << 16


def up_frequency(value, low, fmt, seed, dtype=torch.float32, count=COUNT):
    rounded = lowp.quantize(torch.full((count,), value, dtype=dtype), fmt, "stochastic", seed=seed).double()
    assert rounded.unique().numel() <= 2
    return (rounded.abs() > abs(low)).double().mean().item()


def within_five_sigma(frequency, share, count=COUNT):
    sigma = math.sqrt(share * (1 - share) / count)
    return abs(frequency - share) <= 5 * sigma + 1e-12


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e3m0", "e2m1fn", "bf16", "int8", "posit8", "dynamic8", "nf4", "fixed3.4"])
def test_frequency_of_rounding_up(name, sign):
    """Many positions between many neighbours."""
    fmt = format(name)
    values = sorted(abs(value) for value in fmt.values if value * sign >= 0)
    picks = sorted({0, 1, 2, len(values) // 3, len(values) // 2, len(values) - 2})
    for index in picks:
        low, high = values[index], values[index + 1]
        for position in (1 / 64, 0.25, 0.5, 0.9, 63 / 64):
            x = torch.tensor(sign * (low + (high - low) * position), dtype=torch.float32).item()
            share = (abs(x) - low) / (high - low)
            assert within_five_sigma(up_frequency(x, low, fmt, seed=index * 100 + sign), share), (low, high, position)


@pytest.mark.parametrize("power", [1, pytest.param(7, marks=pytest.mark.slow), 14])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "int8", "posit8", "dynamic8"])
def test_far_under_the_smallest_value(name, power):
    """The mean is kept where nearest rounding gives nothing at all."""
    fmt = format(name)
    share = 2.0**-power
    count = 1 << 20
    assert within_five_sigma(up_frequency(fmt.smallest * share, 0.0, fmt, seed=power, count=count), share, count)


def test_between_the_largest_value_and_overflow():
    assert within_five_sigma(up_frequency(448.0 + 8.0, 448.0, format("e5m2"), seed=1), 8.0 / 64.0)
    x = torch.full((COUNT,), 456.0)  # a quarter of a step beyond e4m3fn's largest value
    lost = lowp.quantize(x, "e4m3fn", "stochastic", seed=2).isnan().double().mean().item()
    assert within_five_sigma(lost, 0.25)
    assert (lowp.quantize(x, "e4m3fn", "stochastic", seed=2, saturate=True) == 448).all()


# In units of 32 bits; with as many units as an integer of 32 bits cannot hold; far apart, and beyond what is counted in units.
GAPS = [
    (0.0, 1e-6),
    (1e-6, 3e-6),
    (0.1, 0.107),
    (0.75, 1.0),
    (0.0, 2.0**-149),
    (2.0**-149, 2.0**-130),
    (1.0, 16.0),
    (3e38, 3.3e38),
]
FAR = [(1e-30, 1.0), (0.1, 123.456)]


@pytest.mark.parametrize("gaps", [GAPS, GAPS + FAR], ids=["units", "floats"])
def test_shares_of_uneven_gaps_are_compared_exactly(gaps):
    """Draws at and beside the share that is covered, against fractions."""
    gaps = [tuple(float(np.float32(end)) for end in gap) for gap in gaps]
    tables = [table.tensor(torch.device("cpu")) for table in gap_tables([*gaps, None], F32)]
    assert (tables[0].dtype == torch.int32) == (len(gaps) == len(GAPS))
    rng = np.random.default_rng(0)
    numbers, entries, drawn = [], [], []
    for entry, (low, high) in enumerate(gaps):
        first, last = (int(np.float32(end).view(np.int32)) for end in (low, high))
        bits = {first, last - 1, *(first + 1, first + 2)[: last - first - 1], *rng.integers(first, last, 40).tolist()}
        for x in np.array(sorted(bits), dtype=np.int32):
            share = (Fraction(float(x.view(np.float32))) - Fraction(low)) / (Fraction(high) - Fraction(low))
            middle = int(share * (1 << 30))
            for draw_at in {0, 1, (1 << 30) - 1, *range(max(middle - 2, 0), min(middle + 3, 1 << 30))}:
                numbers.append(int(x))
                entries.append(entry)
                drawn.append((draw_at, draw_at < share * (1 << 30)))
    numbers += [0, 0x7F7FFFFF, 0x7F800000]  # where there is nowhere to go
    entries += [len(gaps)] * 3
    drawn += [(0, False)] * 3
    at = torch.tensor(entries)
    noise = torch.tensor([(1 << 30) - 1 - number for number, _ in drawn], dtype=torch.int32)
    found = goes_up(torch.tensor(numbers, dtype=torch.int32), [table[at] for table in tables], noise, F32)
    assert found.tolist() == [up for _, up in drawn]


def test_exact_numbers_stay():
    for name in ("e4m3fn", "posit8", "nf4", "int8"):
        values = torch.tensor(format(name).values, dtype=torch.float32)
        for seed in range(5):
            assert torch.equal(lowp.quantize(values, name, "stochastic", seed=seed), values)


def uniform(noise, count=COUNT):
    return draw(key_tensor(noise, 0, torch.device("cpu")), torch.empty(count), 30).double().numpy() / 2.0**30


def correlation(a, b):
    return abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))  # in sigmas


def test_draws_are_uniform():
    for seed in (0, 1, -1, 2**63, 123456789):
        u = uniform(lowp.Noise(seed))
        for bins in (16, 256):
            counts = np.bincount((u * bins).astype(int), minlength=bins)
            chi2 = ((counts - COUNT / bins) ** 2 / (COUNT / bins)).sum()
            assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 255, 256, 4096])
def test_neighbours_are_independent(lag):
    u = uniform(lowp.Noise(42))
    assert correlation(u[:-lag], u[lag:]) < 5
    pairs = np.histogram2d(u[:-lag], u[lag:], bins=16)[0]
    expected = (len(u) - lag) / 256
    assert abs(((pairs - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


def test_each_bit_is_fair_and_independent_of_the_next_element():
    bits = draw(key_tensor(lowp.Noise(9), 0, torch.device("cpu")), torch.empty(COUNT), 30).numpy()
    for bit in range(30):
        ones = bits >> bit & 1
        assert abs(ones.mean() - 0.5) * 2 * math.sqrt(COUNT) < 5
        assert abs((ones[1:] ^ ones[:-1]).mean() - 0.5) * 2 * math.sqrt(COUNT) < 5


def test_seeds_steps_and_streams_are_independent():
    base = lowp.Noise(7, 5, 3)
    others = [lowp.Noise(8, 5, 3), lowp.Noise(7, 6, 3), lowp.Noise(7, 5, 4), lowp.Noise(5, 7, 3), lowp.Noise(3, 5, 7)]
    others += [lowp.Noise(7 + 2**k, 5, 3) for k in (16, 31, 32, 47, 62)]
    u = uniform(base)
    for other in others:
        v = uniform(other)
        assert correlation(u, v) < 5
        assert abs(((u > 0.5) ^ (v > 0.5)).mean() - 0.5) * 2 * math.sqrt(COUNT) < 5


def test_two_halves_with_offsets_are_the_whole():
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    for name in ("e5m2", "posit8", "dynamic8", "int8", "mxfp4"):
        whole = lowp.quantize(x, name, "stochastic", seed=lowp.Noise(1, offset=70))
        if name != "mxfp4":
            parts = [
                lowp.quantize(x[:333], name, "stochastic", seed=lowp.Noise(1, offset=70)),
                lowp.quantize(x[333:], name, "stochastic", seed=lowp.Noise(1, offset=403)),
            ]
            assert torch.equal(torch.cat(parts), whole)
        codes = lowp.encode(x, name, "stochastic", seed=lowp.Noise(1, offset=70), nan="zero")
        assert torch.equal(lowp.decode(codes, name), whole)


def test_known_draws():
    """Golden: noise must not change from version to version, or resumed runs would."""
    noise = draw(key_tensor(lowp.Noise(1, 2, 3), 0, torch.device("cpu")), torch.empty(4), 30)
    assert noise.tolist() == GOLDEN
    assert (draw(key_tensor(lowp.Noise(1, 2, 3), 0, torch.device("cpu")), torch.empty(4), 62) >> 32).tolist() == GOLDEN


GOLDEN = [210621067, 507863076, 640179918, 407634991]


def test_a_kernel_draws_what_plain_operations_do():
    """Noise is made for two vectors at a time: lengths around one and two of them, indices beyond 2^16 and 2^30."""
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(4))
    for offset in (0, 65_521, (1 << 30) - 9):
        for count in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 70_000):
            found = []
            for policy in ("never", "always"):
                lowp.set_kernel_policy(policy)
                found.append(lowp.quantize(x[:count], "e4m3fn", "stochastic", seed=lowp.Noise(7, step=2, offset=offset)))
            assert torch.equal(*found), (offset, count)
