"""Nodes first, then between nodes: for links that are fast inside a machine and slow outside."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowp.formats.floats import FP32
from lowp.wire.plan import Shard
from lowp.wire.reductions.base import Adder, ChunkJob, Reduction, Steps
from lowp.wire.reductions.ring import ring_sum
from lowp.wire.reductions.two_shot import Fold
from lowp.wire.rules import Load, Rules, Stage

VARIANTS = ("shards", "leaders")


class NodeFold:
    """A fold within each node, in the format of sums, and a fold of the nodes' sums.

    `holders` are the ranks that add up this shard within each node, by the last rank of the node.
    """

    def __init__(self, shard: Shard, holders: dict[int, int], rules: Rules, between: Rules, travels: bool) -> None:
        self._shard = shard
        self._holders = holders
        self._rules = rules
        self._nodes = Fold(shard, between, travels)
        self._between = between
        self._inside: Load | None = None

    def add(self, rank: int, load: Load) -> None:
        shard = self._shard
        mine = self._rules.at(rank)
        arrived = mine.read(mine.write(load, shard, Stage.INSIDE, rank), shard, Stage.INSIDE)
        node = next(number for number, last in enumerate(self._holders) if rank <= last)
        last, holder = list(self._holders.items())[node]
        rules = self._rules.at(holder)
        self._inside = (
            rules.begin(arrived, shard, rank) if self._inside is None else rules.add(self._inside, arrived, shard, rank)
        )
        if rank == last:
            self._nodes.add_sum(node, _node_addend(self._between.at(holder), self._inside, shard, node), holder)
            self._inside = None

    def total(self) -> Load:
        return self._nodes.total()


def _node_addend(rules: Rules, load: Load, shard: Shard, node: int) -> Load:
    return rules.read(rules.write(load, shard, Stage.NODE, node), shard, Stage.NODE)


@dataclass(frozen=True)
class Hierarchical(Reduction):
    """Nodes of `size` neighbouring ranks (the last may be smaller). Inside a node, messages and sums are in `accumulate`.

    `shards`: every rank of a node adds up a part of the chunk and takes it to its counterparts in the other nodes (two_shot
    between them, in the wire's format): all links out of a node are used at once, and each carries 1 / size of the message.

    `leaders` (arXiv 1807.11205): everything goes to the node's first rank; the leaders form a ring; then it is handed out.
    """

    size: int
    variant: str = "shards"

    sums_in_format = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a node has at least one rank, not {self.size}")
        if self.variant not in VARIANTS:
            raise ValueError(f"hierarchical has the variants {' and '.join(VARIANTS)}, not {self.variant!r}")

    def __str__(self) -> str:
        return f"hierarchical({self.size})" if self.variant == "shards" else f"hierarchical({self.size}, {self.variant})"

    def _nodes(self, world: int) -> list[range]:
        return [range(first, min(first + self.size, world)) for first in range(0, world, self.size)]

    def shards(self, world: int) -> int:
        nodes = len(self._nodes(world))
        return nodes if self.variant == "leaders" else nodes * min(self.size, world)

    def _between(self, rules: Rules) -> Rules:
        """The rules between nodes: sums in float32 at their owners, or partial sums that travel in the wire's format."""
        return replace(rules, accumulate=FP32 if self.variant == "shards" else None, level=1)

    def steps(self, world: int) -> int | None:
        return 4 if self.variant == "shards" else None

    def exchange(self, job: ChunkJob) -> Steps:
        if self.variant == "leaders":
            yield from _through_leaders(job, self._nodes(job.link.world), self._between(job.rules))
        else:
            yield from _through_shards(job, self._nodes(job.link.world), self._between(job.rules))

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Adder:
        assert index is not None
        nodes, leaders = self._nodes(rules.world), self.variant == "leaders"
        column = 0 if leaders else index // len(nodes)
        holders = {node[-1]: node[column % len(node)] for node in nodes}
        between = self._between(rules).at(self.owner(index, rules.world))
        return NodeFold(shard, holders, rules, between, leaders)

    def owner(self, index: int | None, world: int) -> int:
        assert index is not None
        nodes = self._nodes(world)
        if self.variant == "leaders":
            return nodes[(index - 1) % len(nodes)][0]
        column, number = divmod(index, len(nodes))
        return nodes[number][column % len(nodes[number])]

    def turn(self, rank: int, index: int, world: int) -> int:
        return int(self.variant == "leaders" and rank // self.size < index)


def _through_leaders(job: ChunkJob, nodes: list[range], between: Rules) -> Steps:
    """1. Members send to their leader, which adds in rank order. 2. Leaders form a ring. 3. Leaders hand out the totals."""
    me = job.link.rank
    node = next(node for node in nodes if me in node)
    leader, shards = node[0], range(len(job.chunk.shards))
    totals = job.totals()
    if me != leader:
        yield job.link.exchange({leader: job.write_all(shards, Stage.INSIDE)}, {})
        yield job.link.exchange({}, {leader: totals.buffer})
    else:
        received = job.room_for_ranks(shards, Stage.INSIDE, len(node))
        job.write_own(job.messages(shards, Stage.INSIDE), shards, Stage.INSIDE, received[node.index(me)])
        yield job.link.exchange({}, dict(zip(node, received, strict=True)))
        sums = job.fold(received, shards, Stage.INSIDE, node)
        number = nodes.index(node)

        def addend(index: int) -> Load:
            return _node_addend(between, sums[index], job.chunk.shards[index], number)

        yield from ring_sum(job.under(between), [node[0] for node in nodes], addend, totals)
        if len(node) > 1:
            yield job.link.exchange(dict.fromkeys(node, totals.buffer), {})
    job.finish(totals)


def _through_shards(job: ChunkJob, nodes: list[range], between: Rules) -> Steps:
    """Shard (j, m) is added up inside every node by its holder of j, and over all nodes by node m's holder of j.

    1. Inside: everybody sends shards (j, *) to the node's holder of j, which adds them in rank order.
    2. Between: holders of j exchange the nodes' sums, encoded once; that of node m adds up (j, m) in node order, in float32.
    3. Between: it encodes the total and sends it to the other holders of j.
    4. Inside: holders hand the totals out, as the same bytes.
    """
    me = job.link.rank
    here = next(number for number, node in enumerate(nodes) if me in node)
    columns = len(job.chunk.shards) // len(nodes)

    def holder(number: int, column: int) -> int:
        return nodes[number][column % len(nodes[number])]

    def of(rank: int, number: int) -> list[int]:
        return [column for column in range(columns) if holder(number, column) == rank]

    def rows(column: int) -> list[int]:
        return [column * len(nodes) + number for number in range(len(nodes))]

    def all_rows(held: list[int]) -> list[int]:
        return [index for column in held for index in rows(column)]

    held = of(me, here)
    mine = all_rows(held)
    inside = {rank: job.write_all(all_rows(of(rank, here)), Stage.INSIDE) for rank in nodes[here] if rank != me}
    received = job.room_for_ranks(mine, Stage.INSIDE, len(nodes[here]))
    job.write_own(job.messages(mine, Stage.INSIDE), mine, Stage.INSIDE, received[nodes[here].index(me)])
    yield job.link.exchange(inside, dict(zip(nodes[here], received, strict=True)))
    sums = job.fold(received, mine, Stage.INSIDE, nodes[here])

    # Between two nodes of different sizes a rank may face several counterparts, and one of them several of its columns.
    def facing(number: int) -> dict[int, list[int]]:
        pairs: dict[int, list[int]] = {}
        for column in held:
            pairs.setdefault(holder(number, column), []).append(column)
        return pairs

    def swap(messages: dict[int, Tensor], stage: Stage, sent: Callable[[int], int], wanted: Callable[[int], int]) -> Steps:
        """Exchange messages with the counterparts in every other node; `sent` and `wanted` say of which node's row."""
        sends, receives, rows_of = {}, {}, {}
        for number in range(len(nodes)):
            for peer, shared in facing(number).items() if number != here else ():
                sends[peer] = job.join([messages[rows(column)[sent(number)]] for column in shared])
                rows_of[peer] = [rows(column)[wanted(number)] for column in shared]
                receives[peer] = job.room_for(rows_of[peer], stage)
        yield job.link.exchange(sends, receives)
        return {peer: job.split(receives[peer], rows_of[peer], stage) for peer in rows_of}

    encoded = {i: between.write(sums[i], job.chunk.shards[i], Stage.NODE, here, job.room_for([i], Stage.NODE)) for i in sums}
    came = yield from swap(encoded, Stage.NODE, sent=lambda number: number, wanted=lambda number: here)
    totals = {}
    for column in held:
        i = rows(column)[here]
        messages = [encoded[i] if number == here else came[holder(number, column)][i] for number in range(len(nodes))]
        whole = between.fold_messages(torch.stack(messages), job.chunk.shards[i], Stage.NODE, range(len(nodes)))
        totals[i] = between.write(whole, job.chunk.shards[i], Stage.TOTAL, 0, job.room_for([i], Stage.TOTAL))
    came = yield from swap(totals, Stage.TOTAL, sent=lambda number: here, wanted=lambda number: number)
    for arrived_totals in came.values():
        totals |= arrived_totals

    handed_out = job.join([totals[i] for i in mine])
    gathered = {rank: job.room_for(all_rows(of(rank, here)), Stage.TOTAL) for rank in nodes[here] if rank != me}
    yield job.link.exchange(dict.fromkeys(nodes[here], handed_out), gathered)
    for rank, message in gathered.items():
        totals |= job.split(message, all_rows(of(rank, here)), Stage.TOTAL)
    whole_chunk = job.totals()
    for i, message in totals.items():
        whole_chunk[i].copy_(message)
    job.finish(whole_chunk)
