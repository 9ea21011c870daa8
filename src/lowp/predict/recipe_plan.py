"""`lowp train RECIPE --set wire=plan`: the recipe with the wire that `lowp plan` chooses for it.

1. The recipe's own ranks measure their links, the codecs, and the recipe's model with its own data (calibration.py); or a
   cluster is given (`wire.cluster`).
2. Its gradients in the first step, rank by rank, say what each wire loses.
3. The choice takes the place of `plan` in the recipe, which is then checked, recorded and run as any other: a run that goes on
   goes on with it, and whoever repeats the recorded recipe measures nothing.
"""

import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.predict.architectures import workload_of
from lowp.predict.calibration import calibrate_cluster
from lowp.predict.cluster import Cluster, ModelTimes
from lowp.predict.cluster_file import cluster_here, cluster_of, read_cluster
from lowp.predict.gradients import MOST_RANKS, SampleGradients, cut
from lowp.predict.planning import WirePlan, plan
from lowp.predict.subjects import Subject
from lowp.predict.wires import uncompressed_of
from lowp.predict.workload import ModelLayer, Work, Workload
from lowp.training.launch import is_rank, launch
from lowp.training.mistakes import RecipeError
from lowp.training.reading import with_changes
from lowp.training.recipe import PLAN, Recipe
from lowp.training.rundir import RECIPE
from lowp.training.toml import to_toml
from lowp.training.trainer import Trainer
from lowp.training.world import World

SECONDS = 60.0  # of the calibration
Say = Callable[[str], None]


@dataclass
class RecipeSubject(Subject):
    """A recipe's model, with a micro-batch of its first step."""

    trainer: Trainer | None = None

    def forward(self, module: nn.Module | None = None, inputs: Any = None, targets: Any = None) -> Tensor:
        assert self.trainer is not None
        with self.trainer.passes.autocast():
            return super().forward(module, inputs, targets)


def without_wire(recipe: Recipe) -> Recipe:
    """The recipe in one process, in float32 between ranks: to look at its model, its data and its gradients."""
    return with_changes(recipe, ranks=1, virtual_ranks=recipe.shares, **{"wire.format": "fp32", "wire.scale": ""})


def recipe_trainer(recipe: Recipe, device: torch.device, data: Path | None = None) -> Trainer:
    """Of one process, whatever ranks there are."""
    if recipe.parallel.kind != "data":
        raise RecipeError(f"wire.format: plan is for gradients, and in {recipe.parallel.kind} none travel")
    return Trainer(without_wire(recipe), World(0, 1, device), data)


def recipe_subject(recipe: Recipe, trainer: Trainer, rank: int = 0) -> RecipeSubject:
    """What one rank computes in a micro-batch."""
    inputs, targets = trainer.micro_batches(rank % recipe.shares)[0]
    inputs, loss = trainer.passes.laid_out(inputs), trainer.passes.loss
    return RecipeSubject(model_name(recipe), trainer.model, inputs, loss, "", targets, trainer=trainer)


def model_name(recipe: Recipe) -> str:
    return f"recipe {recipe.name}"


def recipe_gradients(recipe: Recipe, trainer: Trainer) -> SampleGradients:
    """Of the first micro-batch of the first step, of several ranks."""
    ranks, found = min(recipe.shares, MOST_RANKS), []
    for rank in range(ranks):
        subject = recipe_subject(recipe, trainer, rank)
        subject.module.zero_grad(set_to_none=True)
        subject.forward().backward()
        found.append({name: p.grad.float().clone() for name, p in subject.parameters.items() if p.grad is not None})
    trainer.model.zero_grad(set_to_none=True)
    return cut(SampleGradients(tuple(found), f"gradients of {ranks} ranks in the recipe's first step"))


def calibrate_recipe(recipe: Recipe, world: World, *, data: Path | None = None, seconds: float = SECONDS, say: Say) -> Cluster:
    """This machine, and the recipe's model on it. All ranks of the world call it."""
    trainer = recipe_trainer(recipe, world.device, data)
    try:
        subject = recipe_subject(recipe, trainer, world.rank)
        found = calibrate_cluster(name=model_name(recipe), subjects=[subject], seconds=seconds, device=world.device, say=say)
    finally:
        trainer.close()
    # Micro-batches before the last one are computed before anything travels.
    times = found.device.times[subject.name]
    earlier = (recipe.micro_batches - 1) * (times.forward + times.backward)
    return found.with_times(subject.name, replace(times, forward=times.forward + earlier))


def planned_recipe(recipe: Recipe, out: Path | None = None, *, data: Path | None = None, say: Say = print) -> Recipe:
    """The recipe with a format of its own, where it says plan. `out`: a run's directory that may have decided already."""
    if recipe.wire.format != PLAN:
        return recipe
    if out is not None and (out / RECIPE).is_file():
        wire = tomllib.loads((out / RECIPE).read_text(encoding="utf-8"))["wire"]
        say(f"wire: as planned before ({out / RECIPE})")
        return with_changes(recipe, wire=wire)
    if is_rank():
        return _planned_by_ranks(recipe, data, say)
    cluster = _cluster(recipe, data)
    return _applied(recipe, _plan(recipe, cluster, torch.device("cpu"), data), say)


