"""`lowp calibrate`, part by part: links that are known, one process, models layer by layer, the limit."""

import time
import tomllib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowp.predict.calibration import calibrate_cluster, codecs_of
from lowp.predict.cluster import LinkLevel
from lowp.predict.cluster_file import cluster_from, cluster_toml
from lowp.predict.prediction import predict
from lowp.predict.probes.link import MANY, SIZES, SMALL, fitted, sharing_ranks
from lowp.predict.probes.meeting import Meeting
from lowp.predict.probes.model import ROUNDS, WARM_UP, model_times
from lowp.predict.subjects import subject_of


def round_seconds(level, count, size):
    """As the predictor has it."""
    return level.latency_of(size) + count * level.overhead + max(0.0, count * size - level.burst) / level.bandwidth


@given(st.floats(1e6, 1e11), st.floats(0, 1e-2), st.floats(0, 1e-3))
@settings(max_examples=50)
def test_a_link_is_found_from_its_times(bandwidth, latency, overhead):
    true = LinkLevel("true", bandwidth, latency, overhead)
    times = {(1, size): round_seconds(true, 1, size) for size in SIZES} | {(MANY, SMALL): round_seconds(true, MANY, SMALL)}
    found = fitted("found", times)
    for (count, size), seconds in times.items():
        if count == 1:
            assert round_seconds(found, count, size) == pytest.approx(seconds, rel=0.02, abs=1e-9)


def test_a_token_bucket_is_a_burst():
    """What leads to less than nothing at no bytes has passed at once."""
    true = LinkLevel("shaped", 12.5e6, 1e-4, 0.0, burst=70e3)
    times = {(1, size): round_seconds(true, 1, size) for size in SIZES} | {(MANY, SMALL): 1e-4}
    found = fitted("found", times)
    assert found.bandwidth == pytest.approx(12.5e6, rel=0.01)
    assert found.burst == pytest.approx(70e3, rel=0.05)


def test_shared_links():
    assert [sharing_ranks(times, 8) for times in (0.7, 1.0, 2.2, 3.7, 7.0)] == [1, 1, 2, 4, 8]


def test_one_process_has_no_links_and_says_so():
    said = []
    began = time.perf_counter()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    subject = subject_of(net, torch.randn(8, 16))
    found = calibrate_cluster(subjects=[subject], codecs=["e4m3fn/local"], seconds=5, say=said.append)
    assert time.perf_counter() - began < 60
    assert found.levels == ()
    assert any("links    none" in line for line in said)
    times = found.device.times["Sequential"]
    assert list(times.layers) == ["2.bias", "2.weight", "0.bias", "0.weight"] or set(times.layers) == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    assert times.backward == pytest.approx(sum(times.layers.values()))
    assert all(speed.encode > 0 for speed in found.device.codecs.values())
    assert cluster_from(tomllib.loads(cluster_toml(found))) == found  # and it can be read back
    alone = predict(net, found, "fp32", 1, batch=8, inputs=torch.randn(8, 16)).steps[0]
    assert alone.step == pytest.approx(times.forward + times.backward)
    with pytest.raises(ValueError, match="ranks: 2 need links"):
        predict(net, found, "fp32", 2, batch=8, inputs=torch.randn(8, 16))


def test_codecs_are_measured_once_each():
    assert [wire.text for wire in codecs_of(["e5m2/aps", "e5m2/aps@ring", "e4m3fn/local"])] == ["e5m2/aps", "e4m3fn/local"]


@pytest.mark.parametrize("seconds", [0, -1, 4.9, float("nan"), float("inf")])
def test_the_limit_is_a_number_of_seconds(seconds):
    with pytest.raises(ValueError, match=r"seconds: .* must be at least 5"):
        calibrate_cluster(seconds=seconds)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_that_gets_no_gradient_is_named():
    with pytest.raises(ValueError, match=r"backward reached no gradient of unused\.weight"):
        calibrate_cluster(subjects=[subject_of(Unused(), torch.randn(2, 4))], codecs=[], seconds=5)


class Counted(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 4), (60.0, 2 * (WARM_UP + ROUNDS))])
def test_a_slow_model_is_measured_in_few_steps(seconds, calls):
    """Two kinds of step, each once to warm up and once to be measured, where there is no time for more."""
    model = Counted(4, 2)
    times, _ = model_times(Meeting(torch.device("cpu")), subject_of(model, torch.randn(6, 4)), seconds)
    assert model.calls == calls
    assert times.forward > 0
    assert set(times.layers) == {"weight", "bias"}
