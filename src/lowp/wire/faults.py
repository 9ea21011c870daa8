"""When a rank dies or hangs: say which, stop waiting, leave nothing behind.

gloo reports a lost connection at once, or a timeout when the group's timeout is over, in words that name no rank. So the
survivors call the roll through the store: each writes its name, and whose name is missing is the one. (A rank that is alive,
but whose own work failed, writes why.) Then the group is *poisoned*: a receive with a timeout of a millisecond closes the
connection to each peer, which ends everything else that waits there (gloo has no abort).
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowp import compat

ROLL_CALL_SECONDS = 3.0
HERE = "here"  # the answer of a rank that has nothing else to say
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
    reason = str(error).strip().split("\n")[0]
    answers, store = roll_call(group, f"{type(error).__name__}: {reason}" if blames_this_rank(error) else HERE)
    missing = [] if store else [rank for rank in range(dist.get_world_size(group)) if rank not in answers]
    raised = [f"rank {rank} raised {answer}" for rank, answer in sorted(answers.items()) if answer != HERE]
    if raised:
        why = "; ".join(raised)
    elif store:
        why = f"{store} ({reason})"
    elif missing:
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        why = f"{who} did not answer the roll call ({reason})"
    else:
        why = f"all ranks answered the roll call: one of them was too slow, or failed and told the others ({reason})"
    where = f" while {waiting_for}" if waiting_for else ""
    return CollectiveError(f"{doing} failed on rank {dist.get_rank(group)}{where}: {why}", tuple(missing))


def blames_this_rank(error: BaseException) -> bool:
    """Was it the work on this rank that failed, and not a message? Then the error has a class with a name of its own.

    gloo says RuntimeError, NCCL and the store a DistError, and what is wrong with a group ValueError. An audit that forbids a
    tensor says ForbiddenTensor, and a device without memory OutOfMemoryError.
    """
    return type(error).__module__ != "builtins" and not isinstance(error, dist.DistError)


def roll_call(group: Any, answer: str, seconds: float = ROLL_CALL_SECONDS) -> tuple[dict[int, str], str]:
    """What each rank of the group answered, and what is wrong with the store, if it is the store that does not answer.

    On a thread of its own: asking a store whose host hangs blocks without a timeout.
    """
    store = compat.default_store()
    everyone = set(range(dist.get_world_size(group)))
    name = f"lowp/roll_call/{group.group_name}"
    me = dist.get_rank(group)
    answers, broken = {me: answer}, []

    def call() -> None:
        try:
            store.set(f"{name}/{me}", answer)
            end = time.monotonic() + seconds
            while len(answers) < len(everyone) and time.monotonic() < end:
                for rank in everyone - answers.keys():
                    if store.check([f"{name}/{rank}"]):
                        answers[rank] = HERE  # should the store's host leave before we hear more
                        answers[rank] = store.get(f"{name}/{rank}").decode()
                time.sleep(0.05)
        except Exception as error:
            broken.append(error)

    caller = threading.Thread(target=call, name="lowp-roll-call", daemon=True)
    caller.start()
    caller.join(seconds + 1)
    if caller.is_alive():
        return {me: answer}, "the store does not answer: its host (rank 0, or the launcher) hangs"
    if broken and len(answers) == 1:  # a host that answered before has heard what it wanted and left: it is not the one
        return {me: answer}, "the store is gone: its host (rank 0, or the launcher) has died"
    return answers, ""


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
