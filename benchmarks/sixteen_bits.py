"""Sixteen bits are enough: the same trainings in float32 and in pure FP16 and BF16, with every way of rounding updates.

    python -m benchmarks sixteen_bits                        on a GPU: 4 tasks x 7 settings x 5 seeds, some minutes
    python -m benchmarks sixteen_bits --device cpu --quick   tiny sizes, BF16, one seed: under a minute
    python -m benchmarks sixteen_bits --data DIR --pack FILE.npz     MNIST's IDX files (.gz or not) in one file

In the 16-bit rows everything has 16 bits: weights, inputs, activations, gradients, states of the optimizer (Kahan's update
keeps 16 bits more a weight). FP16 has a dynamic loss scale. A seed decides synthetic data, initial weights, order and dropout,
and is the same in all settings: the difference to float32 is taken seed by seed. Intervals are Student's, 95 %. A setting is
"within noise" if the interval of its difference contains 0, or if its mean difference is within the margin that stands above
the table.

`lost updates`: the share of the intended update that did not arrive in the weights (lowp.health.watch), in the step after 9/10
of the training, mean over the layers. The loss is not scaled in that one step: the watch cannot know a scale given to `step`.
With stochastic rounding the share is 0 on average, and scatters around it, widely where layers are small (biases); so the
second figure weighs each layer by its number of elements.
"""

import argparse
import gzip
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks import harness
from torch import Tensor, nn

import lowp

CARRY = Path(__file__).parents[1] / ".carry"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UPDATES = ("stochastic", "kahan", "nearest")


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    weights: str
    update: str
    seed: int
    device: str
    quick: bool
    data: Path
    text: Path


@dataclass
class Problem:
    """What to train. Batches come in the dtype of the weights; `evaluate` gives the metrics, the judged one first."""

    model: nn.Module
    steps: int
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    evaluate: Callable[[nn.Module], dict[str, Tensor]]
    optimizer: str
    settings: dict[str, Any]
    warmup: int = 0


@dataclass(frozen=True)
class Task:
    """`margin`: a difference of the judged metric that does not matter, as a share of float32's mean or absolute."""

    title: str
    make: Callable[[Job], Problem]
    margin: float
    relative: bool
    more_is_better: bool


def least_squares(job: Job) -> Problem:
    """A noisy linear model of 256 weights, many small steps: near the end they are far smaller than a BF16 weight resolves.

    The learning rate was chosen for that: at four times as much (with 64 weights) BF16 to nearest stayed within the margin.
    """
    rows, width, steps, size = (2048, 64, 600, 64) if job.quick else (8192, 256, 2000, 256)
    generator = torch.Generator().manual_seed(job.seed)
    x = torch.randn(rows, width, generator=generator)
    y = x @ torch.randn(width, 1, generator=generator) / math.sqrt(width)
    y += 0.5 * torch.randn(rows, 1, generator=generator)
    model = nn.Linear(width, 1, bias=False)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        weight = next(model.parameters()).detach().double().cpu()
        return {"training loss": (x.double() @ weight.T - y.double()).square().mean()}

    batch = _batches(job, (x, y), steps, size, generator)
    return Problem(model, steps, batch, F.mse_loss, evaluate, "SGD", {"lr": 5e-4, "momentum": 0.9})


def logistic_regression(job: Job) -> Problem:
    """20 features, 10,000 rows, labels drawn from the model that is sought."""
    rows, steps, size = (2000, 500, 100) if job.quick else (10_000, 2000, 100)
    generator = torch.Generator().manual_seed(job.seed)
    x = torch.randn(rows, 20, generator=generator)
    y = torch.bernoulli(torch.sigmoid(x @ torch.randn(20, 1, generator=generator)), generator=generator)
    model = nn.Linear(20, 1)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        weight, bias = (parameter.detach().double().cpu() for parameter in model.parameters())
        logits = x.double() @ weight.T + bias
        accuracy = ((logits > 0) == (y > 0.5)).double().mean()
        return {"training loss": F.binary_cross_entropy_with_logits(logits, y.double()), "training accuracy": accuracy}

    batch = _batches(job, (x, y), steps, size, generator)
    loss = F.binary_cross_entropy_with_logits
    return Problem(model, steps, batch, loss, evaluate, "SGD", {"lr": 5e-3, "momentum": 0.9})


