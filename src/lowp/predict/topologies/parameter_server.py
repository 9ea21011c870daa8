"""Parameter servers: every rank sends its gradients to servers, which add them up and send the sum back.

There is one server on every node, beside the ranks and behind the same link, and it keeps its share of the parameters. On ranks
that are all alike, each has a server. In both rounds the busiest link is the servers': it carries the share of all ranks.
"""

from dataclasses import dataclass

import numpy as np

from lowp.predict.cluster import Arrangement
from lowp.predict.topologies.base import IN, OUT, Pattern, Round, Topology
from lowp.wire.rules import Stage


@dataclass(frozen=True)
class ParameterServer(Topology):
    def __str__(self) -> str:
        return "parameter_server"

    def patterns(self, arrangement: Arrangement) -> tuple[Pattern, ...]:
        ranks, node = arrangement.ranks, arrangement.sizes[-2] if len(arrangement.sizes) > 1 else 1
        servers = ranks // node
        pushed = np.zeros((2, arrangement.alike, len(arrangement.levels), 2))
        for rank in range(arrangement.alike):
            for server in (number * node for number in range(servers)):
                if server != rank:
                    pushed[OUT, rank, arrangement.level(rank, server)] += 1
        for rank in range(1, ranks):  # to the server beside rank 0
            pushed[IN, 0, arrangement.level(0, rank)] += 1
        push = Round(1, Stage.ADDEND, (("encode", Stage.ADDEND, servers),), pushed)
        work = (("add", Stage.ADDEND, ranks), ("encode", Stage.TOTAL, 1.0))
        pull = Round(1, Stage.TOTAL, work, pushed[::-1].copy())
        return (Pattern(servers, (push, pull), (("decode", Stage.TOTAL, servers),)),)
