"""What simulating a whole model costs: a training step with every number rounded, over the same step without.

    python -m benchmarks simulate                      ResNet-18 and a GPT on the CPU
    python -m benchmarks simulate --device cuda        larger batches, float32 (TF32) and bfloat16
    python -m benchmarks simulate --device cuda --mode reduce-overhead    as CUDA graphs
    python -m benchmarks simulate --quick              two rounds of small models: does it run?
    python -m benchmarks simulate --only gpt --contenders plain simulated --rounds 9

A step is forward, backward and SGD. Weights, activations, errors and gradients are rounded to nearest (e4m3fn and e5m2).
Contenders take turns; a ratio is to the compiled plain model in the same round, and its median counts. It is taken again by the
shortest step of each: where the two disagree on the bar, it is undecided. "plain again" is a second compiled plain model: what
ratios can be trusted to. On a busy machine processor time tells more, with `--threads 1` (threads that wait count, too).
QPyTorch rounds as its examples do: quantizers behind modules, weights and gradients in its optimizer.

Compiling is timed with the compiler's caches empty, in seconds of processor time (of this process and its compilers), as others
may use the machine. The kernels of eager quantizers, which serve all models, are built before; how long it took is noted.
"""

import argparse
import gc
import os
import re
import resource
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, alone, facts_of, heading, in_a_line, table, write
from torch import Tensor, nn
from torch.nn import functional as F

import lowp
from lowp.simulation import restore, simulate
from lowp.training.models.gpt import gpt
from lowp.training.models.resnet import resnet18

FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
STEP_BARS = {"cpu": 1.3, "cuda": 1.05}  # of the compiled plain step
COMPILE_BAR = 2.0  # of the plain model's
QTORCH_WIDTHS = {"e4m3fn": (4, 3), "e5m2": (5, 2)}  # exponent and mantissa bits
RATE = 1e-4  # of learning: small, so that no model leaves its numbers' ranges during the benchmark


@dataclass(frozen=True)
class Case:
    """A model, and one batch for it."""

    name: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    labels: Callable[[], Tensor]
    batch: str


