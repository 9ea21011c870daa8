"""The search for formats: against all choices where these are few, within its limits, and without a trace on the model."""

import copy
import io
import itertools
import math

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from lowp.simulation import restore, simulate, simulation_of
from lowp.simulation.greedy import Measurements, descend, improve
from lowp.simulation.search import search
from lowp.training.models import build_model

FORMATS = ("e2m1fn", "e4m3fn", "fp16")
MODELS = {
    "cnn": ((1, 8, 8), {"channels": (2, 3), "hidden": 8}),
    "lstm": ((6,), {"width": 6, "layers": 1, "dropout": 0.5}),
    "gpt": ((6,), {"width": 4, "layers": 1, "heads": 2, "tied": True}),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors are tiny here: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(name):
    """A model, and a batch on which it was trained for a moment: losses mean something then."""
    torch.manual_seed(0)  # weights are drawn from torch's own generator
    shape, options = MODELS[name]
    model = build_model(name, shape=shape, classes=5, options=options)
    inputs = torch.randn(6, *shape) if name == "cnn" else torch.randint(0, 5, (6, *shape))
    targets = inputs if name != "cnn" else torch.randint(0, 5, (6,))
    descended(model, inputs, targets, steps=10)
    return model, inputs, targets


def descended(model, x, y, steps, rate=0.2):
    parameters = list(model.parameters())
    for _ in range(steps):
        y_hat = model(x)
        gradients = torch.autograd.grad(F.cross_entropy(y_hat.flatten(0, -2), y.flatten()), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient


def snapshot(model):
    return {
        "state": copy.deepcopy(model.state_dict()),
        "gradients": copy.deepcopy([parameter.grad for parameter in model.parameters()]),
        "modes": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key in ("modes", "classes", "attributes"):
        assert got[key] == want[key], key
    assert torch.equal(got["random"], want["random"])
    assert all(torch.equal(got["state"][key], value) for key, value in want["state"].items())
    for a, b in zip(got["gradients"], want["gradients"], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("cnn", {"budget": 6.0}), ("lstm", {"tolerance": 0.02}), ("gpt", {"budget": 9.0, "roles": ("weights",)})],
)
def test_models(name, limit):
    """Limits are kept, the frontier falls, the answer can be had again, and the model is what it was."""
    model, x, y = problem(name)
    model.train()
    next(model.children()).eval()
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    before = snapshot(model)
    result = search(model, iter([(x, y)]), **limit, formats=("e2m1fn", "fp16"), rounds=1)
    assert_same(snapshot(model), before)

    chosen = result.chosen
    assert chosen.mean_bits <= limit.get("budget", 15.9)
    assert chosen.loss <= result.reference_loss + limit.get("tolerance", math.inf)
    assert chosen in result.frontier
    assert result.frontier[0].mean_bits == 4.0  # the descent goes to the end
    for narrow, wide in itertools.pairwise(result.frontier):
        assert narrow.mean_bits < wide.mean_bits
        assert narrow.loss > wide.loss
    assert result.evaluations < 6 * len(result.sensitivity)

    model.eval()
    for start in (result.apply, lambda model: policy_applied(result, model)):
        start(model)
        with torch.no_grad():
            assert float(F.cross_entropy(model(x).flatten(0, -2), y.flatten())) == chosen.loss
        restore(model)


def policy_applied(result, model):
    result.policy.start(simulate(model, **result.settings), model)


def test_it_is_deterministic():
    model, x, y = three_layers()
    model.insert(1, Noisy())
    options = {"budget": 5.0, "formats": FORMATS, "rounds": 0, "rounding": "stochastic", "roles": ("weights",)}
    first = search(model, [(x, y)], **options)
    torch.rand(3)
    assert search(model, [(x, y)], **options) == first
    assert search(model, [(x, y)], **options, seed=1).reference_loss != first.reference_loss


class Noisy(nn.Module):
    """Draws random numbers, in evaluation too."""

    def forward(self, x):
        return x + 0.1 * torch.rand_like(x)


def three_layers():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(32, 4)
    y = x[:, :3].argmax(1)
    descended(model, x, y, steps=100)
    return model, x, y


def test_it_comes_close_to_the_best_of_all_choices():
    """Three layers' weights, three formats: 27 choices. Never worse than 5 % of the way from the best loss to the worst, nor
    more than a tenth more bits than the fewest."""
    model, x, y = three_layers()
    names, elements, formats = ("0", "2", "4"), (30, 42, 21), FORMATS[::-1]
    simulation, losses = simulate(model, scale="tensor"), {}
    for choice in itertools.product(range(3), repeat=3):
        simulation.set(layers={name: {"weights": formats[index]} for name, index in zip(names, choice, strict=True)})
        with torch.no_grad():
            losses[choice] = float(F.cross_entropy(model(x), y))
    restore(model)
    spread, reference = max(losses.values()) - min(losses.values()), losses[0, 0, 0]
    measured = Measurements(elements, (16, 8, 4), losses.__getitem__)

    def found(rank):
        fresh = Measurements(elements, (16, 8, 4), losses.__getitem__)
        fresh.measure_sensitivity()
        descend(fresh)
        return improve(fresh, rank, rounds=4)

    for budget in range(4 * 93, 16 * 93, 93):
        choice = found(lambda bits, loss, most=budget: (bits > most, loss, bits))
        best = min(loss for other, loss in losses.items() if measured.bits(other) <= budget)
        assert measured.bits(choice) <= budget
        assert losses[choice] <= best + 0.05 * spread
    for tolerance in (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03):
        choice = found(lambda bits, loss, most=reference + tolerance: (loss > most, bits, loss))
        best = min(measured.bits(other) for other, loss in losses.items() if loss <= reference + tolerance)
        assert losses[choice] <= reference + tolerance
        assert measured.bits(choice) <= 1.1 * best

    result = search(model, [(x, y)], budget=6.0, formats=FORMATS, roles=("weights",))
    choice = found(lambda bits, loss: (bits > 6 * 93, loss, bits))
    assert [result.assignment[name]["weights"] for name in names] == [formats[index] for index in choice]
    assert result.chosen.loss == losses[choice]


def test_a_sensitive_layer_keeps_its_bits():
    """One layer has an outlier: scaled to it, its other weights vanish in a narrow format."""
    model, x, y = three_layers()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
        model[0].weight[0] = model[0].bias[0] = 0.0  # the outlier multiplies nothing
    result = search(model, [(x, y)], tolerance=0.03, formats=FORMATS, roles=("weights",))
    assert result.assignment["2"]["weights"] == "fp16"
    assert "fp16" not in (result.assignment["0"]["weights"], result.assignment["4"]["weights"])
    worst = max(result.sensitivity, key=lambda entry: entry.added_loss)
    assert worst.layers == ("2",)


def additive(harm, pairs=()):
    """A loss that adds up, but for pairs of units that do harm once, not twice."""

    def loss(choice):
        total = sum(harm[unit][index] for unit, index in enumerate(choice))
        return total - sum(min(harm[a][choice[a]], harm[b][choice[b]]) for a, b in pairs)

    return loss


@pytest.mark.parametrize("seed", range(5))
def test_the_algorithm_on_losses_that_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    harm = torch.rand(5, 3, generator=generator, dtype=torch.float64).cumsum(1)
    harm = (harm - harm[:, :1]).tolist()
    elements = torch.randint(1, 20, (5,), generator=generator).tolist()
    asked = []

    def loss(choice):
        asked.append(choice)
        return additive(harm, pairs=[(0, 1)])(choice)

    widths = (16, 8, 4)
    choices = list(itertools.product(range(3), repeat=5))
    for budget in (5 * sum(elements), 7 * sum(elements), 11 * sum(elements)):
        asked.clear()
        measured = Measurements(elements, widths, loss)
        measured.measure_sensitivity()
        descend(measured)
        best = improve(measured, lambda bits, loss, most=budget: (bits > most, loss, bits), rounds=8)
        assert len(asked) == len(set(asked)) < 100 < len(choices)  # nothing is measured twice
        optimum = min(additive(harm, [(0, 1)])(c) for c in choices if measured.bits(c) <= budget)
        assert measured.bits(best) <= budget
        assert optimum <= measured.loss(best) <= 1.1 * optimum
        assert measured.narrowest in measured.losses


def test_losses_that_are_not_finite():
    """A format that ruins one unit is avoided; if all that fits is ruined, this is said."""
    model, x, y = three_layers()

    def ruined_in(layer):
        def evaluate(model, batch):
            model(batch[0])  # which says what belongs together
            formats = {row.layer: row.format for row in rows(model) if row.role == "weights"}
            return math.nan if formats.get(layer) == "e2m1fn" else float(len([f for f in formats.values() if f != "fp16"]))

        return evaluate

    result = search(model, [(x, y)], budget=10, formats=FORMATS, roles=("weights",), evaluate=ruined_in("2"))
    assert result.chosen.loss == 2.0
    assert {entry.layers for entry in result.sensitivity if entry.added_loss == math.inf} == {("2",)}

    def ruined(model, batch):
        model(batch[0])
        return math.nan if any(row.format == "e2m1fn" for row in rows(model)) else 1.0

    with pytest.raises(ValueError, match=r"no formats of 4 bits .* whose loss is finite; the cheapest found take 8\.000"):
        search(model, [(x, y)], budget=4, formats=FORMATS, roles=("weights",), evaluate=ruined)


def rows(model):
    """The formats of a model; nothing while it is as it is."""
    is_simulated = type(model[0]) is not nn.Linear
    return simulation_of(model).formats() if is_simulated else []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_given_back_whatever_happens(error):
    model, x, y = problem("lstm")
    model.train()
    before, calls = snapshot(model), itertools.count()

    def loss(output, targets):
        if next(calls) == 15:
            raise error
        return output.square().mean()

    with pytest.raises(error):
        search(model, [(x, y), (x, y)], tolerance=0.1, formats=FORMATS, loss=loss)
    assert_same(snapshot(model), before)


def test_batches_of_other_kinds():
    """Named inputs, several inputs, losses of one's own: they all are the same model on the same numbers."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.layer(a + b)

    torch.manual_seed(0)
    model, a, b, y = Sum(), torch.randn(8, 4), torch.randn(8, 4), torch.randint(0, 3, (8,))
    options = {"budget": 8.0, "formats": ("e4m3fn", "fp16")}
    want = search(model, [((a, b), y)], **options)
    assert search(model, [({"a": a, "b": b}, y)], **options) == want
    batch = {"left": a, "right": b, "class": y}
    got = search(model, [batch], **options, evaluate=lambda m, d: F.cross_entropy(m(d["left"], d["right"]), d["class"]))
    assert got == want
    assert search(nn.Sequential(model.layer), (a + b, y), **options).chosen.loss == want.chosen.loss  # one batch, not two


def test_by_tensor_and_by_layer():
    model, x, y = three_layers()
    by_layer = search(model, [(x, y)], budget=10.0, formats=("e4m3fn", "fp16"), rounds=0)
    by_tensor = search(model, [(x, y)], budget=10.0, formats=("e4m3fn", "fp16"), rounds=0, by="tensor")
    assert [(entry.layers, entry.roles) for entry in by_layer.sensitivity] == [
        (("0",), ("weights",)),
        (("0", "1"), ("activations",)),
        (("2",), ("weights",)),
        (("2", "3"), ("activations",)),
        (("4",), ("weights",)),
        (("4",), ("activations",)),
    ]
    assert len(by_tensor.sensitivity) == 3 + 5
    assert by_layer.assignment["0"]["activations"] == by_layer.assignment["1"]["activations"]


def test_what_is_shown(tmp_path, capsys):
    model, x, y = three_layers()
    result = search(model, [(x, y)], budget=6.0, formats=("e2m1fn", "fp16"), rounds=0, progress=True)
    assert "evaluation" in capsys.readouterr().err
    lines = result.table().splitlines()
    assert lines == str(result).splitlines()
    assert lines[0].split() == ["bits/number", "bytes", "loss", "added"]
    assert [line.split()[1] for line in lines if line.startswith("->")] == [f"{result.chosen.mean_bits:.3f}"]
    assert len(lines) == 1 + len(result.frontier) + 1 + 1 + 5
    console = Console(width=100, file=io.StringIO())
    console.print(result)
    assert f"{result.chosen.mean_bits:.3f}" in console.file.getvalue()
    result.plot(tmp_path / "frontier.svg")
    assert "bits a number" in (tmp_path / "frontier.svg").read_text()


def test_mistakes():
    model, x, y = three_layers()
    data = [(x, y)]
    for arguments, message in (
        ({}, "needs a budget .* a tolerance"),
        ({"tolerance": -1}, "0 or more, not -1"),
        ({"budget": 3}, "a budget of 3 bits a number cannot be met: all in e2m1fn takes 4"),
        ({"budget": 8, "formats": ("fp16", "e4m3fn")}, r"from few bits to many.*fp16 \(16\), e4m3fn \(8\)"),
        ({"budget": 8, "formats": ("e5m2", "e4m3fn")}, "no two with as many"),
        ({"budget": 8, "formats": ("fp16",)}, "two or more"),
        ({"budget": 8, "formats": ("fp17", "fp32")}, "unknown format 'fp17'"),
        ({"budget": 8, "roles": ("errors",)}, "judges forward passes: roles are weights or activations, not errors"),
        ({"budget": 8, "roles": ("weight",)}, "did you mean 'weights'"),
        ({"budget": 8, "by": "day"}, "by layer or by tensor"),
        ({"budget": 8, "scale": "delayed"}, "remembers what it saw"),
        ({"budget": 8, "loss": F.mse_loss, "evaluate": len}, "not both"),
        ({"budget": 8, "loss": lambda output, targets: output}, r"is a tensor of \(32, 3\)"),
        ({"budget": 8, "loss": lambda output, targets: math.nan}, "is not finite"),
        ({"tolerance": 1e-6, "formats": ("e2m1fn", "e4m3fn")}, "all in e4m3fn, the widest format, adds"),
        ({"tolerance": 1e-3, "budget": 4.0}, r"no formats of 4 bits .* within the tolerance; the cheapest found take"),
    ):
        with pytest.raises(ValueError, match=message):
            search(model, data, **{"formats": FORMATS, "rounds": 0, **arguments})
    for wrong, message in (([], "no batch in it"), ([x], "for others, search")):
        with pytest.raises(ValueError, match=message):
            search(model, wrong, budget=8)
    with pytest.raises(TypeError, match="returns tuple, not a tensor"):
        search(nn.LSTM(4, 4), data, budget=8)
    simulate(model)
    with pytest.raises(ValueError, match=r"simulated already.*restore\(model\)"):
        search(model, data, budget=8)
