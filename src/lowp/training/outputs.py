"""What a run writes down and shows: metrics.jsonl, sinks, numeric health, the screen. Rank 0 does; others have nothing here."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lowp import health
from lowp.training.json_lines import JsonLines
from lowp.training.numerics import wire_settings
from lowp.training.progress import Progress
from lowp.training.rundir import RunDirectory
from lowp.training.sent import SentGradients
from lowp.training.sinks import Sink, open_sinks
from lowp.training.trainer import Trainer
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters


class Outputs:
    """Open from the first step (or the first after a checkpoint) to the end. Without a directory, every call does nothing."""

    def __init__(self, directory: RunDirectory | None, trainer: Trainer, quiet: bool, stack: ExitStack) -> None:
        self.directory = directory
        self._trainer = trainer
        self._lines: JsonLines | None = None
        self._progress: Progress | None = None
        self._sinks: list[Sink] = []
        self.ended = False  # before this process began: the `end` record of the last step is there
        if directory is not None:
            self._open(directory, quiet, stack)

    def _open(self, directory: RunDirectory, quiet: bool, stack: ExitStack) -> None:
        trainer, settings = self._trainer, self._trainer.recipe.log
        unit = "images" if trainer.data.kind == "image" else "sequences"
        title = _title(trainer)
        self._progress = stack.enter_context(Progress(trainer.steps, trainer.steps_per_epoch, title, quiet, unit=unit))
        recipe = trainer.recipe.model_dump()
        self._sinks = open_sinks(settings.sinks, directory.path, recipe, trainer.step, self._progress.message)
        for sink in self._sinks:
            stack.callback(sink.close)
        self._lines = JsonLines(directory.metrics)
        stack.callback(self._lines.close)
        self._lines.rewind(trainer.step)
        self.ended = trainer.step == trainer.steps and self._lines.holds("end", trainer.step)
        if settings.health:
            self._watch_health(stack, directory.health, settings.health)

    def _watch_health(self, stack: ExitStack, path: Path, every: int) -> None:
        """Numeric health of this rank: what the watch finds by itself, what simulated layers round, and what travels.

        Steps that the loss scale leaves out are no steps of the optimizer.
        """
        trainer = self._trainer
        done = trainer.step - (0 if trainer.loss_scale is None else trainer.loss_scale.skipped)
        lines = JsonLines(path)
        lines.rewind(done)
        lines.close()
        watch = stack.enter_context(health.watch(trainer.model, trainer.optimizer, every=every, path=path, step=done))
        if trainer.numerics.simulation is not None:
            trainer.numerics.simulation.watch = watch
        if trainer.placement is None:
            shapes = {name: parameter.shape for name, parameter in trainer.parameters.items()}
            wire = Parameters(shapes, wire_settings(trainer.recipe, trainer.steps_per_epoch), all_names(trainer.model))
            trainer.exchange.before_travel = SentGradients(watch, wire, trainer.recipe.shares, lambda: trainer.step)

    def write(self, record: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(record)
        for sink in self._sinks:
            sink.write(record)
        if self._progress is not None and record["kind"] == "train":
            self._progress.step(record)
        if self._progress is not None and record["kind"] == "test":
            self._progress.tested(record)

    def say(self, message: str, step: int | None = None) -> None:
        """To people and to the record; `step` is the first one that it is about, unless that is the last one done."""
        if self._progress is not None:
            self._progress.message(message)
        self.write({"kind": "event", "step": self._trainer.step if step is None else step, "message": message})

    def step_done(self) -> None:
        if self._progress is not None:
            self._progress.step_done(self._trainer.step)

    def sync(self) -> None:
        """Before a checkpoint: it must have the records up to there."""
        if self._lines is not None:
            self._lines.sync()

    def status(self, state: str | None = None, message: str | None = None) -> None:
        if self.directory is not None:
            self.directory.set_status(state=state, step=self._trainer.step, epoch=self._trainer.epoch, message=message)

    def end(self, record: dict[str, Any]) -> None:
        if not self.ended:
            self.write(record)
        self.status(state="finished", message="")
        if self._progress is not None:
            self._progress.close(record, "" if self.directory is None else str(self.directory.path))


def _title(trainer: Trainer) -> str:
    recipe, data, count = trainer.recipe, trainer.data, trainer.parameters_of_model
    ranks = f"{recipe.virtual_ranks} virtual ranks" if recipe.virtual_ranks > 1 else f"{recipe.ranks} real ranks"
    where = "one process" if recipe.virtual_ranks == recipe.ranks == 1 else ranks
    return (
        f"{recipe.name}: {recipe.model.name} ({count:,} parameters) on {data.name} ({len(data.train):,} samples), "
        f"{where} on {trainer.world.device.type}, batch {recipe.batch}"
    )
