"""The arithmetic of each optimizer, on float32 numbers: what is added to a weight, and what its states become.

A rule is a frozen description with one function, `direction`, written in additions, multiplications, divisions and square roots
only, each rounded by itself: so a CPU and a GPU compute the same bits. It runs inside a kernel, in registers, and on whole
tensors (`Optimizer.intended_update`). How weights and states are rounded afterwards is not part of a rule: see
rounding.py.

`s` are the call's scalars, in the order of `scalars`. Norms, for LARS and LAMB, come as a `Norms`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root of float32 numbers, which torch.sqrt on a CPU is not. Kernels use one instruction."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


Direction = tuple[Tensor, list[Tensor]]  # what is added to the weight, and the new states


class Norms(NamedTuple):
    """The 2-norms of a tensor's weights and of its gradient (LARS) or step (LAMB), float32; 0-dim or of the element's shape."""

    weight: Tensor
    step: Tensor


@dataclass(frozen=True)
class Average:
    """A state as a weighted average of bounded numbers: what is known of its largest magnitude before it is computed.

    The state becomes `decay * state + (1 - decay) * x` with |x| <= gain * (|g| + weight_decay |w|)^power, or, if `norm_gain` is
    given and no norm is zero, |x| <= norm_gain * (2-norm of w).
    """

    decay: float
    gain: float = 1.0
    power: int = 1
    weight_decay: float = 0.0
    norm_gain: float | None = None


@dataclass(frozen=True)
class SGDRule:
    """`g += wd w; v = momentum v + (1 - dampening) g; w -= lr v` (with Nesterov: `lr (g + momentum v)`), as torch.optim.SGD."""

    momentum: bool
    nesterov: bool
    decay: bool
    needs_norms = False
    scalar_count = 4

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def scalars(self, group: dict[str, Any], step: int) -> list[float]:
        first = step == 1  # the buffer begins as the gradient itself
        return [-group["lr"], group["weight_decay"], group["momentum"], 1.0 if first else 1.0 - group["dampening"]]

    def averages(self, group: dict[str, Any]) -> tuple[Average, ...]:
        rest = 1.0 - group["momentum"]
        gain = max(1.0, (1.0 - group["dampening"]) / rest)
        return (Average(group["momentum"], gain, 1, group["weight_decay"]),) if self.momentum else ()

    def direction(self, w: Tensor, g: Tensor, states: list[Tensor], s: Tensor, norms: Norms | None) -> Direction:
        if self.decay:
            g = g + w * s[1]
        if not self.momentum:
            return g * s[0], []
        buffer = states[0] * s[2] + g * s[3]
        step = g + buffer * s[2] if self.nesterov else buffer
        return step * s[0], [buffer]


@dataclass(frozen=True)
class AdamWRule:
    """`m += (1 - b1)(g - m); v = b2 v + (1 - b2) g^2; w -= lr (wd w + m^ / (sqrt(v^) + eps))`.

    m^ and v^ are m and v corrected for having begun at zero.
    """

    needs_norms = False
    scalar_count = 7
    states = ("exp_avg", "exp_avg_sq")

    def scalars(self, group: dict[str, Any], step: int) -> list[float]:
        beta1, beta2 = group["betas"]
        corrected1, corrected2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
        lr, decay = group["lr"], group["weight_decay"]
        return [1.0 - beta1, beta2, 1.0 - beta2, 1.0 / corrected2, group["eps"], -lr / corrected1, -lr * decay]

    def averages(self, group: dict[str, Any]) -> tuple[Average, ...]:
        beta1, beta2 = group["betas"]
        return Average(beta1), Average(beta2, power=2)

    def direction(self, w: Tensor, g: Tensor, states: list[Tensor], s: Tensor, norms: Norms | None) -> Direction:
        return _adam_step(w, g, states, s)


def _adam_step(w: Tensor, g: Tensor, states: list[Tensor], s: Tensor) -> Direction:
    """`m^ / (sqrt(v^) + eps) + wd w` in the units of s[5] and s[6], and the new moments."""
    mean, square = states[0] + (g - states[0]) * s[0], states[1] * s[1] + (g * g) * s[2]
    return (mean / (root(square) * s[3] + s[4])) * s[5] + w * s[6], [mean, square]


@dataclass(frozen=True)
class LARSRule:
    """`lr_l = lr trust |w| / (|g| + wd |w|); v = momentum v + lr_l (g + wd w); w -= v` (docs/PAPERS.md, section 3).

    With `clip` (LARC), lr_l is at most lr. Tensors that are `excluded` from it (biases, norms) take lr itself and do not decay.
    """

    clip: bool
    nesterov: bool
    excluded: bool
    scalar_count = 5
    states = ("momentum_buffer",)

    @property
    def needs_norms(self) -> bool:
        return not self.excluded

    def scalars(self, group: dict[str, Any], step: int) -> list[float]:
        return [group["lr"], group["weight_decay"], group["momentum"], group["trust"], group["eps"]]

    def averages(self, group: dict[str, Any]) -> tuple[Average, ...]:
        # Of lr_l (g + wd w) no element is larger than lr trust |w|, since none of g and w is larger than its norm.
        lr = group["lr"] / (1.0 - group["momentum"])
        if self.excluded:
            return (Average(group["momentum"], lr),)
        return (Average(group["momentum"], lr, 1, group["weight_decay"], lr * group["trust"]),)

    def trusted(self, norms: Norms, s: Tensor) -> Tensor:
        """The layer's own learning rate; the global one where a norm is zero."""
        below = norms.step + norms.weight * s[1] + s[4]
        ratio = norms.weight * s[3] / below
        if self.clip:
            ratio = torch.where(ratio * s[0] > s[0], torch.ones_like(ratio), ratio)
        known = (norms.weight > 0) & (norms.step > 0)
        return torch.where(known, ratio, torch.ones_like(ratio)) * s[0]

    def direction(self, w: Tensor, g: Tensor, states: list[Tensor], s: Tensor, norms: Norms | None) -> Direction:
        if norms is None:
            lr, gradient = s[0], g
        else:
            lr, gradient = self.trusted(norms, s), g + w * s[1]
        scaled = gradient * lr
        velocity = states[0] * s[2] + scaled
        return -(scaled + velocity * s[2] if self.nesterov else velocity), [velocity]


