"""What a call on a small tensor costs, in units of `torch.add` of the same size: what is left is overhead."""

import time
from collections.abc import Callable

import torch

import lowp

SIZES = (1, 100, 1_000, 10_000, 60_000)
WARM_UP = 100
CALLS = 100
FORMAT = "e4m3fn"


def small_costs(device: str, rounds: int) -> list[dict[str, float | int | str]]:
    """For each operation and size: the time of a call over that of `torch.add`."""
    rows = []
    for size in SIZES:
        x = torch.randn(size, device=device)
        codes = lowp.encode(x, FORMAT)
        operations: dict[str, Callable[[], object]] = {
            "quantize": lambda x=x: lowp.quantize(x, FORMAT),
            "stochastic": lambda x=x: lowp.quantize(x, FORMAT, "stochastic", seed=1),
            "encode": lambda x=x: lowp.encode(x, FORMAT),
            "decode": lambda codes=codes: lowp.decode(codes, FORMAT),
        }
        for name, call in operations.items():
            for _ in range(WARM_UP):
                call()
            rows.append({"operation": name, "size": size} | _cost(call, lambda x=x: torch.add(x, x), device, rounds))
    return rows


def _cost(call: Callable[[], object], add: Callable[[], object], device: str, rounds: int) -> dict[str, float]:
    """The fastest round of each, interleaved: overhead is what is left when nobody else interferes."""
    pairs = [(_per_call(call, device), _per_call(add, device)) for _ in range(rounds)]
    fastest, fastest_add = (min(times) for times in zip(*pairs, strict=True))
    return {"cost": fastest / fastest_add, "seconds": fastest}


def _per_call(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / CALLS
