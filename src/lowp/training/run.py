"""One process of a run: the loop around the steps.

All ranks go through the same calls in the same order; rank 0 alone has a directory and a screen. After every step all of them
know whether to stop (stop.py), so that they save, test and end together.
"""

import json
import math
import signal
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lowp.health.audit import audit
from lowp.invocation import command
from lowp.tensor.lists.function import plain_because
from lowp.training import saving
from lowp.training.account import Account
from lowp.training.cuda_settings import cuda_settings
from lowp.training.divergence import DIVERGED, Diverged, Trouble, bad_weight, first_not_finite
from lowp.training.environment import environment
from lowp.training.json_lines import read_lines
from lowp.training.launch import DIVERGED as DIVERGED_CODE
from lowp.training.launch import RanksFailed, is_rank, launch_run
from lowp.training.outputs import Outputs
from lowp.training.recipe import Recipe
from lowp.training.rundir import METRICS, RECIPE, RunDirectory, read_status
from lowp.training.stop import Stop
from lowp.training.toml import to_toml
from lowp.training.torch_settings import torch_defaults
from lowp.training.trainer import Trainer
from lowp.training.world import World

AUDIT_ALLOWS = ("wire sums", "norm statistics", "attention logsumexp")  # what torch's own kernels, and the wire's sums, make


def run(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    data: Path | None = None,
    quiet: bool = False,
    world: World | None = None,
    max_restarts: int = 0,
) -> dict[str, Any]:
    """Train, or go on training; the `end` record (or, where the run was stopped, its last status).

    With one rank, or as one of several that torchrun has started: in this process. Otherwise `recipe.ranks` processes are
    started on this machine, as by `lowp train --ranks`, up to `max_restarts` times again when one dies; what they say appears
    on this process's screen.

    A caller who makes several runs in the same processes joins a world once, hands it to each of them, and leaves it: to start
    processes takes seconds.
    """
    if world is None and recipe.ranks > 1 and not is_rank():
        before = read_status(out)
        code = launch_run(recipe, out, resume=resume, data=data, quiet=quiet, max_restarts=max_restarts)
        return _outcome(code, out, before)
    joined = world
    asked = recipe.threads if joined is None else torch.get_num_threads()
    world = joined or World.join(recipe.device, asked, together=recipe.virtual_ranks)
    recipe = recipe.model_copy(update={"ranks": world.ranks, "threads": torch.get_num_threads()})
    try:
        _check_audit(recipe, world.device, resume)
        with ExitStack() as stack:
            stack.enter_context(torch_defaults(world.device))
            stack.enter_context(cuda_settings(recipe, world.device))
            directory = _directory(world, recipe, out, resume)
            if directory is not None:
                stack.enter_context(directory)
            if not asked:
                recipe = _with_recorded_threads(recipe, world, directory)
            try:
                return _TrainingRun(recipe, world, directory, data, quiet, stack).train()
            except Exception as error:
                if directory is not None and directory.begun and not isinstance(error, Diverged):
                    directory.set_status(state="failed", message=f"{type(error).__name__}: {error}")
                raise
    finally:
        if joined is None:
            world.leave()


def _outcome(code: int, out: Path, before: dict[str, Any]) -> dict[str, Any]:
    """What ranks in processes of their own came to: the record, or the error, that they would have left in this process. Where
    the status is still the one `before`, its message is not about these ranks."""
    status = read_status(out)
    if code == 0:
        return next(record for record in reversed(read_lines(out / METRICS)) if record["kind"] == "end")
    if code > 128:
        return {"kind": "stopped", "step": status["step"], "signal": signal.Signals(code - 128).name}
    if code == DIVERGED_CODE:
        raise Diverged(status["message"])
    message = "" if status == before else status["message"]
    raise RanksFailed(f"a rank ended with exit code {code}: {message or 'what it said is above'}")