def _cluster(recipe: Recipe, data: Path | None) -> Cluster:
    if recipe.wire.cluster and recipe.ranks == 1:
        return cluster_of(recipe.wire.cluster)  # of virtual ranks, it may be any
    if recipe.wire.cluster:
        on_cuda = recipe.device == "cuda" or (recipe.device == "auto" and torch.cuda.is_available())
        return cluster_here(recipe.wire.cluster, torch.device("cuda" if on_cuda else "cpu"))
    if recipe.ranks == 1:
        raise RecipeError(
            "wire.format: plan needs links to measure, and one process has none: give ranks, or wire.cluster (lowp predict "
            "--clusters, or a TOML file)"
        )
    with tempfile.TemporaryDirectory(prefix="lowp-plan-") as folder:
        file, found = Path(folder) / "recipe.toml", Path(folder) / "cluster.toml"
        file.write_text(to_toml(recipe), encoding="utf-8")
        command = ["calibrate", "--recipe", str(file), "--out", str(found), "--seconds", str(SECONDS), "--quiet"]
        command += ["--data", str(data)] if data is not None else []
        code = launch(command, recipe.ranks, recipe.threads, 0)
        if code > 128:
            raise KeyboardInterrupt
        if code or not found.is_file():
            raise RecipeError(f"wire.format: plan could not measure: the ranks ended with exit code {code}")
        return read_cluster(found)


def _planned_by_ranks(recipe: Recipe, data: Path | None, say: Say) -> Recipe:
    """Under torchrun: the ranks measure, the first one plans, and all do the same."""
    world = World.join(recipe.device, recipe.threads)
    recipe = recipe.model_copy(update={"ranks": world.ranks})
    try:
        given = recipe.wire.cluster
        quiet: Say = lambda text: None  # noqa: E731
        cluster = cluster_here(given, world.device) if given else calibrate_recipe(recipe, world, data=data, say=quiet)
        decided, problem = "", ""
        if world.first:
            try:
                decided = to_toml(_applied(recipe, _plan(recipe, cluster, world.device, data), say))
            except ValueError as error:
                problem = str(error)
        if answer := world.tell(problem.encode() if world.first else None):
            raise RecipeError(answer.decode())
        wire = tomllib.loads(world.tell(decided.encode() if world.first else None).decode())["wire"]
    finally:
        world.leave()
    return with_changes(recipe, wire=wire)


def _plan(recipe: Recipe, cluster: Cluster, device: torch.device, data: Path | None) -> WirePlan:
    name, trainer = model_name(recipe), recipe_trainer(recipe, device, data)
    try:
        gradients = recipe_gradients(recipe, trainer)
        subject = recipe_subject(recipe, trainer)
        shapes = {name: tuple(p.shape) for name, p in subject.parameters.items()}
        own = uncompressed_of(subject.parameters.values())
        if (times := cluster.device.times.get(name)) is not None:
            workload = measured_workload(name, shapes, times)
        else:
            workload = replace(workload_of(trainer.model, subject.inputs), name=name)
    finally:
        trainer.close()
    plain = own if recipe.shares == 2 else f"{own}@two_shot"  # what recipes do: torch's own for two ranks
    try:
        return plan(
            workload, cluster, recipe.shares, max_error=recipe.wire.max_error, batch=max(1, recipe.batch // recipe.shares),
            gradients=gradients, torchs=(plain,), uncompressed=own,
        )  # fmt: skip
    except ValueError as error:
        raise RecipeError(f"wire.{error}") from None


def measured_workload(name: str, shapes: dict[str, tuple[int, ...]], times: ModelTimes) -> Workload:
    """A model whose layers were timed, in the order in which their gradients were ready: nothing needs to be traced."""
    turn = {layer: number for number, layer in enumerate(times.layers)}
    missing = [layer for layer in shapes if layer not in turn]
    if missing:
        raise ValueError(f"times.{name}.layers: {missing[0]!r} is missing")
    return Workload(name, tuple(ModelLayer(layer, shape, Work(), Work(), turn[layer]) for layer, shape in shapes.items()))


def _applied(recipe: Recipe, found: WirePlan, say: Say) -> Recipe:
    keys = found.recipe
    assert keys is not None, "torch's own 16 bits were no candidates"
    chosen = found.chosen
    say(
        f"plan: {chosen.wire}, buckets of {keys['bucket_mb']:.3g} MB: predicted {1e3 * chosen.step.step:.3g} ms a step, error "
        f"{chosen.error:.3g} of at most {found.max_error:g} ({found.gradients})"
    )
    for other in found.runners_up[:4]:
        say(f"      not {other.wire}: {1e3 * other.step.step:.3g} ms, {found.why_not(other)}")
    wire = {"scale": "", "reduction": "two_shot"} | keys
    return with_changes(recipe, wire=wire)
