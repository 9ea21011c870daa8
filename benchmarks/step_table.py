"""README's table of step times, from recorded results: `python -m benchmarks.step_table README.md`, and `--check` in the tests.

A cell says how many times as fast a whole training step is as with DDP's own float32: the median step of float32 over the
median step of this wire, both measured in turns in one run. The rows come from the files of `python -m benchmarks predict`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- steps:begin -->", "<!-- steps:end -->"
RESULTS = Path(__file__).parent / "results"
CPU, GPU = RESULTS / "amd-epyc-x2-predict-reality.json", RESULTS / "nvidia-h200-predict-reality.json"
LINKS = {
    "200mbit, 2 ranks": "200 Mbit/s",
    "1gbit, 2 ranks": "1 Gbit/s",
    "10gbit, 2 ranks": "10 Gbit/s",
    "loopback, 2 ranks": "NCCL, one H200",
}
MODELS = {"mlp": "MLP", "resnet18": "ResNet-18", "gpt": "GPT", "resnet50": "ResNet-50", "vgg16": "VGG-16", "gpt2": "GPT-2"}
WIRES = {
    "fp16": "torch's fp16 hook",
    "e4m3fn/local@two_shot": "`e4m3fn`",
    "e4m3fn/local@one_shot": "`e4m3fn`, one_shot",
    "e2m1fn/block:32@two_shot": "`e2m1fn`",
    "e2m1fn/block:32@one_shot": "`e2m1fn`, one_shot",
}


def table() -> str:
    cpu, gpu = json.loads(CPU.read_text()), json.loads(GPU.read_text())
    rows = [row for row in cpu["rows"] + gpu["rows"] if "wire" in row]
    seconds = {(row["link"], row["model"], row["wire"]): row["measured"] for row in rows}
    lines = [
        f"| link | model | {' | '.join(WIRES.values())} |",
        f"| --- | --- | {' | '.join('---:' for _ in WIRES)} |",
    ]
    for link, link_text in LINKS.items():
        for model, model_text in MODELS.items():
            if (link, model, "fp32") in seconds:
                cells = [f"{seconds[link, model, 'fp32'] / seconds[link, model, wire]:.2f}" for wire in WIRES]
                lines.append(f"| {link_text.replace(' ', '&nbsp;')} | {model_text} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{_source(cpu, CPU)} {_source(gpu, GPU)}"])


def _source(result: dict[str, Any], path: Path) -> str:
    facts, rounds = result["facts"], {len(row["rounds"]) for row in result["rows"] if row["link"] in LINKS and "wire" in row}
    where = "two ranks on one GPU, over sockets, with MPS" if facts["device"] == "cuda" else "shaped links between two ranks"
    return (
        f"{facts['machine']}, torch {facts['torch']}, {where}, n = {' or '.join(map(str, sorted(rounds)))} rounds in turns"
        f" ([results](benchmarks/results/{path.with_suffix('.md').name}))."
    )


def rewritten(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_table", description=__doc__)
    parser.add_argument("readme", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    options = parser.parse_args()
    old = options.readme.read_text()
    new = rewritten(old)
    if options.check:
        return int(old != new)
    options.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
