"""What `lowp plan` chooses from, unless it is told other wires; `lowp calibrate` measures these codecs.

Sixteen, eight, six, four and fewer bits, each with the scales that do well there (docs/WIRE.md has their errors). What only
works with error feedback (top-k) is not among them: the error of one step says nothing about it.
"""

from collections.abc import Iterable, Sequence

from lowp.predict.cluster import Arrangement
from lowp.predict.wires import PLAIN, WireChoice, wire_of

CODECS = (
    "fp16/none",
    "bf16/none",
    "e4m3fn/local",
    "e5m2/local",
    "e5m2/aps",
    "int8/block:256",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "nvfp4",
    "e2m1fn/block:32",
    "adaptive:4.4",
    "adaptive:3",
    "adaptive:2.4",
)
BUCKET_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
FEW_RANKS = 8  # up to which everybody may send everything to everybody (one_shot)


def reductions_for(arrangement: Arrangement) -> tuple[str, ...]:
    """Reductions of lowp's that may be the fastest there: by everybody at once, and by nodes of k ranks.

    ring, tree and sequential round every partial sum: they are the papers', for comparison, and never both faster and better.
    """
    ranks = arrangement.ranks
    found = ["two_shot", *(["one_shot"] if ranks <= FEW_RANKS else [])]
    for size in node_sizes(arrangement):
        found += [f"hierarchical({size})", f"hierarchical({size}, leaders)"]
    return tuple(found)


def node_sizes(arrangement: Arrangement) -> list[int]:
    """k of `hierarchical(k)`: the ranks of each level inside the outermost, and their halves, where they divide the ranks."""
    found: set[int] = set()
    for size in arrangement.sizes[:-1]:
        while size > 1:
            found |= {size} if arrangement.ranks % size == 0 and size < arrangement.ranks else set()
            size = size // 2 if size % 2 == 0 else 1
    return sorted(found)


def candidate_wires(
    arrangement: Arrangement, wires: "Sequence[str] | None" = None, torchs: Iterable[str] = PLAIN
) -> list[WireChoice]:
    """torch's own dtypes, and every codec with every reduction that may be the fastest.

    `wires`: given ones instead; where they name a reduction, that one alone.
    """
    found: dict[str, WireChoice] = {}
    for text in [*torchs, *CODECS] if wires is None else wires:
        first = wire_of(text)
        ways = [text] if first.plain or "@" in text else [f"{text}@{way}" for way in reductions_for(arrangement)]
        found |= {way: wire_of(way) for way in ways}
    if not found:
        raise ValueError("wire: at least one is wanted")
    return list(found.values())
