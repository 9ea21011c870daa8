"""Learning rates over time, as the papers have them. Each returns a `torch.optim.lr_scheduler.LambdaLR`, whose `step()` counts
steps.

>>> schedule = poly(optimizer, steps=1000, power=2, warmup=50)
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup(optimizer: Optimizer, steps: int, start: float = 0.0, then: Callable[[int], float] | None = None) -> LambdaLR:
    """From `start` (a fraction of the learning rate) to all of it in `steps` steps; then `then(step)` times it, or just it."""
    if steps < 0 or not 0 <= start <= 1:
        raise ValueError(f"a warm-up takes 0 steps or more and starts between 0 and 1, not {steps} and {start}")

    def factor(step: int) -> float:
        after = 1.0 if then is None else then(step)
        return after if step >= steps else (start + (1 - start) * (step + 1) / steps) * after

    return LambdaLR(optimizer, factor)


_warm_up = warmup  # for functions with an argument of that name


def poly(optimizer: Optimizer, steps: int, power: float = 2.0, warmup: int = 0, start: float = 0.0) -> LambdaLR:
    """`lr * (1 - t)^power` from the warm-up's end (t = 0) to `steps` (t = 1)."""
    if not 0 <= warmup < steps:
        raise ValueError(f"the warm-up ({warmup} steps) must end before the schedule does ({steps} steps)")

    def after(step: int) -> float:
        return (1 - min(1.0, max(0, step - warmup) / (steps - warmup))) ** power

    return _warm_up(optimizer, warmup, start, after)


def piecewise_linear(
    optimizer: Optimizer, steps: Sequence[float], factors: Sequence[float], warmup: float = 0, start: float = 0.0
) -> LambdaLR:
    """Straight lines between points: `piecewise_linear(optimizer, [0, 5 * n, 24 * n], [0, 1, 0])` is DavidNet's.

    A warm-up is one more line, from `start` at step 0 to 1 at step `warmup`, that multiplies them. Where the points rise from 0
    as well, the learning rate grows quadratically.
    """
    if len(steps) != len(factors) or not steps or list(steps) != sorted(set(steps)):
        raise ValueError(f"points need ascending steps and as many factors, not {list(steps)} and {list(factors)}")

    def factor(step: int) -> float:
        growth = start + (1 - start) * step / warmup if step < warmup else 1.0
        return growth * line(step)

    def line(step: int) -> float:
        after = bisect_right(steps, step)
        if after == 0:
            return factors[0]
        if after == len(steps):
            return factors[-1]
        low, high = steps[after - 1], steps[after]
        share = (step - low) / (high - low)
        return factors[after - 1] + share * (factors[after] - factors[after - 1])

    return LambdaLR(optimizer, factor)


def piecewise_constant(
    optimizer: Optimizer, steps: Sequence[int], factor: float = 0.1, warmup: int = 0, start: float = 0.0
) -> LambdaLR:
    """Times `factor` at each of `steps`, after a warm-up: ResNet's schedule."""
    if list(steps) != sorted(set(steps)):
        raise ValueError(f"the learning rate falls at ascending steps, not {list(steps)}")
    return _warm_up(optimizer, warmup, start, lambda step: factor ** bisect_right(steps, step))
