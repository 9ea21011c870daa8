"""Which formats hold for a model? Short trainings beside float32, one role in one format at a time.

1. For every seed the model is trained for some steps in float32: the reference.
2. For every role and format it is trained again, from the same weights, on the same batches, with that role alone in that
   format. The difference of the final losses on samples that were kept aside is paired by seed.
3. A format holds if the upper end of the 95 % interval of the difference is within the tolerance, and fails if the lower end is
   beyond it. In between more seeds, or more steps, are needed.
4. Beside it: signal to noise of the role's numbers in the format, and how many of them become 0 or too large.

Roles are tried one by one: formats that hold alone can fail together. A few dozen steps show what fails at once, and not what
drifts apart over epochs: a study (`lowp ablate`) does.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowp.formats import AnyFormat, BlockFormat, FormatLike
from lowp.formats import format as parse_format
from lowp.health.measures import SUMS, measure, merge, sample, summary
from lowp.lab.recommend_cases import TriedModel, case_of
from lowp.lab.student import critical
from lowp.simulation import simulate
from lowp.wire.codec import codec_of
from lowp.wire.virtual import VirtualWorld

SIMULATED = ("weights", "activations", "errors", "gradients")
ROLES = (*SIMULATED, "state", "wire")
FORMATS = {  # from wide to narrow, what hardware or a wire has for the role
    "weights": ("bf16", "e4m3fn", "mxfp4"),
    "activations": ("bf16", "e4m3fn", "mxfp4"),
    "errors": ("bf16", "e5m2", "mxfp4"),
    "gradients": ("bf16", "e5m2", "mxfp4"),
    "state": ("bf16", "e4m3fn"),
    "wire": ("bf16", "e5m2", "e2m1fn"),
}
HOLDS, UNSURE, FAILS = "holds", "more seeds needed", "fails"
LEVEL = 0.05
WIDE = 1e30  # a format with room for larger numbers needs no scale
SAMPLE = 1 << 16  # numbers of a tensor that are looked at
_SQUARES = [SUMS.index("signal"), SUMS.index("noise")]


@dataclass(frozen=True)
class Trial:
    """One role in one format.

    Attributes:
        bits: of a number, with its share of scales. `share`: of float32's bytes.
        difference: of the loss to float32, its mean over the seeds; `low` and `high`: its 95 % interval.
        sqnr_db, underflow, overflow: of the role's numbers under a scale for each tensor; None where they were not seen.
        verdict: holds, more seeds needed, or fails.
    """

    role: str
    format: str
    bits: float
    difference: float
    low: float
    high: float
    seeds: int
    sqnr_db: float | None
    underflow: float | None
    overflow: float | None
    verdict: str

    @property
    def share(self) -> float:
        return self.bits / 32


@dataclass(frozen=True)
class Recommendation:
    """What `recommend` found. `advice`: for each role the narrowest format that holds; "fp32" where none does."""

    model: str
    steps: int
    seeds: int
    loss: float  # float32's, the mean over the seeds
    first_loss: float  # before the first step
    tolerance: float  # by how much a loss may be larger
    trials: tuple[Trial, ...] = field(repr=False)
    not_tried: tuple[str, ...] = ()  # roles and formats that do not go together

    @property
    def advice(self) -> dict[str, str]:
        found = {}
        for role in dict.fromkeys(trial.role for trial in self.trials):
            holding = [trial for trial in self.trials if trial.role == role and trial.verdict == HOLDS]
            found[role] = min(holding, key=lambda trial: trial.bits).format if holding else "fp32"
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row for each trial, for a table."""
        return [vars(trial) | {"share": trial.share} for trial in self.trials]


