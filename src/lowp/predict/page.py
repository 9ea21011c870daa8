"""docs/prediction.md, written by the code: `python -m lowp.predict.page docs/prediction.md`, and `--check` in the tests."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lowp.predict.published import (
    KERNELS,
    SPEEDUPS,
    PublishedFigure,
    aps_speedups,
    eight_bit_corrected,
    eight_bit_figures,
    four_gpu_figures,
    jia_figures,
    step_figures,
)
from lowp.predict.published_throughput import SERIES, ThroughputRow, bandwidth_rows, median_error, throughput_rows
from lowp.training.units import signed_text

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
_HEADING = """# Prediction against what was published

Written by `python -m lowp.predict.page docs/prediction.md`; a test fails when the code says something else. What is modelled,
and how, is in [the design](../docs/DESIGN.md). Nothing here was fitted to a figure that it predicts.
"""
_EIGHT_BITS = """## 8-bit approximations for parallelism (arXiv 1511.04561)

The paper's own predictor, from its formulas and inputs: AlexNet on 32 nodes with 3 GPUs each, speed-ups over one GPU, in 32 and
in 8 bits, by sub-batch, published / ours. Rounded to the digits of the paper, all 24 differ by .1 at most. Unrounded, 22 do;
the two in 8 bits at sub-batch 1024 differ by .14 and .13.
"""
_CORRECTED = """
Corrected: the paper lists 8-bit messages of 1/8 of the 32-bit size, where four times fewer bytes are 1/4. With the 32-bit time
of a quarter of the sub-batch, its 8-bit speed-ups are smaller:
"""
_FOUR = """
Speed-ups on four GPUs (Krizhevsky measured 3.66 in 32 bits with convnet2's kernels):
"""
_JIA = """## Highly scalable training with mixed precision (arXiv 1807.11205)

Assumed, because the text at hand does not say it: eight P40 on a node, PCIe at 10.2 GB/s, one 100 Gbit/s card for a node at 85
%, 8 us of latency and 2 us for each message ([p40-100gbe.toml](../src/lowp/predict/clusters/p40-100gbe.toml)); 64 images on a
GPU; NCCL as a flat ring that reduces tensor by tensor, in float16; the paper's system with gradients in buckets of 25 MB,
through the nodes' masters, and around a ring from 4 million numbers on. The time of AlexNet's computation is an estimate from
FLOP/s. The 6.6 minutes are from 218 images a second on one GPU, 32 images on each of 2,048, and the reduction through masters:
10 % fewer are predicted. The published time is 225 ms a step; of it 147 are computation at that rate, and 23 are unexplained.
"""
_APS = """## APS on the library's clusters (arXiv 1911.08907)

The settings of the paper's experiments. It has a performance model, whose constants and results could not be had. How many
times faster a step is with e5m2 and APS than with torch's all-reduce in fp16 and in fp32; of two_shot and hierarchical the
faster one. Speeds of computation are estimates from FLOP/s. Where a network is fast, compression costs more than it saves.
"""
_THROUGHPUT = """## Published throughput

The rate of one GPU is the published one; links are as in the cluster's file, datasheets and assumptions. Where there is a size
between one GPU and those that are predicted, one number is fitted to it: the seconds that a step on more than one GPU takes
beside its messages, or, for Horovod, the bandwidth that the network reaches. The best published simulators have errors of 3.7
to 15 %.
"""
_MISSES = """
What misses by more than 5 %, and why:
"""
_TRIED = """
Tried first, and not taken: to fit the bandwidth of the innermost links to the same sizes. On the {count} rows that have a size
to be fitted to, its median error is {tried:.1f} %, with {worst:.0f} % at worst; that of the seconds a step is {taken:.1f} %,
with {most:.0f} % at worst. Two GPUs lose a few per cent for other reasons than their links. The choice was made with these rows
in view.
"""
_REALITY = """
## Measured steps

`lowp calibrate` runs through each link. Then DistributedDataParallel's steps of three models are measured, wire by wire in
turns, and compared with what is predicted from the calibration alone (`python -m benchmarks predict --links`, and `--nccl`).
Every step is in the files.

A calibration measures links, codecs and each model layer by layer. These parts do not add up to a step where they share
processors: the thread that encodes takes turns with backward, messages wait for a thread's turn, and ranks that are late are
waited for. So a calibration also takes a few whole steps of the model: in float32, with a bfloat16 hook, and in int8 with one
scale for 256 numbers. What these take beyond their parts is added to every prediction for the model (`excess` in the file). Of
the wires below it has seen float32 alone. Calibrations without an `excess` are of before, or had no time left for it.
"""
_LEFT_OUT = """
Not predicted: MLPerf's .183 minutes on 3,584 H100, whose batch and epochs could not be had.
"""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    parts = [
        _HEADING,
        *_eight_bits(),
        _JIA,
        _figures([*step_figures(), *jia_figures()]),
        "",
        _APS,
        _aps(),
        "",
        *_throughput(),
        *_reality(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _eight_bits() -> list[str]:
    figures = iter(eight_bit_figures())
    header = ["sub-batch", *(f"{kernel}, {bits} bits" for kernel in KERNELS for bits in (32, 8))]
    rows = [[str(sub_batch), *(_pair(next(figures)) for _ in range(4))] for sub_batch in SPEEDUPS]
    return [
        _EIGHT_BITS,
        markdown(header, rows),
        _CORRECTED,
        _figures(eight_bit_corrected()),
        _FOUR,
        _figures(four_gpu_figures()),
        "",
    ]


def _pair(figure: PublishedFigure) -> str:
    return f"{figure.published:g} / {figure.predicted:.2f}"


def _figures(figures: list[PublishedFigure]) -> str:
    rows = [
        [
            each.what,
            f"{each.published:,g}" if each.published < 100 else f"{each.published:,.0f}",
            _shown(each.predicted),
            each.note,
        ]
        for each in figures
    ]
    return markdown(("", "published", "ours", ""), rows)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _aps() -> str:
    rows = [
        [each.model, str(each.ranks), each.cluster, f"{each.over_fp16:.2f}", f"{each.over_fp32:.2f}", each.reduction]
        for each in aps_speedups()
    ]
    return markdown(("model", "ranks", "cluster", "x fp16", "x fp32", "reduction"), rows)


def _throughput() -> list[str]:
    rows = throughput_rows()
    summary = f"**Median absolute error of {len(rows)} rows: {100 * median_error(rows):.1f} %.**\n"
    header = ("source", "model", "GPUs", "", "published", "predicted", "error", "fitted")
    return [_THROUGHPUT, summary, markdown(header, map(_row, rows)), _MISSES, *_misses(rows), _tried(), _LEFT_OUT.strip()]


def _reality() -> list[str]:
    """From the files of results, which are beside the code; an installed package has none."""
    parts = []
    for path in sorted(RESULTS.glob("*-predict-reality.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        file = path.with_suffix(".md").name
        parts += [f"\n### {found['facts']['machine']}, torch {found['facts']['torch']}\n", *found["summary"]]
        parts += ["", f"Each step: [{file}](../benchmarks/results/{file})."]
    return [_REALITY.rstrip(), *parts] if parts else []


def _tried() -> str:
    tried = bandwidth_rows()
    taken = [row for series in SERIES if series.fitted_size is not None for row in series.rows()]
    worst, most = (100 * max(abs(row.error) for row in rows) for rows in (tried, taken))
    medians = {"tried": 100 * median_error(tried), "taken": 100 * median_error(taken)}
    return _TRIED.format(count=len(tried), worst=worst, most=most, **medians)


def _row(row: ThroughputRow) -> list[str]:
    return [
        row.source, row.model, str(row.ranks), row.unit, _figure(row.published), _figure(row.predicted),
        f"{signed_text(100 * row.error, 1)} %", row.fitted,
    ]  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def _misses(rows: list[ThroughputRow]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if abs(row.error) > 0.05:
            reasons.setdefault(row.why, []).append(f"{row.source}, {row.model} on {row.ranks}")
    return [f"- {'; '.join(where)}: {why}." for why, where in reasons.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowp.predict.page", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    options = parser.parse_args(arguments)
    new = page()
    if options.file.exists() and options.file.read_text(encoding="utf-8") == new:
        return 0
    if options.check:
        print(f"{options.file}: the page is out of date; `make readme` rewrites it", file=sys.stderr)
        return 1
    options.file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
