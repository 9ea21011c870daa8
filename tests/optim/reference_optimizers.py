"""SGD, AdamW, LARS and LAMB once more, to compare lowp.optim with: numpy, float32, one rounding after each operation.

Nothing here is shared with lowp but the noise (whose quality has tests of its own) and, for states, the power of two that they
are
stored under: that choice is free, so it is read from the optimizer and judged by itself (`shift_of`).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from lowp.tensor.noise import Domain, Noise, draws, key_tensor

F = np.float32
MANTISSA = {torch.float16: 10, torch.bfloat16: 7}
LEAST_EXPONENT = {torch.float16: -14, torch.bfloat16: -126}
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
TOP = {torch.float16: 14, torch.bfloat16: 126, torch.float32: 126}


def nearest(numbers, dtype):
    """Rounded to a dtype's numbers, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype).float().numpy()


def stochastic(numbers, dtype, noise):
    """Away from zero where the fraction of a unit and 30 random bits add up to one unit. Halves are not special.

    What nearest rounding leaves finite is not made infinite."""
    size = np.abs(numbers.astype(np.float64))
    largest = torch.finfo(dtype).max
    size = np.where(np.isfinite(nearest(numbers, dtype)), np.minimum(size, largest), size)
    exponent = np.maximum(np.frexp(size)[1] - 1, LEAST_EXPONENT[dtype])
    unit = np.ldexp(1.0, exponent - MANTISSA[dtype])
    count = (np.floor(size / unit * 2.0**30).astype(np.int64) + noise) >> 30
    rounded = np.copysign(count * unit, numbers)
    return np.where(np.abs(rounded) > torch.finfo(dtype).max, np.copysign(np.inf, numbers), rounded).astype(F)


def noise_of(seed, step, number, count, which):
    """The `which`-th random number of each element of a parameter in a step."""
    key = key_tensor(Noise.of(Domain.OPTIMIZER, seed, step, number), 0, torch.device("cpu"))
    return draws(key, torch.empty(1, count), which + 1)[which].number.view(-1).numpy().astype(np.int64)


def shift_of(bound, dtype):
    """The power of two that a state is multiplied by: its bound (65536ths of a power of two) comes under the format's top."""
    return min(126, max(-126, TOP[dtype] - math.ceil(int(bound) / 65536)))


@dataclass
class Reference:
    """One parameter: `weight` and `states` are flat float32 arrays of the numbers that are stored."""

    weight: np.ndarray
    dtype: torch.dtype
    update: str
    options: dict
    seed: int = 0
    number: int = 0
    states: dict = field(default_factory=dict)
    lost: np.ndarray | None = None
    taken_steps: int = 0

    names = ()

    def decays(self):
        """Of each state: what of it is left after a step."""
        raise NotImplementedError

    def __post_init__(self):
        self.states = {name: np.zeros_like(self.weight) for name in self.names}
        self.lost = np.zeros_like(self.weight)

    def step(self, gradient, shifts):
        """Take a step; states are stored times 2^shifts."""
        self.taken_steps += 1
        change, new = self.direction(gradient.astype(F))
        assert change.dtype == F
        self.weight = self._moved(change)
        place = int(self.update == "stochastic")  # its first noise is the weight's
        for (name, numbers), decay in zip(new.items(), self.decays(), strict=True):
            assert numbers.dtype == F
            drawn = (
                self.update != "nearest" and self.dtype != torch.float32 and 1 - decay < 16 * 2.0 ** -(MANTISSA[self.dtype] + 1)
            )
            self.states[name] = self._stored(name, numbers, shifts[name], place if drawn else None)
            place += drawn

    def _noise(self, which):
        return noise_of(self.seed, self.taken_steps, self.number, self.weight.size, which)

    def _moved(self, change):
        if self.update == "nearest":
            return nearest(self.weight + change, self.dtype)
        if self.update == "stochastic":
            return stochastic(self.weight + change, self.dtype, self._noise(0))
        larger = F(2.0 ** (MANTISSA[self.dtype] + 1))
        due = change + self.lost / larger
        new = nearest(self.weight + due, self.dtype)
        self.lost = nearest((due - (new - self.weight)) * larger, self.dtype)
        return new

    def _stored(self, name, numbers, shift, which):
        scaled = numbers * F(2.0**shift)
        if name == "exp_avg_sq" and self.dtype != torch.float32:
            scaled = np.maximum(scaled, F(SMALLEST[self.dtype]))
        assert (np.abs(scaled) <= torch.finfo(self.dtype).max).all(), "the scale lets a state overflow"
        rounded = nearest(scaled, self.dtype) if which is None else stochastic(scaled, self.dtype, self._noise(which))
        return rounded * F(2.0**-shift)


