"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio.

A sink takes the records of metrics.jsonl one by one: each number of a `train`, `test` or `end` record becomes a curve, named
after both (`train/loss`, `test/accuracy`), against the step. Two things make sinks more than a loop over `log`:

A resumed run repeats the steps after its checkpoint, and must not draw them twice. TensorBoard is told to forget what came
after the checkpoint. The trackers cannot forget; but a resumed run computes the same numbers again, so what they have been sent
already is not sent again. How far that is, and by what id the tracker knows the run, is kept in the run's directory.

A sink is a convenience, and the training is not: a full disk or a lost network is reported once, the sink is dropped, and the
training goes on. Only a sink that fails before the first step stops the run, because then there is a user to tell.
"""

import importlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lowp.training.runs import flat

PROJECT = "lowp"  # under which trackers file the runs, unless WANDB_PROJECT says otherwise

Record = dict[str, Any]  # a line of metrics.jsonl
Report = Callable[[str], None]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sinks(
    names: Sequence[str], run: Path, recipe: dict[str, Any], resumed_at: int, report: Report | None = None
) -> list[Sink]:
    """The named sinks of the run in directory `run`, which goes on after step `resumed_at` (0: begins).

    `report` takes the one line about a sink that fails later; without it, the line is a warning. A resumed run goes on without
    a sink that cannot be opened: the launcher that restarted it is nobody to tell.
    """
    report = report or _warn
    for name in names:
        if name not in SINKS:
            raise ValueError(f"unknown sink {name!r}; the sinks are {', '.join(SINKS)}")
    opened: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            opened.append(_Guarded(name, SINKS[name](run, recipe, resumed_at), report))
        except Exception as error:
            if resumed_at == 0:
                for sink in opened:
                    sink.close()
                raise ValueError(f"cannot log to {name}: {_one_line(error)}") from error
            report(f"cannot log to {name}: {_one_line(error)}; the training goes on without it")
    return opened


def curves(record: Record) -> dict[str, float]:
    """The numbers of a record, by the names of their curves. An event has none."""
    kind = record["kind"]
    return {
        f"{kind}/{key}": value
        for key, value in record.items()
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class _Guarded:
    """A sink that may break. It does so once, with one line, and takes no more records."""

    def __init__(self, name: str, sink: Sink, report: Report) -> None:
        self._name = name
        self._sink: Sink | None = sink
        self._report = report

    def write(self, record: Record) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(record)
        except Exception as error:
            broken, self._sink = self._sink, None
            self._report(f"{self._name} failed at step {record.get('step')} and is dropped: {_one_line(error)}")
            try:
                broken.close()  # frees its threads; that a broken sink closes badly is no news
            except Exception:
                return

    def close(self) -> None:
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            self._report(f"{self._name} failed at the end: {_one_line(error)}")


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: Path, recipe: dict[str, Any], resumed_at: int) -> None:
        _package("tensorboard")  # torch's own message names neither the package nor the way to get it
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what earlier files say about this step and later ones. A run that begins again, hides all.
        first = resumed_at + 1 if resumed_at else 0
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first)
        if resumed_at == 0:
            # Indented, since TensorBoard shows text as Markdown: there that is code.
            lines = (f"    {key} = {json.dumps(value, default=str)}" for key, value in flat(recipe).items())
            self._writer.add_text("recipe", "\n".join(lines), 0)

    def write(self, record: Record) -> None:
        for name, value in curves(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if record["kind"] == "event":
            self._writer.add_text("events", str(record["message"]), record["step"])
        self._writer.flush()  # a killed run has its curves up to the kill, and so a resumed one has no gap

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A tracker with wandb's interface: `init(...)` gives a run with `log(numbers, step=...)`, and `finish()` ends it."""

    def __init__(self, package: Any, notes: Path, start: Callable[[str], Any]) -> None:
        """`notes`: the file with the run's id and the last step sent, by kind of record. `start(id)` calls `package.init`."""
        self._package = package
        self._notes = notes
        known = _read_notes(notes)
        # Two runs called aps8-001 on two machines are two runs: the id needs more than the name, and no seed may decide it.
        self._id: str = known.get("id") or f"{notes.parent.resolve().name}-{uuid.uuid4().hex[:8]}"
        self._sent: dict[str, int] = known.get("sent", {})
        self._run = start(self._id)
        self._note()

    def write(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        numbers = curves(record)
        if not numbers or step <= self._sent.get(kind, -1):
            return
        self._run.log(numbers, step=step)
        self._sent[kind] = step
        self._note()

    def close(self) -> None:
        self._package.finish()

    def _note(self) -> None:
        """Replaced whole, so that a kill leaves the notes as they were or as they are to be. The disk is not waited for: what
        a machine that fails forgets is sent twice, and no more.
        """
        partial = self._notes.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self._id, "sent": self._sent}), encoding="utf-8")
        partial.replace(self._notes)


def _open_wandb(run: Path, recipe: dict[str, Any], _resumed_at: int) -> Sink:
    wandb = _package("wandb")
    project = os.environ.get("WANDB_PROJECT", PROJECT)

    def start(identity: str) -> Any:
        return wandb.init(
            project=project,
            id=identity,
            name=run.resolve().name,
            dir=str(run),
            config=recipe,
            resume="allow",
            settings={"console": "off"},  # its copy of the console would hold every frame of the progress bar
        )

    return Tracker(wandb, run / "wandb.json", start)


def _open_trackio(run: Path, recipe: dict[str, Any], _resumed_at: int) -> Sink:
    trackio = _package("trackio")

    def start(identity: str) -> Any:
        return trackio.init(project=PROJECT, name=identity, config=recipe, resume="allow")  # it knows runs by their names

    return Tracker(trackio, run / "trackio.json", start)


SINKS: dict[str, Callable[[Path, dict[str, Any], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; pip install {name}") from None


def _read_notes(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{path} is damaged; remove it, and the tracker shows what follows as a new run") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
