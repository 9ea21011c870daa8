"""The processes of a run: who this one is, what it computes on, and the few words that all of them exchange.

torchrun, or `lowp train` itself through the same launcher, starts the processes and tells each its rank by environment
variables. Without them a process is alone.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.machine import usable_cores
from lowp.training.rendezvous import attempt, choose_interface, store_of_ranks
from lowp.wire.faults import CollectiveError

TIMEOUT = timedelta(minutes=10)  # of a collective; a rank may have to build kernels first


@dataclass(frozen=True)
class World:
    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def join(cls, device: str, threads: int, *, together: int = 1) -> "World":
        """Meet the other ranks, if there are any.

        Args:
            device: "cpu", "cuda" or "auto".
            threads: of each rank, 0 for the usual number (`threads_of_a_rank`). How sums are divided among threads decides
                their last bits, so `together` virtual ranks get what as many real ones on this machine would.
        """
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        chosen = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
        torch.set_num_threads(threads_of_a_rank(threads, max(here, together)))
        place = torch.device(chosen)
        if chosen == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            torch.cuda.set_device(place)
        if ranks > 1:
            _meet(rank, ranks, place)
        return cls(rank, ranks, place)

    @property
    def first(self) -> bool:
        """Is this the rank that writes files and talks to people?"""
        return self.rank == 0

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor, on the CPU. Exact where all but one rank have zeros."""
        numbers = numbers.cpu()
        if self.ranks > 1:
            with named_failure("adding up figures"):
                dist.all_reduce(numbers)
        return numbers

    def max(self, numbers: Tensor) -> Tensor:
        """The largest of all ranks, element by element, of a small tensor without NaN, on the CPU."""
        numbers = numbers.cpu()
        if self.ranks > 1:
            with named_failure("agreeing on the largest figures"):
                dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, on rank 0; nothing elsewhere."""
        if self.ranks == 1:
            return [message]
        sizes = torch.zeros(self.ranks, dtype=torch.int64)
        sizes[self.rank] = len(message)
        lengths = self.sum(sizes).tolist()
        with named_failure("gathering what ranks have"):
            if not self.first:
                dist.send(_tensor(message), 0)
                return []
            found = [message]
            for rank in range(1, self.ranks):
                room = torch.empty(lengths[rank], dtype=torch.uint8)
                dist.recv(room, rank)
                found.append(room.numpy().tobytes())
        return found

    def tell(self, message: bytes | None) -> bytes:
        """Rank 0's message, on every rank."""
        if self.ranks == 1:
            assert message is not None
            return message
        size = self.sum(torch.tensor([len(message) if self.first and message is not None else 0]))
        text = _tensor(message) if self.first and message is not None else torch.empty(int(size), dtype=torch.uint8)
        with named_failure("hearing from rank 0"):
            dist.broadcast(text, 0)
        return text.numpy().tobytes()

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks rank 0's tensors."""
        if self.ranks > 1:
            with named_failure("copying from rank 0"):
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


_meetings = itertools.count()  # of this process: ranks go through the same ones


def _meet(rank: int, ranks: int, device: torch.device) -> None:
    """Make the process group, with addresses that are of this meeting alone.

    The launcher keeps one store through its restarts; under the old names ranks would find addresses of the dead.
    """
    choose_interface()
    here = dist.PrefixStore(f"lowp/{attempt()}/{next(_meetings)}", store_of_ranks(TIMEOUT))
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=here,
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )


@contextmanager
def named_failure(doing: str) -> Iterator[None]:
    """Whatever gloo says when another rank has gone is a CollectiveError here, as on the wire."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{doing} failed: another rank has gone, or is stuck ({error})") from error


def threads_of_a_rank(recipe: int, sharing: int) -> int:
    """What the recipe says; if it says 0, OMP_NUM_THREADS; without that, this process's cores divided by the ranks that share
    them. (torchrun sets OMP_NUM_THREADS=1 where nobody else has set it, and says so.)"""
    if recipe:
        return recipe
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # OpenMP allows a number for each nested level
    if asked:
        if not asked.isdecimal() or int(asked) == 0:
            raise ValueError(f"OMP_NUM_THREADS is {os.environ['OMP_NUM_THREADS']!r}, not a number of threads")
        return int(asked)
    return max(1, usable_cores() // sharing)


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
