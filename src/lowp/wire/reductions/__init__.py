"""The registry of reductions. A new one is a file here and an entry in REDUCTIONS."""

import re

from lowp import former_names
from lowp.wire.reductions.base import ChunkJob as ChunkJob
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.by_size import BySize
from lowp.wire.reductions.hierarchical import Hierarchical
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.ring import Ring
from lowp.wire.reductions.sequential import Sequential
from lowp.wire.reductions.tree import Tree
from lowp.wire.reductions.two_shot import TwoShot

REDUCTIONS: tuple[Reduction, ...] = (
    TwoShot(),
    OneShot(),
    Ring(),
    Tree(),
    Sequential(),
    Hierarchical(2),
    Hierarchical(2, "gather"),
    Hierarchical(2, "leaders"),
    BySize(Tree(), TwoShot()),
)


def reduction_of(text: "str | Reduction") -> Reduction:
    """Parse a name: two_shot, one_shot, ring, tree, sequential, hierarchical(k), hierarchical(k, <variant>), by_size."""
    if isinstance(text, Reduction):
        return text
    if not isinstance(text, str):
        raise TypeError(f"a reduction is a name such as 'two_shot', not {type(text).__name__}")
    text = former_names.current(text, former_names.REDUCTIONS, "reduction")
    for reduction in REDUCTIONS:
        if str(reduction) == text or (isinstance(reduction, BySize) and text == "by_size"):
            return reduction
    if found := re.fullmatch(r"hierarchical\(\s*(\d+)\s*(?:,\s*(\w+)\s*)?\)", text):
        return Hierarchical(int(found[1]), found[2] or "shards")
    raise ValueError(
        f"unknown reduction {text!r}; it is two_shot, one_shot, ring, tree, sequential, hierarchical(k), "
        "hierarchical(k, gather), hierarchical(k, leaders), by_size or auto"
    )
