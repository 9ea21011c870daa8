"""Published throughput: fitted on the smallest sizes of a series, predicted for the others.

1. The rate of one GPU is the published one. Links and their latencies are those of the cluster's file: datasheets and
   assumptions.
2. Where a series has a size between one GPU and those that are predicted, one number is fitted to it: `step_overhead`, the
   seconds that a step on more than one GPU takes beside its messages. For Horovod's figures, which begin with 128 GPUs, it is
   the bandwidth that the network reaches.
3. Everything else is predicted. No figure of a predicted size is used.

What was tried first is kept beside it (`bandwidth_rows`): the bandwidth of the innermost links, fitted to the same sizes. From
the few per cent that two GPUs lose it infers links of a twentieth of their nominal speed, and is wrong by 20 % on four. The
choice between the two was made with these rows in view, so that they are no proof of it; the sizes of the errors are what they
are.

The best published simulators have errors of 3.7 to 15 %.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from lowp.predict.cluster import Cluster
from lowp.predict.cluster_file import cluster_of
from lowp.predict.prediction import predict
from lowp.predict.published import IMAGENET

_INPUTS = "less than 2 ms of the 20 to 33 ms that a step grows by are messages; the node's processors feed 8 GPUs: not modelled"


@dataclass(frozen=True)
class ThroughputRow:
    """One figure: throughput in images a second, efficiency as a fraction, or minutes."""

    source: str
    model: str
    ranks: int
    unit: str
    published: float
    predicted: float
    fitted: str
    why: str = ""  # it misses

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Series:
    """Images a second by number of GPUs. The second size is fitted, if there is a third."""

    source: str
    cluster: str
    model: str
    batch: int
    wire: str
    rates: dict[int, float]
    why: dict[int, str]

    @property
    def machine(self) -> Cluster:
        """The cluster, with the rate of one GPU as published."""
        cluster = cluster_of(self.cluster)
        return replace(cluster, device=replace(cluster.device, samples={self.model: ((self.batch, self.rates[1]),)}))

    def step(self, cluster: Cluster, ranks: int) -> float:
        return predict(self.model, cluster, self.wire, ranks, batch=self.batch).steps[0].step

    @property
    def fitted_size(self) -> int | None:
        sizes = [ranks for ranks in self.rates if ranks > 1]
        return sizes[0] if len(sizes) > 1 else None

    def rows(self) -> list[ThroughputRow]:
        """With `step_overhead` fitted to the second size."""
        cluster, fitted, first = self.machine, "the rate of 1", self.fitted_size
        if first is not None:
            overhead = max(0.0, first * self.batch / self.rates[first] - self.step(cluster, first))
            cluster = replace(cluster, device=replace(cluster.device, step_overhead=overhead))
            fitted = f"the rates of 1 and {first}: {1e3 * overhead:.1f} ms a step"
        return self._predicted(cluster, fitted)

    def bandwidth_rows(self) -> list[ThroughputRow]:
        """With the bandwidth of the innermost links fitted to the second size instead."""
        cluster, first = self.machine, self.fitted_size
        if first is None:
            return []

        def with_bandwidth(rate: float) -> Cluster:
            return replace(cluster, levels=(replace(cluster.levels[0], bandwidth=rate), *cluster.levels[1:]))

        nominal = cluster.levels[0].bandwidth
        rate = solved(
            lambda rate: -self.step(with_bandwidth(rate), first), -first * self.batch / self.rates[first], 1e7, nominal
        )
        return self._predicted(with_bandwidth(rate), f"the rates of 1 and {first}: {1e-9 * rate:.2f} GB/s")

    def _predicted(self, cluster: Cluster, fitted: str) -> list[ThroughputRow]:
        return [
            ThroughputRow(
                self.source, self.model, ranks, "images/s", rate, ranks * self.batch / self.step(cluster, ranks), fitted,
                self.why.get(ranks, ""),
            )
            for ranks, rate in self.rates.items()
            if ranks not in (1, self.fitted_size)
        ]  # fmt: skip


_DGX, _EC2, _NVIDIA = "TensorFlow, DGX-1 P100", "TensorFlow, EC2 K80", "NVIDIA, ResNet-50 v1.5"
_SHARED = "the loss grows faster than a ring's bytes: 8 GPUs share links that 2 do not, and a fit to 2 cannot see it"
_SERVERS = "parameter servers ran on the processors of the workers' machines, as the source says: their time is not modelled"
# What each series ran on is in its source: parameter servers or NCCL's rings in a DGX-1; on EC2 gradients were added inside
# each server first and then exchanged between servers, each of which kept its share: the exchange of a torus whose rows are
# servers.
SERIES = (
    Series(_DGX, "dgx1-p100", "resnet50", 64, "fp32@parameter_server", {1: 219, 2: 422, 4: 852, 8: 1734}, {}),
    Series(
        _DGX, "dgx1-p100", "alexnet", 512, "fp32@all_reduce(ring)", {1: 2987, 2: 5658, 4: 10509, 8: 17822},
        {4: _SHARED, 8: _SHARED},
    ),
    Series(
        _DGX, "dgx1-p100", "vgg16", 64, "fp32@all_reduce(ring)", {1: 154, 2: 295, 4: 584, 8: 1081}, {8: _SHARED},
    ),
    Series(
        _EC2, "ec2-k80", "resnet50", 64, "fp32@torus", {1: 52.4, 8: 378, 16: 751, 32: 1388, 64: 2744},
        {32: _SERVERS, 64: _SERVERS},
    ),
    Series(_EC2, "ec2-k80", "inception_v3_no_aux", 64, "fp32@torus", {1: 29.7, 8: 229, 16: 459, 32: 902, 64: 1783}, {}),
    Series(f"{_NVIDIA}, V100-16G FP32", "dgx1-v100", "resnet50", 128, "fp32", {1: 367, 8: 2855}, {}),
    Series(f"{_NVIDIA}, V100-16G mixed", "dgx1-v100", "resnet50", 256, "fp32", {1: 1200, 8: 8322}, {8: _INPUTS}),
    Series(f"{_NVIDIA}, V100-32G FP32", "dgx1-v100", "resnet50", 128, "fp32", {1: 356, 8: 2766}, {}),
    Series(f"{_NVIDIA}, V100-32G mixed", "dgx1-v100", "resnet50", 256, "fp32", {1: 1156, 8: 8056}, {8: _INPUTS}),
    Series(f"{_NVIDIA}, A100 TF32", "dgx-a100", "resnet50", 256, "fp32", {1: 938, 8: 7248}, {}),
    Series(f"{_NVIDIA}, A100 mixed", "dgx-a100", "resnet50", 256, "fp32", {1: 2470, 8: 16621}, {8: _INPUTS}),
)  # fmt: skip


def horovod_rows() -> list[ThroughputRow]:
    """Efficiency on 512 Pascal GPUs; the bandwidth that 25 Gbit/s reach is fitted to VGG-16 on 128."""
    source, wire = "Horovod, Pascal, 25 GbE", "fp32@all_reduce(ring)"
    cluster = cluster_of("p100-25gbe")

    def efficiency(model: str, ranks: int, links: Cluster) -> float:
        return predict(model, links, wire, ranks, batch=64).steps[0].efficiency

    def with_bandwidth(rate: float) -> Cluster:
        return replace(cluster, levels=(cluster.levels[0], replace(cluster.levels[1], bandwidth=rate)))

    rate = solved(lambda rate: efficiency("vgg16", 128, with_bandwidth(rate)), 0.79, 1e8, 3.125e9)
    fitted = f"VGG-16 on 128: {8e-9 * rate:.1f} Gbit/s"
    why = "a ring's latency on 512 ranks is an assumption"
    cases = (("inception_v3_no_aux", 0.90, why), ("resnet101", 0.90, why), ("vgg16", 0.68, ""))
    return [
        ThroughputRow(source, model, 512, "efficiency", published, efficiency(model, 512, with_bandwidth(rate)), fitted, note)
        for model, published, note in cases
    ]


def goyal_rows() -> list[ThroughputRow]:
    """Efficiency from 8 to 256 GPUs, by recursive halving and doubling, which the paper names. Nothing to fit."""
    cluster = cluster_of("p100-50gbe")
    few, many = (predict("resnet50", cluster, "fp32@halving_doubling", ranks, batch=32).steps[0] for ranks in (8, 256))
    predicted = many.throughput / few.throughput / 32
    why = 'its gradients went through the hosts\' memory (gloo), which is not modelled; and "about 90 %" is a round figure'
    source, fitted = "Goyal and others, P100, 50 GbE", "TensorFlow's rate of 1"
    return [ThroughputRow(source, "resnet50", 256, "efficiency", 0.90, predicted, fitted, why)]


def mlperf_rows() -> list[ThroughputRow]:
    """Minutes of NVIDIA's runs of ResNet-50 on H100, MLPerf 3.0.

    The logs say the batch of a GPU (400 on 8 GPUs, 50 on 64, 40 on 512, 42 on 768), the epochs (35, 35, 50, 56) and, for 8 and
    64, images a second: 56,060 and 294,400. The time of a step that does not depend on its batch, and the rest for each image,
    are fitted to these two. For 3,584 GPUs the logs could not be had, and without a batch there is nothing to predict.
    """
    sizes = {8: (400, 56060.0), 64: (50, 294400.0)}
    cluster = cluster_of("dgx-h100")
    bare = {}
    for ranks, (batch, rate) in sizes.items():  # what remains of a step without its exchange
        exchange = _exchange(cluster, ranks, batch)
        bare[batch] = batch / (ranks * batch / rate - exchange)
    device = replace(cluster.device, samples={"resnet50": tuple(sorted(bare.items()))})
    fitted = "steps of 8 and 64, by batch"
    rows = []
    for ranks, batch, epochs, published in ((512, 40, 50, 0.509), (768, 42, 56, 0.369)):
        step = predict("resnet50", replace(cluster, device=device), "fp16", ranks, batch=batch).steps[0].step
        minutes = epochs * IMAGENET / (ranks * batch) * step / 60
        rows.append(ThroughputRow("MLPerf 3.0, NVIDIA, H100", "resnet50", ranks, "minutes", published, minutes, fitted))
    return rows


def _exchange(cluster: Cluster, ranks: int, batch: int) -> float:
    """Seconds of a step beside its computation."""
    times = predict("resnet50", cluster, "fp16", ranks, batch=batch).steps[0].times
    return times.step - times.compute


def solved(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a growing function has the value that is wanted, by bisection; an end, where it lies beyond."""
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low * high) ** 0.5


def bandwidth_rows() -> list[ThroughputRow]:
    return [row for series in SERIES for row in series.bandwidth_rows()]


def throughput_rows() -> list[ThroughputRow]:
    rows = [row for series in SERIES for row in series.rows()]
    return [*rows, *horovod_rows(), *goyal_rows(), *mlperf_rows()]


def median_error(rows: list[ThroughputRow]) -> float:
    return statistics.median(abs(row.error) for row in rows)
