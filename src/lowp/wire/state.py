"""What a compression of gradients remembers between steps, in the form in which it is saved. It is checked before it is taken.

    version     1
    step        how many steps were done
    world       the number of ranks
    codec       format, scale, rounding, skip, layers and error feedback, as `Settings.describe_codec` writes them
    shapes      [name, shape] of each parameter, in the model's order
    bounds      the scales of `aps_delayed` (one byte each), by parameter: the same on all ranks; 255: not known yet
    residuals   by rank, then by parameter: what rounding took from this rank's gradients (float32, flat, as they lie in memory)

Residuals differ between ranks, so the rank is part of the key. That makes one form right for three ways of saving:

- every rank saves its own `state_dict()` to its own file;
- torch.distributed.checkpoint takes the handle as it is: keys of different ranks differ, so each rank saves and loads its own.
  (It loads into the tensors of a `state_dict()`. So there are always tensors for all parameters, zeros before the first step.)
- `state_dict(all_ranks=True)` has every rank's residuals on every rank: one of them saves it, all load it.

The rejected alternative is to add up residuals when the number of ranks changes. The mean divides by another number then, and
each residual would have to be rounded once more. Another number of ranks is refused instead; `step_only` goes on without them.

`bounds` and `residuals` are called memory below. A state without memory is a step; it fits any number of ranks and any codec.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.wire.communicator import differing
from lowp.wire.faults import explain

VERSION = 1
UNKNOWN = 255  # no bound that is remembered has this byte (scaling.NONFINITE)
_OTHERWISE = "load_state_dict(saved, step_only=True) takes the step alone"


@dataclass(frozen=True)
class Owner:
    """Who saves or loads a state: one rank of a group, with these parameters and this codec."""

    rank: int
    world: int
    shapes: Mapping[str, torch.Size]
    codec: str
    error_feedback: bool
    delayed: bool  # is there a parameter with a delayed scale?

    def save(
        self, step: int, residuals: Mapping[str, Tensor], bounds: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        """A state of copies. What is not known of a parameter is written as zeros, or as an unknown bound."""
        delayed = self.delayed or bool(bounds)
        unknown = torch.tensor(UNKNOWN, dtype=torch.uint8, device=device)
        mine = {
            name: residuals[name].clone()
            if name in residuals
            else torch.zeros(shape.numel(), dtype=torch.float32, device=device)
            for name, shape in (self.shapes.items() if self.error_feedback else ())
        }
        return {
            "version": VERSION,
            "step": step,
            "world": self.world,
            "codec": self.codec,
            "shapes": [[name, list(shape)] for name, shape in self.shapes.items()],
            "bounds": {name: bounds.get(name, unknown).clone() for name in self.shapes} if delayed else {},
            "residuals": {str(self.rank): mine} if self.error_feedback else {},
        }

    def gather(self, state: dict[str, Any], group: Any) -> dict[str, Any]:
        """The state with every rank's residuals, on every rank, in host memory. All ranks call it."""
        everyones: dict[str, dict[str, Tensor]] = {}
        try:
            for name, mine in state["residuals"].get(str(self.rank), {}).items():
                theirs = [torch.empty_like(mine) for _ in range(self.world)]
                if mine.numel():
                    dist.all_gather(theirs, mine, group=group)
                for rank, residual in enumerate(theirs):
                    everyones.setdefault(str(rank), {})[name] = residual.cpu()
        except RuntimeError as error:
            raise explain(error, "gathering the residuals of all ranks", "", group, ours=False) from error
        return state | {"residuals": everyones}

    def load(self, saved: Any, step_only: bool = False) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        """Step, residuals and bounds of this rank, or a ValueError that says what does not fit. Nothing is copied."""
        if not isinstance(saved, Mapping) or "step" not in saved:
            raise ValueError("this is no state of a compression of gradients: it has no 'step'")
        step = saved["step"]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"the saved step is {step!r}, not a count")
        if step_only:
            return step, {}, {}
        self._check_origin(saved)
        residuals, bounds = saved.get("residuals", {}), saved.get("bounds", {})
        if residuals or bounds or self.error_feedback or self.delayed:
            self._check_memory(saved)
        mine = self._own(residuals) if self.error_feedback else {}
        if bounds:
            self._check_names(bounds, "delayed scales")
        for name, bound in bounds.items():
            _check_tensor(bound, torch.uint8, (), f"the saved scale of {name!r}")
        return step, mine, {name: bound for name, bound in bounds.items() if int(bound) != UNKNOWN}

    def _check_origin(self, saved: Mapping[str, Any]) -> None:
        """Is it a state of this version and of this model?"""
        missing = [key for key in ("version", "world", "codec", "shapes") if key not in saved]
        if missing:
            raise ValueError(
                f"the saved state does not say whose it is (no {', '.join(missing)}): lowp wrote such states before it checked "
                f"them; {_OTHERWISE}"
            )
        if saved["version"] != VERSION:
            raise ValueError(f"the saved state has version {saved['version']!r}, this lowp reads version {VERSION}")
        theirs, ours = {name: tuple(shape) for name, shape in saved["shapes"]}, {n: tuple(s) for n, s in self.shapes.items()}
        self._check_names(theirs, "parameters")
        for name, shape in ours.items():
            if theirs[name] != shape:
                raise ValueError(f"the saved state is of another model: {name!r} had the shape {theirs[name]}, now {shape}")

    def _check_memory(self, saved: Mapping[str, Any]) -> None:
        """Was it remembered with this codec, by as many ranks?"""
        if saved["codec"] != self.codec:
            first, second = differing(saved["codec"], self.codec)
            raise ValueError(f"the state was saved with {first}, now it is {second}; {_OTHERWISE}")
        if saved["world"] != self.world:
            raise ValueError(
                f"the state was saved by {saved['world']} ranks, now there are {self.world}: residuals and delayed scales "
                f"belong to a number of ranks; {_OTHERWISE}"
            )

    def _own(self, residuals: Mapping[str, Any]) -> dict[str, Tensor]:
        """This rank's residuals, of all parameters."""
        if str(self.rank) not in residuals:
            there = ", ".join(residuals) or "none"
            raise ValueError(
                f"this is rank {self.rank}, and the saved state has the residuals of rank {there}: let every rank save its own "
                f"state, or let one rank save state_dict(all_ranks=True), which all ranks call; {_OTHERWISE}"
            )
        mine = residuals[str(self.rank)]
        self._check_names(mine, "residuals")
        for name, residual in mine.items():
            _check_tensor(residual, torch.float32, (self.shapes[name].numel(),), f"the saved residual of {name!r}")
        return dict(mine)

    def _check_names(self, names: Iterable[str], what: str) -> None:
        names = set(names)
        missing = [name for name in self.shapes if name not in names]
        unknown = sorted(names - self.shapes.keys())
        if missing or unknown:
            found = f"it lacks {missing[0]!r}" if missing else f"it has {unknown[0]!r}, which is no parameter here"
            raise ValueError(f"the {what} of the saved state are those of another model: {found}")


def _check_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != shape:
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} is {found}, not {dtype} of shape {shape}")


class Remembers(Protocol):
    """A handle or a compressor."""

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Mapping[str, Any], step_only: bool = False) -> None: ...


class AllRanks:
    """The state of all ranks, for those who call `state_dict()` on every rank and save what one of them has.

    >>> accelerator.register_for_checkpointing(handle.all_ranks)
    """

    def __init__(self, owner: Remembers) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        return self._owner.state_dict(all_ranks=True)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._owner.load_state_dict(saved)
