"""One tensor rounded in each direction: forward to one format, its gradient to another, each as its `Target` says.

The gradient passes straight through the rounding of the value. A target does, in this order:

1. find the tensor's largest magnitude, if its scale needs it or it is remembered;
2. multiply by a power of two (scales.py), round to the format, and count the finite numbers that left the range;
3. divide by the power.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.simulation.scales import aps_shift, fitting_shift, power_of_two
from lowp.tensor import node
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.core import quantize_operation
from lowp.tensor.dynamo import in_graph, is_exporting, let_dynamo_fall_back, teach_dynamo
from lowp.tensor.fitting import carrier_of, largest
from lowp.tensor.noise import KEY_SIZE, Domain, Noise, key_tensor
from lowp.tensor.ops import quantize
from lowp.tensor.overflow import overflows

UNKNOWN = "the scale"  # followed by "of the weights of layer 'fc'"
_ONE_KEY = 1 << 30  # elements


@dataclass(frozen=True, eq=False)  # no hash of its own: torch 2.11 takes one of what it traces a call of, before it is filled
class Target:
    """What becomes of a tensor: its format, and how it gets there."""

    format: str
    rounding: str
    # "none", "fitting" or "aps"; or the exponent itself, as text (compiled code takes a number that changes for a variable); or
    # UNKNOWN and whose it is
    scale: str = "none"
    axis: int | None = None  # the dimension of channels, if each has its own scale
    saturates: bool = False  # finite numbers stop at the format's largest; otherwise they overflow as the format says
    noise: Noise | None = None  # for stochastic rounding
    overflows: Tensor | None = None  # where finite numbers that leave the format's range are counted, if they are
    seen: Tensor | None = None  # where the largest magnitude is remembered, at `place`
    bounds: Tensor | None = None  # the maximum to scale by, at `place`; the tensor's own where that is not positive
    place: int = 0
    as_node: bool = False  # one node of a graph (tensor/node.py), also where a compiler behind Dynamo calls this
    shown: Callable[[Tensor, Tensor], None] | None = None  # is shown the tensor and what became of it, if anybody watches

    @property
    def key(self) -> tuple:
        """The noise as numbers and tensors, which a graph can hold."""
        return () if self.noise is None else (int(self.noise.domain), self.noise.seed, self.noise.step, self.noise.stream)

    @property
    def remembers(self) -> bool:
        """Does it write to something, or raise, when it rounds?"""
        tensors = (self.overflows, self.seen, self.bounds)
        return any(each is not None for each in tensors) or self.shown is not None or self.scale.startswith(UNKNOWN)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            teach_dynamo()
        elif (self.seen is not None or self.overflows is not None) and compat.is_batchedtensor(x):
            raise ValueError("under vmap nothing can be remembered or counted: no delayed scale, and no count_overflow")
        if self.scale.startswith(UNKNOWN):
            raise ValueError(f"{self.scale} has not been calibrated: run the model, and backward, inside lowp.calibrate(model)")
        maximum = None
        if self.scale in ("fitting", "aps") or self.seen is not None:
            maximum = largest(x, self.axis, self.scale != "aps")
            if self.seen is not None:
                row = self.seen[self.place]
                row.copy_(torch.maximum(row, maximum.to(row.dtype)))
            if self.bounds is not None:
                bound = self.bounds[self.place]
                maximum = torch.where(bound > 0, bound.to(maximum.dtype), maximum)
        counts = self.overflows is not None
        as_node = self.as_node or _in_compiled_code()
        rounded, left = _round(x, maximum, self.format, self.rounding, self.scale, self.saturates, counts, as_node, *self.key)
        if _in_compiled_code():
            let_dynamo_fall_back()
        if self.overflows is not None:
            self.overflows.add_(left)
        if self.shown is not None:
            self.shown(x.detach(), rounded.detach())
        return rounded


def passed(x: Tensor, ahead: Target | None, behind: Target | None) -> Tensor:
    """`x`, rounded to `ahead`, whose gradient is rounded to `behind`. None leaves either alone."""
    if ahead is None and behind is None:
        return x
    if not _in_compiled_code() or (ahead and ahead.remembers) or (behind and behind.remembers):
        return _Passage.apply(x, ahead, behind)  # type: ignore[return-value]
    teach_dynamo()
    result = _pass_in_graph(x, _parts(ahead), _parts(behind))
    let_dynamo_fall_back()
    return result


def _in_compiled_code() -> bool:
    """Is Dynamo tracing, for a graph that may have lowp's operators? An exported program has to do without."""
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def _parts(target: Target | None) -> tuple | None:
    """A target that remembers nothing, as plain numbers and tensors, which a graph can hold."""
    return (
        None if target is None else (target.format, target.rounding, target.scale, target.axis, target.saturates, *target.key)
    )


