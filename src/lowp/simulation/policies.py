"""Precision that changes while a model trains. A policy decides; the training loop asks it and tells the simulation.

- `Schedule`: formats by epoch. Warm up in fp32, then go narrow.
- `OnOverflow`: a layer whose numbers keep leaving the range moves to a wider format.
- `GradientDiversity`: everything moves up a ladder of formats when gradients stop telling different things (MuPPET).

Each has a `state_dict` of plain data and tensors, so that a resumed run decides what the uninterrupted one would have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.simulation.layers import ROLES, FormatName, checked_format, checked_roles


class Schedule:
    """Formats by epoch: `Schedule({0: {"weights": "fp32"}, 5: {"weights": "posit16", "layers": {...}}})`.

    An entry holds from its epoch on; what it does not name goes on as the entries before it left it.
    """

    def __init__(self, phases: Mapping[int, Mapping[str, Any]]) -> None:
        if not phases:
            raise ValueError("a schedule needs at least one phase: {epoch: {role: format}}")
        for epoch, phase in phases.items():
            if not isinstance(epoch, int) or epoch < 0:
                raise ValueError(f"a schedule counts epochs from 0; {epoch!r} is none")
            checked_roles({role: name for role, name in phase.items() if role != "layers"}, f"the schedule's epoch {epoch}")
        self.phases = {epoch: dict(phases[epoch]) for epoch in sorted(phases)}

    def at(self, epoch: int) -> dict[str, Any]:
        """What holds in an epoch, as arguments for `Simulation.set`; empty before the first phase."""
        held: dict[str, Any] = {}
        for start, phase in self.phases.items():
            if start <= epoch:
                held |= phase
        return held

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the epoch says it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"a schedule has no state, but was given {', '.join(state)}")


class OnOverflow:
    """Promote a layer to the format `to` when it has overflowed in `after` checks."""

    def __init__(self, to: FormatName = "fp16", after: int = 1) -> None:
        checked_format(to, "every role")
        if after < 1:
            raise ValueError(f"after counts checks and is at least 1, not {after}")
        self.to, self.after = to, after
        self._fired: dict[str, int] = {}
        self._promoted: list[str] = []

    def check(self, overflowed: Mapping[str, Iterable[str]], at_once: bool = False) -> list[str]:
        """Take what `Simulation.overflowed()` found; the layers to promote now, each of them once. `at_once` does not wait."""
        due = []
        for layer in sorted(layer for layer, roles in overflowed.items() if any(True for _ in roles)):
            self._fired[layer] = self._fired.get(layer, 0) + 1
            if (at_once or self._fired[layer] >= self.after) and layer not in self._promoted:
                due.append(layer)
        self._promoted += due
        return due

    def state_dict(self) -> dict[str, Any]:
        return {"fired": dict(self._fired), "promoted": list(self._promoted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fired, self._promoted = dict(state["fired"]), list(state["promoted"])


class GradientDiversity:
    """Up a ladder of formats when gradients become alike, after MuPPET (arXiv 2006.09049).

    The diversity of a window of gradients g_1 ... g_n of a layer is `sum |g_k|^2 / |sum g_k|^2`: 1/n if all are the same, 1 if
    they are orthogonal, more if they cancel. While gradients stay diverse, there is something to learn at this precision.

    1. `observe` takes each step's gradients: the reduced ones, so that all ranks decide alike.
    2. An epoch's diversity is the mean over its windows and over the layers.
    3. `epoch_done` compares: `p = the largest diversity since the last switch / this epoch's`. If p exceeds `threshold` for the
       `patience`-th time, the next format of the ladder is due, and counting starts anew.

    The paper observes once an epoch, over windows of several epochs, against a threshold that decays; here an epoch may hold
    many windows, and `threshold` may be set between epochs. An epoch in which no window ended decides nothing. Windows that
    hold anything not finite, and layers whose gradients add up to zero, are left out.
    """

    def __init__(
        self,
        ladder: Sequence[FormatName] = ("e4m3fn", "fp16", "fp32"),
        threshold: float = 1.5,
        window: int = 10,
        patience: int = 2,
        roles: Sequence[str] = ROLES,
    ) -> None:
        if len(ladder) < 2:
            raise ValueError(f"a ladder has two formats or more, not {len(ladder)}")
        for format in ladder:
            checked_roles(dict.fromkeys(roles, format), "roles")
        if window < 2 or patience < 1 or threshold < 1:
            raise ValueError(
                "GradientDiversity needs a window of at least 2 gradients, a patience of at least 1 and a threshold of at "
                f"least 1 (p never is less), not {window}, {patience} and {threshold}"
            )
        self.ladder, self.roles = tuple(ladder), tuple(roles)
        self.threshold, self.window, self.patience = threshold, window, patience
        self.level = 0
        self._violations = 0
        self._largest = 0.0  # diversity since the last switch
        self._taken = 0  # gradients in the window
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._windows: list[Tensor] = []  # of this epoch: the diversity of each layer, on the device until the epoch ends

    def changes(self) -> dict[str, FormatName]:
        """The formats of the present level, as arguments for `Simulation.set`."""
        return dict.fromkeys(self.roles, self.ladder[self.level])

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """One step's reduced gradients, by parameter or layer. Nobody waits for the device."""
        for name, gradient in gradients.items():
            exact = gradient.detach().to(torch.float64)
            square = exact.square().sum()
            if self._taken == 0:
                self._sums[name], self._squares[name] = exact.clone(), square
            elif name not in self._sums:
                raise ValueError(f"{name!r} has a gradient now but had none when the window began")
            else:
                self._sums[name] += exact
                self._squares[name] = self._squares[name] + square
        self._taken += 1
        if self._taken == self.window:
            self._windows.append(torch.stack([self._squares[name] / self._sums[name].square().sum() for name in self._sums]))
            self._sums, self._squares, self._taken = {}, {}, 0

    def epoch_done(self) -> dict[str, FormatName] | None:
        """The new formats if it is time to switch, else None. This waits for the device, once."""
        means = [_mean_of_finite(window) for window in torch.stack(self._windows).tolist()] if self._windows else []
        self._windows = []
        diversity = _mean_of_finite(means)
        if math.isnan(diversity) or self.level + 1 == len(self.ladder):
            return None
        self._largest = max(self._largest, diversity)
        self._violations += self._largest / diversity > self.threshold
        if self._violations < self.patience:
            return None
        self.level, self._violations, self._largest = self.level + 1, 0, 0.0
        return self.changes()

    def state_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "violations": self._violations,
            "largest": self._largest,
            "taken": self._taken,
            "sums": {name: total.clone() for name, total in self._sums.items()},
            "squares": dict(self._squares),
            "windows": list(self._windows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not 0 <= state["level"] < len(self.ladder):
            raise ValueError(f"the saved policy is on step {state['level']} of a ladder that has {len(self.ladder)}")
        self.level, self._violations, self._largest = state["level"], state["violations"], state["largest"]
        self._taken, self._windows = state["taken"], list(state["windows"])
        self._sums = {name: total.clone() for name, total in state["sums"].items()}
        self._squares = dict(state["squares"])


def _mean_of_finite(numbers: Sequence[float]) -> float:
    finite = [number for number in numbers if math.isfinite(number)]
    return math.fsum(finite) / len(finite) if finite else math.nan
