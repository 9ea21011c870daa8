"""Eager calls on a CPU beside torch's own copies, in one process: how many times as long a call takes.

    python -m benchmarks.speed.eager

A call with `out=` is compared with `out.copy_(x)` of the same tensor, one that allocates its result with `x.clone()`. Encoding
and decoding are compared with copying as many float32 numbers. Both are timed in turn, and the quotient of the two
least times is printed: medians say nothing where other processes use the same cores. Small calls are in microseconds.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lowp

SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24))
SMALL = 64  # elements
BLOCKS = ("mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "nvfp4")
ROW = 1024  # elements of a row that is cut into blocks
NOISE = lowp.Noise(1, step=2)
Call = Callable[[], object]


def calls(size: int) -> dict[str, tuple[Call, Call]]:
    """What is timed, and the copy that it is compared with."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-24, 24, (size,), generator=generator).float())
    out, bytes_out = torch.empty_like(x), torch.empty(size, dtype=torch.uint8)
    codes = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)

    def quantize(fmt: str, source: Tensor = x, target: Tensor | None = out, **more: object) -> tuple[Call, Call]:
        copy = source.clone if target is None else lambda: target.copy_(source)
        return lambda: lowp.quantize(source, fmt, out=target, **more), copy  # type: ignore[arg-type]

    def encode(fmt: str, **more: object) -> tuple[Call, Call]:
        return lambda: lowp.encode(x, fmt, out=bytes_out, nan="zero", **more), lambda: out.copy_(x)  # type: ignore[arg-type]

    def decode(fmt: str) -> tuple[Call, Call]:
        return lambda: lowp.decode(codes, fmt, out=out), lambda: out.copy_(x)

    found = {
        "quantize e5m2": quantize("e5m2"),
        "quantize e5m2, allocating": quantize("e5m2", target=None),
        "quantize e4m3fn": quantize("e4m3fn"),
        "quantize e3m0": quantize("e3m0"),
        "quantize posit8": quantize("posit8"),
        "quantize nf4": quantize("nf4"),
        "stochastic e5m2": quantize("e5m2", rounding="stochastic", seed=NOISE),
        "stochastic e4m3fn": quantize("e4m3fn", rounding="stochastic", seed=NOISE),
        "toward zero e5m2": quantize("e5m2", rounding="toward_zero"),
        "encode e5m2": encode("e5m2"),
        "encode e4m3fn": encode("e4m3fn"),
        "encode e3m0": encode("e3m0"),
        "encode posit8": encode("posit8"),
        "encode stochastic e5m2": encode("e5m2", rounding="stochastic", seed=NOISE),
        "decode e5m2": decode("e5m2"),
        "decode posit8": decode("posit8"),
    }
    for dtype in (torch.bfloat16, torch.float16):
        name, short = str(dtype).removeprefix("torch."), x.to(dtype)
        found[f"quantize e5m2 of {name}"] = quantize("e5m2", short, torch.empty_like(short))
        found[f"quantize e4m3fn of {name}"] = quantize("e4m3fn", short, torch.empty_like(short))
    return found | block_calls(x)


def block_calls(x: Tensor) -> dict[str, tuple[Call, Call]]:
    """Block formats allocate their results; `copy_` of the same dtype beside them writes into memory that is there."""
    found: dict[str, tuple[Call, Call]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows = x.clamp(-1e4, 1e4).to(dtype).view(-1, ROW)
        out, name = torch.empty_like(rows), str(dtype).removeprefix("torch.")
        for fmt in BLOCKS:
            codes = lowp.encode(rows, fmt)
            own: dict[str, Call] = {
                "quantize": lambda rows=rows, fmt=fmt: lowp.quantize(rows, fmt),
                "encode": lambda rows=rows, fmt=fmt: lowp.encode(rows, fmt),
                "decode": lambda codes=codes, fmt=fmt, dtype=dtype: lowp.decode(codes, fmt, dtype=dtype),
            }
            for operation, call in own.items():
                found[f"{operation} {fmt} {name}"] = call, lambda out=out, rows=rows: out.copy_(rows)
    return found


def ratio(call: Call, copy: Call, seconds: float) -> float:
    call(), call(), copy()
    ours: list[float] = []
    theirs: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 5:
        for measured, times in ((call, ours), (copy, theirs)):
            began = time.perf_counter()
            measured()
            times.append(time.perf_counter() - began)
    return min(ours) / min(theirs)


def small_calls() -> dict[str, float]:
    """Microseconds."""
    x, codes = torch.randn(SMALL), torch.zeros(SMALL, dtype=torch.uint8)
    out, short = torch.empty_like(x), x.bfloat16()
    found: dict[str, Call] = {
        "clone": x.clone,
        "quantize": lambda: lowp.quantize(x, "e5m2"),
        "quantize, out=": lambda: lowp.quantize(x, "e5m2", out=out),
        "quantize of bfloat16": lambda: lowp.quantize(short, "e5m2"),
        "stochastic": lambda: lowp.quantize(x, "e5m2", "stochastic", seed=NOISE),
        "encode": lambda: lowp.encode(x, "e5m2"),
        "encode, nan refused": lambda: lowp.encode(x, "e3m0"),
        "decode": lambda: lowp.decode(codes, "e5m2"),
    }
    return {name: _least(call) for name, call in found.items()}


def _least(call: Call, rounds: int = 60, repeats: int = 200) -> float:
    for _ in range(100):
        call()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best * 1e6


def main(only: str = "") -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n\nsmall calls ({SMALL} elements), microseconds")
    for name, microseconds in small_calls().items():
        print(f"  {name:28}{microseconds:8.2f}")
    print("\ntimes as long as copy_ (or clone), by number of elements")
    print(" " * 32 + "".join(f"{'2^' + str(size.bit_length() - 1):>8}" for size in SIZES))
    for name, row in times_as_long(only):
        print(f"  {name:30}" + "".join(f"{value:8.2f}" for value in row), flush=True)


def times_as_long(only: str = "") -> Iterator[tuple[str, list[float]]]:
    """What is timed, and its time over that of the copy, for each of SIZES."""
    tables = {size: calls(size) for size in SIZES}
    for name in tables[SIZES[0]]:
        if only in name:
            yield name, [ratio(*tables[size][name], seconds=0.15 if size < 1 << 22 else 0.4) for size in SIZES]


if __name__ == "__main__":
    main(*sys.argv[1:])