@in_graph
def _pass_in_graph(x: Tensor, ahead: tuple | None, behind: tuple | None) -> Tensor:
    """`passed`, as one call in Dynamo's graph.

    An autograd function that Dynamo sees is traced twice, and becomes two graphs of its own inside the graph: of a GPT of two
    blocks, tracing then takes 3.2 seconds of processor time instead of 1 (the plain model: 0.2). Also, gradients by
    `torch.func.grad` are not rounded then: that does not look into such a graph.
    """
    return _Passage.apply(x, _target(ahead), _target(behind))  # type: ignore[return-value]


def _target(parts: tuple | None) -> Target | None:
    """The inverse of `_parts`, for a graph that is being compiled."""
    if parts is None:
        return None
    *how, key = *parts[:5], parts[5:]
    return Target(*how, noise=Noise(*key[1:], domain=Domain(key[0])) if key else None, as_node=True)


class _Passage(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, ahead: Target | None, behind: Target | None) -> Tensor:
        # Never x itself: autograd refuses to change an input in place that was handed on, as `nn.ReLU(inplace=True)` does.
        return x.clone() if ahead is None else ahead(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.behind = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # Straight through once more: second derivatives exist, and are rounded as the gradient is.
        return passed(gradient, ctx.behind, None), None, None


@in_graph
def _round(
    x: Tensor,
    maximum: Tensor | None,
    format: str,
    rounding: str,
    scale: str,
    saturates: bool,
    counts: bool,
    as_node: bool,
    *key: Any,
) -> tuple[Tensor, Tensor | None]:
    """`x` rounded to the format's grid where its scale puts it, and how many finite numbers left the range if that `counts`."""
    fmt, noise = parse_format(format), Noise(*key[1:], domain=Domain(key[0])) if key else None
    if scale == "none":
        rounded = _round_as_it_is(x, fmt, rounding, noise, as_node)
        return rounded, _overflow_count(x, rounded, fmt, saturates) if counts else None
    up, down = _powers(maximum, fmt, scale)
    scaled = x.detach().to(carrier_of(x).dtype) * up
    inside = torch.where(scaled.isinf(), scaled, scaled.clamp(-fmt.max, fmt.max)) if saturates else scaled
    rounded = _round_as_it_is(inside, fmt, rounding, noise, as_node)
    return (rounded * down).to(x.dtype), _overflow_count(scaled, rounded, fmt, saturates) if counts else None


def _powers(maximum: Tensor | None, fmt: AnyFormat, scale: str) -> tuple[Tensor | float, Tensor | float]:
    """The power of two, and its inverse."""
    if maximum is None:
        return 2.0 ** int(scale), 2.0 ** -int(scale)
    shift = aps_shift(maximum, fmt) if scale == "aps" else fitting_shift(maximum, fmt)
    return power_of_two(shift, carrier_of(maximum)), power_of_two(-shift, carrier_of(maximum))


def _overflow_count(x: Tensor, rounded: Tensor, fmt: AnyFormat, saturates: bool) -> Tensor:
    return overflows(x, fmt, None if saturates else rounded).sum()


def _round_as_it_is(x: Tensor, fmt: AnyFormat, rounding: str, noise: Noise | None, as_node: bool) -> Tensor:
    """`quantize`. In compiled code it is one node where that is better (tensor/node.py); its noise is on a GPU (`_key_at`)."""
    if as_node and node.suits(x, fmt, rounding, noise):
        return node.quantize_as_node(x, fmt, rounding, noise)
    if isinstance(fmt, BlockFormat):
        return quantize(x, fmt, rounding, seed=noise).clone()  # of a view, which autograd refuses to change in place
    if noise is None or not isinstance(noise.step, Tensor) or x.numel() > _ONE_KEY:
        return quantize(x, fmt, rounding, seed=noise)
    operation = quantize_operation(fmt, x.dtype, rounding, False, x.dtype)
    tables = tuple(table.tensor(x.device) for table in operation.tables)
    key = _key_at(int(noise.domain), noise.step, noise.seed, noise.stream, x.device)  # type: ignore[arg-type]  # the seed is an integer
    return operation(x.detach().view(CARRIERS[x.dtype].storage), tables, key).view(x.dtype)


@torch.library.custom_op("lowp::noise_key_at", mutates_args=())
def _key_at(domain: int, step: Tensor, seed: int, stream: int, device: torch.device) -> Tensor:
    """The key for a step that is a tensor, on the host: reading it there waits for no device."""
    return key_tensor(Noise(seed, int(step), stream, domain=Domain(domain)), 0, device)


@_key_at.register_fake
def _(domain: int, step: Tensor, seed: int, stream: int, device: torch.device) -> Tensor:
    return torch.empty(KEY_SIZE, dtype=torch.int32, device=device)