def _with_recorded_threads(recipe: Recipe, world: World, directory: RunDirectory | None) -> Recipe:
    """A run that goes on has the threads that it began with, whatever OMP_NUM_THREADS or another machine would give it now:
    they decide the last bits of sums."""
    recorded = b""
    if directory is not None and directory.resumed:
        recorded = str(tomllib.loads((directory.path / RECIPE).read_text(encoding="utf-8")).get("threads", 0)).encode()
    threads = int(world.tell(recorded if world.first else None) or 0)
    if not threads:
        return recipe
    torch.set_num_threads(threads)
    return recipe.model_copy(update={"threads": threads})


def _check_audit(recipe: Recipe, device: torch.device, resume: bool) -> None:
    """Known before the first step: without compiled kernels our optimizers compute in FP32 tensors, not in registers."""
    if recipe.precision.audit and not resume and (why := plain_because(device)) is not None:
        raise ValueError(
            f"precision.audit: {why}; without kernels lowp.optim runs as plain operations, whose FP32 temporaries the audit "
            "finds (to train without it: --set precision.audit=false)"
        )


def _directory(world: World, recipe: Recipe, out: Path, resume: bool) -> RunDirectory | None:
    return _by_first(world, lambda: RunDirectory.create(out, to_toml(recipe), environment(), resume=resume))


def _by_first(world: World, action: Callable[[], Any]) -> Any:
    """Rank 0 alone does it. Where it cannot, every rank hears why."""
    result, problem = None, b""
    if world.first:
        try:
            result = action()
        except OSError as error:
            problem = str(error).encode()
    if answer := world.tell(problem if world.first else None):
        raise OSError(answer.decode())
    return result