def recommend(
    model: "str | nn.Module",
    inputs: Any = None,
    targets: Any = None,
    loss: Callable[..., Tensor] | None = None,
    *,
    roles: Sequence[str] = ROLES,
    formats: "Sequence[FormatLike] | None" = None,
    steps: int = 20,
    seeds: int = 3,
    tolerance: float = 0.02,
    data: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Recommendation:
    """Try formats on a model and its data for some steps beside float32, and say for each role which hold.

    Args:
        model: a recipe (`lowp recipes`, a TOML file), a model of `lowp recipes --models`, `module:function` as `lowp predict`
            takes it, or an nn.Module with `inputs`, and `targets` and `loss(outputs, targets)`. It is not changed.
        roles: which to try, of weights, activations, errors, gradients, state (the optimizer's) and wire (two ranks).
        formats: to try for every role. Default: what hardware has, FORMATS. Optimizer states are kept in 8 to 16 bits, without
            blocks: other formats are not tried for them, and `not_tried` lists them.
        steps, seeds: of each training. Weights, or where a module is given the batches, differ by seed.
        tolerance: by how much a loss may be larger than float32's, as a part of it.
        data: where data sets lie.
        progress: called with how many trainings are done, of how many, and what is next.
    """
    _check(roles, steps, seeds, tolerance)
    case = case_of(model, inputs, targets, loss, data)
    asked = [(role, parse_format(each)) for role in roles for each in (formats or FORMATS[role])]
    plan = [(role, fmt) for role, fmt in asked if role != "state" or _holds_states(fmt)]
    not_tried = tuple(f"{role} {fmt}" for role, fmt in asked if (role, fmt) not in plan)
    if not plan:
        raise ValueError(f"optimizer states are kept in formats of 8 to 16 bits, without blocks: not in {not_tried[0]}")
    total, done = seeds * (1 + len(plan)), 0

    def trained(role: str | None, fmt: Any, seed: int) -> float:
        nonlocal done
        if progress is not None:
            progress(done, total, "fp32" if role is None else f"{role} {fmt}")
        done += 1
        return _train(case, role, fmt, seed, steps)

    first = statistics.fmean(_loss(case, case.model(seed), seed) for seed in range(seeds))
    reference = [trained(None, None, seed) for seed in range(seeds)]
    if not all(map(math.isfinite, reference)):
        raise ValueError(f"the loss in float32 is not finite after {steps} steps: there is nothing to compare with")
    margin = tolerance * statistics.fmean(reference)
    seen = _numbers(case, roles)
    trials = []
    for role, fmt in plan:
        differences = [trained(role, fmt, seed) - reference[seed] for seed in range(seeds)]
        trials.append(_judged(role, fmt, differences, margin, seen.get(role, [])))
    if progress is not None:
        progress(total, total, "")
    return Recommendation(case.name, steps, seeds, statistics.fmean(reference), first, margin, tuple(trials), not_tried)


def _holds_states(fmt: AnyFormat) -> bool:
    return not isinstance(fmt, BlockFormat) and fmt.signed and 8 <= fmt.bits <= 16


def _check(roles: Sequence[str], steps: int, seeds: int, tolerance: float) -> None:
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; roles are {', '.join(ROLES)}")
    if steps < 1:
        raise ValueError(f"at least one step is needed, not {steps}")
    if seeds < 2:
        raise ValueError(f"an interval needs at least two seeds, not {seeds}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is a part of float32's loss, between 0 and 1, not {tolerance}")


def _train(case: TriedModel, role: str | None, fmt: Any, seed: int, steps: int) -> float:
    """The loss on the samples kept aside, after some steps; not finite where they diverged."""
    module = case.model(seed)
    simulated: dict[str, Any] = {role: str(fmt)} if role in SIMULATED else {}
    if simulated:
        simulate(module, **simulated, scale="none" if isinstance(fmt, BlockFormat) else "tensor", seed=seed)
    optimizer = case.optimizer(module, str(fmt) if role == "state" else None)
    for step in range(steps):
        batches = case.batches(seed, step, 2 if role == "wire" else 1)
        gradients = [_gradients(case, module, batch) for batch in batches]
        if role == "wire":
            means = VirtualWorld(2).all_reduce(gradients, str(fmt), op="mean", step=step)
            for name, parameter in module.named_parameters():
                parameter.grad = means.get(name)
        if not all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None):
            return math.inf
        optimizer.step()
    return _loss(case, module, seed)


