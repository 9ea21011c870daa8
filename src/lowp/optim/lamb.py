"""Layer-wise adaptive moments, for large batches."""

from typing import Any

from torch import Tensor

from lowp.optim.adamw import check_adam
from lowp.optim.arguments import excluded, options_of
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.optim.rules import LAMBRule, Rule


class LAMB(LowPrecisionOptimizer):
    """LAMB: AdamW whose step in each layer is as long as the layer's weights (You et al., 2019).

        r = m^ / (sqrt(v^) + eps) + weight_decay * w;   w -= lr * |w| / |r| * r

    Args:
        params, lr, betas, eps, weight_decay: as for AdamW.
        exclude: which parameters take `lr` itself and do not decay; see `LARS`.
        update, state, state_scale, state_rounding, seed, nonfinite: see `LowPrecisionOptimizer`.
    """

    roots = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        exclude: Any = None,
        maximize: bool = False,
        update: str = "stochastic",
        state: Any = None,
        state_scale: str | None = None,
        state_rounding: str | None = None,
        seed: int = 0,
        nonfinite: str = "raise",
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        self._exclude = exclude
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, options_of(update, state, state_scale, state_rounding, seed, nonfinite, maximize))

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        return LAMBRule(excluded(parameter, name, self._exclude))
