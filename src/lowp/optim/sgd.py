"""Stochastic gradient descent with momentum."""

from typing import Any, Unpack

from torch import Tensor
from torch.optim.sgd import sgd

from lowp.optim.arguments import LARGEST, Options, at_least, options_of
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import Rule, SGDRule


class SGD(LowPrecisionOptimizer):
    """`torch.optim.SGD` for weights, momentum and updates in 16 bits or fewer.

    With float32 weights and states it is torch's own, bit for bit.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`. Decay is added to the gradient.
        options: what all optimizers share: see `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, defaults, options_of(options))

    def check_settings(self, group: dict[str, Any]) -> None:
        at_least("momentum", group["momentum"], 0.0, 1.0)
        at_least("dampening", group["dampening"], -LARGEST)
        at_least("weight_decay", group["weight_decay"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return SGDRule(group["momentum"] != 0, group["nesterov"], group["weight_decay"] != 0)

    def plain_step(
        self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]
    ) -> bool:
        if not members:
            return True
        # torch begins the buffer with the gradient itself, which ours, of zeros, stands for.
        buffers: list[Tensor | None] = (
            [s["momentum_buffer"] if s["step"] > 1 else None for s in states] if group["momentum"] else []
        )
        sgd(
            members, gradients, buffers, weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
            dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"], has_sparse_grad=False,
            foreach=group["foreach"], fused=group["fused"],
        )  # fmt: skip
        for state, buffer in zip(states, buffers, strict=False):
            if buffer is not None and buffer is not state["momentum_buffer"]:
                state["momentum_buffer"].copy_(buffer)
        return True
