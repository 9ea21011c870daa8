"""The error table of "8-bit approximations for parallelism in deep learning" (arXiv 1511.04561), drawn and rounded again.

    python -m studies errors        writes studies/eight-bits/errors.jsonl; a minute on one core, no GPU

What the paper calls the mean absolute error is the mean *squared* error: its figures agree with that and with nothing else. Two
ways to round:

- `nearest`: to the nearest number of the type, as `lowp.quantize` does.
- `published`: the published kernel searches by halving steps from entry 63 and then compares with the lower neighbour alone.
  Where the search ends below the number, its upper neighbour is never looked at: it truncates. (Read in the authors' code for
  the dynamic type. That the other types went through the same search is supposed; the figures agree with it.)

Dynamic and linear divide by the largest magnitude first, so that their errors depend on how many numbers are drawn: n draws of
ten million each. The paper does not say how many it drew.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lowp

DRAWS, NUMBERS = 3, 10_000_000
DATA: dict[str, Callable[[torch.Generator], Tensor]] = {
    "U(0, 1)": lambda generator: torch.rand(NUMBERS, generator=generator),
    "N(0, 1)": lambda generator: torch.randn(NUMBERS, generator=generator),
    "N(0, 10^2)": lambda generator: torch.randn(NUMBERS, generator=generator) * 10,
    "N(0, .2^2)": lambda generator: torch.randn(NUMBERS, generator=generator) * 0.2,
}
SCALED = ("dynamic8", "linear8")
TYPES = ("dynamic8", "linear8", "mantissa8", "static8")
# Of the paper: "mean absolute" and mean relative error in %.
PUBLISHED = {
    ("U(0, 1)", "dynamic8"): (0.00004, 1.39),
    ("U(0, 1)", "linear8"): (0.0024, 2.16),
    ("U(0, 1)", "mantissa8"): (0.0017, 7.22),
    ("U(0, 1)", "static8"): (0.0007, 4.82),
    ("N(0, 1)", "dynamic8"): (0.0005, 2.46),
    ("N(0, 1)", "linear8"): (0.0004, 6.47),
    ("N(0, 1)", "mantissa8"): (0.0104, 6.89),
    ("N(0, 1)", "static8"): (0.0093, 6.3),
    ("N(0, 10^2)", "dynamic8"): (0.049, 2.49),
    ("N(0, 10^2)", "linear8"): (0.041, 6.44),
    ("N(0, 10^2)", "mantissa8"): (1.066, 7.19),
    ("N(0, 10^2)", "static8"): (0.926, 6.28),
    ("N(0, .2^2)", "dynamic8"): (0.000018, 2.45),
    ("N(0, .2^2)", "linear8"): (0.000015, 6.15),
    ("N(0, .2^2)", "mantissa8"): (0.00055, 8.26),
    ("N(0, .2^2)", "static8"): (0.00022, 6.58),
}


def as_published(x: Tensor, kind: str) -> Tensor:
    """Numbers as the published kernel rounds them to a type."""
    values = lowp.decode(torch.arange(256, dtype=torch.uint8), kind, dtype=torch.float64)
    table = values[values >= 0 if kind == "linear8" else values > 0].unique()
    if kind == "dynamic8":
        table = table[:-1]  # 1 has a bound of its own
    magnitude, last = x.abs().double(), len(table) - 1
    place = torch.full_like(magnitude, 63, dtype=torch.int64)
    for step in (32, 16, 8, 4, 2, 1):
        place = torch.where(table[place] > magnitude, place - step, place + step).clamp(0, last)
    here, below = table[place], table[(place - 1).clamp(min=0)]
    found = torch.where((here > magnitude) & (magnitude - below < here - magnitude), below, here)
    if kind == "dynamic8":
        found = torch.where(magnitude > 0.995703, torch.ones_like(found), found)
    return found * x.sign()


def rounded(x: Tensor, kind: str, way: str) -> Tensor:
    scale = x.abs().max() if kind in SCALED else torch.ones(())
    if way == "published":
        return as_published(x / scale, kind) * scale
    return lowp.quantize(x / scale, kind, saturate=True).double() * scale


def rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, draw in DATA.items():
        for kind in TYPES:
            for way in ("published", "nearest"):
                errors = []
                for seed in range(DRAWS):
                    x = draw(torch.Generator().manual_seed(seed))
                    difference = rounded(x, kind, way) - x.double()
                    relative = (difference.abs() / x.abs().double())[x != 0]
                    errors.append(
                        (float(difference.square().mean()), float(difference.abs().mean()), 100 * float(relative.mean()))
                    )
                squared, absolute, relative_errors = zip(*errors, strict=True)  # of all draws
                paper = dict(zip(("paper_error", "paper_relative"), PUBLISHED[name, kind], strict=True))
                found.append({"kind": "errors", "data": name, "type": kind, "rounding": way, "squared": squared}
                             | {"absolute": absolute, "relative": relative_errors} | paper)  # fmt: skip
    return found


def main(folder: Path) -> None:
    lines = [json.dumps(row) for row in rows()]
    (folder / "eight-bits" / "errors.jsonl").write_text("\n".join(lines) + "\n")
