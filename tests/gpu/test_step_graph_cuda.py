"""Steps of `lowp train` that are recorded in a CUDA graph compute what the same steps do without one."""

import copy
from pathlib import Path

import pytest
import torch

import lowp
from lowp.lab.settings import plan_of_study
from lowp.lab.study import read_study
from lowp.training.cuda_settings import cuda_settings
from lowp.training.exchange.virtual import VirtualRanks
from lowp.training.recipe import Recipe
from lowp.training.recording import Recording
from lowp.training.run import run
from lowp.training.step_graph import EAGER_STEPS, StepGraph
from lowp.training.trainer import Trainer
from lowp.training.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]
STUDIES = Path(__file__).parents[2] / "studies"
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


def trained(recipe, plain, steps, monkeypatch, data=None, epoch=0, resumed_at=None):
    """Weights, figures and what is remembered after some steps; and what was recorded. `epoch`: so many steps are one."""
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(Recording, "_may_be_recorded", lambda self: False)
        world = World.join("cuda", threads=0)
        try:
            trainer = Trainer(recipe, world, data)
            with cuda_settings(recipe, world.device):
                for step in range(steps):
                    if step == resumed_at:
                        trainer = resumed(trainer, recipe, world, data)
                    if epoch and step % epoch == 0:
                        if step:
                            trainer.numerics.epoch_ends()
                        trainer.numerics.epoch_begins(step // epoch)
                    trainer.train_step()
            trainer.confirm()
            of_pass, of_ranks = trainer.recording.of_pass, trainer.recording.of_ranks
            graphs = of_pass, None if of_ranks is None else of_ranks._graph
            recorded = [graph is not None and graph._graph is not None for graph in graphs]
            numbers = [p.detach().cpu() for p in trainer.model.state_dict().values()]
            remembered = str(trainer.numerics.state_dict()), trainer.exchange.bytes_sent()
            return numbers, (trainer.take_metrics(), *remembered), recorded
        finally:
            trainer.close()
            world.leave()


def resumed(trainer, recipe, world, data):
    """Another trainer, with the states that this one saves."""
    trainer.confirm()
    saved = copy.deepcopy((trainer.state(), trainer.state_of_ranks()))
    trainer.close()
    new = Trainer(recipe, world, data)
    new.load_state(*saved)
    return new


def check_the_same(recipe, steps, monkeypatch, recorded, **more):
    plain, graph = (trained(recipe, plain, steps, monkeypatch, **more) for plain in (True, False))
    assert plain[1] == graph[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], graph[0], strict=True))
    assert plain[2] == [False, False]
    assert graph[2] == recorded


def recipe_of(model, *, ranks=1, wire=None, compiled=False, **precision):
    return Recipe(
        name="graph", seed=3, epochs=1, batch=64, virtual_ranks=ranks, device="cuda", deterministic=True, wire=wire or {},
        model={"name": model, "options": MODELS[model], "compile": compiled}, data={"name": "fashion14"},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9}, precision=precision,
    )  # fmt: skip


PASS, STEP = [True, False], [False, True]  # what is recorded


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_recorded_steps_are_the_same(model, precision, monkeypatch):
    check_the_same(recipe_of(model, **PRECISIONS[precision]), 12, monkeypatch, PASS)


@pytest.mark.parametrize("precision", ["autocast", "loss scale"])
@pytest.mark.parametrize("wire", [{}, APS], ids=["fp32", "aps"])
@pytest.mark.parametrize("model", MODELS)
def test_recorded_virtual_ranks_are_the_same(model, wire, precision, monkeypatch):
    """Dropout too: each rank's pass draws by its own seed, and is recorded by itself."""
    recorded = PASS if "dropout" in MODELS[model] else STEP
    check_the_same(recipe_of(model, ranks=4, wire=wire, **PRECISIONS[precision]), 12, monkeypatch, recorded)


def test_recorded_compiled_virtual_ranks_are_the_same(monkeypatch):
    recipe = recipe_of("resnet18", ranks=4, wire=APS, compiled=True, activations="bf16")
    check_the_same(recipe, 7, monkeypatch, STEP)


def changed_rows(study, **changes):
    """The settings of a study, with another set of data, and fewer of them."""
    rows = plan_of_study(read_study(STUDIES / study)).settings
    return {row.name: Recipe.model_validate(row.recipe.model_dump() | {"deterministic": True} | changes) for row in rows}