def _gradients(case: TriedModel, module: nn.Module, batch: Any) -> dict[str, Tensor]:
    module.zero_grad()
    case.loss(module, batch).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _loss(case: TriedModel, module: nn.Module, seed: int) -> float:
    with torch.no_grad():
        return float(case.loss(module, case.kept(seed)))


def _judged(role: str, fmt: Any, differences: list[float], margin: float, seen: list[Tensor]) -> Trial:
    n = len(differences)
    if all(map(math.isfinite, differences)):
        mean = statistics.fmean(differences)
        half = critical(n - 1, LEVEL) * statistics.stdev(differences) / math.sqrt(n)
        low, high = mean - half, mean + half
        verdict = HOLDS if high <= margin else FAILS if low > margin else UNSURE
    else:
        mean = low = high = math.inf
        verdict = FAILS
    sqnr, underflow, overflow = _fidelity(fmt, seen)
    bits = codec_of(str(fmt)).wire_bytes(SAMPLE) * 8 / SAMPLE if role == "wire" else float(fmt.bits)
    return Trial(role, str(fmt), bits, mean, low, high, n, sqnr, underflow, overflow, verdict)


def _fidelity(fmt: Any, tensors: list[Tensor]) -> tuple[float | None, float | None, float | None]:
    """Signal to noise in dB, and the shares that become 0 and that exceed the largest number, under a scale for each tensor."""
    total = None
    for tensor in tensors:
        largest = tensor.abs().max().item()
        if largest == 0 or not math.isfinite(largest):
            continue
        scaled_by_itself = isinstance(fmt, BlockFormat) or fmt.max > WIDE
        factor = 1.0 if scaled_by_itself else 2.0 ** math.floor(math.log2(fmt.max / largest))
        found = measure(tensor * factor, fmt)
        found[_SQUARES] /= factor**2  # in the tensor's own unit, as those of the others
        total = found if total is None else merge(total, found)
    if total is None:
        return None, None, None
    figures = summary(total.tolist())
    sqnr = figures["sqnr_db"]
    return math.inf if sqnr is None else sqnr, figures["underflow"], figures["overflow"]


def _numbers(case: TriedModel, roles: Sequence[str]) -> dict[str, list[Tensor]]:
    """Samples of every role's numbers in float32, in the second step (the first has no optimizer's state)."""
    module = case.model(0)
    optimizer = case.optimizer(module, None)
    _gradients(case, module, case.batches(0, 0, 1)[0])
    optimizer.step()
    activations: list[Tensor] = []
    errors: list[Tensor] = []
    leaves = [leaf for leaf in module.modules() if not any(leaf.children())]
    hooks = [leaf.register_forward_hook(lambda _m, _i, out: _follow(out, activations, errors)) for leaf in leaves]
    gradients = _gradients(case, module, case.batches(0, 1, 1)[0])
    for hook in hooks:
        hook.remove()
    found = {
        "weights": [p for p in module.parameters() if p.dim() > 1],
        "activations": activations,
        "errors": errors,
        "gradients": list(gradients.values()),
        "state": [s for state in optimizer.state.values() for s in state.values() if isinstance(s, Tensor) and s.dim()],
        "wire": list(gradients.values()),
    }
    return {role: [_sample(tensor) for tensor in found[role]] for role in roles}


def _follow(out: Any, activations: list[Tensor], errors: list[Tensor]) -> None:
    if isinstance(out, Tensor) and out.is_floating_point():
        activations.append(_sample(out))
        if out.requires_grad:
            out.register_hook(lambda gradient: errors.append(_sample(gradient)))


def _sample(tensor: Tensor) -> Tensor:
    return sample(tensor, SAMPLE).float().clone()


__all__ = ["FORMATS", "ROLES", "Recommendation", "Trial", "recommend"]
