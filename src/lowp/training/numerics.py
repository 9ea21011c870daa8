"""Formats of a model's roles while it trains: what is stored, what is cast on the fly, what is simulated, and how that changes.

Decisions that depend on numbers (promote a layer that overflows, climb a ladder by gradient diversity) are taken from what is
the same on all ranks: reduced gradients, and overflows anywhere. They are made at the end of an epoch, and saved.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp.simulation import simulate
from lowp.simulation.layers import Rules
from lowp.simulation.policies import GradientDiversity, OnOverflow, Schedule
from lowp.tensor.matmul import Arithmetic
from lowp.tensor.recorded_step import RecordedStep
from lowp.training.recipe import STORED, ArithmeticSettings, LayerRoles, Precision, Recipe
from lowp.training.world import World
from lowp.wire.settings import Settings

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROLES = ("weights", "activations", "errors", "gradients")


def stored_dtype(precision: Precision) -> torch.dtype:
    """Of weights, and of everything that follows them. A simulated format lives in float32."""
    return DTYPES.get(precision.weights, torch.float32)


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """16-bit activations over float32 weights: torch casts, layer by layer."""
    mixed = precision.weights == "fp32" and precision.activations in ("fp16", "bf16")
    return DTYPES[precision.activations] if mixed else None


def simulated_roles(precision: Precision) -> dict[str, str]:
    """The roles that are rounded to a format in a model of another, and the formats."""
    found = {role: getattr(precision, role) for role in ROLES}
    if precision.weights in STORED:
        found.pop("weights")
        if precision.activations in STORED:
            found.pop("activations")
    elif not precision.activations:
        found["activations"] = precision.weights
    return {role: fmt for role, fmt in found.items() if fmt and fmt != "fp32"}


def arithmetic_of(precision: Precision) -> Arithmetic | None:
    """How layers multiply and add; None: as torch does."""
    settings = precision.arithmetic
    if not precision.accumulate and settings == ArithmeticSettings():
        return None
    return Arithmetic(
        multiply=settings.multiply or None,
        accumulate=precision.accumulate or "fp32",
        kahan=settings.kahan,
        chunk=settings.chunk,
        quire=settings.quire,
        rounding=settings.rounding,
        approximate=settings.approximate or None,
    )


def layer_rules(precision: Precision) -> Rules:
    """The recipe's formats of some layers, as `simulate` takes them."""
    return {pattern: _rule(roles, arithmetic_of(precision)) for pattern, roles in precision.layers.items()}


def _rule(roles: LayerRoles, arithmetic: Arithmetic | None) -> dict[str, Any]:
    """A layer's own accumulators have another format, and what else the recipe says of its arithmetic."""
    rule = roles.model_dump(exclude_none=True, exclude=None if roles.scale else {"scale"})
    if roles.accumulate is not None:
        own = replace(arithmetic or Arithmetic(), accumulate=roles.accumulate)
        rule["accumulate"] = None if roles.accumulate == "fp32" else own
    return rule


def wire_settings(recipe: Recipe, steps_per_epoch: int) -> Settings:
    """How gradients travel, with the recipe's phases as steps."""
    wire = recipe.wire
    phases = {phase.epoch * steps_per_epoch: phase.wire for phase in recipe.precision.schedule if phase.wire is not None}
    return Settings.of(
        {0: wire.format, **phases} if phases else wire.format,
        scale=wire.scale or None,
        rounding=wire.rounding,
        reduction=wire.reduction,
        sum_format=wire.sum_format or None,
        kahan=wire.kahan,
        skip=wire.skip,
        layers=wire.layers,
        error_feedback=wire.error_feedback,
        seed=recipe.seed,
    )


