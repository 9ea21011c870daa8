"""A second computation of what a reduction takes: every rank and every message, event by event.

Nothing is shared with predict/topologies but what ranks send (wire/traffic.py). A message takes the sender's way out and the
receiver's way in for as long as its bytes need, and is there a latency later. A rank sends what it can to whom is free, to the
next rank first; a tree's root in its own order.
"""

import heapq
from collections import defaultdict

from lowp.wire.traffic import waits_of

SENT, ARRIVED = 0, 1


def seconds(reduction, ranks, length, latency, bandwidth):
    """`length(stage)` are the bytes of a shard's message. Links are all alike, and work takes no time."""
    waits = [waits_of(reduction, rank, ranks) for rank in range(ranks)]
    at = [-1] * ranks
    queues = [[] for _ in range(ranks)]
    out_busy, in_busy = set(), set()
    arrived, taken = defaultdict(int), defaultdict(int)
    unsent = [0] * ranks
    events, now, end, number = [], 0.0, 0.0, 0

    def advance(rank):
        at[rank] += 1
        if at[rank] < len(waits[rank]):
            parcels = waits[rank][at[rank]].sent
            if reduction.shards(ranks) > 1 or str(reduction) == "one_shot":
                parcels = sorted(parcels, key=lambda parcel: (parcel.peer - rank) % ranks)
            queues[rank] += [(parcel.peer, parcel.shards * length(parcel.stage) / bandwidth) for parcel in parcels]
            unsent[rank] = len(parcels)

    def is_done(rank):
        if at[rank] >= len(waits[rank]):
            return False
        wanted = [parcel.peer for parcel in waits[rank][at[rank]].received]
        return not unsent[rank] and all(arrived[peer, rank] > taken[peer, rank] for peer in wanted)

    for rank in range(ranks):
        advance(rank)
    while any(at[rank] < len(waits[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while is_done(rank):
                for parcel in waits[rank][at[rank]].received:
                    taken[parcel.peer, rank] += 1
                advance(rank)
                end = now
        for rank in range(ranks):
            free = next((m for m in queues[rank] if m[0] not in in_busy), None) if rank not in out_busy else None
            if free is not None:
                queues[rank].remove(free)
                out_busy.add(rank)
                in_busy.add(free[0])
                number += 1
                heapq.heappush(events, (now + free[1], number, SENT, rank, free[0]))
        first = True
        while events and (first or events[0][0] <= now + 1e-12):  # all that happens at once, before anybody goes on
            now, _, kind, rank, peer = heapq.heappop(events)
            first = False
            if kind == SENT:
                out_busy.remove(rank)
                in_busy.remove(peer)
                number += 1
                heapq.heappush(events, (now + latency, number, ARRIVED, rank, peer))
            else:
                arrived[rank, peer] += 1
                unsent[rank] -= 1
    return end
