"""Recipes that say "as the paper has it": their arithmetic is the published one, and their descriptions are true."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowp.formats import format as parse_format
from lowp.training.check import check
from lowp.training.learning_rate import factor_of
from lowp.training.reading import read_recipe
from lowp.training.recipe import Recipe
from lowp.training.recipes import RECIPES
from lowp.training.trainer import Trainer
from lowp.training.world import World
from lowp.wire.virtual import VirtualWorld

CPU = torch.device("cpu")
CIFAR_SAMPLES = 50_000


def published_rate(step: int, steps_per_epoch: int, warmup_steps: int) -> float:
    """CPD's: a piecewise linear rate, times step / warmup_steps once more in the warm-up."""
    rate = np.interp(step / steps_per_epoch, [0, 5, 24], [0, 0.4, 0])
    return rate * (step / warmup_steps if step <= warmup_steps else 1)


def test_davidnets_learning_rate_is_the_published_one_in_every_step():
    recipe = read_recipe("davidnet")
    steps_per_epoch = CIFAR_SAMPLES // recipe.batch
    warmup_steps = -(-CIFAR_SAMPLES * 5 // recipe.batch)
    assert (recipe.batch, recipe.virtual_ranks, steps_per_epoch, warmup_steps) == (4096, 8, 12, 62)
    factor = factor_of(recipe.learning_rate, steps_per_epoch, 24 * steps_per_epoch)
    for step in range(24 * steps_per_epoch):
        published = published_rate(step, steps_per_epoch, warmup_steps)
        assert recipe.optimizer.lr * factor(step) / 8 == pytest.approx(published, rel=1e-12)  # 8: a mean over 8 ranks
    assert factor(0) == 0
    assert factor(30) == pytest.approx(0.5 * 30 / 62)
    assert factor(62) == pytest.approx((24 - 62 / 12) / 19)


def test_davidnet_512_is_the_authors():
    recipe = read_recipe("davidnet-512")
    assert (recipe.batch, recipe.batch // recipe.virtual_ranks, recipe.epochs) == (512, 64, 24)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.optimizer.nesterov) == (0.4, 5e-4, True)
    factor = factor_of(recipe.learning_rate, 97, 24 * 97)
    assert [factor(97 * epoch) for epoch in (0, 1, 5, 24)] == pytest.approx([0, 0.2, 1, 0])
    check(recipe)


def test_a_step_of_davidnet_is_cpds_sum_to_rounding():
    """Ours: a mean, rate 3.2, decay 6.25e-5. CPD's: summed losses, added ranks, rate 0.4 / 512, decay 5e-4 x 512."""
    changes = ["data.name=fashion14", "data.augment=", "model.name=mlp", "model.options.hidden=[8]", "device=cpu"]
    changes += ["precision.tf32=false", "model.channels_last=false"]
    trainer = Trainer(read_recipe("davidnet", changes), World(0, 1, CPU))
    theirs = copy.deepcopy(trainer.model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4 * 512, nesterov=True)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(8):
            ((inputs, targets),) = trainer.micro_batches(rank)
            assert len(inputs) == 512
            F.cross_entropy(theirs(inputs), targets, reduction="sum").backward()  # added to what the ranks before left
        optimizer.param_groups[0]["lr"] = 0.4 / 512 * trainer.factor(step)
        before = [p.detach().clone() for p in theirs.parameters()]
        optimizer.step()
        trainer.train_step()
        for ours, other, old in zip(trainer.model.parameters(), theirs.parameters(), before, strict=True):
            torch.testing.assert_close(ours - old, other - old, rtol=1e-4, atol=2e-7)
            assert step == 0 or not torch.equal(other, old)


@pytest.mark.parametrize("name", ["aps8-paper", "aps8"])
def test_aps8_paper_rounds_every_partial_sum_and_aps8_does_not(name):
    recipe = read_recipe(name)
    wire = recipe.wire
    gradients = [torch.randn(512, generator=torch.Generator().manual_seed(rank)) for rank in range(8)]
    found = VirtualWorld(8).all_reduce(gradients, wire.format, scale=wire.scale, reduction=wire.reduction)
    largest = max(float((8 * each).abs().max()) for each in gradients)
    shift = 2.0 ** (15 - int(np.ceil(np.log2(largest))))
    total = torch.zeros(512)
    for each in gradients:  # the paper's formula, with e5m2 from torch
        total = (total + (each * shift).to(torch.float8_e5m2).float()).to(torch.float8_e5m2).float()
    same = torch.equal(found, total / shift)
    assert same == (name == "aps8-paper")


def test_the_papers_two_levels_can_be_asked_for():
    changes = ["virtual_ranks=8", "wire.reduction=hierarchical(4, leaders)", "wire.sum_format=e5m2", "epochs=1"]
    recipe = read_recipe("aps8-paper", [*changes, "data.limit=256", "model.options.hidden=[4]"])
    check(recipe)
    trainer = Trainer(recipe, World(0, 1, CPU))
    trainer.train_step()
    assert all(bool(p.grad.isfinite().all()) for p in trainer.parameters.values())


def state_bits(recipe: Recipe) -> float:
    assert isinstance(recipe.precision.state, str)
    return parse_format(recipe.precision.state or recipe.precision.weights).bits


def test_descriptions_are_true():
    """What `lowp recipes` says in a line, held against what the recipe sets."""
    recipes = {name: make() for name, make in RECIPES.items()}
    fp8 = recipes["fp8"]
    assert "states and wire 8 bits" in fp8.description
    assert state_bits(fp8) == parse_format(fp8.wire.format).bits == 8
    for name, recipe in recipes.items():
        if "sums are FP32" in recipe.description:
            assert recipe.wire.reduction == "two_shot", name
        if "every partial sum" in recipe.description:
            assert recipe.wire.reduction == "sequential", name
        if recipe.wire.scale == "aps" and max(recipe.ranks, recipe.virtual_ranks) > 1 and "fashion" not in recipe.data.name:
            assert "APS" in recipe.description, name
    promote = recipes["promote"]
    assert "Weights and activations" in promote.description
    assert (promote.precision.errors, promote.precision.gradients) == ("", "")
