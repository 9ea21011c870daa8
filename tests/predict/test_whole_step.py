"""Whole steps beside the sum of their parts, on one rank that passes for two: its messages take no time."""

import statistics

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowp.predict.cluster import Cluster, Device, LinkLevel
from lowp.predict.prediction import predict
from lowp.predict.probes import whole_step
from lowp.predict.probes.meeting import Meeting
from lowp.predict.probes.model import model_times
from lowp.predict.probes.whole_step import PROBES, measured_workload, with_excess
from lowp.predict.subjects import subject_of


class PassesForTwo(Meeting):
    @property
    def ranks(self):
        return 2


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def subject():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return subject_of(net, torch.randn(32, 64))


def calibrated(subject, bandwidth):
    """Links of a known speed, and the model as it is."""
    times, _ = model_times(Meeting(torch.device("cpu")), subject, 0.2)
    levels = (LinkLevel("network", bandwidth, 0.0),)
    return Cluster("c", Device("d", "cpu", bandwidth=1e10, flops=1e10), levels).with_times(subject.name, times)


def test_an_excess_is_what_parts_leave_unexplained(group, subject, monkeypatch):
    cluster = calibrated(subject, 1e12)
    before = cluster.device.times[subject.name]
    computed = before.forward + before.backward
    pairs = iter([(3 * computed, computed), (5 * computed, 2 * computed), (9 * computed, 2 * computed)])
    monkeypatch.setattr(whole_step, "_measured", lambda *_: next(pairs))
    times, steps = with_excess(PassesForTwo(torch.device("cpu")), subject, cluster, PROBES, 60.0)
    assert list(steps) == list(times.excess) == list(PROBES)
    assert list(steps.values()) == [3 * computed, 5 * computed, 9 * computed]
    parts = predict(measured_workload(subject, before), cluster, list(PROBES.values()), 2, batch=32).steps
    left = [more * computed - (part.step - computed) for more, part in zip((2, 3, 7), parts, strict=True)]
    assert list(times.excess.values()) == [pytest.approx(statistics.median(left))] * 3
    assert times.forward + times.backward == pytest.approx(1.5 * computed)  # of 1, 1, 2 and 2
    assert times.backward == pytest.approx(sum(times.layers.values()))


def test_steps_are_measured(group, subject):
    cluster = calibrated(subject, 1e12)
    times, steps = with_excess(PassesForTwo(torch.device("cpu")), subject, cluster, PROBES, 60.0)
    assert list(steps) == list(PROBES)
    assert all(0 < took < 1 for took in steps.values())
    assert 0 < times.forward + times.backward < 1


def test_parts_that_take_longer_than_the_whole_leave_nothing(group, subject):
    times, _ = with_excess(PassesForTwo(torch.device("cpu")), subject, calibrated(subject, 1e3), {"fp32": "fp32"}, 60.0)
    assert times.excess == {"fp32": 0.0}


def test_where_no_time_is_left_nothing_is_measured(group, subject):
    cluster = calibrated(subject, 1e12)
    times, steps = with_excess(PassesForTwo(torch.device("cpu")), subject, cluster, PROBES, 1e-6)
    assert steps == {}
    assert times == cluster.device.times[subject.name]


def test_layers_that_were_timed_need_no_tracing(subject):
    times, _ = model_times(Meeting(torch.device("cpu")), subject, 0.1)
    workload = measured_workload(subject, times)
    assert [layer.name for layer in workload.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {workload.layers[i].name for i in workload.order[:2]} == {"2.weight", "2.bias"}
