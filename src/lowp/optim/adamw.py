"""Adam with decoupled weight decay."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowp.optim.arguments import at_least, options_of
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import AdamWRule, Rule


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` for weights, moments and updates in 16 bits or fewer.

    With float32 weights, `update="nearest"` and `state="fp32"` (or None) it is torch's own, bit for bit.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for `torch.optim.AdamW` (there is no amsgrad). Decay goes through the
            same rounding as the rest of the update: in 16 bits it would be lost otherwise.
        update, state, state_scale, state_rounding, seed, nonfinite: see `LowPrecisionOptimizer`.
    """

    roots = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        update: str = "stochastic",
        state: Any = None,
        state_scale: str | None = None,
        state_rounding: str | None = None,
        seed: int = 0,
        nonfinite: str = "raise",
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options_of(update, state, state_scale, state_rounding, seed, nonfinite, maximize))

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return AdamWRule()

    def plain_step(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> bool:
        if not members:
            return True
        states = [self.state[p] for p in members]
        steps = [torch.tensor(float(s["step"] - 1)) for s in states]
        beta1, beta2 = group["betas"]
        adamw(
            members, gradients, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], steps, foreach=None,
            capturable=False, differentiable=False, fused=None, has_complex=False, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip
        return True


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    at_least("lr", lr)
    for i, beta in enumerate(betas):
        at_least(f"betas[{i}]", beta, 0.0, 1.0)
    at_least("eps", eps)
    at_least("weight_decay", weight_decay)