class _TrainingRun:
    def __init__(
        self, recipe: Recipe, world: World, directory: RunDirectory | None, data: Path | None, quiet: bool, stack: ExitStack
    ) -> None:
        self.recipe, self.world, self.directory = recipe, world, directory
        self.trainer = Trainer(recipe, world, data)
        stack.callback(self.trainer.close)
        saved, refused = saving.restore(self.trainer, directory.checkpoints if directory else None)
        self._check_not_past()
        self._saved_at = self.trainer.step if saved is not None else -1
        self.account = Account(self.trainer, saved)
        self.outputs = Outputs(directory, self.trainer, quiet, stack)
        _by_first(world, self._begin_again)
        self.outputs.status(state="running", message="")
        for line in refused:
            self.outputs.say(line)
        if directory is not None and directory.resumed:
            self.outputs.say(f"resumed at step {self.trainer.step} of {self.trainer.steps}")
        self._test: dict[str, Any] | None = None  # the last one
        self._stop = stack.enter_context(Stop(world.ranks))

    def _check_not_past(self) -> None:
        step, steps, each = self.trainer.step, self.trainer.steps, self.trainer.steps_per_epoch
        if step > steps:
            raise ValueError(
                f"epochs: {self.recipe.epochs} would end the run after step {steps}, and it has done {step} already: to go on, "
                f"--set epochs={step // each + 1} or more"
            )

    def _begin_again(self) -> None:
        if self.directory is not None and self.directory.resumed:
            self.directory.begin(to_toml(self.recipe), environment())

    def train(self) -> dict[str, Any]:
        trainer = self.trainer
        try:
            while trainer.step < trainer.steps:
                if trainer.step % trainer.steps_per_epoch == 0:
                    for change in trainer.numerics.epoch_begins(trainer.step // trainer.steps_per_epoch):
                        self.outputs.say(change, trainer.step + 1)
                self._stop.ask()
                self._step()
                self._after_step()
                if (signal := self._stop.agreed()) is not None and trainer.step < trainer.steps:
                    return self._stopped(signal.name)
        except DIVERGED as error:
            self._diverged(str(error), getattr(error, "parameter", None))
        record = self.account.end_record(self._test or trainer.test())
        self.outputs.end(record)
        return record

    def _step(self) -> None:
        """One step; where a layer overflowed and may be promoted, it is, and the step is taken again."""
        try:
            self._audited_step()
        except DIVERGED:
            promoted = self.trainer.numerics.promote(at_once=True)
            if not promoted:
                raise
            for change in promoted:
                self.outputs.say(change, self.trainer.step + 1)
            self._step()
        self.outputs.step_done()

    def _audited_step(self) -> None:
        if not self.recipe.precision.audit or self.trainer.step > 0:
            self.trainer.train_step()
            return
        with audit(mode="report", allow=AUDIT_ALLOWS) as report:
            self.trainer.train_step()
        if self.directory is not None:
            (self.directory.path / "audit.txt").write_text(f"{report}\n", encoding="utf-8")
        if not report.clean:
            raise ValueError(f"precision.audit: the first step is not free of tensors of 32 bits and more: {report.verdict}")
        self.outputs.say("audit: the first step made no tensor of 32 bits or more (audit.txt)")

    def _after_step(self) -> None:
        trainer, recipe = self.trainer, self.recipe
        epoch_done = trainer.step % trainer.steps_per_epoch == 0
        last = trainer.step == trainer.steps
        if epoch_done or trainer.step % recipe.log.every == 0:
            self.outputs.write(self.account.train_record())
        if epoch_done:
            for change in trainer.numerics.epoch_ends():
                self.outputs.say(change)
            epoch = trainer.step // trainer.steps_per_epoch
            if last or (recipe.test_every and epoch % recipe.test_every == 0):
                self._test = self.account.test_record()
                self.outputs.write(self._test)
                if math.isnan(self._test["loss"]):
                    self._diverged("the test loss is NaN", save=False)
        if trainer.step % (recipe.checkpoints.every or trainer.steps_per_epoch) == 0 or last:
            trainer.confirm()
            if (name := self._first_found(bad_weight(trainer.model))) is not None:
                self._diverged(f"the weights of {name!r} are not finite", name, save=False)
            self._save()

    def _save(self) -> None:
        if self._saved_at == self.trainer.step:
            return
        self.outputs.sync()
        saving.save(self.trainer, self.directory.checkpoints if self.directory else None, self.account.state())
        self._saved_at = self.trainer.step
        self.outputs.status()
        self.account.pause()

    def _stopped(self, signal: str) -> dict[str, Any]:
        self._save()
        where = f"stopped by {signal} after step {self.trainer.step} of {self.trainer.steps}"
        if self.directory is not None:
            self.outputs.say(f"{where}; go on with: {command('train', self.directory.path, '--resume')}")
        self.outputs.status(state="stopped", message=where)
        return {"kind": "stopped", "step": self.trainer.step, "signal": signal}

    def _diverged(self, error: str, layer: str | None = None, save: bool = True) -> None:
        """Say what is not finite, save what was there before the step, and end. `layer` is what the error is about."""
        trainer, found = self.trainer, Trouble(error, layer)
        if trainer.placement is None:
            batches = {rank: trainer.micro_batches(rank) for rank in trainer.exchange.ranks}
            here = first_not_finite(trainer.model, batches)
            met = self._first_found(None if here is None else asdict(here))
            found = Trouble("outputs are finite, gradients are not", layer) if met is None else Trouble(**met)
        message = f"diverged in step {trainer.step}: {found.sentence} ({error})"
        if save:
            self._save()
        where = {"layer": found.layer, "rank": found.rank}
        self.outputs.write({"kind": "event", "step": trainer.step, "message": message, **where})
        self.outputs.status(state="diverged", message=message)
        raise Diverged(message)

    def _first_found(self, finding: Any) -> Any:
        """What the first rank that found anything, something else than None, has found."""
        answers = self.world.gather(json.dumps(finding).encode())
        found = next((answer for answer in answers if answer != b"null"), b"null")
        return json.loads(self.world.tell(found if self.world.first else None))