def cases_for(device: str, quick: bool) -> list[Case]:
    dtypes = [torch.float32] if device == "cpu" or quick else [torch.float32, torch.bfloat16]
    images = 4 if quick else (32 if device == "cpu" else 512)
    width, layers, texts, length = (32, 1, 2, 16) if quick else ((128, 4, 16, 64) if device == "cpu" else (768, 12, 16, 512))
    channels = 8 if quick else 64
    found = []
    for dtype in dtypes:
        found.append(
            Case(
                "resnet18",
                dtype,
                lambda: resnet18((3, 32, 32), 10, width=channels),
                lambda dtype=dtype: torch.randn(images, 3, 32, 32, generator=_generator()).to(dtype),
                lambda: torch.randint(0, 10, (images,), generator=_generator()),
                f"{images} images of 32 x 32",
            )
        )
        found.append(
            Case(
                "gpt",
                dtype,
                lambda: gpt((length,), 256, width=width, layers=layers, heads=width // 32 if width < 768 else 12),
                lambda: torch.randint(0, 256, (texts, length), generator=_generator()),
                lambda: torch.randint(0, 256, (texts * length,), generator=_generator()),
                f"{texts} texts of {length}, {layers} blocks of width {width}",
            )
        )
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


Stepper = Callable[[], None]


def stepper(
    case: Case, device: str, compiled: bool, prepare: Callable[[nn.Module, Any], Any], mode: str = "default"
) -> Stepper:
    """One training step. `prepare(model, optimizer)` makes the model simulated, and gives the optimizer to use."""
    with torch.random.fork_rng():  # models initialise from the global generator
        torch.manual_seed(0)
        model = case.model().to(device, case.dtype)
    if device == "cuda" and case.name == "resnet18":
        model = model.to(memory_format=torch.channels_last)
    inputs, labels = case.inputs().to(device), case.labels().to(device)
    optimizer = prepare(model, torch.optim.SGD(model.parameters(), RATE))

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2).float() if case.name == "gpt" else model(inputs).float(), labels)

    run = torch.compile(_with_code_of_its_own(loss_of), mode=mode) if compiled else loss_of

    def step() -> None:
        if mode != "default":
            torch.compiler.cudagraph_mark_step_begin()
        run(inputs, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _with_code_of_its_own(function: Any) -> Any:
    """Dynamo keeps what it compiled with a function's code, and gives up on code that it was asked to compile often."""
    code = function.__code__.replace(co_name=f"{function.__name__}_of_one")
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def left_alone(model: nn.Module, optimizer: Any) -> Any:
    return optimizer


def simulated(model: nn.Module, optimizer: Any) -> Any:
    simulate(model, **FORMATS)
    return optimizer


def quantized_by_qtorch(model: nn.Module, optimizer: Any) -> Any:
    """QPyTorch's quantizers behind the same modules that lowp rounds the output of."""
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # where pip puts ninja
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qtorch import FloatingPoint
        from qtorch.optim import OptimLP
        from qtorch.quant import Quantizer, float_quantize

    numbers = {role: FloatingPoint(*QTORCH_WIDTHS[name]) for role, name in FORMATS.items()}
    if next(model.parameters()).dtype != torch.float32:
        raise RuntimeError("QPyTorch rounds float32 tensors alone")
    layers = simulate(model, activations="e4m3fn").layers
    rounding = [layer.name for layer in layers if "activations" in layer.roles]
    restore(model)
    for name in rounding:
        quantizer = Quantizer(numbers["activations"], numbers["errors"], "nearest", "nearest")
        model.get_submodule(name).register_forward_hook(lambda module, given, result, round=quantizer: round(result))

    def rounded_to(number: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: float_quantize(x, number.exp, number.man, "nearest")

    return OptimLP(optimizer, weight_quant=rounded_to(numbers["weights"]), grad_quant=rounded_to(numbers["gradients"]))


CONTENDERS: dict[str, tuple[bool, Callable[[nn.Module, Any], Any]]] = {
    "plain, compiled": (True, left_alone),
    "plain again, compiled": (True, left_alone),
    "simulated, compiled": (True, simulated),
    "plain, eager": (False, left_alone),
    "simulated, eager": (False, simulated),
    "QPyTorch, eager": (False, quantized_by_qtorch),
    "QPyTorch, compiled": (True, quantized_by_qtorch),
}
BASE, OURS = "plain, compiled", "simulated, compiled"


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def first_steps(step: Stepper, device: str) -> dict[str, Any]:
    """The step that compiles (and one more, for what is only set up then): its time, its kernels, the memory of the second."""
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        torch.compile(_with_code_of_its_own(_double))(torch.ones(8, device=device))  # the compiler's own first steps: headers
        kernels, began, used = metrics.generated_kernel_count, time.perf_counter(), processor_seconds()
        step()
        _wait(device)
        found: dict[str, Any] = {"first_step_s": time.perf_counter() - began, "first_step_cpu_s": processor_seconds() - used}
        found["kernels"] = metrics.generated_kernel_count - kernels
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    _wait(device)
    if device == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def _double(x: Tensor) -> Tensor:
    return x * 2


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def turn(step: Stepper, device: str, seconds: float) -> tuple[float, float]:
    """As many steps as fit into the time, one at least: milliseconds of the median step, and of processor time for each.

    On CUDA five steps follow each other, and count as one of their mean time.
    """
    together = 5 if device == "cuda" else 1
    times: list[float] = []
    began, used = time.perf_counter(), time.process_time()
    while not times or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for _ in range(together):
            step()
        _wait(device)
        times.append((time.perf_counter() - start) / together)
    return 1e3 * statistics.median(times), 1e3 * (time.process_time() - used) / len(times) / together


def compare(case: Case, options: argparse.Namespace, missing: dict[str, str]) -> dict[str, Any]:
    """Every contender's first steps, then its steps in turns."""
    torch._dynamo.reset()
    steps: dict[str, Stepper] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, (compiled, prepare) in CONTENDERS.items():
        if name != BASE and options.contenders and not any(name.startswith(each) for each in options.contenders):
            continue
        try:
            step = stepper(case, options.device, compiled, prepare, options.mode)
            rows[name] = first_steps(step, options.device)
        except Exception as error:  # a peer that does not build, or a compiler that gives up on it: say so and go on
            if "QPyTorch" not in name:
                raise
            missing[f"{name} ({case.name}, {_short(case.dtype)})"] = in_a_line(error)
            continue
        steps[name] = step
        print(f"        {name}: first step {rows[name]['first_step_s']:.1f} s", flush=True)
    for row in rows.values():
        row |= {"ms": [], "cpu_ms": []}
    with alone():
        for _ in range(options.rounds):
            for name, step in steps.items():
                wall, used = turn(step, options.device, options.seconds)
                rows[name]["ms"].append(wall)
                rows[name]["cpu_ms"].append(used)
    steps.clear()
    gc.collect()
    return {"case": case.name, "dtype": _short(case.dtype), "batch": case.batch, "mode": options.mode, "contenders": rows}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tables(found: list[dict[str, Any]], device: str) -> Iterator[str]:
    heads = ["contender", "first step, CPU s", "over plain", "kernels", "peak MiB", "step ms"]
    heads += ["over plain, compiled", "range", "by minima", "by processor time", ""]
    for case in found:
        mode = "" if case["mode"] == "default" else f", compiled with mode={case['mode']!r}"
        yield from ("", f"## {case['case']}, {case['dtype']}: {case['batch']}{mode}", "")
        base = case["contenders"][BASE]
        yield from table(heads, [_cells(name, row, base, device) for name, row in case["contenders"].items()])


def _cells(name: str, row: dict[str, Any], base: dict[str, Any], device: str) -> list[str]:
    ratios = [ours / other for ours, other in zip(row["ms"], base["ms"], strict=True)]
    ratio, least = statistics.median(ratios), min(row["ms"]) / min(base["ms"])
    used = statistics.median(ours / other for ours, other in zip(row["cpu_ms"], base["cpu_ms"], strict=True))
    compiling = row["first_step_cpu_s"] / base["first_step_cpu_s"]
    cells = [name, f"{row['first_step_cpu_s']:.1f}", f"{compiling:.2f}" if name.endswith("compiled") else ""]
    cells += [str(row["kernels"] or ""), f"{row['peak_mib']:,.0f}" if "peak_mib" in row else ""]
    cells += [f"{statistics.median(row['ms']):.1f}", f"{ratio:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}", f"{least:.3f}"]
    cells += [f"{used:.3f}"]
    return [*cells, _verdict(ratio, least, compiling, STEP_BARS[device]) if name == OURS else ""]


def _verdict(ratio: float, least: float, compiling: float, bar: float) -> str:
    step = ("met" if ratio <= bar else "**missed**") if (ratio <= bar) == (least <= bar) else "**undecided**"
    return f"step <= {bar}: {step}; compiling <= {COMPILE_BAR:g}: {'met' if compiling <= COMPILE_BAR else '**missed**'}"


def build_eager_kernels(device: str, dtypes: set[torch.dtype]) -> float:
    began = time.perf_counter()
    for dtype in dtypes:
        for name in set(FORMATS.values()):
            lowp.quantize(torch.ones(1 << 17, device=device, dtype=dtype), name)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn, at least one step")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="cases of this dtype")
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help="how their names begin; plain, compiled is always there"
    )
    parser.add_argument(
        "--mode", default="default", help="of torch.compile; with reduce-overhead (CUDA graphs) launching costs no time"
    )
    parser.add_argument(
        "--combo",
        action="store_true",
        help="let inductor join small kernels (torch._inductor.config.combo_kernels), for all contenders",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="2 short rounds of small models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, 0.1
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    torch.backends.cudnn.allow_tf32 = True
    if options.combo:
        from torch._inductor import config

        config.combo_kernels = True
    cases = [
        case
        for case in cases_for(options.device, options.quick)
        if re.search(options.only or "", case.name) and options.dtype in (None, _short(case.dtype))
    ]
    if not cases:
        sys.exit(f"--only {options.only!r}, --dtype {options.dtype}: no case is called so; there are resnet18 and gpt")
    facts = facts_of(options.device)
    built = build_eager_kernels(options.device, {case.dtype for case in cases})
    facts["kernels of eager quantizers"] = f"built before, in {built:.1f} s"
    found: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    lines: list[str] = []
    for case in cases:
        print(f"{case.name}, {_short(case.dtype)}", flush=True)
        found.append(compare(case, options, missing))
        lines = [*heading("a step of a simulated model over the plain one's", facts), *tables(found, options.device), ""]
        lines += [f"- not available: {name}: {reason}" for name, reason in missing.items()]
        name = "simulate-quick" if options.quick else "simulate"
        paths = write(options.out, name, facts, {"cases": found, "not_available": missing}, lines)
    print("\n".join([*lines, *(f"written: {path}" for path in paths)]))


if __name__ == "__main__":
    main()