class SGDReference(Reference):
    @property
    def names(self):
        return ("momentum_buffer",) if self.options.get("momentum") else ()

    def decays(self):
        return [self.options[name.split("_")[0]] for name in self.names]

    def direction(self, g):
        o = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False} | self.options
        g = -g if o["maximize"] else g
        if o["weight_decay"]:
            g = g + self.weight * F(o["weight_decay"])
        if not o["momentum"]:
            return g * F(-o["lr"]), {}
        # The buffer begins as the first gradient itself (without the sign of a zero: it is added to zeros).
        first = self.taken_steps == 1
        momentum, share = (0.0, 1.0) if first else (o["momentum"], 1 - o["dampening"])
        buffer = self.states["momentum_buffer"] * F(momentum) + g * F(share)
        step = g + buffer * F(o["momentum"]) if o["nesterov"] else buffer
        return step * F(-o["lr"]), {"momentum_buffer": buffer}


class AdamWReference(Reference):
    names = ("exp_avg", "exp_avg_sq")

    def decays(self):
        return self.options.get("betas", (0.9, 0.999))

    def moments(self, g):
        (beta1, beta2), m, v = self.decays(), self.states["exp_avg"], self.states["exp_avg_sq"]
        return m + (g - m) * F(1 - beta1), v * F(beta2) + (g * g) * F(1 - beta2)

    def direction(self, g):
        o = {"eps": 1e-8, "weight_decay": 1e-2, "maximize": False} | self.options
        beta1, beta2 = self.decays()
        m, v = self.moments(-g if o["maximize"] else g)
        below = np.sqrt(v) * F(1 / math.sqrt(1 - beta2**self.taken_steps)) + F(o["eps"])
        step = (m / below) * F(-o["lr"] / (1 - beta1**self.taken_steps))
        return step + self.weight * F(-o["lr"] * o["weight_decay"]), {"exp_avg": m, "exp_avg_sq": v}


def lars(w, g, v, *, lr, trust, momentum, weight_decay, clip=False, nesterov=False, excluded=False, eps=0.0):
    """One step of LARS in float64: the new weight and the new velocity."""
    w, g, v = (np.asarray(x, dtype=np.float64) for x in (w, g, v))
    ratio = 1.0
    if excluded:
        weight_decay = 0.0
    elif np.any(w) and np.any(g):
        ratio = trust * np.linalg.norm(w) / (np.linalg.norm(g) + weight_decay * np.linalg.norm(w) + eps)
        ratio = min(ratio, 1.0) if clip else ratio
    scaled = lr * ratio * (g + weight_decay * w)
    v = momentum * v + scaled
    return w - (scaled + momentum * v if nesterov else v), v


def lamb(w, g, m, v, step, *, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=1e-2, excluded=False):
    """One step of LAMB in float64: the new weight and both moments."""
    w, g, m, v = (np.asarray(x, dtype=np.float64) for x in (w, g, m, v))
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    r = m / (1 - betas[0] ** step) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
    r = r if excluded else r + weight_decay * w
    known = np.any(w) and np.any(r) and not excluded
    return w - lr * (np.linalg.norm(w) / np.linalg.norm(r) if known else 1.0) * r, m, v