@dataclass(frozen=True)
class LAMBRule:
    """AdamW's step with decay, `r = m^ / (sqrt(v^) + eps) + wd w`, times `lr |w| / |r|`. `excluded` tensors: lr, no decay."""

    excluded: bool
    scalar_count = 8
    states = ("exp_avg", "exp_avg_sq")

    @property
    def needs_norms(self) -> bool:
        return not self.excluded

    def scalars(self, group: dict[str, Any], step: int) -> list[float]:
        beta1, beta2 = group["betas"]
        corrected1, corrected2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
        decay = 0.0 if self.excluded else group["weight_decay"]
        return [1.0 - beta1, beta2, 1.0 - beta2, 1.0 / corrected2, group["eps"], 1.0 / corrected1, decay, -group["lr"]]

    def averages(self, group: dict[str, Any]) -> tuple[Average, ...]:
        return AdamWRule().averages(group)

    def step(self, w: Tensor, g: Tensor, states: list[Tensor], s: Tensor) -> Direction:
        """r, whose norm is asked for before anything is updated."""
        return _adam_step(w, g, states, s)

    def direction(self, w: Tensor, g: Tensor, states: list[Tensor], s: Tensor, norms: Norms | None) -> Direction:
        step, new = self.step(w, g, states, s)
        if norms is None:
            return step * s[7], new
        known = (norms.weight > 0) & (norms.step > 0)
        ratio = torch.where(known, norms.weight / norms.step, torch.ones_like(norms.weight))
        return step * (ratio * s[7]), new


Rule = SGDRule | AdamWRule | LARSRule | LAMBRule
