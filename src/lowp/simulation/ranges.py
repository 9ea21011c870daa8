"""What scales remember: the largest magnitudes that tensors had in earlier steps, or in a calibration.

Every tensor that a layer rounds has a row, all layers' and roles' one after the other:

1. Passes raise a layer's `seen` to the largest magnitude that they meet. Several passes of a step (virtual ranks, accumulated
   batches, recomputed activations) give the largest of them all, in whatever order.
2. Ranks that train together agree: everybody takes the largest that any of them has seen.
3. When the next step begins, `seen` becomes the first column of the history, whose last one goes, and `bounds` the
   largest of each row's last n. Nothing moves during a pass, so that all passes of a step are scaled alike.

`seen` and `bounds` are changed in place, by compiled code too: a new step compiles nothing and does not wait for the device.
A magnitude of zero says nothing to scale by. In a calibration, where zero is an answer, "not seen" is -1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.simulation.layers import SimulatedLayer

Agree = Callable[[Tensor], Tensor]
_NOT_SEEN = -1.0


class Ranges:
    """The rows of one simulation."""

    def __init__(self, layers: Sequence[SimulatedLayer]) -> None:
        self._places = [(layer, role) for layer in layers for role in layer.tensor_roles]
        self._rows = [layer.places(role) for layer, role in self._places]
        self._step = 0  # that `seen` belongs to
        self._history: Tensor | None = None  # [rows, steps], the latest first

    def _with_scale(self, kind: str) -> list[tuple[SimulatedLayer, str]]:
        plans = [layer.plans[role] for layer, role in self._places]
        return [place for place, plan in zip(self._places, plans, strict=True) if plan is not None and plan.scale == kind]

    def prepare(self) -> None:
        """Make room for what the scales of now remember. What was remembered before stays."""
        delayed = self._with_scale("delayed")
        if not delayed and not self._with_scale("calibrated"):
            return
        for layer, role in self._places:
            if role not in layer.seen:
                zeros = torch.zeros(layer.places(role), dtype=torch.float64, device=layer.overflows[role].device)
                layer.seen[role], layer.bounds[role] = zeros, zeros.clone()
        if delayed:
            longest = max(layer.scales[role].size for layer, role in delayed)
            history = torch.zeros(sum(self._rows), 0, dtype=torch.float64) if self._history is None else self._history
            self._history = torch.nn.functional.pad(history, (0, max(longest - history.size(1), 0)))

    def begin(self, step: int) -> None:
        """Move on, if this is another step than the one before."""
        if step != self._step and self._history is not None:
            seen = self._seen()
            self._history = torch.cat([seen[:, None], self._history.to(seen.device)[:, :-1]], 1)
            self._set_bounds(self._history)
            counted = [layer.seen[role] for layer, role in self._with_scale("delayed")]
            if counted:  # none, where scales are others now
                compat.foreach_zero_(counted)
        self._step = step

    def _set_bounds(self, history: Tensor) -> None:
        delayed = set(self._with_scale("delayed"))
        lengths = [layer.scales[role].size if (layer, role) in delayed else 0 for layer, role in self._places]
        by_row = torch.tensor(lengths).repeat_interleave(torch.tensor(self._rows)).to(history.device)
        counts = torch.arange(history.size(1), device=history.device) < by_row[:, None]
        maxima = torch.where(counts, history, torch.zeros_like(history)).amax(1)
        compat.foreach_copy_([layer.bounds[role] for layer, role in self._places], list(maxima.split(self._rows)))

    def agree(self, agree: Agree) -> None:
        """Go by what all ranks have seen in this step."""
        if self._history is not None:
            self._see(agree(self._seen()))

    def _seen(self) -> Tensor:
        """Of all rows, on the device of the first."""
        parts = [layer.seen[role] for layer, role in self._places]
        return torch.cat([part.to(parts[0].device) for part in parts])

    def _see(self, maxima: Tensor) -> None:
        compat.foreach_copy_([layer.seen[role] for layer, role in self._places], list(maxima.split(self._rows)))

    def start_calibration(self) -> None:
        places = self._with_scale("calibrated")
        if not places:
            raise ValueError("there is nothing to calibrate: no role has the scale 'calibrated'")
        for layer, role in places:
            layer.seen[role].fill_(_NOT_SEEN)

    def end_calibration(self, agree: Agree | None) -> None:
        """Keep the maxima that were seen; what was not seen this time keeps those of before."""
        seen = self._seen()
        if agree is not None:
            seen = agree(seen)
        calibrated = set(self._with_scale("calibrated"))
        for (layer, role), maxima in zip(self._places, seen.cpu().split(self._rows), strict=True):
            if (layer, role) in calibrated:
                found = {place: maximum for place, maximum in enumerate(maxima.tolist()) if maximum != _NOT_SEEN}
                layer.calibrated[role] = layer.calibrated.get(role, {}) | found
                layer.fix()

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors. Of ranks that have agreed on this step, the same on all of them."""
        calibrated: dict[str, dict[str, list[float | None]]] = {}
        for layer, role in self._places:
            if maxima := layer.calibrated.get(role):
                by_place = [maxima.get(place) for place in range(layer.places(role))]
                calibrated.setdefault(layer.name, {})[role] = by_place
        if self._history is None:
            return {"calibrated": calibrated}
        return {"calibrated": calibrated, "step": self._step, "history": self._history.cpu(), "seen": self._seen().cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the scales have been loaded: `prepare` has made room for them."""
        for layer, role in self._places:
            maxima = state["calibrated"].get(layer.name, {}).get(role, [])
            layer.calibrated[role] = {place: maximum for place, maximum in enumerate(maxima) if maximum is not None}
            layer.fix()
        if self._history is not None and "history" in state:
            if len(state["history"]) != sum(self._rows):
                raise ValueError(
                    f"the saved simulation remembers {len(state['history'])} tensors, this model has {sum(self._rows)}"
                )
            self._step, self._history = state["step"], state["history"].clone()
            self._set_bounds(self._history)
            self._see(state["seen"])
