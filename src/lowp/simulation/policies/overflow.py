"""Promotion: a layer whose numbers leave the range of its format gets a wider one."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lowp.simulation.layers import FormatName, checked_format
from lowp.simulation.policies.policy import Agree, Policy, require_counts
from lowp.simulation.policies.schedule import UNITS
from lowp.simulation.simulation import Simulation


class OnOverflow(Policy):
    """Promote a layer to the format `to` when it has overflowed in `after` checks, one at the end of each epoch (or step).

    A check waits for the device, once. After a step that failed, every layer that overflowed is promoted without waiting for
    more of it.
    """

    count_overflow = True

    def __init__(self, to: FormatName = "fp16", after: int = 1, by: str = "epoch") -> None:
        checked_format(to, "every role")
        if after < 1:
            raise ValueError(f"after counts checks and is at least 1, not {after}")
        if by not in UNITS:
            raise ValueError(f"checks are by epoch or by step, not by {by!r}")
        self.to, self.after, self.by = to, after, by
        self._fired: dict[str, int] = {}
        self._promoted: list[str] = []

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        require_counts(simulation, self)

    def check(self, overflowed: Mapping[str, Iterable[str]], at_once: bool = False) -> list[str]:
        """Take what `Simulation.overflowed()` found; the layers to promote now, each of them once. `at_once` does not wait."""
        due = []
        for layer in sorted(layer for layer, roles in overflowed.items() if any(True for _ in roles)):
            self._fired[layer] = self._fired.get(layer, 0) + 1
            if (at_once or self._fired[layer] >= self.after) and layer not in self._promoted:
                due.append(layer)
        self._promoted += due
        return due

    def after_step(self, simulation: Simulation, gradients: Mapping[str, Tensor], agree: Agree | None = None) -> list[str]:
        return self._promote(simulation, agree) if self.by == "step" else []

    def after_epoch(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return self._promote(simulation, agree) if self.by == "epoch" else []

    def after_failure(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return self._promote(simulation, agree, at_once=True)

    def _promote(self, simulation: Simulation, agree: Agree | None, at_once: bool = False) -> list[str]:
        due = self.check(simulation.overflowed(agree), at_once)
        for layer in due:
            simulation.promote(layer, self.to)
        return [f"layer {layer} overflowed and is promoted to {self.to}" for layer in due]

    def state_dict(self) -> dict[str, Any]:
        return {"fired": dict(self._fired), "promoted": list(self._promoted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fired, self._promoted = dict(state["fired"]), list(state["promoted"])
