"""Products of matrices in narrow arithmetic: GFLOP/s (two a multiplication), beside a scalar loop and torch's own product.

    python -m benchmarks matmul                    the GPU if there is one, else the CPU with 2 threads
    python -m benchmarks matmul --quick            e5m2 alone, one size
    python -m benchmarks matmul --only 'e5m2'      what matches

The scalar loop is what one would write: three loops, a sum rounded to e5m2 after every addition, compiled by numba; it gets
256 x 256 whatever the size. Contenders take turns, so that what disturbs one disturbs all; medians and the best of all rounds,
first calls (compilation) apart. On CUDA, events around a call. Inputs are numbers of the format that sums have, unless the
name says otherwise.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import RESULTS, heading, in_a_line, table, write
from benchmarks.speed.report import Report
from torch import Tensor

import lowp
from lowp.tensor.matmul import matmul

SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 4096)}
BARS = {"cpu": dict.fromkeys(SIZES["cpu"], 5.0), "cuda": {4096: 1000.0}}  # GFLOP/s for sums in e5m2, by size
SCALAR_SIZE = 256
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: format of the inputs, arithmetic
    "e5m2": ("e5m2", {"accumulate": "e5m2"}),
    "e5m2, products of e4m3fn": ("e5m2", {"accumulate": "e5m2", "multiply": "e4m3fn"}),
    "e5m2, kahan": ("e5m2", {"accumulate": "e5m2", "kahan": True}),
    "e5m2, chunk 64": ("e5m2", {"accumulate": "e5m2", "chunk": 64}),
    "e5m2, quire": ("e5m2", {"accumulate": "e5m2", "quire": True}),
    "e5m2, integer_add": ("e5m2", {"accumulate": "e5m2", "approximate": "integer_add"}),
    "e5m2, stochastic": ("e5m2", {"accumulate": "e5m2", "rounding": "stochastic"}),
    "e5m2, fp32 inputs": ("fp32", {"accumulate": "e5m2"}),
    "e4m3fn": ("e4m3fn", {"accumulate": "e4m3fn"}),
    "fp16": ("fp16", {"accumulate": "fp16"}),
    "bf16": ("bf16", {"accumulate": "bf16"}),
    "fp32": ("fp32", {"accumulate": "fp32"}),
    "posit8": ("posit8", {"accumulate": "posit8"}),
    "posit8, quire": ("posit8", {"accumulate": "posit8", "quire": True}),
    "fixed8.8": ("fixed8.8", {"accumulate": "fixed8.8"}),
}


@dataclass
class Contender:
    library: str
    name: str
    size: int
    call: Callable[[], Any]
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def gflops(self, seconds: float) -> float:
        return 2 * self.size**3 / seconds / 1e9


def operands(size: int, format: str, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    both = [lowp.quantize(torch.randn(size, size, generator=generator), format).to(device) for _ in range(2)]
    return both[0], both[1]


def scalar_loop() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Sums in e5m2, number by number; infinite beyond its range."""
    import numba

    @numba.njit
    def rounded(x: np.float32) -> np.float32:
        size = abs(x)
        step = np.float32(2.0**-16)
        while size >= step * np.float32(8.0):
            step *= np.float32(2.0)
        near = np.float32(np.rint(size / step) * step)
        near = np.float32(np.inf) if near > np.float32(57344.0) else near
        return -near if x < 0 else near

    @numba.njit
    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                total = np.float32(0.0)
                for k in range(a.shape[1]):
                    total = rounded(np.float32(total + a[i, k] * b[k, j]))
                out[i, j] = total
        return out

    return product


def peers(report: "MatmulReport", size: int, device: str) -> list[Contender]:
    a, b = operands(size, "fp32", device)
    found = [Contender("torch", "fp32, its own sums", size, lambda: torch.matmul(a, b))]
    if device == "cuda":
        return found
    try:
        loop = scalar_loop()
    except ImportError as error:
        report.missing["numba"] = in_a_line(error)
        return found
    small = [x.numpy() for x in operands(SCALAR_SIZE, "e5m2", "cpu")]
    ours = matmul(*(torch.from_numpy(x) for x in small), accumulate="e5m2").numpy()
    if not np.array_equal(loop(*small), ours):
        report.failures["numba"] = "the scalar loop computes something else"
    return [*found, Contender("numba", "e5m2, scalar loop", SCALAR_SIZE, lambda: loop(*small))]


