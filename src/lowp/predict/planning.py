"""`lowp plan`: the wire, the reduction and the size of buckets with which a step is predicted to be the fastest.

1. Every candidate (candidates.py) is predicted with buckets of 25 MB, DistributedDataParallel's own. The twelve fastest are
   predicted with the other sizes too; of each, the best size counts, or 25 MB where that is as good.
2. From the fastest on, the error of each on the model's own gradients is found (gradients.py), until enough are within the
   budget to choose from and to compare with.
3. The fastest within the budget is chosen. Of those that are as fast but for 1 %, the one with the smallest error. Uncompressed
   gradients if nothing is 3 % faster: what loses nothing needs no reason. They travel in float32, or in a 16-bit model's dtype.

Everything here is a function of its arguments: all ranks that plan from one calibration choose the same.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowp.predict.architectures import usual_batch, workload_of
from lowp.predict.candidates import BUCKET_MB, candidate_wires
from lowp.predict.cluster import Cluster
from lowp.predict.cluster_file import cluster_of
from lowp.predict.gradients import MOST_RANKS, SampleGradients, gradients_of
from lowp.predict.prediction import BUCKET_MB as USUAL_BUCKET_MB
from lowp.predict.prediction import MEGABYTE, PredictedStep, predict
from lowp.predict.subjects import subject_of
from lowp.predict.wires import FP32, PLAIN, WireChoice, compress_arguments
from lowp.predict.workload import Workload

MAX_ERROR = 0.1  # e4m3fn has .026 on normal numbers, nvfp4 .095, e2m1fn/block:32 .11
GAIN = 1.03  # by which compression must be faster than uncompressed gradients to be worth what it loses
SAME = 1.01  # two times that differ by less are the same
SIZED = 12  # candidates whose sizes of buckets are tried
COMPARED = 6  # candidates within the budget that are looked at


@dataclass(frozen=True)
class PlanOption:
    """A way to send gradients: how long a step takes with it, and what it loses. `error` None: nobody has looked."""

    choice: WireChoice
    bucket_mb: float
    step: PredictedStep
    error: float | None = None
    within: bool = False  # the budget
    uncompressed: bool = False  # in the gradients' own dtype

    @property
    def wire(self) -> str:
        return self.choice.text

    def record(self) -> dict[str, Any]:
        return self.step.record() | {"bucket_mb": self.bucket_mb, "error": self.error, "within": self.within}


@dataclass(frozen=True)
class WirePlan:
    """`options` are all candidates, the fastest first; `chosen` is one of them."""

    chosen: PlanOption
    options: tuple[PlanOption, ...]
    max_error: float
    gradients: str  # where they come from

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `lowp.compress_gradients`; empty: DistributedDataParallel as it is."""
        if self.chosen.choice.plain:
            return {}
        arguments = compress_arguments(self.chosen.wire)
        return arguments | {"reduction": self.chosen.step.reduction}

    @property
    def code(self) -> str:
        """The lines that apply it."""
        chosen = self.chosen
        lines = [f"ddp = DistributedDataParallel(model, bucket_cap_mb={chosen.bucket_mb:g})"]
        if not chosen.choice.plain:
            own = self.arguments
            given = "".join(f", {key}={_quoted(own[key])}" for key in ("scale", "rounding", "reduction") if key in own)
            lines.append(f'lowp.compress_gradients(ddp, "{own["format"]}"{given})')
        elif not chosen.uncompressed:
            lines.insert(0, "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks")
            lines.append(f"ddp.register_comm_hook(None, default_hooks.{chosen.wire}_compress_hook)")
        return "\n".join(lines)

    @property
    def recipe(self) -> dict[str, Any] | None:
        """Keys of a recipe's [wire]; None where no recipe can: torch's own 16 bits."""
        bucket = self.chosen.bucket_mb * MEGABYTE / 1e6
        if self.chosen.uncompressed:
            return {"format": "fp32", "bucket_mb": bucket}  # which is uncompressed in recipes, whatever the dtype
        return None if self.chosen.choice.plain else self.arguments | {"bucket_mb": bucket}

    @property
    def recipe_toml(self) -> str:
        if self.recipe is None:
            return f"# recipes have no wire for torch's own {self.chosen.wire}; --no-torch plans without it"
        lines = (f"{key} = {_quoted(value) if isinstance(value, str) else value}" for key, value in self.recipe.items())
        return "\n".join(["[wire]", *lines])

    @property
    def runners_up(self) -> tuple[PlanOption, ...]:
        """Those that were looked at, the fastest first."""
        return tuple(each for each in self.options if each.error is not None and each is not self.chosen)

    def why_not(self, other: PlanOption) -> str:
        """What speaks against another option."""
        slower = other.step.step / self.chosen.step.step - 1
        if not other.within:
            assert other.error is not None
            return f"error {other.error:.3g} is above {self.max_error:g}" if math.isfinite(other.error) else "it overflows"
        if slower > SAME - 1:
            return f"{100 * slower:.0f} % slower" if slower >= 0.1 else f"{100 * slower:.1f} % slower"
        if self.chosen.uncompressed:
            plain = self.chosen.wire
            return f"only {-100 * slower:.1f} % faster than {plain}, which loses nothing" if slower < 0 else "not faster"
        return "as fast, with a larger error"

    def records(self) -> list[dict[str, Any]]:
        """For pandas: one for each candidate."""
        return [each.record() | {"chosen": each is self.chosen} for each in self.options]


