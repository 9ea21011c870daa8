"""One optimizer step of 25 M parameters in 16 bits and fewer, beside torch's own: time, and bytes a parameter.

    python -m benchmarks optim                    the GPU if there is one, else the CPU with 2 threads
    python -m benchmarks optim --device cpu --quick
    python -m benchmarks optim --only 'lowp AdamW fp16'      what matches, and torch's steps to compare it with
    python -m benchmarks optim --algorithms AdamW SGD --layouts ResNet-50

Parameters have the 161 shapes of ResNet-50, and then are one matrix of the same size. Contenders of an algorithm take turns,
one step each a round, so that what disturbs one disturbs all; ratios are of medians. On the CPU, which others use too, `copy_`
before and after tells whether a step was disturbed; then it is repeated, twice at most, and a note says how often that failed.

On CUDA a round measures twice. Device time: events around a step that is launched while the device is still busy with a matrix
product, so that launching is hidden, as it is in a program that keeps the device busy (a note says where it was not). Wall
time: steps in a row, nothing hidden. Peaks are `torch.cuda.max_memory_allocated`, less what was there before the contender.
"""

import os
import sys

# The repository's root instead of this folder, so that the module also works as a script
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from benchmarks.speed.report import Report, in_a_line  # noqa: E402
from torch import nn  # noqa: E402

import lowp  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALGORITHMS = ("AdamW", "SGD", "LARS", "LAMB")
COMPARED = ("default", "foreach", "fused")  # torch's fp32 steps that everything is divided by
SAME = "fused, same dtype"  # as the weights: this too
MEMORY_BARS = {("SGD", "as weights"): 6.0, ("AdamW", "as weights"): 8.0, ("AdamW", "8 bits"): 6.0}  # fp16, no compensation
CPU_BAR, CUDA_BAR, CUDA_BAR_8_BITS = 1.2, 1.0, 1.3  # times torch's fused step of the same dtype
COPY_BYTES = 100_000_000
HEADSTART_MS = 20.0
STEPS_IN_A_ROW = 10
QUIET = 1.5  # a step on the CPU counts where copy_ took no longer than this times its best
ATTEMPTS = 3


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Every parameter of ResNet-50 in torchvision's order: convolutions, weights and biases of batch norms, the classifier."""

    def convolution(out: int, into: int, size: int) -> list[tuple[int, ...]]:
        return [(out, into, size, size), (out,), (out,)]

    shapes, into = convolution(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            shapes += convolution(4 * width, into, 1) if block == 0 else []
            into = 4 * width
    return [*shapes, (1000, into), (1000,)]


# A matrix, and not a vector: states of fewer than 16 bits have a scale for every 256 elements of a row.
LAYOUTS: dict[str, list[tuple[int, ...]]] = {"ResNet-50": resnet50_shapes(), "one matrix": [(24_958, 1024)]}


@dataclass(frozen=True)
class Contender:
    """One optimizer in one setting. `make` takes the parameters."""

    library: str
    algorithm: str
    weights: str
    setting: str
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    state: str = "as weights"

    @property
    def name(self) -> str:
        return f"{self.library} {self.algorithm} {self.weights} {self.setting}"

    @property
    def reference(self) -> bool:
        return self.library == "torch" and self.weights == "fp32"


def contenders(algorithm: str, quick: bool) -> Iterator[Contender]:
    settings: dict[str, Any] = {"AdamW": {"lr": 1e-3}, "SGD": {"lr": 1e-2, "momentum": 0.9}}.get(algorithm, {})
    if algorithm in ("AdamW", "SGD"):
        cls = getattr(torch.optim, algorithm)
        for name in COMPARED:
            how = {} if name == "default" else {name: True}
            yield Contender("torch", algorithm, "fp32", name, lambda p, how=how: cls(p, **settings, **how))
        for weights in ("fp16", "bf16"):
            yield Contender("torch", algorithm, weights, "fused", lambda p: cls(p, **settings, fused=True))
    ours = getattr(lowp.optim, algorithm)
    layerwise = algorithm in ("LARS", "LAMB")
    for weights in ("fp16",) if quick else ("fp16", "bf16"):
        for update in ("stochastic",) if layerwise else ("stochastic", "kahan", "nearest"):
            for state in (None,) if layerwise else (None, "dynamic8") if quick else (None, "dynamic8", "e4m3fn"):
                make = lambda p, update=update, state=state: ours(p, **settings, update=update, state=state)  # noqa: E731
                setting = update if state is None else f"{update}, {state}"
                yield Contender("lowp", algorithm, weights, setting, make, "as weights" if state is None else "8 bits")


def peers(missing: dict[str, str]) -> Iterator[Contender]:
    """Other libraries' AdamW. One that cannot be imported is listed with the reason."""
    for module, make in (
        ("torchao.optim", lambda m: ("bf16 stochastic", lambda p: m._AdamW(p, bf16_stochastic_round=True), "as weights")),
        ("torchao.optim", lambda m: ("AdamW8bit", lambda p: m.AdamW8bit(p, bf16_stochastic_round=True), "8 bits")),
        ("bitsandbytes.optim", lambda m: ("AdamW8bit", lambda p: m.AdamW8bit(p), "8 bits")),
    ):
        library = module.partition(".")[0]
        try:
            setting, function, state = make(importlib.import_module(module))
        except Exception as error:
            missing[library] = "not installed" if isinstance(error, ModuleNotFoundError) else in_a_line(error)
            continue
        yield Contender(library, "AdamW", "bf16", setting, function, state)


@dataclass
class Running:
    """A contender with its parameters, and its times: milliseconds, one a round."""

    contender: Contender
    optimizer: torch.optim.Optimizer
    bytes: dict[str, float]
    first_step_s: float
    peak_bytes: float | None  # a parameter; CUDA
    times: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)  # CUDA
    host: list[float] = field(default_factory=list)  # CUDA: launching


