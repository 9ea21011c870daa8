"""Formats by time: warm up in fp32, then go narrow."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowp.simulation.policies.policy import Policy, checked_settings, listed
from lowp.simulation.simulation import Simulation

UNITS = ("epoch", "step")


class Schedule(Policy):
    """Formats by epoch: `Schedule({0: {"weights": "fp32"}, 5: {"weights": "posit16", "layers": {...}}})`; or `by="step"`.

    An entry has what `Simulation.set` takes, and holds from its epoch on; what it does not name goes on as it was.
    """

    def __init__(self, phases: Mapping[int, Mapping[str, Any]], by: str = "epoch") -> None:
        if by not in UNITS:
            raise ValueError(f"a schedule is by epoch or by step, not by {by!r}")
        if not phases:
            raise ValueError(f"a schedule needs at least one phase: {{{by}: {{role: format}}}}")
        for start, phase in phases.items():
            if not isinstance(start, int) or start < 0:
                raise ValueError(f"a schedule counts {by}s from 0; {start!r} is none")
            checked_settings(phase, f"the schedule's {by} {start}")
        self.by = by
        self.phases = {start: dict(phases[start]) for start in sorted(phases)}
        self._begun = 0  # phases that have been applied

    def at(self, when: int) -> dict[str, Any]:
        """What holds in an epoch (or step), as arguments for `Simulation.set`; empty before the first phase."""
        held: dict[str, Any] = {}
        for start, phase in self.phases.items():
            if start <= when:
                held |= phase
        return held

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        """Look at every phase, whose patterns may match nothing, and begin the first."""
        before = simulation.state_dict()
        try:
            for phase in self.phases.values():
                simulation.set(**phase)
        finally:
            simulation.load_state_dict(before)
        self.before_step(simulation, 0, 0)

    def before_step(self, simulation: Simulation, step: int, epoch: int) -> list[str]:
        """Apply the phases that begin here: only those, so that what others changed meanwhile stays."""
        now = epoch if self.by == "epoch" else step
        due = [start for start in self.phases if start <= now][self._begun :]
        if not due:
            return []
        changes: dict[str, Any] = {}
        for start in due:
            changes |= self.phases[start]
        simulation.set(**changes)
        self._begun += len(due)
        return [f"from here on: {listed(changes)}"]

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        begun = state.get("begun", 0)
        if begun > len(self.phases):
            raise ValueError(f"the saved schedule is in phase {begun}, and this one has {len(self.phases)}")
        self._begun = begun
