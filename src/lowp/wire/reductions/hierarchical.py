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

VARIANTS = ("shards", "gather", "leaders")


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


def holder(node: range, column: int) -> int:
    """The rank of a node that adds up a column of shards. (The last node may have fewer ranks than there are columns.)"""
    return node[column % len(node)]


def held_by(rank: int, node: range, columns: int) -> list[int]:
    return [column for column in range(columns) if holder(node, column) == rank]


@dataclass(frozen=True)
class Hierarchical(Reduction):
    """Nodes of `size` neighbouring ranks (the last may be smaller). Inside a node, messages and sums are in `sum_format`.

    `shards`: every rank of a node adds up a part of the chunk and takes it to its counterparts in the other nodes (two_shot
    between them, in the wire's format): all links out of a node are used at once, and each carries 1 / size of the message.

    `gather` (arXiv 2010.10458, made for top-k): the same, with one_shot between nodes. The nodes' sums are encoded once; their
    sum is not rounded to the wire's format, top-k drops nothing of it, and it is handed out in `sum_format`. A link out
    of a node carries (nodes - 1) / size messages, instead of about 2 / size: for few nodes.

    `leaders` (arXiv 1807.11205): everything goes to the node's first rank; the leaders form a ring; then it is handed out.
    """

    size: int
    variant: str = "shards"

    sums_in_format = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a node has at least one rank, not {self.size}")
        if self.variant not in VARIANTS:
            raise ValueError(f"hierarchical has the variants {', '.join(VARIANTS)}, not {self.variant!r}")

    def __str__(self) -> str:
        return f"hierarchical({self.size})" if self.variant == "shards" else f"hierarchical({self.size}, {self.variant})"

    def _nodes(self, world: int) -> list[range]:
        return [range(first, min(first + self.size, world)) for first in range(0, world, self.size)]

    @property
    def total_stage(self) -> Stage:
        return Stage.HANDED_OUT if self.variant == "gather" else Stage.TOTAL

    def shards(self, world: int) -> int:
        nodes, columns = len(self._nodes(world)), min(self.size, world)
        return {"leaders": nodes, "gather": columns, "shards": nodes * columns}[self.variant]

    def addends(self, world: int) -> int:
        return len(self._nodes(world))

    def between(self, rules: Rules) -> Rules:
        """The rules between nodes: sums in float32 at their owners, or partial sums that travel in the wire's format."""
        return replace(rules, sum_format=None if self.variant == "leaders" else FP32, level=1)

    def steps(self, world: int) -> int | None:
        return {"leaders": None, "gather": 3, "shards": 4}[self.variant]

    def reduce(self, job: ChunkJob) -> Steps:
        through = {"leaders": _through_leaders, "gather": _through_gather, "shards": _through_shards}[self.variant]
        yield from through(job, self._nodes(job.link.world), self.between(job.rules))

    def _column(self, index: int, nodes: int) -> int:
        """Which of a node's ranks adds up a shard."""
        return {"leaders": 0, "gather": index, "shards": index // nodes}[self.variant]

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Adder:
        assert index is not None
        nodes, leaders = self._nodes(rules.world), self.variant == "leaders"
        column = self._column(index, len(nodes))
        holders = {node[-1]: holder(node, column) for node in nodes}
        between = self.between(rules).at(self.owner(index, rules.world))
        return NodeFold(shard, holders, rules, between, leaders)

    def owner(self, index: int | None, world: int) -> int:
        assert index is not None
        nodes = self._nodes(world)
        number = {"leaders": index - 1, "gather": 0, "shards": index}[self.variant] % len(nodes)
        return holder(nodes[number], self._column(index, len(nodes)))

    def turn(self, rank: int, index: int, world: int) -> int:
        return int(self.variant == "leaders" and rank // self.size < index)


def _through_leaders(job: ChunkJob, nodes: list[range], between: Rules) -> Steps:
    """1. Members send to their leader, which adds in rank order. 2. Leaders form a ring. 3. Leaders hand out the totals."""
    me = job.link.rank
    node = next(node for node in nodes if me in node)
    leader, shards = node[0], range(len(job.chunk.shards))
    totals = job.totals()
    if me != leader:
        yield job.link.send_receive({leader: job.write_all(shards, Stage.INSIDE)}, {})
        yield job.link.send_receive({}, {leader: totals.buffer})
    else:
        received = job.buffer_for_ranks(shards, Stage.INSIDE, len(node))
        job.write_own(job.messages(shards, Stage.INSIDE), shards, Stage.INSIDE, received[node.index(me)])
        yield job.link.send_receive({}, dict(zip(node, received, strict=True)))
        sums = job.fold(received, shards, Stage.INSIDE, node)
        number = nodes.index(node)

        def addend(index: int) -> Load:
            return _node_addend(between, sums[index], job.chunk.shards[index], number)

        yield from ring_sum(job.under(between), [node[0] for node in nodes], addend, totals)
        if len(node) > 1:
            yield job.link.send_receive(dict.fromkeys(node, totals.buffer), {})
    job.finish(totals)


def _add_inside(job: ChunkJob, node: range, shards_of: Callable[[int], list[int]]) -> Steps:
    """Every rank of a node sends the shards of each other one to it. Returns the sums of one's own, in rank order."""
    me = job.link.rank
    mine = shards_of(me)
    inside = {rank: job.write_all(shards_of(rank), Stage.INSIDE) for rank in node if rank != me}
    received = job.buffer_for_ranks(mine, Stage.INSIDE, len(node))
    job.write_own(job.messages(mine, Stage.INSIDE), mine, Stage.INSIDE, received[node.index(me)])
    yield job.link.send_receive(inside, dict(zip(node, received, strict=True)))
    return job.fold(received, mine, Stage.INSIDE, node)


def _hand_out(
    job: ChunkJob, node: range, shards_of: Callable[[int], list[int]], totals: dict[int, Tensor], stage: Stage
) -> Steps:
    """Every rank of a node gives the totals of its shards to all others; then everybody has the sum of the chunk."""
    me = job.link.rank
    gathered = {rank: job.buffer_for(shards_of(rank), stage) for rank in node if rank != me}
    yield job.link.send_receive(dict.fromkeys(node, job.join([totals[i] for i in shards_of(me)])), gathered)
    whole_chunk = job.buffers(stage)
    for rank, message in gathered.items():
        totals |= job.split(message, shards_of(rank), stage)
    for i, message in totals.items():
        whole_chunk[i].copy_(message)
    job.finish(whole_chunk)


def _through_gather(job: ChunkJob, nodes: list[range], between: Rules) -> Steps:
    """Shard j is added up inside every node by its holder of j.

    1. Inside: everybody sends shard j to the node's holder of j, which adds them in rank order.
    2. Between: holders of j send each other the nodes' sums, encoded once. Each of them adds these in node order, in float32:
       all come to the same total.
    3. Inside: holders hand the totals out, in the format of sums.
    """
    me, rules, shards = job.link.rank, job.rules, job.chunk.shards
    here = next(number for number, node in enumerate(nodes) if me in node)

    def shards_of(rank: int, node: range = nodes[here]) -> list[int]:
        return held_by(rank, node, len(shards))

    sums = yield from _add_inside(job, nodes[here], shards_of)
    encoded = {j: between.write(sums[j], shards[j], Stage.NODE, here, job.buffer_for([j], Stage.NODE)) for j in sums}
    shared = {rank: [j for j in shards_of(rank, node) if j in sums] for node in nodes for rank in node if node != nodes[here]}
    sends = {rank: job.join([encoded[j] for j in own]) for rank, own in shared.items() if own}
    receives = {rank: job.buffer_for(shared[rank], Stage.NODE) for rank in sends}
    yield job.link.send_receive(sends, receives)
    came = {rank: job.split(message, shared[rank], Stage.NODE) for rank, message in receives.items()}
    # All nodes lose the same of a total: the first one keeps it.
    last = rules if here == 0 or rules.feedback is None else replace(rules, feedback=None)
    totals = {}
    for j in sums:
        messages = [encoded[j] if node == nodes[here] else came[holder(node, j)][j] for node in nodes]
        whole = between.fold_messages(torch.stack(messages), shards[j], Stage.NODE, range(len(nodes)))
        whole.maxima = None  # they are for the wire's format
        totals[j] = last.write(whole, shards[j], Stage.HANDED_OUT, 0, job.buffer_for([j], Stage.HANDED_OUT))
    yield from _hand_out(job, nodes[here], shards_of, totals, Stage.HANDED_OUT)


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

    def rows(column: int) -> list[int]:
        return [column * len(nodes) + number for number in range(len(nodes))]

    def shards_of(rank: int) -> list[int]:
        return [index for column in held_by(rank, nodes[here], columns) for index in rows(column)]

    held = held_by(me, nodes[here], columns)
    sums = yield from _add_inside(job, nodes[here], shards_of)

    # Between two nodes of different sizes a rank may face several counterparts, and one of them several of its columns.
    def facing(number: int) -> dict[int, list[int]]:
        pairs: dict[int, list[int]] = {}
        for column in held:
            pairs.setdefault(holder(nodes[number], column), []).append(column)
        return pairs

    def swap(messages: dict[int, Tensor], stage: Stage, sent: Callable[[int], int], wanted: Callable[[int], int]) -> Steps:
        """Exchange messages with the counterparts in every other node; `sent` and `wanted` say of which node's row."""
        sends, receives, rows_of = {}, {}, {}
        for number in range(len(nodes)):
            for peer, shared in facing(number).items() if number != here else ():
                sends[peer] = job.join([messages[rows(column)[sent(number)]] for column in shared])
                rows_of[peer] = [rows(column)[wanted(number)] for column in shared]
                receives[peer] = job.buffer_for(rows_of[peer], stage)
        yield job.link.send_receive(sends, receives)
        return {peer: job.split(receives[peer], rows_of[peer], stage) for peer in rows_of}

    encoded = {i: between.write(sums[i], job.chunk.shards[i], Stage.NODE, here, job.buffer_for([i], Stage.NODE)) for i in sums}
    came = yield from swap(encoded, Stage.NODE, sent=lambda number: number, wanted=lambda number: here)
    totals = {}
    for column in held:
        i = rows(column)[here]
        messages = [encoded[i] if number == here else came[holder(nodes[number], column)][i] for number in range(len(nodes))]
        whole = between.fold_messages(torch.stack(messages), job.chunk.shards[i], Stage.NODE, range(len(nodes)))
        totals[i] = between.write(whole, job.chunk.shards[i], Stage.TOTAL, 0, job.buffer_for([i], Stage.TOTAL))
    came = yield from swap(totals, Stage.TOTAL, sent=lambda number: here, wanted=lambda number: number)
    for arrived_totals in came.values():
        totals |= arrived_totals

    yield from _hand_out(job, nodes[here], shards_of, totals, Stage.TOTAL)