def timed(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass
class MatmulReport(Report):
    """Rows here are dicts; facts of the machine, what is missing and what failed are as in the other benchmarks."""

    rows: list[Any] = field(default_factory=list)

    def add(self, size: int, contender: Contender) -> None:
        best, median = min(contender.seconds), statistics.median(contender.seconds)
        self.rows.append(
            {
                "group": size,
                "library": contender.library,
                "name": contender.name,
                "size": contender.size,
                "median_gflops": contender.gflops(median),
                "best_gflops": contender.gflops(best),
                "first_call_s": contender.first_s,
                "seconds": contender.seconds,
            }
        )

    def markdown(self) -> str:
        lines = heading("products in narrow arithmetic", self.facts())
        for group in dict.fromkeys(row["group"] for row in self.rows):
            rows = [row for row in self.rows if row["group"] == group]
            scalar = next((row["median_gflops"] for row in rows if row["library"] == "numba"), None)
            lines += ["", f"## {group} x {group}, n = {len(rows[0]['seconds'])} rounds, GFLOP/s", ""]
            body = []
            for row in rows:
                ratio = f"{row['median_gflops'] / scalar:.0f}" if scalar else ""
                cells = [row["library"], row["name"], f"{row['median_gflops']:.4g}", f"{row['best_gflops']:.4g}", ratio]
                body.append([*cells, f"{row['first_call_s']:.1f}"])
            lines += table(["library", "arithmetic", "median", "best", "/ scalar loop", "first call, s"], body)
        lines += ["", *(f"- {verdict}" for verdict in self.verdicts())]
        lines += [f"- not available: {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines + [f"- FAILED: {name}: {reason}" for name, reason in self.failures.items()]) + "\n"

    def verdicts(self) -> list[str]:
        bars = BARS[self.device]
        own = [row for row in self.rows if row["library"] == "lowp" and row["name"] == "e5m2" and row["size"] in bars]
        return [
            f"bar: e5m2 at {row['size']}: {row['median_gflops']:.4g} GFLOP/s, wanted {bars[row['size']]:g}: "
            f"{'reached' if row['median_gflops'] >= bars[row['size']] else 'MISSED'}"
            for row in own
        ]

    def write(self, folder: Path) -> list[Path]:
        whole = {"not_available": self.missing, "failed": self.failures, "bars": self.verdicts(), "rows": self.rows}
        return write(folder, "matmul", self.facts(), whole, self.markdown().splitlines())


def measure(size: int, options: argparse.Namespace, report: MatmulReport) -> None:
    group = peers(report, size, options.device)
    for name, (format, arithmetic) in CASES.items():
        if options.quick and name != "e5m2":
            continue
        a, b = operands(size, format, options.device)
        group.append(Contender("lowp", name, size, lambda a=a, b=b, own=arithmetic: matmul(a, b, **own)))
    group = [c for c in group if c.library != "lowp" or not options.only or re.search(options.only, c.name)]
    for contender in group:
        contender.first_s = timed(contender.call, options.device)
    for _ in range(options.rounds):
        for contender in group:
            contender.seconds.append(timed(contender.call, options.device))
    for contender in group:
        report.add(size, contender)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="e5m2 alone, one size, 3 rounds")
    parser.add_argument("--only", metavar="REGEX", help="arithmetics whose name matches")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    options.rounds = 3 if options.quick else options.rounds
    report = MatmulReport(device=options.device, threads=torch.get_num_threads())
    lowp.set_kernel_policy("auto")
    for size in options.sizes or SIZES[options.device][: 1 if options.quick else None]:
        measure(size, options, report)
        report.write(options.out)  # what is there already, should the rest fail or be stopped
    print(report.markdown())
    for path in report.write(options.out):
        print(f"written: {path}")
    if report.failures:
        sys.exit(f"failed: {', '.join(report.failures)}")


if __name__ == "__main__":
    main()
