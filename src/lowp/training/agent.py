"""The process that starts ranks on this machine and watches them: torch's elastic agent, without its network.

torchrun's agents find each other through a store that listens on every interface and that holds pickles: whoever can reach the
port can run code in the launcher. On one machine there is one agent and no other to find. Its own store stays in memory
(`SingleAgentRendezvous`), and ranks meet in a file of a folder that only this user can open (rendezvous.py). Nothing listens
here, nothing is unpickled.

Signals are only noted when they arrive, and acted on between two looks at the ranks (`_monitor_workers`). An exception in the
middle of starting a process would leave a rank running that is not in any list.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

GRACE = 300  # seconds that ranks have to finish their step and save, after a signal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# What a rank does first. It begins with signals blocked (`_start_workers`): one that came while Python itself is starting would
# end in a traceback. From here on SIGINT ends it without a word, until the run itself listens (stop.py).
FIRST = """\
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
from lowp.cli import app
app(prog_name="lowp")
"""


class SingleAgentRendezvous(RendezvousHandler):
    """The rendezvous of a single agent: it is rank 0 of 1, at once, with a store in its own memory."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        nowhere = RendezvousStoreInfo("127.0.0.1", 0)  # ranks meet in a file
        return RendezvousInfo(dist.HashStore(), 0, 1, nowhere)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Starts the ranks, restarts them, and ends them when it is asked to."""

    asked: signal.Signals | None = None  # by which signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals from here on. (Those that this process was told to ignore, by nohup or a shell, stay ignored.)"""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers: whoever has it must end this one
            return
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, self._hear) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks ranks to finish their step and save; Ctrl-C once more ends them now."""
        if self.asked is None:
            self.asked = signal.Signals(number)
        elif number == signal.SIGINT and self._pcontext is not None:
            for process in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # processes begin with what is blocked in their parent
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if self.asked is not None and result.state != WorkerState.SUCCEEDED:
            raise SignalException(f"the launcher was ended by {self.asked.name}", sigval=self.asked)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout if self.asked is None else GRACE)

    def exit_code_of(self, rank: int) -> int | None:
        """None where it was never started."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return handlers[rank].proc.returncode if rank in handlers else None
