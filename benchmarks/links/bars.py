"""What we want to reach, and whether a row of measurements does."""

import statistics
from dataclasses import dataclass

from benchmarks.links.contenders import ADAPTIVE, AUTO, BASE, EIGHT_BITS, FLAT, FOUR_BITS, HALF, HIERARCHICAL

NCCL = "nccl"  # several ranks on one GPU, over sockets
SIZE, RANKS = 1 << 24, 2  # where the ratios below are wanted
RATIOS = {
    "1gbit": ((EIGHT_BITS, BASE, 3.8), (EIGHT_BITS, HALF, 1.9), (FOUR_BITS, BASE, 6.5)),
    "200mbit": (
        (EIGHT_BITS, BASE, 3.9),
        (FOUR_BITS[:1], BASE, 7.5),
        (FOUR_BITS[1:], BASE, 6.9),
        ((ADAPTIVE,), BASE, 6.5),
    ),  # with a scale a block: 4.5 bits
    NCCL: ((EIGHT_BITS, BASE, 3.0), (EIGHT_BITS, HALF, 1.6), (FOUR_BITS, BASE, 5.0)),
}
FAST_LINKS = ("10gbit", "loopback")  # where compression may not pay
NOT_SLOWER = 1 / 1.05  # of the speed of fp32, at any size and number of ranks
BYTES_TOLERANCE = 0.03  # from what the codec says


@dataclass(frozen=True)
class Verdict:
    wanted: str
    value: float
    met: bool

    def __str__(self) -> str:
        return f"{self.wanted}: {'met' if self.met else 'NOT met'}"


def ratio(row: dict, other: dict) -> float:
    """How many times faster than `other` this is: the median over rounds, in each of which both ran."""
    return statistics.median(b / a for a, b in zip(row["seconds"], other["seconds"], strict=True))


def verdicts(row: dict, rivals: dict[str, dict]) -> list[Verdict]:
    """`rivals` are the rows by contender that ran in the same rounds."""
    found = []
    for against, limit in _speeds_wanted(row):
        if against in rivals:
            value = ratio(row, rivals[against])
            found.append(Verdict(f">= {limit:.3g} x {against}", value, value >= limit))
    if row.get("expected_bytes") and row["contender"] not in (BASE, HALF):
        value = bytes_over_expected(row)
        found.append(Verdict(f"bytes within {BYTES_TOLERANCE:.0%}", value, abs(value - 1) <= BYTES_TOLERANCE))
    return found


def bytes_over_expected(row: dict) -> float:
    return statistics.median(row["bytes"]) / row["expected_bytes"]


def _speeds_wanted(row: dict) -> list[tuple[str, float]]:
    name, wanted = row["contender"], []
    here = row["ranks"] == RANKS and (row["kind"] == "ddp" or row["elements"] == SIZE)
    if here:
        wanted += [(against, limit) for names, against, limit in RATIOS.get(row["rate"], ()) if name in names]
    if name == AUTO and row["rate"] in FAST_LINKS:
        wanted.append((BASE, NOT_SLOWER))
    if name == HIERARCHICAL:
        wanted.append((FLAT, 1.0))
    return wanted