class Numerics:
    def __init__(self, recipe: Recipe, model: nn.Module, world: World) -> None:
        precision = recipe.precision
        self._world = world
        self.autocast = autocast_dtype(precision)
        self._promote = OnOverflow(precision.promote.to, precision.promote.after) if precision.promote else None
        self._switch = GradientDiversity(**precision.switch.model_dump()) if precision.switch else None
        phases = {phase.epoch: phase.model_dump(exclude_none=True, exclude={"epoch"}) for phase in precision.schedule}
        self._said = {epoch: f"from here on: {_listed(phase)}" for epoch, phase in phases.items()}
        roles = {epoch: {role: fmt for role, fmt in phase.items() if role != "wire"} for epoch, phase in phases.items()}
        self._schedule = Schedule(roles) if any(roles.values()) else None
        layers, arithmetic = layer_rules(precision), arithmetic_of(precision)
        formats: dict[str, Any] = simulated_roles(precision) | (self._switch.changes() if self._switch else {})
        self.simulation = None
        if formats or layers or arithmetic or precision.products or self._schedule:
            self.simulation = simulate(
                model,
                **formats,
                accumulate=arithmetic,
                products=precision.products or None,
                rounding=precision.rounding,
                scale=precision.scale,
                layers=layers,
                exempt_first_last=precision.exempt_first_last,
                seed=recipe.seed,
                count_overflow=self._promote is not None,
            )
        self.keyed_by = None if self.simulation is None else RecordedStep(world.device)

    @property
    def may_be_recorded(self) -> bool:
        """Does a pass launch the same in every step, but for its keys and for changed formats (`number`)? The products of an
        arithmetic do not: the host makes tables for each of them."""
        return self.simulation is None or all(layer.arithmetic is None for layer in self.simulation.layers)

    @property
    def learns(self) -> bool:
        """Does a step leave something behind for later ones, as its gradients, overflows or largest numbers were?"""
        layers = () if self.simulation is None else self.simulation.layers
        delayed = any(scale.kind == "delayed" for layer in layers for scale in layer.scales.values())
        return delayed or self._promote is not None or self._switch is not None

    @property
    def number(self) -> int:
        """It changes when formats do."""
        return 0 if self.simulation is None else self.simulation.changes

    @property
    def moment(self) -> int:
        """What keys the noise of the pass that `begin` was called for."""
        return 0 if self.simulation is None else self.simulation.moment_number

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a pass that is recorded, or will be."""
        if self.simulation is None:
            yield
            return
        self.simulation.keyed_by = self.keyed_by
        try:
            yield
        finally:
            self.simulation.keyed_by = None

    def begin(self, step: int, rank: int) -> None:
        """Key the noise of stochastic rounding."""
        if self.simulation is not None:
            self.simulation.step, self.simulation.rank = step, rank

    def epoch_begins(self, epoch: int) -> list[str]:
        """Apply the recipe's phases; says what changed. (The wire has its own: `wire_settings`.)"""
        if epoch not in self._said:
            return []
        if self.simulation is not None and self._schedule is not None:
            self.simulation.set(**self._schedule.at(epoch))
        return [self._said[epoch]]

    def agree(self) -> None:
        """Scales that remember a step's largest numbers go by those of all ranks."""
        if self.simulation is not None and self._world.ranks > 1:
            self.simulation.agree(self._world.max)

    def observe(self, parameters: Mapping[str, Tensor]) -> None:
        """See a step's gradients, which all ranks have in common."""
        if self._switch is not None:
            self._switch.observe({name: p.grad for name, p in parameters.items() if p.grad is not None})

    def promote(self, at_once: bool) -> list[str]:
        """Give layers that have overflowed, on any rank, a wider format; says which.

        At the end of an epoch, those that have in as many epochs as the recipe says; `at_once`, where an overflow has made the
        step impossible, all that have.
        """
        if self._promote is None or self.simulation is None:
            return []
        overflowed, said = self.simulation.overflowed(self._world.sum), []
        for layer in self._promote.check(overflowed, at_once):
            self.simulation.promote(layer, self._promote.to)
            said.append(f"layer {layer} overflowed and is promoted to {self._promote.to}")
        return said

    def epoch_ends(self) -> list[str]:
        """Decide what changes from here on; says what does."""
        said = self.promote(at_once=False)
        if self._switch is not None and self.simulation is not None and (changes := self._switch.epoch_done()):
            self.simulation.set(**changes)  # type: ignore[arg-type]  # roles are no layers
            said.append(f"gradients are no longer diverse; from here on: {_listed(changes)}")
        return said

    def state_of_rank(self) -> dict[str, Any]:
        """What this process has seen that others have not: overflows of the epoch under way."""
        return {} if self._promote is None or self.simulation is None else {"overflows": self.simulation.overflow_counts()}

    def load_state_of_ranks(self, saved: list[dict[str, Any]]) -> None:
        """From the entries of the ranks that this process stands for. Virtual ranks count together, in the first one's entry:
        the others, where they go on as processes, begin with none."""
        if self._promote is not None and self.simulation is not None:
            none = torch.zeros_like(self.simulation.overflow_counts())
            counts = [entry["overflows"].to(none.device) for entry in saved if "overflows" in entry]
            self.simulation.load_overflow_counts(torch.stack([none, *counts]).sum(0))

    def state_dict(self) -> dict[str, Any]:
        parts = {"simulation": self.simulation, "promote": self._promote, "switch": self._switch}
        return {name: None if part is None else part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        parts = {"simulation": self.simulation, "promote": self._promote, "switch": self._switch}
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(saved[name])


def _listed(formats: Mapping[str, Any]) -> str:
    return ", ".join(f"{role} in {fmt}" for role, fmt in formats.items())
