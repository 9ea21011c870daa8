"""Layer-wise adaptive rate scaling, for large batches."""

from typing import Any

from torch import Tensor

from lowp.optim.arguments import at_least, excluded, options_of
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import LARSRule, Rule


class LARS(LowPrecisionOptimizer):
    """LARS: each layer's learning rate follows the ratio of its weights' norm to its gradient's (You et al., 2017).

        lr_l = lr * trust * |w| / (|g| + weight_decay * |w| + eps);  v = momentum * v + lr_l * (g + weight_decay * w);  w -= v

    Norms are sums of integers: they cannot leave FP16's range, and are the same on CPU, CUDA and any number of shards.

    Args:
        params, lr, momentum, weight_decay, nesterov: as usual.
        trust: the trust coefficient.
        exclude: which parameters take `lr` itself and do not decay: None for all of one dimension (biases, norms), a function
            of the parameter, or a list of name patterns (give `model.named_parameters()` then).
        clip: never more than `lr` (LARC).
        update, state, state_scale, state_rounding, seed, nonfinite: see `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 0.001,
        *,
        eps: float = 0.0,
        nesterov: bool = False,
        exclude: Any = None,
        clip: bool = False,
        maximize: bool = False,
        update: str = "stochastic",
        state: Any = None,
        state_scale: str | None = None,
        state_rounding: str | None = None,
        seed: int = 0,
        nonfinite: str = "raise",
    ) -> None:
        at_least("lr", lr)
        at_least("momentum", momentum, 0.0, 1.0)
        at_least("weight_decay", weight_decay)
        at_least("trust", trust)
        at_least("eps", eps)
        self._exclude = exclude
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps, "nesterov": nesterov,
            "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, options_of(update, state, state_scale, state_rounding, seed, nonfinite, maximize))

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return LARSRule(group["clip"], group["nesterov"], excluded(parameter, name, self._exclude))
