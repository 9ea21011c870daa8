"""When a pass is recorded, and when it is recorded again. (What graphs compute: tests/gpu/test_step_graph_cuda.py.)"""

import gc
from contextlib import contextmanager

import pytest
import torch

from lowp.optim.loss_scale import LossScale
from lowp.training.plugins import PluginError
from lowp.training.step_graph import EAGER_STEPS, StepGraph


class GeneratorOfDevice:
    """Stands for the generator of a CUDA device, of which a recording that fails leaves `state` unusable."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(3)

    def get_state(self):
        return self.state.get_state()

    def graphsafe_set_state(self, state):
        assert state is not self.state
        self.state = state


class Replays:
    """Stands for a CUDA graph."""

    def __init__(self):
        self.launched = 0

    def replay(self):
        self.launched += 1


def graph_that_records(monkeypatch, keyed_by=None):
    recorded, taken = [], []

    def record(self, inputs, targets):
        self._batch, self._gradients, self._graph = (inputs.clone(), targets.clone()), [], Replays()
        recorded.append(self._number)
        return True

    monkeypatch.setattr(StepGraph, "_record", record)
    return StepGraph(lambda inputs, targets: taken.append(len(inputs)), [], keyed_by), recorded, taken


def test_a_pass_is_recorded_again_where_a_number_of_it_changes(monkeypatch):
    graph, recorded, taken = graph_that_records(monkeypatch)
    x, y = torch.randn(4, 2), torch.zeros(4)

    def launched(number, steps):
        return [graph.run(x, y, number) for _ in range(steps)]

    assert launched(65536.0, EAGER_STEPS + 2) == [True] * (EAGER_STEPS + 2)
    assert (len(taken), recorded, graph._graph.launched) == (EAGER_STEPS, [65536.0], 2)
    assert launched(32768.0, EAGER_STEPS + 2) == [True] * (EAGER_STEPS + 2)
    assert (len(taken), recorded, graph._graph.launched) == (2 * EAGER_STEPS, [65536.0, 32768.0], 2)
    assert not graph.run(x[:2], y[:2], 32768.0)  # another batch size: without the graph
    assert graph.run(x, y, 32768.0)
    assert graph._graph.launched == 3


def test_a_pass_that_cannot_be_recorded_is_left_to_the_caller(monkeypatch):
    graph, _, taken = graph_that_records(monkeypatch)

    def fail(self, inputs, targets):
        self._failed = True
        return False

    monkeypatch.setattr(StepGraph, "_record", fail)
    x, y = torch.randn(4, 2), torch.zeros(4)
    assert [graph.run(x, y) for _ in range(EAGER_STEPS + 2)] == [True] * EAGER_STEPS + [False] * 2
    assert len(taken) == EAGER_STEPS


@pytest.mark.parametrize("kind", [RuntimeError, PluginError])  # of an operation's, and of one inside a model
def test_a_recording_that_fails_is_said_and_undone(kind, monkeypatch):
    @contextmanager
    def recording(graph, capture_error_mode):
        streams.append("of the recording")
        yield

    streams, passes, generator = ["before"], [], GeneratorOfDevice()
    for name, stands_in in {
        "CUDAGraph": object,
        "graph": recording,
        "current_stream": lambda: streams[-1],
        "set_stream": streams.append,
        "default_generators": {None: generator},
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)

    def backward(inputs, targets):
        passes.append(len(inputs))
        if len(passes) > EAGER_STEPS:
            torch.rand(5, generator=generator.state)  # drawn while it is recorded: not drawn
            raise kind("out of memory")

    graph, x, y = StepGraph(backward, []), torch.randn(4, 2), torch.zeros(4)
    assert [graph.run(x, y) for _ in range(EAGER_STEPS)] == [True] * EAGER_STEPS
    with pytest.warns(UserWarning, match="could not be recorded as one: out of memory"):
        assert not graph.run(x, y)
    assert streams == ["before", "of the recording", "before"]
    assert torch.equal(torch.rand(9, generator=generator.state), torch.rand(9, generator=torch.Generator().manual_seed(3)))
    assert gc.isenabled()
    assert not graph.run(x, y)
    assert len(passes) == EAGER_STEPS + 1


def test_keys_are_written_before_each_launch(monkeypatch):
    class Keys:
        now, filled = None, []

        def fill(self, step):
            self.filled.append(step)

    keys = Keys()
    graph, _, _ = graph_that_records(monkeypatch, keys)
    for step in range(EAGER_STEPS + 3):
        assert graph.run(torch.randn(4, 2), torch.zeros(4), None, step)
    assert keys.now == EAGER_STEPS - 1  # of the last pass that was not recorded
    assert keys.filled == [EAGER_STEPS, EAGER_STEPS + 1, EAGER_STEPS + 2]


def test_a_loss_that_was_scaled_in_a_graph_counts():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scale = torch.optim.SGD([weight], lr=0.5), LossScale(8.0)
    weight.grad = torch.full((3,), 8.0)
    scale.mark_scaled()
    assert scale.step(optimizer)
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
