"""The error of a mean over virtual ranks, and the bits that it took.

    vNMSE = sum of (reduced mean - exact mean)^2 / sum of (exact mean)^2

over all parameters of a model; the exact mean and both sums are float64. 0 is exact, 1 is what sending zeros would give. Bits
are the bytes that rank 0 sends, headers, indices and agreed scales included, over those of float32 in a ring, times 32.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.errors.gradients import Snapshot
from torch import Tensor

from lowp.formats import Rounding
from lowp.training.exchange.base import buckets_of
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

CODECS = (
    "bf16 none",
    "e5m2 aps",
    "e5m2 local",
    "e4m3fn aps",
    "e4m3fn local",
    "e4m3fn block:32",
    "int8 local",
    "int8 block:256",
    "mxint8",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "e2m3fn local",
    "e2m3fn block:32",
    "e3m2fn local",
    "e3m2fn block:32",
    "posit6 local",
    "posit6 block:32",
    "nvfp4",
    "mxfp4",
    "e2m1fn aps",
    "e2m1fn local",
    "e2m1fn local stochastic",
    "e2m1fn block:32",
    "e2m1fn block:32 stochastic",
    "e2m1fn block:16",
    "int4 local",
    "int4 block:32",
    "int4 block:32 stochastic",
    "nf4 local",
    "nf4 block:32",
    "e3m0 local",
    "e3m0 block:32",
    "topk:0.01",
    "topk:0.1",
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Wire:
    """A codec as a user writes it: a format, then in any order a scale and a rounding where they are not the usual ones."""

    text: str
    settings: Settings

    @classmethod
    def of(cls, text: str) -> "Wire":
        """Raises ValueError for a word that is no format, scale or rounding."""
        format, *others = text.split() or [""]
        options: dict[str, str] = {}
        for word in others:
            kind = "rounding" if word in tuple(Rounding) else "scale"
            if kind in options:
                raise ValueError(f"{text!r} has two words for its {kind}: {options[kind]!r} and {word!r}")
            options[kind] = word
        return cls(text, Settings.of(format, **options))


def exact_mean(rows: Tensor) -> Tensor:
    """Of (ranks, elements) float32, in float64; one rank after the other, as there may be gigabytes of them."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row in rows:
        total += row
    return total / len(rows)


def measured(wire: Wire, rows: Tensor, exact: Tensor, snapshot: Snapshot) -> Row:
    """One reduction (two_shot) of all ranks' gradients, in the buckets of `lowp train`."""
    shapes, parameters = snapshot.shapes, snapshot.trainer.parameters
    sizes = [shape.numel() for shape in shapes.values()]
    buckets = buckets_of(parameters, snapshot.trainer.recipe.wire.bucket_mb * 1e6)
    exchange = VirtualExchange(len(rows), shapes, wire.settings, buckets=buckets)

    def gradients(rank: int) -> dict[str, Tensor]:
        return dict(zip(shapes, rows[rank].split(sizes), strict=True))

    began = time.perf_counter()
    means = exchange.reduce(gradients)
    seconds = time.perf_counter() - began
    got = torch.cat([means[name].reshape(-1) for name in shapes])
    sent, of_fp32 = exchange.bytes_sent()
    error = float((got - exact).square().sum() / exact.square().sum())
    return {"codec": wire.text, "bits": 32 * sent / of_fp32, "vnmse": error, "seconds": seconds}
