"""Master weights: the weights that an optimizer keeps and updates, in a format of your choice.

`simulate(model, weights=...)` rounds what forward and backward see of a weight; the optimizer goes on with float32. Narrow
hardware that trains has no float32 anywhere, so what the optimizer keeps between two steps is rounded as well:

1. At the start every parameter is rounded to nearest, once.
2. `optimizer.step()` computes `w - update` in float32, as wide as the adder of such hardware would be.
3. Then the sum is rounded to the format, and that is the weight. To nearest, an update of less than half a step of the format
   is lost, every time; stochastically it arrives with the probability that makes it right on average.

The tensors stay float32 and hold the format's numbers only. What is on the grid stays there, so parameters without a gradient,
and steps that a loss scale leaves out, change nothing. Noise is keyed by (seed, step, number of the parameter): ranks that hold
the same weights keep holding the same, and a resumed run goes on as if it had not stopped.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import BlockFormat, Format, FormatLike
from lowp.formats import format as parse_format
from lowp.simulation.layers import checked_format
from lowp.tensor.noise import Domain, Noise
from lowp.tensor.ops import quantize

ROUNDINGS = ("nearest", "stochastic")


class MasterWeights:
    """Keep an optimizer's parameters in a format: rounded now, and after every `optimizer.step()`.

        master = lowp.MasterWeights(optimizer, "fixed1.14", rounding="stochastic")
        ...                                 # train as ever
        master.remove()                     # the weights stay as they are

    Args:
        optimizer: any of torch.optim or lowp.optim. (A step inside `torch.compile` is left for the rounding: a graph break.)
        format: any scalar format with a sign and a zero. Blocks, whose scales move, cannot hold a weight that is updated.
        rounding: "nearest" or "stochastic", of every update.
        seed: of stochastic rounding; the same on all ranks.

    `step` counts the steps that were taken, and is all that a checkpoint needs. Parameters that are added later
    (`add_param_group`) are rounded with the next step. Overflow follows the format: fixed point and posits stop at their
    largest value, fp16 becomes infinite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, format: FormatLike, rounding: str = "nearest", seed: int = 0) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"MasterWeights takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"updates are rounded to 'nearest' or 'stochastic', not {rounding!r}")
        Noise.of(Domain.MASTER, seed, 0, 0)  # refuses what is no seed
        self.format, self.rounding, self.seed, self.step = checked_master(format), rounding, seed, 0
        self._optimizer = optimizer
        for _, parameter in self._parameters():  # all are looked at before any is changed
            _check_holds(parameter, self.format)
        self._round("nearest")
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @compat.disable_dynamo  # its counter would be a constant of the graph, compiled again with every step
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step += 1
        self._round(self.rounding)

    def _parameters(self) -> Iterator[tuple[int, Tensor]]:
        """With their numbers, which do not change: groups are added at the end."""
        return enumerate(parameter for group in self._optimizer.param_groups for parameter in group["params"])

    @torch.no_grad()
    def _round(self, rounding: str) -> None:
        for number, parameter in self._parameters():
            _check_holds(parameter, self.format)
            noise = Noise.of(Domain.MASTER, self.seed, self.step, number) if rounding == "stochastic" else None
            weight = parameter.detach()
            quantize(weight, self.format, rounding, seed=noise, out=weight)

    def remove(self) -> None:
        """Round no more. The weights stay as they are."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Plain data. The weights themselves are in the model's."""
        return {"format": str(self.format), "rounding": self.rounding, "seed": self.seed, "step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on counting where the saved run stopped. The state of other master weights is refused."""
        for key, ours in self.state_dict().items():
            if key not in saved:
                raise ValueError(f"this is not the state of MasterWeights: it has no {key!r}")
            if key != "step" and saved[key] != ours:
                raise ValueError(f"the saved master weights have {key} {saved[key]!r}, these {ours!r}")
        self.step = int(saved["step"])


def checked_master(format: FormatLike) -> Format:
    """A format that can hold weights from step to step, or a clear error."""
    fmt = parse_format(format)
    checked_format(fmt, "master weights")
    if isinstance(fmt, BlockFormat):
        raise ValueError(
            f"{fmt} has no room for master weights: a block's scale follows its largest number, and would round the others "
            "again with every step"
        )
    return fmt


def _check_holds(parameter: Tensor, fmt: Format) -> None:
    if not parameter.is_floating_point():
        raise TypeError(f"master weights are floating-point parameters, not {parameter.dtype}")
    if hasattr(parameter, "to_local"):
        raise TypeError("master weights of sharded parameters (DTensor) cannot be rounded: shards would repeat their noise")
    if not _holds(parameter.dtype, fmt):
        own = str(parameter.dtype).removeprefix("torch.")
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is {own}, which does not hold every number of {fmt}: keep the "
            "model in float32"
        )


@cache
def _holds(dtype: torch.dtype, fmt: Format) -> bool:
    """Is every number of the format one of the dtype? (In float32, entries of a codebook are taken as it rounds them.)"""
    if dtype in (torch.float32, torch.float64):
        return True
    if fmt.bits > torch.finfo(dtype).bits:
        return False
    values = torch.tensor(fmt.values, dtype=torch.float64)
    return torch.equal(values.to(dtype).to(torch.float64), values)
