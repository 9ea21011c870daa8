"""Training runs for tests, started as users start them: a command, in a directory, in a process of its own.

Importing torch and lowp takes seconds, and these tests start dozens of processes. So one process imports everything once, and
forks a fresh one for each command (`serve`). Such a process is like one from a shell: its own session and process group, its
own output, the default signals. Ranks are started as torchrun starts them, by environment variables; what `--ranks` itself does
(src/lowp/training/launch.py) is tested with real interpreters: `Server.interpreter`.
"""

import atexit
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
TIMES = {"seconds", "samples_per_second", "step_ms", "times_ms", "wire_ms"}  # of a record: not the same run after run
# What may differ between real and virtual ranks: two real ones send float32 by torch's all-reduce, without the padding of
# messages, and virtual ranks count overflows together.
OF_THE_RANKS = frozenset({"ranks", "virtual_ranks", "bytes_sent", "overflows"})
DEADLINE = 120.0  # seconds for any one process; the machine is shared

# 12 steps of a model with dropout, a checkpoint and a line of metrics often.
TINY = {
    "epochs": 2,
    "batch": 48,
    "data.limit": 288,
    "threads": 1,
    "device": "cpu",
    "model.options.hidden": [16],
    "model.options.dropout": 0.1,
    "checkpoints.every": 3,
    "log.every": 2,
    "optimizer.lr": 0.05,
}


def arguments(recipe: str, out: Path | str, *more: str, **changes: object) -> list[str]:
    """`lowp train RECIPE --out OUT --set ...`; in names of keys, __ stands for the dot."""
    settings = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    if "model.name" in settings:  # a model of one's own does not have the mlp's options
        settings = {key: value for key, value in settings.items() if not key.startswith("model.options.")}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", recipe, "--out", str(out), *sets, *more]


def until(happened, seconds: float = DEADLINE):
    """What `happened` gives, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)
    return found


# What a user brings along, named in recipes as train.training:NAME.


def normed(shape, classes, width=12):
    """A model with everything that is easy to get wrong: running statistics, dropout, a parameter that gets no gradient."""
    from torch import nn

    class Normed(nn.Sequential):
        def __init__(self) -> None:
            layers = [nn.Flatten(), nn.Linear(math.prod(shape), width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
            super().__init__(*layers, nn.Linear(width, classes))
            self.unused = nn.Parameter(nn.init.ones_(nn.Linear(3, 1).weight.detach()))

    return Normed()


def spoiled(shape, classes):
    """A model whose layer `sick` gives NaN from the step on that the environment names, if it names one."""
    import torch
    from torch import nn

    class Sick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.passes += self.training
            sick = self.training and "LOWP_TEST_SICK" in os.environ and self.passes > int(os.environ["LOWP_TEST_SICK"])
            return x * math.nan if sick else x

    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 12), nn.BatchNorm1d(12))
    return nn.Sequential(
        OrderedDict[str, nn.Module](body=body, sick=Sick(), norm=nn.BatchNorm1d(12), last=nn.Linear(12, classes))
    )


def spoiled_data(inputs, targets, generator):
    """A transform of samples: on the rank that the environment names, one pixel is NaN."""
    if os.environ.get("LOWP_TEST_SICK_RANK") == os.environ.get("RANK", "0"):
        inputs = inputs.clone()
        inputs[0, 0, 3, 3] = math.nan
    return inputs, targets


# Processes.


class Process:
    """A process that the server forked, or an interpreter of its own; `said` is all that it printed."""

    def __init__(self, pid: int, log: Path, poll) -> None:
        self.pid, self.log, self._poll = pid, log, poll
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._poll()
        return self.code

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code; the negative number of the signal that ended it."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline, f"process {self.pid} does not end; it said: {self.said}"
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """It and whatever it started, at once."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(10)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Server:
    """Forks processes that run a command of lowp."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._count = logs, 0
        self._started: list[Process] = []
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        assert self._ask() == "ready"

    def _ask(self, request: dict | None = None):
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        if request is not None:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
        assert select.select([self._server.stdout], [], [], DEADLINE)[0], "the server of processes does not answer"
        return json.loads(self._server.stdout.readline())

    def start(self, words: list[str], *, cwd: Path | None = None, **environment: str) -> Process:
        log = self._log()
        pid = self._ask({"words": words, "cwd": str(cwd or self._logs), "log": str(log), "environment": environment})
        return self._watched(Process(pid, log, lambda: self._ask({"poll": pid})))

    def start_ranks(self, words: list[str], count: int, **options) -> list[Process]:
        """As torchrun on one host would."""
        port = str(_free_port())
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self.start(words, RANK=str(r), LOCAL_RANK=str(r), **common, **options) for r in range(count)]

    def interpreter(self, words: list[str], *, cwd: Path | None = None) -> Process:
        """`python -m lowp ...`, from nothing: for what starts interpreters itself."""
        log = self._log()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "lowp", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd or self._logs,
                env=_environment(),
                start_new_session=True,
            )
        return self._watched(Process(child.pid, log, child.poll))

    def run(self, words: list[str], *, code: int = 0, **options) -> str:
        """To its end, which has exit code `code`; what it said."""
        process = self.start(words, **options)
        assert process.wait() == code, process.said
        return process.said

    def run_ranks(self, words: list[str], count: int, *, code: int = 0, **options) -> str:
        """All to their end; what rank 0 said."""
        ranks = self.start_ranks(words, count, **options)
        codes = [rank.wait() for rank in ranks]
        assert codes == [code] * count, "\n".join(rank.said for rank in ranks)
        return ranks[0].said

    def _log(self) -> Path:
        self._count += 1
        return self._logs / f"process-{self._count}.log"

    def _watched(self, process: Process) -> Process:
        self._started.append(process)
        return process

    def clear(self) -> None:
        """Nothing that was started goes on."""
        for process in self._started:
            process.kill()
        self._started.clear()

    def close(self) -> None:
        self.clear()
        self._server.communicate(timeout=10)


@contextmanager
def server(logs: Path) -> Iterator[Server]:
    found = Server(logs)
    try:
        yield found
    finally:
        found.close()


def _environment() -> dict[str, str]:
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    return kept | {"PYTHONPATH": f"{SOURCE}:{TESTS}", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "400", "NO_COLOR": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks_of(process: Process) -> list[int]:
    """The processes that a launcher has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"train" in Path(f"/proc/{child}/cmdline").read_bytes()]


