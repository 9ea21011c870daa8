"""What papers and benchmarks have published, and what this layer says about it.

Two kinds: the papers' own predictors, repeated from their formulas (1511.04561, the steps of 1807.11205); and figures that were
measured, predicted from inputs that do not contain them. docs/prediction.md shows all of it, written by page.py. Nothing here
is fitted to what is predicted: what was fitted, and to which smaller size, is said beside every row (published_throughput.py).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from lowp.predict.architectures import workload_of
from lowp.predict.cluster import Cluster
from lowp.predict.cluster_file import cluster_of
from lowp.predict.prediction import PredictedStep, predict
from lowp.predict.topologies import topology_of
from lowp.predict.topologies.base import routes
from lowp.wire.reductions.by_size import BySize
from lowp.wire.reductions.hierarchical import Hierarchical
from lowp.wire.reductions.ring import Ring

IMAGENET = 1281167  # training images


@dataclass(frozen=True)
class PublishedFigure:
    what: str
    published: float
    predicted: float
    note: str = ""

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


# 8-bit approximations for parallelism in deep learning (arXiv 1511.04561). Milliseconds of one step of AlexNet.

KERNELS = {"Nervana": 104.1, "convnet2": 177.0}
_FC, _FC_PARALLEL, _CONV_PENALTY = 6.5, 3.34, 0.05
_FC_PENALTY = {32: 6.81, 8: 2.55}
_WHOLE_BATCH, _GPUS, _NODES = 12288, 96, 32
_HIDDEN = 1.3  # ms of a transfer that computation hides
SYNCHRONISATION = {  # by sub-batch: ms in 32 bits, and in 8
    128: (2.1, 0.35), 256: (4.2, 0.55), 512: (7.15, 1.13), 1024: (17.4, 2.25), 2048: (25.5, 3.26), 12288: (250.0, 31.0),
}  # fmt: skip
SPEEDUPS = {  # by sub-batch: Nervana in 32 and 8 bits, convnet2 in 32 and 8 bits
    128: (13.4, 13.8, 20.7, 21.4),
    256: (20.0, 24.4, 29.7, 35.2),
    512: (23.0, 39.3, 33.5, 51.9),
    1024: (14.8, 48.6, 22.7, 61.0),
    2048: (11.3, 50.6, 17.7, 62.8),
    12288: (1.3, 9.7, 2.15, 15.5),
}
CORRECTED = {512: (35.9, 48.4), 1024: (37.6, 50.2), 2048: (31.4, 43.5)}
FOUR_GPUS = {("Nervana", 32): 3.53, ("Nervana", 8): 3.67, ("convnet2", 32): 3.71, ("convnet2", 8): 3.80}


def speedup_on_96(step: float, sub_batch: int, synchronisation: float) -> float:
    """Of 32 nodes with 3 GPUs: convolutions in data parallelism, linear layers in model parallelism, one sub-batch at a time.

    Of every transfer 1.3 ms are hidden by the computation; what is longer is waited for by 31 of the 32 nodes in turn.
    """
    waiting = (_NODES - 1) * (synchronisation - _HIDDEN) if synchronisation > _HIDDEN else synchronisation
    return _GPUS * step / (step - _FC + _FC * _WHOLE_BATCH / sub_batch + waiting)


def speedup_on_4(step: float, bits: int) -> float:
    return 4 * step / (step - _FC + _CONV_PENALTY + 4 * _FC_PARALLEL + _FC_PENALTY[bits])


def eight_bit_figures() -> list[PublishedFigure]:
    """All 24 speed-ups on 96 GPUs, as published."""
    found = []
    for sub_batch, published in SPEEDUPS.items():
        cases = [(kernel, bits) for kernel in KERNELS for bits in (32, 8)]
        for (kernel, bits), figure in zip(cases, published, strict=True):
            synchronisation = SYNCHRONISATION[sub_batch][0 if bits == 32 else 1]
            predicted = speedup_on_96(KERNELS[kernel], sub_batch, synchronisation)
            found.append(PublishedFigure(f"{kernel}, {bits} bits, sub-batch {sub_batch}", figure, predicted))
    return found


def eight_bit_corrected() -> list[PublishedFigure]:
    """The paper has 8-bit messages of an eighth of the 32-bit size, where four times fewer bytes are a quarter.

    A message in 8 bits takes what one in 32 bits takes for a quarter of the sub-batch. "Published" is this project's own
    reading.
    """
    found = []
    for sub_batch, figures in CORRECTED.items():
        synchronisation = SYNCHRONISATION[sub_batch // 4][0]
        for kernel, figure in zip(KERNELS, figures, strict=True):
            predicted = speedup_on_96(KERNELS[kernel], sub_batch, synchronisation)
            found.append(PublishedFigure(f"{kernel}, 8 bits corrected, sub-batch {sub_batch}", figure, predicted))
    return found


def four_gpu_figures() -> list[PublishedFigure]:
    return [
        PublishedFigure(f"{kernel}, {bits} bits, 4 GPUs", figure, speedup_on_4(KERNELS[kernel], bits))
        for (kernel, bits), figure in FOUR_GPUS.items()
    ]


# Highly scalable training with mixed precision (arXiv 1807.11205).

_RANKS, _GROUP = 1024, 16
_ALEXNET_BATCH, _RESNET_BATCH = 64, 64
_THRESHOLD = 1 << 22  # elements of a bucket from which on it takes the ring: assumed


def hierarchical_steps(ranks: int, group: int) -> int:
    """As the paper counts them: reduce and broadcast in groups, a ring among their masters."""
    return 4 * (group - 1) + 2 * (ranks // group - 1)


def step_figures() -> list[PublishedFigure]:
    (ring,) = routes(topology_of("ring"), cluster_of("ethernet-100g").arrange(_RANKS))
    return [
        PublishedFigure("steps of a ring, 1,024 ranks", 2046, ring.waits, "counted by running lowp's ring"),
        PublishedFigure("steps in groups of 16", 186, hierarchical_steps(_RANKS, _GROUP), "the paper's formula"),
    ]


@lru_cache(maxsize=8)
def jia_steps(model: str) -> tuple[PredictedStep, PredictedStep]:
    """A step on 1,024 P40: tensor by tensor around a flat ring; fused, with hierarchical or ring, by size."""
    workload, cluster = workload_of(model), cluster_of("p40-100gbe")
    batch = _ALEXNET_BATCH if model == "alexnet_bn" else _RESNET_BATCH
    single = [[layer.name] for layer in reversed(workload.layers)]
    by_size = BySize(Hierarchical(cluster.levels[0].ranks or 1, "leaders"), Ring(), _THRESHOLD)
    flat = predict(workload, cluster, "fp16@all_reduce(ring)", _RANKS, batch=batch, buckets=single)
    fused = predict(workload, cluster, {"format": "fp16", "reduction": by_size}, _RANKS, batch=batch)
    return flat.steps[0], fused.steps[0]


def jia_figures() -> list[PublishedFigure]:
    """Its speed-ups over NCCL on 1,024 GPUs, and its training in 6.6 minutes."""
    found = []
    for model, published in (("resnet50", 11.0), ("alexnet_bn", 3.0)):
        flat, fused = jia_steps(model)
        note = f"a step of {1e3 * flat.step:.0f} ms becomes {1e3 * fused.step:.0f} ms"
        found.append(
            PublishedFigure(f"{model}, 1,024 P40: times faster than a flat ring", published, flat.step / fused.step, note)
        )
    minutes, step = jia_minutes()
    found.append(PublishedFigure("resnet50, 2,048 P40, 90 epochs: minutes", 6.6, minutes, f"steps of {1e3 * step:.0f} ms"))
    return found


def jia_minutes(ranks: int = 2048, batch: int = 32, epochs: int = 90) -> tuple[float, float]:
    """Minutes of the training, and seconds of a step, from 218 images/s on one GPU and its reduction through masters."""
    found = predict("resnet50", cluster_of("p40-100gbe"), "fp16@hierarchical(leaders)", ranks, batch=batch).steps[0]
    return epochs * IMAGENET / (ranks * batch) * found.step / 60, found.step


# APS (arXiv 1911.08907): the settings of its experiments on clusters of the library. It publishes no figure that could be had.

APS_CASES = (  # model, batch of a rank, ranks
    ("resnet18-cifar", 512, 8),
    ("davidnet", 512, 8),
    ("resnet50", 32, 256),
    ("alexnet_bn", 128, 256),
)
APS_CLUSTERS = ("ethernet-10g", "ethernet-25g", "p100-25gbe", "p40-100gbe", "dgx1-v100")


@dataclass(frozen=True)
class ApsSpeedup:
    """How many times faster a step is with e5m2 and APS than with fp16 and with fp32; with each, lowp's faster reduction."""

    model: str
    cluster: str
    ranks: int
    over_fp16: float
    over_fp32: float
    reduction: str


def aps_speedups() -> list[ApsSpeedup]:
    found = []
    for model, batch, ranks in APS_CASES:
        for name in APS_CLUSTERS:
            cluster = _without_samples(cluster_of(name))
            wires = ("fp32", "fp16", "e5m2/aps", "e5m2/aps@hierarchical")
            steps = {step.wire: step for step in predict(model, cluster, wires, ranks, batch=batch).steps}
            best = min(steps["e5m2/aps"], steps["e5m2/aps@hierarchical"], key=lambda step: step.step)
            half, whole = (steps[other].step / best.step for other in ("fp16", "fp32"))
            found.append(ApsSpeedup(model, name, ranks, half, whole, best.reduction))
    return found


def _without_samples(cluster: Cluster) -> Cluster:
    """Speeds by FLOP/s and bandwidth for all models alike: rates of one model say nothing about the others."""
    return replace(cluster, device=replace(cluster.device, samples={}))
