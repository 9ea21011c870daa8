"""Adam with decoupled weight decay."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowp.optim.arguments import Options, at_least, betas_of, options_of, refuse
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import AdamWRule, Rule


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` for weights, moments and updates in 16 bits or fewer.

    With float32 weights and states it is torch's own, bit for bit.

    Args:
        params, lr, betas, eps, weight_decay: as for `torch.optim.AdamW`. Decay goes through the same rounding as the rest of
            the update: in 16 bits it would be lost otherwise.
        amsgrad: refused if it is True.
        options: what all optimizers share: see `LowPrecisionOptimizer`.
    """

    roots = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        refuse({"amsgrad": amsgrad})
        defaults = {"lr": lr, "betas": betas_of(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options_of(options))

    def check_settings(self, group: dict[str, Any]) -> None:
        check_adam(group)

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return AdamWRule()

    def plain_step(
        self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]
    ) -> bool:
        if not members:
            return True
        steps = [
            torch.tensor(float(s["step"] - 1), device=p.device if group["fused"] else None)
            for s, p in zip(states, members, strict=True)
        ]
        beta1, beta2 = group["betas"]
        adamw(
            members, gradients, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], steps,
            foreach=None if isinstance(group["lr"], Tensor) else group["foreach"], fused=group["fused"],
            capturable=False, differentiable=False, has_complex=False, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip
        return True


def check_adam(group: dict[str, Any]) -> None:
    betas_of(group["betas"])
    at_least("eps", group["eps"])
    at_least("weight_decay", group["weight_decay"])