CIFAR = changed_rows(
    "neighbours/cifar.toml", batch=64, data={"name": "fashion14", "augment": ["crop", "flip"]}, epochs=2,
)  # fmt: skip


@pytest.mark.parametrize("row", CIFAR)
def test_mechanisms_of_neighbours(row, monkeypatch):
    """In the 9th step an epoch begins: formats change, and the pass is recorded again."""
    not_recorded = "integer add" in row  # the host makes tables for each of its products
    check_the_same(CIFAR[row], 16, monkeypatch, [not not_recorded, False], epoch=8)


@pytest.fixture
def text(tmp_path):
    """Characters, where `shakespeare` is looked for."""
    letters = torch.randint(97, 123, (40_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (tmp_path / "tinyshakespeare.txt").write_bytes(bytes(letters.tolist()))
    return tmp_path


FOUR_BITS = changed_rows("four-bits/longer.toml", data={"name": "shakespeare", "context": 64})


@pytest.mark.parametrize("row", FOUR_BITS)
def test_products_of_four_bits(row, text, monkeypatch):
    check_the_same(FOUR_BITS[row], 8, monkeypatch, PASS, data=text)


LSTM = changed_rows("neighbours/lstm.toml", data={"name": "shakespeare", "context": 16}, virtual_ranks=4, batch=4)


@pytest.mark.parametrize("row", LSTM)
def test_ranks_of_one_sample(row, text, monkeypatch):
    check_the_same(LSTM[row], 8, monkeypatch, STEP, data=text)


DAVIDNET = changed_rows(
    "aps/ranks256-davidnet.toml", data={"name": "fashion14", "augment": ["crop", "flip"]}, virtual_ranks=32, batch=256,
    model={"name": "resnet18", "options": {"width": 8}},
)  # fmt: skip


@pytest.mark.parametrize("row", DAVIDNET)
def test_ranks_of_eight_samples(row, monkeypatch):
    check_the_same(DAVIDNET[row], 8, monkeypatch, STEP)


def test_stochastic_wires_are_not_recorded_with_their_step(monkeypatch):
    wire = {"format": "e5m2", "scale": "local", "rounding": "stochastic"}
    check_the_same(recipe_of("cnn", ranks=4, wire=wire), 6, monkeypatch, PASS)


FIXED = dict.fromkeys(("weights", "activations", "errors", "gradients"), "fixed7.8")


def test_fixed_point_is_drawn_anew_in_every_step_and_rank(monkeypatch):
    recipe = recipe_of("cnn", ranks=4, wire=APS, rounding="stochastic", loss_scale=128.0, **FIXED)
    check_the_same(recipe, 6, monkeypatch, PASS)


@pytest.mark.parametrize(
    ("recipe", "recorded"),
    [
        (recipe_of("cnn", ranks=4, wire=APS, activations="bf16"), STEP),
        (recipe_of("cnn", ranks=2, rounding="stochastic", loss_scale=128.0, **FIXED), PASS),
        (recipe_of("mlp", ranks=4, wire=APS | {"scale": "aps_delayed"}), PASS),
    ],
    ids=["step", "stochastic", "delayed"],
)
def test_a_resumed_run_goes_on_with_the_same_bits(recipe, recorded, monkeypatch):
    whole, halves = (trained(recipe, False, 14, monkeypatch, resumed_at=at) for at in (None, 7))
    assert (whole[2], halves[2]) == (recorded, recorded)
    assert whole[1][:2] == halves[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(whole[0], halves[0], strict=True))


def test_gradients_asked_for_twice(monkeypatch):
    """Where memory does not hold all ranks' gradients, aps has each pass taken twice, and the figures count it once."""
    recipe = recipe_of("cnn", ranks=4, wire=APS)
    expected = trained(recipe, True, 8, monkeypatch)
    monkeypatch.setattr(VirtualRanks, "_fits", False)
    twice = trained(recipe, False, 8, monkeypatch)
    assert twice[2] == PASS
    assert twice[1] == expected[1]
    assert all(torch.equal(a, b) for a, b in zip(twice[0], expected[0], strict=True))


def confirmed_step(trainer):
    trainer.train_step()
    trainer.confirm()


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_recorded_step_that_is_not_finite_is_undone(ranks, monkeypatch):
    """A weight is NaN for a step; afterwards training goes on as if there had been none."""

    def after(plain):
        recipe = recipe_of("resnet18", ranks=ranks, wire=APS if ranks > 1 else None)
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(Recording, "_may_be_recorded", lambda self: False)
            world = World.join("cuda", threads=0)
            try:
                trainer = Trainer(recipe, world, None)
                with cuda_settings(recipe, world.device):
                    for _ in range(6):
                        trainer.train_step()
                    trainer.confirm()
                    weight = next(iter(trainer.parameters.values()))
                    good = weight.detach().clone()
                    with torch.no_grad():
                        weight.fill_(float("nan"))
                    with pytest.raises(lowp.NonFiniteGradient):
                        confirmed_step(trainer)
                    assert trainer.step == 6
                    with torch.no_grad():
                        weight.copy_(good)
                    for _ in range(2):
                        trainer.train_step()
                trainer.confirm()
                assert (trainer.recording.of_pass is None and trainer.recording.of_ranks is None) == plain
                return [p.detach().cpu() for p in trainer.model.state_dict().values()], trainer.take_metrics()
            finally:
                trainer.close()
                world.leave()

    plain, recorded = after(True), after(False)
    assert plain[1] == recorded[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], recorded[0], strict=True))


