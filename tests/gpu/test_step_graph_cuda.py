"""Steps of `lowp train` that are recorded in a CUDA graph compute what the same steps do without one."""

import pytest
import torch

from lowp.training import step_graph
from lowp.training.cuda_settings import cuda_settings
from lowp.training.recipe import Recipe
from lowp.training.run import run
from lowp.training.trainer import Trainer
from lowp.training.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]
MODELS = {
    "mlp": {"hidden": [64, 32], "dropout": 0.2},
    "cnn": {},
    "resnet18": {"width": 8},
}


PRECISIONS = {
    "fp32": {},
    "autocast": {"activations": "bf16"},
    "loss scale": {"activations": "fp16", "loss_scale": "dynamic"},  # 2^16 overflows at first: recorded again
    "pure fp16": {"weights": "fp16", "update": "stochastic", "loss_scale": "dynamic"},
}
APS = {"format": "e5m2", "scale": "aps", "reduction": "sequential"}


def trained(model, options, eager, steps, monkeypatch, *, ranks=1, wire=None, compiled=False, **precision):
    monkeypatch.setattr(step_graph, "EAGER_STEPS", eager)
    recipe = Recipe(
        name="graph", seed=3, epochs=1, batch=64, virtual_ranks=ranks, device="cuda", deterministic=True, wire=wire or {},
        model={"name": model, "options": options, "compile": compiled}, data={"name": "fashion14"},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9}, precision=precision,
    )  # fmt: skip
    world = World.join("cuda", threads=0)
    try:
        trainer = Trainer(recipe, world)
        with cuda_settings(recipe, world.device):
            for _ in range(steps):
                trainer.train_step()
        trainer.confirm()
        assert (trainer._graph._graph is not None) == (eager < steps * ranks)
        return [p.detach().cpu() for p in trainer.model.state_dict().values()], trainer.take_metrics()
    finally:
        world.leave()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_recorded_steps_are_the_same(model, precision, monkeypatch):
    told = PRECISIONS[precision]
    plain, graph = (trained(model, MODELS[model], eager, 12, monkeypatch, **told) for eager in (1000, 3))
    assert plain[1] == graph[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], graph[0], strict=True))


@pytest.mark.parametrize("precision", ["autocast", "loss scale"])
@pytest.mark.parametrize("wire", [{}, APS], ids=["fp32", "aps"])
@pytest.mark.parametrize("model", MODELS)
def test_recorded_virtual_ranks_are_the_same(model, wire, precision, monkeypatch):
    """Dropout too: each rank's pass draws by its own seed."""
    told = {"ranks": 4, "wire": wire, **PRECISIONS[precision]}
    plain, graph = (trained(model, MODELS[model], eager, 5, monkeypatch, **told) for eager in (1000, 3))
    assert plain[1] == graph[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], graph[0], strict=True))


def test_recorded_compiled_virtual_ranks_are_the_same(monkeypatch):
    told = {"ranks": 4, "wire": APS, "compiled": True, "activations": "bf16"}
    plain, graph = (trained("resnet18", MODELS["resnet18"], eager, 5, monkeypatch, **told) for eager in (1000, 3))
    assert plain[1] == graph[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], graph[0], strict=True))


def test_a_run(tmp_path):
    recipe = Recipe(
        name="graph", seed=3, epochs=1, batch=512, device="cuda", model={"name": "mlp"}, data={"name": "fashion14"},
        optimizer={"name": "sgd", "lr": 0.05},
    )  # fmt: skip
    run(recipe, tmp_path / "run", quiet=True)