def prepare(contender: Contender, shapes: list[tuple[int, ...]], device: str) -> Running:
    """Parameters with gradients, and two steps: what has to be built is built, and states exist."""
    cuda = device == "cuda"
    base = 0
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
    generator = torch.Generator(device).manual_seed(1)
    dtype = DTYPES[contender.weights]
    model = nn.ParameterList()
    for shape in shapes:
        model.append(nn.Parameter((torch.randn(shape, device=device, generator=generator) * 0.02).to(dtype)))
        model[-1].grad = (torch.randn(shape, device=device, generator=generator) * 1e-2).to(dtype)
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # the making of random numbers was no part of it
    optimizer = contender.make(list(model))
    began = time.perf_counter()
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    optimizer.step()
    memory = lowp.health.memory(model, optimizer)
    by_role = memory.bytes_per_parameter_by_role | {"total": memory.bytes_per_parameter}
    peak = (torch.cuda.max_memory_allocated() - base) / memory.parameters if cuda else None
    return Running(contender, optimizer, by_role, first, peak)


class Clock:
    """Times a call: on the CPU from begin to end; on CUDA by events behind a matrix product of about 20 ms, and in a row."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.products = 0
        self.disturbed = 0
        self.source = torch.randn(COPY_BYTES // 4, device=device)
        self.target = torch.empty_like(self.source)
        self.best_copy = min(self.wall(self.copy) for _ in range(10))
        if self.cuda:
            self.matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
            self.product = torch.empty_like(self.matrix)
            self.head_start(3)
            once = self.on_device(lambda: self.head_start(10)) / 10
            self.products = max(1, round(HEADSTART_MS / once))

    def head_start(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def on_device(self, call: Callable[[], Any], host: list[float] | None = None) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.head_start(self.products)
        begin.record()
        began = time.perf_counter()
        call()
        if host is not None:
            host.append(1e3 * (time.perf_counter() - began))
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def wall(self, call: Callable[[], Any], times: int = 1) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        if self.cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / times

    def round(self, running: Running) -> None:
        step = running.optimizer.step
        if self.cuda:
            running.times.append(self.on_device(step, running.host))
            running.wall.append(self.wall(step, STEPS_IN_A_ROW))
        else:
            running.times.append(self.undisturbed(step))

    def undisturbed(self, step: Callable[[], Any]) -> float:
        taken = 0.0
        for _ in range(ATTEMPTS):
            before, taken, after = self.wall(self.copy), self.wall(step), self.wall(self.copy)
            self.best_copy = min(self.best_copy, before, after)
            if max(before, after) <= QUIET * self.best_copy:
                return taken
        self.disturbed += 1
        return taken

    def copy(self) -> None:
        self.target.copy_(self.source)

    def copy_ms(self, rounds: int) -> float:
        time_one = self.on_device if self.cuda else self.wall
        return statistics.median(time_one(self.copy) for _ in range(rounds + 2))


def measure(group: list[Contender], layout: str, clock: Clock, options: argparse.Namespace, report: "OptimReport") -> None:
    """Make all contenders of a group, let them take turns, and turn their times into rows."""
    running = []
    for contender in group:
        print(f"{time.perf_counter() - report.began:7.1f} s  {layout}: {contender.name}", flush=True)
        try:
            running.append(prepare(contender, LAYOUTS[layout], options.device))
        except Exception as error:
            reasons = report.failures if contender.library == "lowp" else report.missing
            reasons[f"{contender.name} ({layout})"] = in_a_line(error)
    for _ in range(options.rounds):
        for each in running:
            clock.round(each)
    report.disturbed = clock.disturbed
    figures = [
        (each, (statistics.median(each.times), statistics.median(each.wall or [0.0]), min(each.times))) for each in running
    ]
    medians = {each.contender.setting: found for each, found in figures if each.contender.reference}
    same = {
        e.contender.weights: found for e, found in figures if (e.contender.library, e.contender.setting) == ("torch", "fused")
    }
    for each in running:
        own = {SAME: same[each.contender.weights]} if each.contender.weights in same else {}
        report.rows.append(row_of(each, layout, medians | own))


def row_of(running: Running, layout: str, medians: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    contender = running.contender
    median = statistics.median(running.times)
    row: dict[str, Any] = {
        "layout": layout, "name": contender.name, "library": contender.library, "algorithm": contender.algorithm,
        "weights": contender.weights, "setting": contender.setting, "state": contender.state, "median_ms": median,
        "min_ms": min(running.times), "n": len(running.times), "rounds_ms": running.times, "bytes": running.bytes,
        "first_step_s": running.first_step_s, "ratios": {name: median / medians[name][0] for name in medians},
    }  # fmt: skip
    row["min_ratios"] = {name: min(running.times) / medians[name][2] for name in medians}
    if running.wall:
        wall, host = statistics.median(running.wall), statistics.median(running.host)
        row |= {"wall_ms": wall, "wall_rounds_ms": running.wall, "host_ms": host, "peak_bytes": running.peak_bytes}
        row["wall_ratios"] = {name: wall / medians[name][1] for name in medians}
    return row


@dataclass
class OptimReport(Report):
    """Rows here are dicts; facts of the machine, what is missing and what failed are as in the other benchmarks."""

    rows: list[Any] = field(default_factory=list)
    copy_ms: float = 0.0
    disturbed: int = 0  # steps on the CPU beside which copy_ was slow
    began: float = field(default_factory=time.perf_counter)

    def bars(self) -> Iterator[tuple[str, float, float, float]]:
        """What was promised: a name, the figure, the same by minima, and the bar that they must not exceed.

        On a busy machine medians mislead: with two thirds of the steps disturbed, fp16 AdamW seemed to take 0.47 of the fused
        step, and took 1.84 of it when the machine was quiet. Where medians and minima disagree on a bar, it is undecided.
        """
        for row in self.rows:
            if row["library"] != "lowp":
                continue
            where = f"{row['algorithm']} {row['weights']}, {row['setting']} ({row['layout']})"
            memory_bar = MEMORY_BARS.get((row["algorithm"], row["state"])) if row["weights"] == "fp16" else None
            if memory_bar and "kahan" not in row["setting"]:
                yield f"bytes a parameter: {where}", row["bytes"]["total"], row["bytes"]["total"], memory_bar
            if SAME not in row["ratios"]:
                continue
            if self.device == "cuda":
                bar = CUDA_BAR if row["state"] == "as weights" else CUDA_BAR_8_BITS
                yield f"device time / {SAME}: {where}", row["ratios"][SAME], row["min_ratios"][SAME], bar
                yield f"wall time / {SAME}: {where}", row["wall_ratios"][SAME], row["wall_ratios"][SAME], bar
            elif row["state"] == "as weights":
                for name in ("fused", SAME):
                    yield f"time / {name}: {where}", row["ratios"][name], row["min_ratios"][name], CPU_BAR

    def markdown(self) -> str:
        speed = 2 * COPY_BYTES / self.copy_ms / 1e6
        lines = [f"# {self.machine}: an optimizer's step", "", "Written by `benchmarks/optim.py`.", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts().items()]
        lines += [f"- lowp: {lowp.__version__}"] if "lowp" not in self.facts() else []
        lines += [f"- copy_ of {COPY_BYTES // 1_000_000} MB: {self.copy_ms:.3f} ms, {speed:.0f} GB/s read and written"]
        lines += ["", "## Bars", "", "| what | by medians | by minima | bar | |", "|---|---|---|---|---|"]
        for what, value, least, bar in self.bars():
            lines.append(f"| {what} | {value:.4f} | {least:.4f} | {bar:g} | {verdict(value, least, bar)} |")
        for layout in dict.fromkeys(row["layout"] for row in self.rows):
            for algorithm in ALGORITHMS:
                rows = [row for row in self.rows if (row["layout"], row["algorithm"]) == (layout, algorithm)]
                lines += self._table(f"{algorithm}, {layout}", rows) if rows else []
        lines += ["", *(f"- not available: {name}: {reason}" for name, reason in self.missing.items())]
        lines += [f"- FAILED: {name}: {reason}" for name, reason in self.failures.items()]
        steps = sum(row["n"] for row in self.rows)
        lines += (
            [f"- the machine was busy with something else during {self.disturbed} of {steps} steps"] if self.disturbed else []
        )
        late = [row["name"] for row in self.rows if row.get("host_ms", 0.0) > 0.8 * HEADSTART_MS]
        lines += [f"- the host was not ahead, so that launching shows in the device's time: {name}" for name in late]
        return "\n".join(lines) + "\n"

    def _table(self, title: str, rows: list[dict[str, Any]]) -> list[str]:
        cuda = self.device == "cuda"
        heads = ["optimizer", "device ms" if cuda else "ms", "min", *(f"/ {name}" for name in rows[0]["ratios"])]
        heads += ["wall ms", *(f"wall / {name}" for name in rows[0]["ratios"]), "peak B/parameter"] if cuda else []
        heads += ["B/parameter", "weights", "gradients", "state", "first step, s"]
        body = []
        for row in rows:
            cells = [row["name"], f"{row['median_ms']:.3f}", f"{row['min_ms']:.3f}"]
            cells += [f"{ratio:.2f}" for ratio in row["ratios"].values()]
            if cuda:
                cells += [f"{row['wall_ms']:.3f}", *(f"{ratio:.2f}" for ratio in row["wall_ratios"].values())]
                cells += [f"{row['peak_bytes']:.2f}"]
            cells += [f"{row['bytes'][role]:.2f}" for role in ("total", "weights", "gradients", "state")]
            body.append([*cells, f"{row['first_step_s']:.1f}"])
        table = ["| " + " | ".join(cells) + " |" for cells in [heads, ["---"] * len(heads), *body]]
        return ["", f"## {title}, n = {rows[0]['n']} rounds", "", *table]

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^a-z0-9]+", "-", self.machine.lower().replace("(r)", "")).strip("-") + "-optim"
        names = ("what", "value", "by_minima", "bar", "verdict")
        bars = [dict(zip(names, (*each, verdict(*each[1:])), strict=True)) for each in self.bars()]
        whole = {
            "facts": self.facts() | {"lowp": lowp.__version__},
            "copy_ms": self.copy_ms,
            "bars": bars,
            "not_available": self.missing,
        }
        paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
        paths[0].write_text(json.dumps(whole | {"failed": self.failures, "rows": self.rows}, indent=1) + "\n")
        paths[1].write_text(self.markdown())
        return paths


def verdict(value: float, least: float, bar: float) -> str:
    if (value <= bar) != (least <= bar):
        return "**undecided**: medians and minima disagree"
    return "met" if value <= bar else f"**missed** by {value / bar - 1:.2%}"


def _is_wanted(contender: Contender, only: str | None) -> bool:
    return only is None or re.search(only, contender.name) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--quick", action="store_true", help="fp16 and dynamic8 states only, 3 rounds")
    parser.add_argument("--only", metavar="REGEX", help="contenders whose name matches; torch's fused steps stay")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=tuple(LAYOUTS))
    parser.add_argument(
        "--build", action="store_true", help="two steps of each contender, and no measurement: kernels are there then"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    options.rounds = 3 if options.quick else options.rounds
    report = OptimReport(device=options.device, threads=torch.get_num_threads())
    clock = Clock(options.device)
    report.copy_ms = clock.copy_ms(options.rounds)
    for layout in options.layouts:
        for algorithm in options.algorithms:
            group = list(contenders(algorithm, options.quick))
            group += peers(report.missing) if algorithm == "AdamW" and options.peers else []
            group = [c for c in group if (c.library, c.setting) == ("torch", "fused") or _is_wanted(c, options.only)]
            if options.build:
                for contender in group:
                    if contender.library == "lowp":
                        prepare(contender, LAYOUTS[layout], options.device)
                continue
            measure(group, layout, clock, options, report)
            report.write(options.out)  # what is there already, should the rest fail or be stopped
            gc.collect()
    if options.build:
        return
    print(report.markdown())
    for path in report.write(options.out):
        print(f"written: {path}")
    if report.failures:
        sys.exit(f"{len(report.failures)} contenders of lowp failed")


if __name__ == "__main__":
    main()
