"""Formats by size: demote the largest tensors first until the model fits, promote what overflows.

The method of "Training with Mixed-Precision Floating-Point Assignments" (W. Lee, R. Sharma, A. Aiken, arXiv 2301.13464):

1. Tensors are put into groups (measuring.py): a layer with weights and what follows it, with the weights that read from it.
2. Groups are demoted from the high format to the low one in decreasing order of size, until a part of all numbers that the
   user chose is low. Few large groups do less harm than many small ones.
3. After every step, a forward tensor (weights or activations) of which 1 % of the numbers or more overflowed goes back to the
   high format until the end of training: this tensor alone, not its group. Backward tensors are left to the loss scale.

Formats are the paper's by default: 16 bits (e6m9) high, 8 bits low, where errors have an exponent bit more than what is seen
going forward, and gradients of weights stay high. (Its low forward format is e4m3 with 4 added to the exponent bias. Here that
is a matter of `simulate`'s scales, and e4m3fn the nearest format that has a name.)

Ours: the budget is in bytes, or a fraction of those of the all-high model (r of the numbers low makes 1 - r/2 if all go from 16
bits to 8); ladders of more than two rungs, where all groups go down one rung before any goes down the next; every layer with a
matrix begins a group, not only linear layers and convolutions; after a step that failed, every forward tensor that overflowed
at all is promoted; the check may be made less often than at every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.formats import format as parse_format
from lowp.simulation.layers import OFF, ROLES, FormatName, checked_roles
from lowp.simulation.measuring import FormatSlot, call, measure
from lowp.simulation.policies.fixed import exactly
from lowp.simulation.policies.policy import Agree, Policy, require_counts
from lowp.simulation.simulation import Simulation

Rung = FormatName | Mapping[str, FormatName]

PAPERS_LADDER: tuple[Rung, ...] = ("e6m9", {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2"})
_FORWARD = ("weights", "activations")  # the roles that are promoted


@dataclass
class Group:
    """Tensors that are demoted together, and how far down the ladder they are."""

    places: tuple[FormatSlot, ...]
    rung: int = 0

    @property
    def elements(self) -> int:
        return sum(place.elements for place in self.places)


class MemoryBudget(Policy):
    """Demote the largest tensors until all of them fit into `budget`; promote those that overflow.

    Args:
        budget: a fraction (a float up to 1.0) of what everything takes in the ladder's first format, or bytes (an integer).
            It is met at the start; promotions may exceed it, as in the paper.
        example: what one step gives the model, for the sizes of activations and the groups: an input, a tuple of arguments, a
            mapping of named ones, or a function that takes the model and runs it. The model runs on it once, as in evaluation.
            It can be left out if `roles` are weights and gradients alone; then every layer is a group.
        ladder: formats from high to low, each a format or `{role: format}`; roles that a rung does not name stay as they are.
        roles: those that are counted and assigned. The others are left as they are.
        threshold: the part of a tensor's numbers that has to overflow in a step for it to be promoted. None: nothing ever is.
        every: steps from check to check. A check waits for the device, once.

    After `start`, `assignment` is `{layer: {role: format}}`, `bytes` what it takes, and `groups` how it came about.
    """

    def __init__(
        self,
        budget: float,
        example: Any = None,
        ladder: Sequence[Rung] = PAPERS_LADDER,
        roles: Sequence[str] = ROLES,
        threshold: float | None = 0.01,
        every: int = 1,
    ) -> None:
        if not (isinstance(budget, int) and budget > 0) and not (isinstance(budget, float) and 0 < budget <= 1):
            raise ValueError(f"a budget is a fraction, above 0.0 and up to 1.0, or a number of bytes; {budget!r} is neither")
        if example is None and ("activations" in roles or "errors" in roles):
            raise ValueError("MemoryBudget needs an example, a batch as one step has it, to know how large activations are")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold is a part of a tensor's numbers, from 0 to 1, not {threshold}")
        if every < 1:
            raise ValueError(f"every counts steps and is at least 1, not {every}")
        self.budget, self.example, self.roles, self.threshold, self.every = budget, example, tuple(roles), threshold, every
        self.ladder = _rungs(ladder, self.roles)
        self.count_overflow = threshold is not None
        self.groups: tuple[Group, ...] = ()
        self.assignment: dict[str, dict[str, str]] = {}
        self._promoted: set[tuple[str, str]] = set()  # layer, role
        self._steps = 0  # since the last check

    @property
    def bytes(self) -> float:
        """What the counted tensors take in their formats of now."""
        return (
            sum(place.elements * _bits(self._format(place, group.rung)) for group in self.groups for place in group.places) / 8
        )

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        if self.count_overflow:
            require_counts(simulation, self)
        for row in simulation.formats():
            if row.role in self.roles and row.format != OFF:
                raise ValueError(
                    f"MemoryBudget chooses formats itself, but {row.layer!r} has {row.role} in {row.format} already"
                )
        self._promoted, self._steps = set(), 0
        places = measure(model, lambda: self._run(model))
        self.groups = self._grouped([place for place in places if place.role in self.roles])
        self._demote()
        self._assign(simulation)

    def _run(self, model: nn.Module) -> None:
        if callable(self.example):
            self.example(model)
        elif self.example is not None:
            call(model, self.example)

    def _grouped(self, places: Sequence[FormatSlot]) -> tuple[Group, ...]:
        """Groups in the order in which they are demoted. Without an example nobody knows who reads what: each layer is one."""
        groups: dict[int | str, list[FormatSlot]] = {}
        for place in places:
            groups.setdefault(place.layers[0] if self.example is None else place.group, []).append(place)
        return tuple(sorted((Group(tuple(group)) for group in groups.values()), key=lambda group: -group.elements))

    def _demote(self) -> None:
        """Rung by rung and group by group, until the budget is met."""
        all_high = self.bytes
        allowed = self.budget if isinstance(self.budget, int) else self.budget * all_high
        for rung in range(1, len(self.ladder)):
            for group in self.groups:
                if self.bytes <= allowed:
                    return
                group.rung = rung
        if self.bytes > allowed:
            raise ValueError(
                f"a budget of {allowed:,.0f} bytes cannot be met: with everything at the end of the ladder it is "
                f"{self.bytes:,.0f}, {self.bytes / all_high:.3f} of what the first format takes"
            )

    def _format(self, place: FormatSlot, rung: int) -> str:
        return self.ladder[0 if (place.layers[0], place.role) in self._promoted else rung][place.role]

    def _assign(self, simulation: Simulation) -> None:
        """Tell the simulation, and see that it took it: a layer may be exempt by other means."""
        formats = {
            (layer, place.role): self._format(place, group.rung)
            for group in self.groups
            for place in group.places
            for layer in place.layers
        }
        self.assignment = {row.layer: {} for row in simulation.formats()}
        for row in simulation.formats():
            if row.role in self.roles:
                self.assignment[row.layer][row.role] = formats[row.layer, row.role]
        simulation.set(layers=exactly(self.assignment))
        for row in simulation.formats():
            if row.role in self.roles and row.format != formats[row.layer, row.role]:
                raise ValueError(f"{row.role} of {row.layer!r} stay in {row.format}, which MemoryBudget cannot change")

    def after_step(self, simulation: Simulation, gradients: Mapping[str, Tensor], agree: Agree | None = None) -> list[str]:
        self._steps += 1
        if self.threshold is None or self._steps < self.every:
            return []
        return self._promote(simulation, agree, self.threshold)

    def after_failure(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return [] if self.threshold is None else self._promote(simulation, agree, 0.0)

    def _promote(self, simulation: Simulation, agree: Agree | None, threshold: float) -> list[str]:
        parts = self._overflowed_parts(simulation, agree)
        promoted = []
        for group in self.groups:
            for place in group.places:
                high, key = self.ladder[0][place.role], (place.layers[0], place.role)
                part = max(parts[layer, place.role] for layer in place.layers) / max(place.elements, 1)
                if part > 0 and part >= threshold and place.role in _FORWARD and self._format(place, group.rung) != high:
                    self._promoted.add(key)
                    promoted.append(f"{place.role} of {' and '.join(place.layers)} overflowed and are promoted to {high}")
        if promoted:
            self._assign(simulation)
        return promoted

    def _overflowed_parts(self, simulation: Simulation, agree: Agree | None) -> dict[tuple[str, str], float]:
        """Numbers that overflowed in a step, on the average rank: counts are reset. One more 1 in the sum counts the ranks."""
        counts = simulation.overflow_counts()
        simulation.load_overflow_counts(torch.zeros_like(counts))
        counts = torch.cat([counts, counts.new_ones(1)])
        *agreed, ranks = (counts if agree is None else agree(counts)).tolist()
        steps, self._steps = max(self._steps, 1), 0
        rows = simulation.formats()
        return {(row.layer, row.role): count / ranks / steps for row, count in zip(rows, agreed, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"promoted": sorted(self._promoted), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `start`, which finds the same groups; the simulation's own state has the formats."""
        unknown = {layer for layer, _ in state["promoted"]} - self.assignment.keys()
        if unknown:
            raise ValueError(f"the saved policy promoted {min(unknown)!r}, which this model does not have")
        self._promoted, self._steps = {(layer, role) for layer, role in state["promoted"]}, state["steps"]
        for group in self.groups:
            for place in group.places:
                for layer in place.layers:
                    self.assignment[layer][place.role] = self._format(place, group.rung)


def _rungs(ladder: Sequence[Rung], roles: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Every rung as a format for every role, checked: down the ladder no role gets wider."""
    if len(ladder) < 2:
        raise ValueError(f"a ladder has two rungs or more, from high to low, not {len(ladder)}")
    found: list[dict[str, str]] = []
    for number, rung in enumerate(ladder):
        named = rung if isinstance(rung, Mapping) else dict.fromkeys(roles, rung)
        formats = (found[-1] if found else dict.fromkeys(roles, OFF)) | {
            role: name or OFF for role, name in checked_roles(named, f"rung {number} of the ladder").items() if role in roles
        }
        wider = [role for role in roles if found and _bits(formats[role]) > _bits(found[-1][role])]
        if wider:
            before, after = found[-1][wider[0]], formats[wider[0]]
            raise ValueError(
                f"a ladder goes from high to low, and {after} for {wider[0]} has more bits than {before} before it"
            )
        found.append(formats)
    return tuple(found)


def _bits(name: str) -> float:
    return parse_format(name).bits