def mnist(job: Job) -> Problem:
    """The MLP of docs/PAPERS.md, section 2: 784-1024-1024-10, dropout .2 / .3 / .3; AdamW, 4 epochs."""
    width, steps, size = (128, 150, 128) if job.quick else (1024, 4 * 60_000 // 256, 256)
    dtype = DTYPES[job.weights]
    arrays = load_mnist(job.data)
    images, tests = (_on_device(arrays[f"{part}_images"], job.device) for part in ("train", "test"))
    labels, answers = (_on_device(arrays[f"{part}_labels"], job.device).long() for part in ("train", "test"))
    inputs, tests = (images.view(len(images), -1) / 255).to(dtype), (tests.view(len(tests), -1) / 255).to(dtype)
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(784, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, 10),
    )  # fmt: skip

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        accuracy = (model(tests).argmax(1) == answers).double().mean()
        return {"test accuracy": accuracy, "training loss": F.cross_entropy(model(inputs[:10_000]).float(), labels[:10_000])}

    generator = torch.Generator().manual_seed(job.seed)
    batch = _batches(job, (inputs, labels), steps, size, generator)
    return Problem(model, steps, batch, F.cross_entropy, evaluate, "AdamW", {"lr": 1e-3})


def gpt(job: Job) -> Problem:
    """Characters of Shakespeare: 4 layers, width 128, 4 heads, context 128; AdamW with a warm-up."""
    layers, width, context, steps, size = (2, 32, 32, 80, 16) if job.quick else (4, 128, 128, 600, 64)
    characters = torch.from_numpy(np.frombuffer(job.text.read_bytes(), dtype=np.uint8).copy()).long()
    kinds, codes = torch.unique(characters, return_inverse=True)
    codes = codes.to(job.device)
    cut = len(codes) * 9 // 10
    places = torch.arange(context + 1, device=job.device)
    generator = torch.Generator().manual_seed(job.seed)
    starts = torch.randint(cut - context, (steps, size, 1), generator=generator).to(job.device)
    fixed = torch.Generator().manual_seed(0)  # the same windows for everybody
    windows = 4 if job.quick else 16
    held_out = torch.randint(cut, len(codes) - context, (windows, 64, 1), generator=fixed).to(job.device)

    def cut_out(starts: Tensor) -> tuple[Tensor, Tensor]:
        window = codes[starts + places]
        return window[:, :-1], window[:, 1:].reshape(-1)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        def mean_loss(windows: Tensor) -> Tensor:
            losses = [F.cross_entropy(model(x).float(), y) for x, y in map(cut_out, windows)]
            return torch.stack(losses).double().mean()

        return {"validation loss": mean_loss(held_out), "training loss": mean_loss(starts[:windows])}

    model = Characters(len(kinds), layers, width, 4, context)
    batch = lambda step: cut_out(starts[step])  # noqa: E731
    return Problem(
        model, steps, batch, F.cross_entropy, evaluate, "AdamW", {"lr": 2e-3, "weight_decay": 0.1}, warmup=steps // 20
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        three = self.queries_keys_values(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = three.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class Characters(nn.Module):
    """A GPT. Logits of all places come as rows."""

    def __init__(self, kinds: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(kinds, width), nn.Embedding(context, width)
        for embedding in (self.character, self.place):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, kinds, bias=False))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.character(codes) + self.place.weight[: codes.shape[1]]
        return self.last(self.blocks(x)).flatten(0, 1)


TASKS = {
    "least_squares": Task("Least squares, SGD with momentum", least_squares, 0.01, True, False),
    "logistic": Task("Logistic regression, SGD with momentum", logistic_regression, 0.01, True, False),
    "mnist": Task("MNIST, 784-1024-1024-10 with dropout, AdamW", mnist, 0.001, False, True),
    "gpt": Task("A character-level GPT of 4 layers on Shakespeare, AdamW", gpt, 0.01, True, False),
}


def _batches(job: Job, tensors: Sequence[Tensor], steps: int, size: int, generator: torch.Generator) -> Callable:
    """Epochs in random order, the last incomplete batch left out; floats in the job's dtype; everything on the device."""
    count = len(tensors[0])
    per_epoch = count // size
    epochs = -(-steps // per_epoch)
    order = torch.cat([torch.randperm(count, generator=generator)[: per_epoch * size] for _ in range(epochs)])
    places = order.view(-1, size).to(job.device)
    moved = [x.to(job.device, DTYPES[job.weights] if x.is_floating_point() else x.dtype) for x in tensors]
    return lambda step: tuple(x[places[step]] for x in moved)


def train(job: Job) -> dict[str, Any]:
    """Run one job; whatever ends it early is its result."""
    if job.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other cost more than such small steps
    # A loss scale that begins too high leaves the first step out; the schedule follows the data, not the optimizer
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    began = time.perf_counter()
    torch.manual_seed(job.seed)
    problem = TASKS[job.task].make(job)
    found = {"task": job.task, "weights": job.weights, "update": job.update, "seed": job.seed, "steps": problem.steps}
    try:
        found |= _trained(job, problem)
    except (lowp.NonFiniteGradient, lowp.LossScaleExhausted) as error:
        found["error"] = harness.in_a_line(error)
    return found | {"seconds": time.perf_counter() - began}


def _trained(job: Job, problem: Problem) -> dict[str, Any]:
    torch.manual_seed(1000 + job.seed)  # dropout, whatever numbers the making of the problem took
    model = problem.model.to(job.device, DTYPES[job.weights])
    # In float32 torch's own step is taken, where a look at all gradients would make the host wait
    nonfinite = "propagate" if job.weights == "fp32" else "raise"
    options = {"update": job.update, "seed": job.seed, "nonfinite": nonfinite}
    optimizer = getattr(lowp.optim, problem.optimizer)(model.parameters(), **problem.settings, **options)
    schedule = lowp.optim.schedules.poly(optimizer, problem.steps, power=1.0, warmup=problem.warmup)
    scale = lowp.LossScale("dynamic") if job.weights == "fp16" else None
    late, records = problem.steps * 9 // 10, []
    for step in range(problem.steps):
        x, y = problem.batch(step)
        loss = problem.loss(model(x), y)
        if step == late:
            with lowp.health.watch(model, optimizer, roles="updates") as health:
                loss.backward()
                optimizer.step()
                records = health.records
        elif scale is not None:
            scale.scale(loss).backward()
            scale.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        metrics = {name: float(value) for name, value in problem.evaluate(model).items()}
    known = [(record["lost_updates"], record["elements"]) for record in records if record["lost_updates"] is not None]
    reasons = sorted({record["reason"] for record in records if "reason" in record})
    if reasons:
        raise RuntimeError(f"the watch could not see the updates of {job.task}, {job.weights} {job.update}: {reasons[0]}")
    lost = [share for share, _ in known]
    weighed = sum(share * elements for share, elements in known) / max(1, sum(elements for _, elements in known))
    skipped = 0 if scale is None else scale.skipped
    shares = {"lost_updates": statistics.fmean(lost), "lost_by_elements": weighed} if lost else {}
    return {"metrics": metrics, "skipped": skipped} | shares


# Figures.


def row_of(task: Task, runs: list[dict[str, Any]], baseline: dict[int, float]) -> dict[str, Any]:
    """One setting: its seeds together, and beside float32."""
    done = [run for run in runs if "metrics" in run]
    row: dict[str, Any] = {"weights": runs[0]["weights"], "update": runs[0]["update"], "n": len(done)}
    row["failed"] = [run["error"] for run in runs if "error" in run]
    row["seconds"] = statistics.fmean(run["seconds"] for run in runs)
    if not done:
        return row | {"verdict": "no"}
    names = list(done[0]["metrics"])
    row["metrics"] = {name: harness.interval([run["metrics"][name] for run in done]) for name in names}
    for share in ("lost_updates", "lost_by_elements"):
        found = [run[share] for run in done if share in run]
        row[share] = statistics.fmean(found) if found else None
    row["skipped"] = statistics.fmean(run["skipped"] for run in done)
    differences = [run["metrics"][names[0]] - baseline[run["seed"]] for run in done if run["seed"] in baseline]
    if row["weights"] == "fp32" or not differences:
        return row
    mean, half = row["difference"] = harness.interval(differences)
    margin = task.margin * (abs(statistics.fmean(baseline.values())) if task.relative else 1.0)
    inside = abs(mean) <= margin or abs(mean) <= half
    better = (mean > 0) == task.more_is_better
    row["verdict"] = "no" if row["failed"] or not (inside or better) else "yes" if inside else "better"
    return row


def rows_of(task: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = [run for run in runs if run["task"] == task]
    settings = dict.fromkeys((run["weights"], run["update"]) for run in own)
    fp32 = [run for run in own if run["weights"] == "fp32" and "metrics" in run]
    baseline = {run["seed"]: next(iter(run["metrics"].values())) for run in fp32}
    return [row_of(TASKS[task], [r for r in own if (r["weights"], r["update"]) == s], baseline) for s in settings]


def table(task: str, rows: list[dict[str, Any]], quick: bool) -> Iterator[str]:
    known = TASKS[task]
    names = next((list(row["metrics"]) for row in rows if "metrics" in row), [])
    percent = names[:1] == ["test accuracy"]
    margin = f"{known.margin:.1%}" + (" of float32's" if known.relative else " (points)")
    yield from (
        "",
        f"## {known.title}{' (tiny: --quick)' if quick else ''}",
        "",
        f"Judged: {names[0] if names else 'nothing'}; margin {margin}.",
        "",
    )
    heads = [
        "weights",
        "update",
        "n",
        *names,
        "difference to fp32",
        "within noise",
        "lost updates",
        "steps left out",
        "s a run",
    ]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        metrics = [_figure(row["metrics"][name], "accuracy" in name) if "metrics" in row else "-" for name in names]
        difference = _figure(row["difference"], percent, "+") if "difference" in row else ""
        verdict = row.get("verdict", "") + (f" ({len(row['failed'])} runs failed)" if row["failed"] else "")
        shares = [row.get(share) for share in ("lost_updates", "lost_by_elements")]
        lost = "-" if None in shares else " / ".join(f"{share:.1%}" for share in shares)
        cells = [row["weights"], row["update"], str(row["n"]), *metrics, difference, verdict, lost]
        yield "| " + " | ".join([*cells, f"{row.get('skipped', 0):.1f}", f"{row['seconds']:.1f}"]) + " |"
    yield from (f"\n{row['weights']} {row['update']}: {reason}" for row in rows for reason in dict.fromkeys(row["failed"]))


def _figure(pair: tuple[float, float], percent: bool, sign: str = "") -> str:
    mean, half = pair
    factor, digits, unit = (100, 2, " %") if percent else (1, 5, "")
    around = "" if math.isnan(half) else f" ± {factor * half:.{digits}f}"
    return f"{factor * mean:{sign}.{digits}f}{around}{unit}"


# Data.


@lru_cache(maxsize=1)
def load_mnist(path: Path) -> dict[str, np.ndarray]:
    """train_images, train_labels, test_images, test_labels (uint8), from a folder of IDX files or an .npz."""
    if path.suffix == ".npz" and path.exists():
        return dict(np.load(path))
    names = {"train": "train", "test": "t10k"}
    found = {}
    for part, file in names.items():
        for kind, dimensions in (("images", 3), ("labels", 1)):
            name = f"{file}-{kind}-idx{dimensions}-ubyte"
            plain, packed = path / name, path / f"{name}.gz"
            if not plain.exists() and not packed.exists():
                raise SystemExit(f"no MNIST: neither {plain} nor {packed.name}; give --data a folder of IDX files, or an .npz")
            content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
            shape = np.frombuffer(content, dtype=">i4", count=dimensions, offset=4)
            found[f"{part}_{kind}"] = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return found


def _on_device(array: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)


# The whole.


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    weights = ("bf16",) if options.quick else ("fp16", "bf16")
    for task in options.tasks:
        for setting in [("fp32", "nearest"), *((w, update) for w in weights for update in UPDATES)]:
            for seed in range(options.seeds):
                yield Job(task, *setting, seed, options.device, options.quick, options.data, options.text)


def results_of(jobs: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    """One after the other, or in processes that share the GPU: models so small are bounded by launching, not by the device."""
    if processes == 1:
        yield from map(train, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(train, jobs)


def write(facts: dict[str, Any], options: argparse.Namespace, runs: list[dict[str, Any]]) -> tuple[str, list[Path]]:
    rows = {task: rows_of(task, runs) for task in options.tasks if any(run["task"] == task for run in runs)}
    lines = harness.heading("sixteen bits are enough", facts)
    lines += [f"- seeds: {options.seeds}; ± is the 95 % interval of the mean; quick: {'yes' if options.quick else 'no'}"]
    lines += [f"- processes that shared the device: {options.jobs} (seconds are theirs, side by side)"]
    lines += [line for task, own in rows.items() for line in table(task, own, options.quick)]
    return "\n".join(lines), harness.write(options.out, "sixteen-bits", facts, {"tables": rows, "runs": runs}, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, BF16 only, one seed")
    parser.add_argument("--seeds", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--jobs", type=int, help="processes side by side; default 4 on CUDA, 1 on the CPU")
    parser.add_argument("--data", type=Path, default=CARRY / "mnist.npz", help="MNIST: an .npz or a folder of IDX files")
    parser.add_argument("--text", type=Path, default=CARRY / "tinyshakespeare.txt")
    parser.add_argument("--pack", type=Path, metavar="FILE.npz", help="only write MNIST, from --data, into this file")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    options = parser.parse_args()
    if options.pack:
        np.savez_compressed(options.pack, **load_mnist(options.data))
        return
    options.seeds = options.seeds or (1 if options.quick else 5)
    options.jobs = options.jobs or (4 if options.device == "cuda" else 1)
    if "gpt" in options.tasks and not options.text.exists():
        sys.exit(f"no text at {options.text}; give --text a file, or leave gpt out of --tasks")
    if "mnist" in options.tasks:
        load_mnist(options.data)  # to fail now, not in an hour
    facts = harness.facts_of(options.device)
    began, runs = time.perf_counter(), []
    for run in results_of(list(jobs_of(options)), options.jobs):
        runs.append(run)
        if run["seed"] == options.seeds - 1:
            print(f"{time.perf_counter() - began:6.1f} s  {run['task']} {run['weights']} {run['update']}", flush=True)
            write(facts, options, runs)
    text, paths = write(facts, options, runs)
    print(text)
    print(f"\n{time.perf_counter() - began:.0f} s in all; written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
