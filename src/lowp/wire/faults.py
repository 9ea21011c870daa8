"""When a rank dies or hangs: say which, stop waiting, leave nothing behind.

gloo reports a lost connection at once, or a timeout when the group's timeout is over, in words that name no rank. So the
survivors call the roll through the store: each writes its name, and whose name is missing is the one. Then the group is
*poisoned*: a receive with a timeout of a millisecond closes the connection to each peer, which ends everything else that
waits there (gloo has no abort).
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ROLL_CALL_SECONDS = 3.0
_POISON_TAG = (1 << 31) - 1


class CollectiveError(RuntimeError):
    """A collective that did not come to its end. `ranks` are those that did not answer the roll call."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def explain(error: BaseException, doing: str, waiting_for: str, group: Any, ours: bool = True) -> CollectiveError:
    """What went wrong, in one sentence that names the collective and the rank.

    A group of ours is poisoned first: whoever waits for a rank that waits learns of it now, and answers the roll call.
    """
    if ours:
        poison(group)
    missing, store = roll_call(group)
    if store:
        who = store
    elif missing:
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not answer the roll call"
    else:
        who = "all ranks answered the roll call: one of them was too slow, or failed and told the others"
    reason = str(error).strip().split("\n")[0]
    where = f" while {waiting_for}" if waiting_for else ""
    return CollectiveError(f"{doing} failed on rank {dist.get_rank(group)}{where}: {who} ({reason})", tuple(missing))


def roll_call(group: Any, seconds: float = ROLL_CALL_SECONDS) -> tuple[list[int], str]:
    """The ranks of the group that are silent, and what is wrong with the store, if it is the store that does not answer.

    On a thread of its own: asking a store whose host hangs blocks without a timeout.
    """
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group)
    name = f"lowp/roll_call/{group.group_name}"
    me = dist.get_rank(group)
    present, broken = {me}, []

    def call() -> None:
        try:
            store.set(f"{name}/{me}", "here")
            end = time.monotonic() + seconds
            while len(present) < len(members) and time.monotonic() < end:
                for rank in set(range(len(members))) - present:
                    if store.check([f"{name}/{rank}"]):
                        present.add(rank)
                time.sleep(0.05)
        except Exception as error:
            broken.append(error)

    caller = threading.Thread(target=call, name="lowp-roll-call", daemon=True)
    caller.start()
    caller.join(seconds + 1)
    if caller.is_alive():
        return [], "the store does not answer: its host (rank 0, or the launcher) hangs"
    if broken and len(present) == 1:  # a host that answered before has heard what it wanted and left: it is not the one
        return [], "the store is gone: its host (rank 0, or the launcher) has died"
    return sorted(set(range(len(members))) - present), ""


def poison(group: Any) -> None:
    """End everything that waits in a gloo group."""
    if dist.get_backend(group) != "gloo":
        return
    for rank in range(dist.get_world_size(group)):
        if rank != dist.get_rank(group):
            with suppress(RuntimeError):
                room = torch.empty(1, dtype=torch.uint8)
                work = dist.irecv(room, group=group, group_src=rank, tag=_POISON_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
