"""Top-k: its time beside `copy_`, its bits by ranks and reduction, and its error with and without error feedback.

    python -m benchmarks top_k              a minute
    python -m benchmarks top_k --quick      does it run?

- time: a bucket of 2^21 numbers in 100 layers, one thread. `encode` chooses and writes a rank's message, `decode` reads one,
  `fold` adds up 8. Contenders take turns with `copy_`; ratios of the least times, and medians of the rounds' ratios.
- bits: what rank 0 sends for 2^20 numbers over what float32 takes in a ring, times 32, as `benchmarks errors` counts them;
  in hierarchical reductions on nodes of 8, also what leaves the node.
- error: vNMSE of the mean over 8 virtual ranks, after one step and of the sum over all steps. Numbers are normal, times a
  lognormal magnitude that each element keeps; half of a number is shared by all ranks and steps, and half is noise.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS, facts_of, heading, ratio, table, take_turns, write
from torch import Tensor

import lowp
from lowp.formats.floats import FP32
from lowp.tensor.kernels import building
from lowp.tensor.noise import Domain
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.plan import Bucket, Layer, chunks_of, cuts_for
from lowp.wire.reductions import reduction_of
from lowp.wire.traffic import CountingLink, LengthJob, LengthRules
from lowp.wire.virtual import VirtualExchange

LAYERS = 100
CODECS = ("topk:0.001", "topk:0.01", "topk:0.01:e4m3fn", "topk:0.1")
ROOMS = ("topk:0.01:fp32:1", "topk:0.01", "topk:0.01:fp32:4", "topk:0.01:fp32:all", "topk:0.02:fp32:1", "topk:0.01:e4m3fn")
NODES = 8  # ranks of a node


def times(codec_text: str, numbers: Tensor, rounds: int) -> dict[str, Any]:
    codec, size = codec_of(codec_text), numbers.numel() // LAYERS
    sizes = [size] * (LAYERS - 1) + [numbers.numel() - size * (LAYERS - 1)]
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate(sizes))
    (chunk,) = chunks_of(layers, 1, (numbers.numel(), 1 << 18))
    messages = Messages(chunk.shards, lambda part: part.codec)
    copy, buffer = torch.empty_like(numbers), torch.zeros(8, messages.length, dtype=torch.uint8)
    work: dict[str, Callable[[], Any]] = {
        "copy_": lambda: copy.copy_(numbers),
        "encode": lambda: messages.encode(numbers, buffer[0]),
        "decode": lambda: messages.decode(buffer[0], copy),
        "fold": lambda: messages.decode(buffer.view(-1), copy, messages=8, stride=messages.length),
    }

    def seconds(name: str) -> float:
        began = time.perf_counter()
        work[name]()
        return time.perf_counter() - began

    with building():
        for rank in range(8):
            messages.encode(numbers.roll(rank), buffer[rank])
        take_turns(work, 3, seconds)
    found = take_turns(work, rounds, seconds)
    return {"codec": codec_text, "copy": min(found["copy_"])} | {
        name: {"least": min(figures) / min(found["copy_"]), "median": ratio(figures, found["copy_"])}
        for name, figures in found.items()
        if name != "copy_"
    }


class NodeLink(CountingLink):
    """Counts what leaves a node of its own."""

    outside = 0

    def send_receive(self, sends: Any, receives: Any) -> list[Any]:
        self.outside += sum(message.numel() for rank, message in sends.items() if rank // NODES != self.rank // NODES)
        return super().send_receive(sends, receives)


def bits(codec: str, ranks: int, elements: int, reduction: str = "two_shot") -> tuple[float, float]:
    """Of an element, by rank 0: all that is sent, and what leaves the node (with reductions that name their receivers)."""
    order = reduction_of(reduction)
    bucket = Bucket.of((Layer("weight", elements, codec_of(codec), 0),))
    rules = LengthRules(world=ranks, domain=Domain.WIRE, sum_format=FP32, addends=order.addends(ranks))
    link = NodeLink(0, ranks)
    for chunk in bucket.chunks(order.shards(ranks), cuts_for(None, torch.device("cpu"))):
        numbers = torch.empty(chunk.size, device="meta")
        for _ in order.reduce(LengthJob(chunk, numbers, numbers, rules, link)):  # type: ignore[arg-type]  # it counts
            pass
    of_fp32 = 2 * (ranks - 1) / ranks * 4 * elements
    return 32 * link.bytes_sent / of_fp32, 32 * link.outside / of_fp32


def error(codec: str, feedback: bool, steps: int, elements: int, ranks: int = 8) -> dict[str, Any]:
    """Relative squared errors: after one step, and of the sum over all steps."""

    def draw(*place: int) -> Tensor:
        return torch.randn(elements, generator=torch.Generator().manual_seed(hash(place)))

    magnitude, common = draw(0).exp(), draw(1)
    exchange = VirtualExchange(ranks, {"weight": torch.Size([elements])}, codec, error_feedback=feedback)
    wanted, found, first = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64), 0.0
    for step in range(steps):
        rows = [magnitude * (common + draw(2, step, rank)) for rank in range(ranks)]
        wanted += torch.stack(rows).mean(0, dtype=torch.float64)
        found += exchange.reduce(lambda rank, rows=rows: {"weight": rows[rank]})["weight"]
        apart = float((found - wanted).square().sum() / wanted.square().sum())
        first = first if step else apart
    return {"codec": codec, "feedback": feedback, "first": first, "sum": apart}


def report(facts: dict[str, Any], content: dict[str, Any]) -> list[str]:
    ways = ("encode", "decode", "fold")
    rows = [[r["codec"], *(f"{r[way]['least']:.2f} ({r[way]['median']:.2f})" for way in ways)] for r in content["times"]]
    lines = [*heading("top-k", facts), "", "Times `copy_`: least times (medians of the rounds' ratios).", ""]
    lines += table(["codec", *ways], rows)
    lines += ["", "Bits an element that rank 0 sends; for hierarchical, what leaves the node in brackets.", ""]
    heads = list(content["bits"][0])
    lines += table(heads, [[row[head] for head in heads] for row in content["bits"]])
    lines += ["", f"vNMSE on 8 ranks: after one step; of the sum of {content['steps']} steps, without and with feedback.", ""]
    found = {(row["codec"], row["feedback"]): row for row in content["errors"]}
    every = [
        [codec, f"{found[codec, False]['first']:.3f}", *(f"{found[codec, feedback]['sum']:.4f}" for feedback in (False, True))]
        for codec in ROOMS
    ]
    return lines + table(["codec", "one step", "sum", "sum, feedback"], every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few numbers and rounds: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lowp.set_kernel_policy("auto")
    quick = options.quick
    numbers = torch.randn(1 << (14 if quick else 21), generator=torch.Generator().manual_seed(0))
    numbers *= torch.randn(numbers.numel(), generator=torch.Generator().manual_seed(1)).exp()
    steps, elements = (2, 1 << 10) if quick else (50, 1 << 15)

    def row(codec: str) -> dict[str, str]:
        flat = {f"two_shot, {ranks} ranks": f"{bits(codec, ranks, 1 << 20)[0]:.2f}" for ranks in (2, 8, 64)}
        for ranks in (16, 64):
            for reduction in (f"hierarchical({NODES})", f"hierarchical({NODES}, gather)"):
                every, outside = bits(codec, ranks, 1 << 20, reduction)
                flat[f"{reduction}, {ranks} ranks"] = f"{every:.1f} ({outside:.3f})"
        return {"codec": codec} | flat

    content = {
        "times": [times(codec, numbers, 3 if quick else 41) for codec in CODECS],
        "bits": [row(codec) for codec in ROOMS],
        "errors": [error(codec, feedback, steps, elements) for codec in ROOMS for feedback in (False, True)],
        "steps": steps,
    }
    facts = facts_of("cpu", 1)
    lines = report(facts, content)
    print("\n".join(lines))
    if not quick or options.out != RESULTS:
        write(options.out, "top-k", facts, content, lines)


if __name__ == "__main__":
    main()
