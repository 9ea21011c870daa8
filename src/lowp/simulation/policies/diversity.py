"""Precision that follows the gradients: up a ladder of formats when they become alike."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowp.simulation.layers import ROLES, FormatName, checked_roles
from lowp.simulation.policies.policy import Agree, Policy, listed
from lowp.simulation.simulation import Simulation


class GradientDiversity(Policy):
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

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        self._set(simulation, self.changes())

    def after_step(self, simulation: Simulation, gradients: Mapping[str, Tensor], agree: Agree | None = None) -> list[str]:
        self.observe(gradients)
        return []

    def after_epoch(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        changes = self.epoch_done()
        if changes is None:
            return []
        self._set(simulation, changes)
        return [f"gradients are no longer diverse; from here on: {listed(changes)}"]

    @staticmethod
    def _set(simulation: Simulation, changes: Mapping[str, FormatName]) -> None:
        simulation.set(**changes)  # type: ignore[arg-type]  # roles are no layers

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