def plan(
    model: "str | nn.Module | Workload",
    cluster: "str | Path | Cluster",
    ranks: int,
    *,
    max_error: float = MAX_ERROR,
    batch: int | None = None,
    inputs: Any = None,
    loss: "Callable[[Any], Tensor] | None" = None,
    wires: "Sequence[str] | None" = None,
    bucket_mb: "Iterable[float]" = BUCKET_MB,
    buckets: "Sequence[Sequence[str]] | None" = None,
    torchs: Iterable[str] = PLAIN,
    gradients: SampleGradients | None = None,
    uncompressed: str = FP32,
) -> WirePlan:
    """The fastest way to send a model's gradients, within a budget of error.

        found = lowp.plan("cnn", "cluster.toml", ranks=4, max_error=0.05)
        print(found.code)
        pandas.DataFrame(found.records())

    Args:
        model, cluster, batch, inputs: as for `lowp.predict`. `loss`: of what the model returns.
        max_error: |mean that travelled - exact mean| / |exact mean|, on the model's own gradients.
        wires: what to choose from, instead of the usual; without a reduction, with all that may be the fastest.
        bucket_mb: sizes of buckets to try. `buckets`: names of parameters, where they are laid already.
        torchs: which of torch's own dtypes may be chosen: "fp32", "fp16", "bf16".
        gradients: of several ranks, where they are there already.
        uncompressed: the format in which this model's gradients travel if nobody compresses them: "fp32", "fp16", "bf16".
    """
    if not 0 <= max_error < math.inf:
        raise ValueError(f"max_error: {max_error:g} must be at least 0")
    workload, machine = workload_of(model, inputs), cluster_of(cluster)
    arrangement = machine.arrange(ranks)
    if batch is None and (measured := machine.device.times.get(workload.name)) is not None:
        batch = measured.batch
    if batch is None:
        batch = usual_batch(workload.name)
    sizes = _sizes(bucket_mb) if buckets is None else [USUAL_BUCKET_MB]
    candidates = candidate_wires(arrangement, wires, torchs)
    options = _predicted(workload, machine, candidates, ranks, batch, sizes, buckets, uncompressed)
    if gradients is None:
        if isinstance(model, Workload):
            raise ValueError("gradients: is missing; a Workload computes none")
        gradients = gradients_of(subject_of(model, inputs, loss, batch=_samples(ranks)), ranks)
    options = _with_errors(options, gradients, max_error, ranks, arrangement.node)
    return WirePlan(chosen_of(options), tuple(options), max_error, gradients.source)


def _samples(ranks: int) -> int:
    """Of a named model's batch that several ranks' gradients are taken from: two for each, the fewest that norms need."""
    return 2 * min(ranks, MOST_RANKS)


def _sizes(bucket_mb: Iterable[float]) -> list[float]:
    sizes = list(dict.fromkeys(bucket_mb))
    if not sizes:
        raise ValueError("bucket_mb: at least one is wanted")
    return sizes


def _predicted(
    workload: Workload,
    cluster: Cluster,
    wires: Sequence[WireChoice],
    ranks: int,
    batch: int,
    sizes: Sequence[float],
    buckets: "Sequence[Sequence[str]] | None",
    uncompressed: str,
) -> list[PlanOption]:
    """Every wire with its best size of buckets, the fastest first. Only what fits the memory, if anything does."""

    def at(size: float, some: Sequence[WireChoice]) -> list[PlanOption]:
        steps = predict(workload, cluster, some, ranks, batch=batch, bucket_mb=size, buckets=buckets).steps
        return [
            PlanOption(wire, size, step, uncompressed=wire.text.partition("@")[0] == uncompressed)
            for wire, step in zip(some, steps, strict=True)
        ]

    first = USUAL_BUCKET_MB if USUAL_BUCKET_MB in sizes else sizes[0]
    found = {option.wire: [option] for option in sorted(at(first, wires), key=_order)}
    few = [options[0].choice for options in list(found.values())[:SIZED]]
    few += [wire for wire in wires if wire.plain and wire not in few]
    for size in sizes:
        for option in at(size, few) if size != first else ():
            found[option.wire].append(option)
    best = [_best_size(each) for each in found.values()]
    fitting = [option for option in best if option.step.fits is not False]
    return sorted(fitting or best, key=_order)


def _order(option: PlanOption) -> tuple[float, str]:
    """The same on every rank: equal times are ordered by name."""
    return option.step.step, option.wire


def _best_size(options: Sequence[PlanOption]) -> PlanOption:
    best = min(options, key=lambda option: option.step.step)
    usual = [o for o in options if o.bucket_mb == USUAL_BUCKET_MB and o.step.step <= SAME * best.step.step]
    return usual[0] if usual else best


def _with_errors(
    options: Sequence[PlanOption], gradients: SampleGradients, max_error: float, ranks: int, node: int
) -> list[PlanOption]:
    """The errors of the fastest options, until some are within the budget; and of uncompressed ones, which are always there."""
    found: list[PlanOption] = []
    enough = 0
    for option in options:
        if enough >= COMPARED and not option.uncompressed:
            found.append(option)
            continue
        error = gradients.error(option.choice, ranks, node)
        within = option.uncompressed or error <= max_error
        enough += within
        found.append(replace(option, error=error, within=within))
    return found


def chosen_of(options: Sequence[PlanOption]) -> PlanOption:
    """Of options whose errors are known."""
    able = [option for option in options if option.within]
    if not able:
        least = min((option.error for option in options if option.error is not None), default=math.inf)
        raise ValueError(f"max_error: nothing is within the budget; the smallest error is {least:.3g}")
    fastest = min(option.step.step for option in able)
    for option in able:
        if option.uncompressed and option.step.step <= GAIN * fastest:
            return option
    same = [option for option in able if option.step.step <= SAME * fastest]
    return min(same, key=lambda option: (option.error or 0.0, option.step.step, option.wire))


def _quoted(value: object) -> str:
    return f'"{value}"'
