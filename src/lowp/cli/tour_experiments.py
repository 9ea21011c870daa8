"""The two experiments of `lowp tour`, small enough to run without compiling anything."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import lowp
from lowp.cli.fidelity import Fidelity, measure
from lowp.cli.rounder import FormatRounder, plain_operations
from lowp.formats import AnyFormat, BlockFormat, PositFormat

SCALES = tuple(10.0**-exponent for exponent in range(9))  # of the layers' gradients: 1 to 1e-8
LAYER = 4096  # elements
FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn", "posit8", "dynamic8", "e2m1fn", "mxfp8_e4m3", "mxfp4", "nvfp4")
USABLE_DB = 10.0  # a layer whose noise is a tenth of its signal still knows where to go

UPDATES = 1000
UPDATE = 1e-3
WEIGHTS = 512  # that all take the same updates: stochastic rounding is right on average
ACCUMULATED = ("bf16", "e5m2")


@dataclass(frozen=True)
class Surveyed:
    """One format on the layers: as they are, and each multiplied by a power of two first (None for blocks, which do that)."""

    fmt: AnyFormat
    plain: list[Fidelity]
    scaled: list[Fidelity] | None

    @staticmethod
    def usable(layers: list[Fidelity]) -> int:
        return sum((layer.sqnr_db or 0.0) >= USABLE_DB for layer in layers)


def gradients(seed: int) -> Tensor:
    """Gaussian layers with scales from 1 down to 1e-8, as gradients have them from the last layer to the first."""
    noise = torch.randn(len(SCALES), LAYER, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise * torch.tensor(SCALES, dtype=torch.float64)[:, None]


def survey(layers: Tensor) -> list[Surveyed]:
    found = []
    for name in FORMATS:
        fmt = lowp.format(name)
        rounder = FormatRounder(fmt)
        plain = [measure(layer, rounder) for layer in layers]
        scaled = (
            None
            if isinstance(fmt, BlockFormat)
            else [measure(layer * power_of_two_scale(layer, fmt), rounder) for layer in layers]
        )
        found.append(Surveyed(fmt, plain, scaled))
    return found


def power_of_two_scale(layer: Tensor, fmt: AnyFormat) -> float:
    """The scale that brings the layer's maximum just under the format's; a posit's under 4, where posits are precise."""
    target = 4.0 if isinstance(fmt, PositFormat) else fmt.max
    return 2.0 ** math.floor(math.log2(target / float(layer.abs().max())))


@dataclass(frozen=True)
class Accumulated:
    """Weights that start at 1 and take many small updates, each sum rounded to the format."""

    name: str
    nearest: list[float]  # the weight after each update; all weights are the same
    stochastic: list[float]  # the mean of the weights
    spread: list[float]  # and their standard deviation


def accumulate(seed: int) -> list[Accumulated]:
    """Both roundings, for each format, update by update."""
    with plain_operations():
        return [_accumulate(name, seed) for name in ACCUMULATED]


def _accumulate(name: str, seed: int) -> Accumulated:
    result = Accumulated(name, [1.0], [1.0], [0.0])
    nearest = torch.ones(1, dtype=torch.float64)
    stochastic = torch.ones(WEIGHTS, dtype=torch.float64)
    for step in range(UPDATES):
        nearest = lowp.quantize(nearest + UPDATE, name)
        stochastic = lowp.quantize(stochastic + UPDATE, name, "stochastic", seed=lowp.Noise(seed, step=step))
        result.nearest.append(float(nearest))
        result.stochastic.append(float(stochastic.mean()))
        result.spread.append(float(stochastic.std()))
    return result
