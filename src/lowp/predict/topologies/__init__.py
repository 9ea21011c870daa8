"""The registry of topologies. A new one is a file here and an entry in TOPOLOGIES; every reduction of the wire is one."""

from lowp.names import did_you_mean
from lowp.predict.topologies.all_reduce import AllReduce
from lowp.predict.topologies.base import Topology
from lowp.predict.topologies.counted import CountedReduction
from lowp.predict.topologies.halving_doubling import HalvingDoubling
from lowp.predict.topologies.parameter_server import ParameterServer
from lowp.predict.topologies.torus import Torus
from lowp.wire.reductions import REDUCTIONS, reduction_of
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.hierarchical import Hierarchical

TOPOLOGIES: tuple[Topology, ...] = (
    AllReduce(),
    AllReduce("ring"),
    AllReduce("tree"),
    *(CountedReduction(reduction) for reduction in REDUCTIONS),
    HalvingDoubling(),
    Torus(),
    ParameterServer(),
)
_NAMES = (
    "all_reduce, all_reduce(ring), all_reduce(tree), two_shot, one_shot, ring, tree, sequential, hierarchical, "
    "hierarchical(k), hierarchical(k, gather), hierarchical(k, leaders), by_size, halving_doubling, torus or parameter_server"
)


def topology_of(text: "str | Reduction | Topology", kahan: bool = False, node: int | None = None) -> Topology:
    """By name. `hierarchical` without a number has nodes of `node` ranks, as the cluster has them."""
    if isinstance(text, Topology):
        return text
    if isinstance(text, Reduction):
        return CountedReduction(text, kahan)
    for topology in TOPOLOGIES:
        if str(topology) == text and not isinstance(topology, CountedReduction):
            return topology
    if text in ("hierarchical", "hierarchical(gather)", "hierarchical(leaders)"):
        variant = text[len("hierarchical(") : -1] or "shards"
        return CountedReduction(Hierarchical(node or 1, variant), kahan)
    try:
        return CountedReduction(reduction_of(text), kahan)
    except ValueError as error:
        if not str(error).startswith("unknown reduction"):
            raise
    hint = did_you_mean(text, [str(each) for each in TOPOLOGIES], f"it is {_NAMES}")
    raise ValueError(f"unknown reduction {text!r}; {hint}")
