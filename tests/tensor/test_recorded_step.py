"""Keys of noise that lie in memory, for what a CUDA graph has recorded, are those that the host computes."""

import pytest
import torch

import lowp
from lowp.tensor.noise import KEY_SIZE, Domain, Noise, key_tensor
from lowp.tensor.recorded_step import RecordedStep

CPU = torch.device("cpu")
PLACES = [
    (Domain.SIMULATION, 0, (0, 0, 0), 0, 0),
    (Domain.SIMULATION, 0, (7, 3, 1), 0, 0),
    (Domain.SIMULATION, 0, ((1 << 31) - 1, 15, (1 << 28) - 1), 0, 0),  # the largest stream: its highest bit is set
    (Domain.SIMULATED_PRODUCTS, 0, (2, 5), 0, 0),
    (Domain.SIMULATION, -5, (7, 3, 1), 3, 0),
    (Domain.SIMULATION, (1 << 64) - 1, (1, 2, 3), 5, (1 << 30) - 5),  # the first number of another block
    (Domain.SIMULATION, 0, (1, 2, 3), 0, 3 << 30),
]


def noise_at(place, step):
    domain, seed, stream, offset, first = place
    return Noise.of(domain, seed, step, *stream, offset=offset), first


def recorded_keys(recorded, noises):
    """Ask for keys twice: once to be counted, and once to be recorded."""
    for noise, first in noises:
        recorded.key(noise, first)
    with recorded.recording():
        return [recorded.key(noise, first) for noise, first in noises]


def test_keys_are_those_of_the_step():
    recorded = RecordedStep(CPU)
    there = recorded_keys(recorded, [noise_at(place, recorded) for place in PLACES])
    for step in (0, 1, 5 << 40 | 17, (1 << 63) - 1):
        recorded.fill(step)
        for place, found in zip(PLACES, there, strict=True):
            assert found.tolist() == key_tensor(*noise_at(place, step), CPU).tolist()


def test_each_key_lies_as_the_first_does():
    recorded = RecordedStep(CPU)
    there = recorded_keys(recorded, [(Noise.of(Domain.SIMULATION, 1, recorded, n, 0, 0), 0) for n in range(40)])
    recorded.fill(9)
    for n in range(40):
        assert there[n].tolist() == key_tensor(Noise.of(Domain.SIMULATION, 1, 9, n, 0, 0), 0, CPU).tolist()
    assert all(key.data_ptr() % 16 == there[0].data_ptr() % 16 for key in there)
    assert all(len(key) == KEY_SIZE for key in there)


def test_more_keys_than_before_are_refused():
    recorded = RecordedStep(CPU)
    with recorded.recording(), pytest.raises(RuntimeError, match="more keys"):
        recorded.key(*noise_at(PLACES[0], recorded))
    recorded.fill(3)  # nothing


def test_another_recording_forgets_the_keys_of_the_one_before():
    recorded = RecordedStep(CPU)
    (old,) = recorded_keys(recorded, [noise_at(PLACES[0], recorded)])
    recorded.fill(1)
    before = old.clone()
    (new,) = recorded_keys(recorded, [noise_at(PLACES[1], recorded)])
    recorded.fill(2)
    assert torch.equal(old, before)
    assert new.tolist() == key_tensor(*noise_at(PLACES[1], 2), CPU).tolist()


@pytest.mark.parametrize("fmt", ["fixed7.8", "e5m2", "posit8", "mxfp4", "nvfp4"])
def test_tensors_are_rounded_as_in_the_step(fmt):
    recorded, x = RecordedStep(CPU), torch.randn(96, 64)
    recorded.now = 11
    place = 3, 1, 0
    expected = lowp.quantize(x, fmt, "stochastic", seed=Noise.of(Domain.SIMULATION, 4, 11, *place))
    found = lowp.quantize(x, fmt, "stochastic", seed=Noise.of(Domain.SIMULATION, 4, recorded, *place))
    assert torch.equal(found, expected)
    other = lowp.quantize(x, fmt, "stochastic", seed=Noise.of(Domain.SIMULATION, 4, 12, *place))
    assert not torch.equal(other, expected)


def test_products_with_such_noise_are_refused():
    noise = Noise.of(Domain.SIMULATED_SUMS, 0, RecordedStep(CPU), 0, 0)
    with pytest.raises(AssertionError):
        lowp.matmul(torch.randn(4, 4), torch.randn(4, 4), accumulate="fp16", rounding="stochastic", seed=noise)
