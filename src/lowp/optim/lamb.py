"""Layer-wise adaptive moments, for large batches."""

from typing import Any, Unpack

from torch import Tensor

from lowp.optim.adamw import check_adam
from lowp.optim.arguments import Options, betas_of, check_exclude, excluded, options_of
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import LAMBRule, Rule


class LAMB(LowPrecisionOptimizer):
    """LAMB: AdamW whose step in each layer is as long as the layer's weights (You et al., 2019).

        r = m^ / (sqrt(v^) + eps) + weight_decay * w;   w -= lr * |w| / |r| * r

    Args:
        params, lr, betas, eps, weight_decay: as for AdamW.
        exclude: which parameters take `lr` itself and do not decay; see `LARS`.
        options: what all optimizers share: see `LowPrecisionOptimizer`.
    """

    roots = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        exclude: Any = None,
        **options: Unpack[Options],
    ) -> None:
        self._exclude = exclude
        defaults = {"lr": lr, "betas": betas_of(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options_of(options))
        check_exclude(exclude, self.param_groups)

    def check_settings(self, group: dict[str, Any]) -> None:
        check_adam(group)

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return LAMBRule(excluded(parameter, name, self._exclude))
