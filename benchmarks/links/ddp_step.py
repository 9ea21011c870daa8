"""Forward and backward of a model of 25 million parameters under DDP, and how much of the communication backward hides.

For each contender three things are timed, in turn:

1. the step: forward, backward, and the communication that DDP starts for each bucket as soon as its gradients are there;
2. the computation alone: the same under `no_sync`;
3. the communication alone: the hook, called by us with the buckets of a step that was, one after the other as DDP would.

`computation + communication - step` is what happened at the same time; it can be no more than the smaller of the two. The
optimizer is left out: it is the same for all, and communicates nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from benchmarks.links.clock import Clock, summarize, tried
from benchmarks.links.contenders import BASE, HOOKS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 1024, 24, 8
PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)
WARM_UP = 4  # buckets are made anew after the first step; PowerSGD starts with the third


@dataclass
class Subject:
    """A model with its hook, which is wrapped to keep the last step's buckets."""

    ddp: DistributedDataParallel
    hook: Callable | None = None
    hook_state: object = None
    handle: object = None
    buckets: list[dist.GradBucket | SimpleNamespace] = field(default_factory=list)
    keep: bool = False

    def listen(self) -> None:
        """Whoever registers a hook on this model registers ours, which calls theirs."""
        register = self.ddp.register_comm_hook

        def wrapped(state: object, hook: Callable) -> None:
            self.hook, self.hook_state = hook, state

            def listening(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                if self.keep:
                    self.buckets.append(bucket)
                return hook(state, bucket)

            register(state, listening)

        self.ddp.register_comm_hook = wrapped

    def step(self) -> None:
        self.ddp.zero_grad()
        self.ddp(torch.ones(BATCH, WIDTH)).square().mean().backward()

    def compute(self) -> None:
        with self.ddp.no_sync():
            self.step()

    def communicate(self) -> None:
        """Inside a backward of one number, since hooks may ask autograd to call them at its end; DDP waits there too."""
        engine = torch.autograd.Variable._execution_engine

        def replay(_: torch.Tensor) -> None:
            futures = [self.hook(self.hook_state, bucket) for bucket in self.buckets]
            engine.queue_callback(lambda: [future.wait() for future in futures])

        number = torch.ones(1, requires_grad=True)
        number.register_hook(replay)
        number.sum().backward()


def build(name: str) -> Subject:
    torch.manual_seed(0)  # the same everywhere, so that DDP need not send the parameters around
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers[:-1]), init_sync=False, gradient_as_bucket_view=True)
    subject = Subject(ddp)
    subject.listen()
    subject.handle = HOOKS[name].register(ddp)
    for i in range(WARM_UP):
        subject.keep = i == WARM_UP - 1
        subject.step()
    subject.keep = False
    if subject.hook is None:
        assert name == BASE, f"{name} registered no hook that we could listen to"
        subject.hook, subject.hook_state = allreduce_hook, dist.group.WORLD
        subject.buckets = plain_buckets(ddp)
    return subject


def plain_buckets(ddp: DistributedDataParallel) -> list[SimpleNamespace]:
    """Without a hook nobody is shown the buckets, but DDP tells their sizes in bytes."""
    sizes = [int(size) for size in ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    buffers = [torch.zeros(size // 4) for size in sizes]
    return [SimpleNamespace(buffer=lambda buffer=buffer: buffer) for buffer in buffers]


def ddp_steps(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    subjects: dict[str, Subject] = {}
    for name in case["contenders"]:
        reason = failures.get(name) or tried(lambda name=name: subjects.__setitem__(name, build(name)))
        if reason:
            failures[name] = reason
            subjects.pop(name, None)
    parts = {"step": Subject.step, "compute": Subject.compute, "communicate": Subject.communicate}
    rounds: dict[str, list[dict[str, float]]] = {f"{name}/{part}": [] for name in subjects for part in parts}
    for _ in range(case["rounds"]):
        for name, subject in subjects.items():
            for part, call in parts.items():
                rounds[f"{name}/{part}"].append(clock.measure(lambda call=call, subject=subject: call(subject)))
    figures = summarize(rounds)
    rows = []
    for name, subject in subjects.items():
        step, compute, communicate = (figures[f"{name}/{part}"] for part in parts)
        row = {"contender": name, "elements": PARAMETERS, "compute": compute["seconds"], "communicate": communicate["seconds"]}
        rows.append(row | step | {"remarks": HOOKS[name].remarks(subject.handle)})
    return rows