# What runs leave behind.


def records(run: Path, but: frozenset[str] = frozenset()) -> list[dict]:
    """Of metrics.jsonl, without times, and without what is said only of the interruptions."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if not (line["kind"] == "event" and _of_interruption(line["message"]))]
    return [{key: value for key, value in line.items() if key not in TIMES | but} for line in own]


def _of_interruption(message: str) -> bool:
    return bool(re.match(r"resumed at|stopped by|.*(is damaged|is missing|is another run's|was renamed)", message))


def final_state(run: Path, but: frozenset[str] = frozenset()) -> tuple[bytes, bytes]:
    """The newest checkpoint, less the times: its structure and its tensors, as bytes that can be compared."""
    from lowp.training import checkpoint
    from lowp.training.stored_state import to_bytes

    newest = max((run / "checkpoints").glob("step-*"))
    _, state = checkpoint.load(newest, fingerprint=None)
    log = {key: value for key, value in state["log"].items() if "seconds" not in key and key not in but}
    ranks = [{key: value for key, value in rank.items() if key not in but} for rank in state["ranks"]]
    return to_bytes({**state, "ranks": ranks, "log": log})


def assert_same(one: Path, other: Path, but: frozenset[str] = frozenset()) -> None:
    """Two runs left the same weights, the same states and the same metrics, bit for bit, `but` for some figures."""
    (structure, tensors), (other_structure, other_tensors) = final_state(one, but), final_state(other, but)
    assert structure == other_structure, "the structure of the last checkpoint differs"
    assert tensors == other_tensors, "the tensors of the last checkpoint differ"
    assert_same_records(one, other, but)


def assert_same_records(one: Path, other: Path, but: frozenset[str] = frozenset()) -> None:
    different = [pair for pair in zip_longest(records(one, but), records(other, but)) if pair[0] != pair[1]]
    assert not different, "the first two records that differ:\n{}\n{}".format(*different[0])


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


# The server.


def serve() -> None:
    """One request a line on stdin, one answer a line on stdout."""
    import rich.live  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo  # noqa: F401  # what torch loads with its first optimizer

    import lowp.cli
    import lowp.training.check
    import lowp.training.recipes
    import lowp.training.run

    lowp.set_kernel_policy("never")  # to build one takes seconds

    ended: dict[int, int] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"], ended)
        else:
            answer = os.fork()
            if answer == 0:
                _become(request)
        print(json.dumps(answer), flush=True)


def _poll(pid: int, ended: dict[int, int]) -> int | None:
    if pid not in ended:
        found, code = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(code)
    return ended.get(pid)


def _become(request: dict) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["lowp", *request["words"]]
    from lowp.cli import app

    try:
        app()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `lowp` does at its end (starting.has_ended)
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)  # to take down what the server imported would take seconds


if __name__ == "__main__":
    serve()
