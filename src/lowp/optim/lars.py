"""Layer-wise adaptive rate scaling, for large batches."""

from typing import Any, Unpack

from torch import Tensor

from lowp.optim.arguments import Options, at_least, check_exclude, excluded, options_of
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
            of the parameter, or a list of patterns (names.py; give `model.named_parameters()` then).
        clip: never more than `lr` (LARC).
        options: what all optimizers share: see `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 0.001,
        *,
        eps: float = 0.0,
        nesterov: bool = False,
        exclude: Any = None,
        clip: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._exclude = exclude
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps, "nesterov": nesterov,
            "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, options_of(options))
        check_exclude(exclude, self.param_groups)

    def check_settings(self, group: dict[str, Any]) -> None:
        at_least("momentum", group["momentum"], 0.0, 1.0)
        for name in ("weight_decay", "trust", "eps"):
            at_least(name, group[name])

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return LARSRule(group["clip"], group["nesterov"], excluded(parameter, name, self._exclude))
