"""Encode and decode a bucket of 100 MB on a GPU, against the memory it must move.

    python benchmarks/wire_cuda.py [--out DIR]

The bound: bytes that must be read and written, at the speed at which `copy_` moves a tensor of the same size. Scales that are
taken from the gradient itself (`aps`, `local`) must read it twice: 4 more bytes an element. Every figure is the median of many
runs on rotating buffers, timed by the device; a bucket of many layers is timed with what the host does for it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import lowp
from lowp.wire.codec import codec_of
from lowp.wire.exchange import SharedScales, State, enter, leave
from lowp.wire.plan import CUDA_CUTS, Layer, chunks_of
from lowp.wire.rules import Load, Rules, Stage

ELEMENTS = 100 * (1 << 20) // 4
BUFFERS = 4  # together larger than the cache
BAR = 1.3


def timed(work, rounds=20):
    """Median milliseconds of work(i), over rotating buffers, replayed from a CUDA graph: without the host's time."""
    for i in range(BUFFERS):
        work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(BUFFERS):
            work(i)
    times = []
    for _ in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / BUFFERS)
    return statistics.median(times[3:])


def with_launches(work, rounds=20):
    """The same with everything that the host does for it."""
    for i in range(BUFFERS):
        work(i)
    times = []
    for i in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work(i % BUFFERS)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def codec_case(name, scale, flats, results):
    codec = codec_of(name, "nearest", scale)
    messages = [torch.empty(codec.wire_bytes(ELEMENTS), dtype=torch.uint8, device="cuda") for _ in flats]
    peak = torch.zeros(1, dtype=torch.uint8, device="cuda")
    encode = timed(lambda i: codec.encode(flats[i], messages[i], None, peak if codec.sends_peaks else None))
    decode = timed(lambda i: codec.decode(messages[i], results[i]))
    code_bytes = codec.wire_bytes(ELEMENTS) / ELEMENTS
    return {
        "what": f"{name} {scale}",
        "encode_ms": encode,
        "decode_ms": decode,
        "bytes": 4 + 4 + 2 * code_bytes + (4 if scale == "local" else 0),
    }


def bucket_case(name, scale, sizes, flats):
    """What the hook does for a bucket of many layers on one rank of many: scales, entering, encoding; decoding, leaving."""
    layers = tuple(Layer(str(i), size, codec_of(name, "nearest", scale), i) for i, size in enumerate(sizes))
    (chunk,) = chunks_of(layers, 1, CUDA_CUTS)
    shard = chunk.shards[0]
    state = State()
    device = torch.device("cuda", 0)
    world = 8

    def whole(i):
        flat = flats[i]
        scales = SharedScales(layers, world, state, device)
        scales.measure(flat.split(list(sizes)).__getitem__)
        factors, marks = scales.factors(), scales.marks()
        rules = Rules(world=world, factors=factors)
        numbers, peaks = enter(flat, chunk, factors, world)
        message = rules.write(Load(numbers, peaks), shard, Stage.ADDEND, 0)
        load = rules.read(message, shard, Stage.TOTAL, numbers)
        leave(load.numbers, load.peaks, chunk, factors, marks, world, flat)

    return {"what": f"bucket of {len(sizes)} layers, {name} {scale}", "whole_ms": with_launches(whole)}


def write(record: dict, folder: Path, name: str) -> None:
    """JSON, and a table for people."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-wire.json").write_text(json.dumps(record, indent=1))
    lines = [
        f"# {record['device']}, torch {record['torch']}: a bucket of {record['elements']:,} float32",
        "",
        f"`copy_`: {record['copy_ms']:.4f} ms, {record['copy_gb_per_s']:.0f} GB/s. Bar: {BAR} x the bound for encode + decode.",
        "",
        "| codec | encode, ms | decode, ms | x the bound |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        times = (
            (f"{row['encode_ms']:.4f}", f"{row['decode_ms']:.4f}")
            if "encode_ms" in row
            else (f"{row['whole_ms']:.2f} in all", "")
        )
        lines.append(f"| {row['what']} | {times[0]} | {times[1]} | {row['of_bound']:.2f} |")
    lines += ["", "Buckets of many layers are timed with everything that the host does for them: launches are the bound there."]
    (folder / f"{name}-wire.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    flats = [torch.randn(ELEMENTS, device="cuda") * 1e-3 for _ in range(BUFFERS)]
    results = [torch.empty_like(flat) for flat in flats]
    copy = timed(lambda i: results[i].copy_(flats[i]))
    bandwidth = 8 * ELEMENTS / copy  # bytes a millisecond
    rows = []
    for name in ("e5m2", "e4m3fn", "int8", "e2m1fn", "posit8"):
        for scale in ("none", "local"):
            row = codec_case(name, scale, flats, results)
            row["bound_ms"] = row["bytes"] * ELEMENTS / bandwidth
            row["of_bound"] = (row["encode_ms"] + row["decode_ms"]) / row["bound_ms"]
            rows.append(row)
            times = f"encode {row['encode_ms']:.4f} decode {row['decode_ms']:.4f} ms"
            print(f"{row['what']:20} {times}: {row['of_bound']:.2f} x the bound (bar {BAR})")
    sizes = [ELEMENTS // 10] * 9
    sizes += [(ELEMENTS - sum(sizes)) // 60] * 60
    for scale in ("aps", "local"):
        row = bucket_case("e5m2", scale, sizes, [flat.split([sum(sizes), ELEMENTS - sum(sizes)])[0] for flat in flats])
        row["bound_ms"] = (4 + 4 + 2 + 4) * sum(sizes) / bandwidth
        row["of_bound"] = row["whole_ms"] / row["bound_ms"]
        rows.append(row)
        print(f"{row['what']:40} {row['whole_ms']:.4f} ms: {row['of_bound']:.2f} x the bound")
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lowp": lowp.__version__,
        "copy_ms": copy,
        "elements": ELEMENTS,
        "copy_gb_per_s": bandwidth / 1e6,
        "rows": rows,
    }
    write(record, options.out, name)
    print(f"copy_: {copy:.4f} ms, {bandwidth / 1e6:.0f} GB/s")


if __name__ == "__main__":
    main()