def test_the_audit_of_a_run_that_is_recorded(tmp_path):
    lowp.set_kernel_policy("auto")
    recipe = recipe_of("cnn", **PRECISIONS["pure fp16"], audit=True)
    run(recipe, tmp_path / "run", quiet=True)


def test_dropout_between_recurrent_layers_is_drawn_by_seed(text, monkeypatch):
    recipe = Recipe(
        name="graph", seed=3, epochs=1, batch=8, device="cuda", deterministic=True,
        model={"name": "lstm", "options": {"width": 32, "dropout": 0.3}}, data={"name": "shakespeare", "context": 16},
        optimizer={"name": "sgd", "lr": 0.5},
    )  # fmt: skip
    check_the_same(recipe, 8, monkeypatch, PASS, data=text)


def test_a_run(tmp_path):
    recipe = Recipe(
        name="graph", seed=3, epochs=1, batch=512, device="cuda", model={"name": "mlp"}, data={"name": "fashion14"},
        optimizer={"name": "sgd", "lr": 0.05},
    )  # fmt: skip
    run(recipe, tmp_path / "run", quiet=True)


def pass_of(model, more=lambda: None):
    def backward(inputs, targets):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        more()
        loss.backward()

    return backward


def test_the_first_passes_of_a_process_choose_what_the_recorded_one_needs(monkeypatch):
    """cuDNN times its ways of a convolution at the first pass in each thread, of a shape that no other test has."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    layers = (
        torch.nn.Conv2d(3, 13, 5, padding=1),
        torch.nn.Conv2d(13, 17, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(17 * 13 * 13, 7),
    )
    model = torch.nn.Sequential(*layers).cuda()
    graph = StepGraph(pass_of(model), [*model.parameters()])
    x, y = torch.randn(11, 3, 17, 17, device="cuda"), torch.randint(7, (11,), device="cuda")
    assert all(graph.run(x, y) for _ in range(EAGER_STEPS + 2))
    assert graph._graph is not None


def test_a_pass_that_cannot_be_recorded_goes_on_without_a_graph():
    """A pass that waits for the device ends its recording, and nothing else: what draws, draws as before."""
    model = torch.nn.Linear(5, 3).cuda()
    x, y = torch.randn(4, 5, device="cuda"), torch.randint(3, (4,), device="cuda")
    backward = pass_of(model, lambda: x.sum().item())
    graph = StepGraph(backward, [*model.parameters()])
    before = torch.cuda.current_stream()
    for _ in range(EAGER_STEPS):
        assert graph.run(x, y)
    with pytest.warns(UserWarning, match="could not be recorded"):
        assert not graph.run(x, y)
    assert torch.cuda.current_stream() == before
    torch.manual_seed(5)
    drawn = torch.rand(1000, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1000, device="cuda"), drawn)
    assert not torch.equal(torch.rand(1000, device="cuda"), drawn)
    assert not graph.run(x, y)
    backward(x, y)
    expected = torch.nn.Linear(5, 3)
    expected.load_state_dict(model.state_dict())
    pass_of(expected)(x.cpu(), y.cpu())
    torch.testing.assert_close(model.weight.grad.cpu(), expected.weight.grad)
