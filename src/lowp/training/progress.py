"""What rank 0 shows while it trains: a live line, a row for each epoch, a table at the end.

On a terminal the last line is live: a thread of rich's draws it four times a second from what the training loop has left in
plain attributes. So `step_done`, which the loop calls at every step, only stores a number. What does not fit the terminal's
width is left out, the least important first.

Elsewhere (a file, CI) nothing can be drawn over. There the same line is printed, at most every few seconds, without control
characters.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowp.training.units import bytes_text, count_text, duration_text, loss_text, number_text, share_of_fp32, share_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FRAMES_PER_SECOND = 4
SECONDS_BETWEEN_LINES = 5.0  # where there is no terminal
NARROWEST_BAR, WIDEST_BAR = 8, 40
EPOCH_COLUMNS = (("epoch", 6), ("train loss", 11), ("test loss", 10), ("accuracy", 9), ("lr", 10), ("sent", 8), ("of fp32", 9))

Record = dict[str, Any]  # a line of metrics.jsonl


class Progress:
    """Use it in a `with`: a terminal whose live line is not ended has lost its cursor.

    `unit` is what a sample is called: images, characters.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        title: str,
        quiet: bool = False,
        console: "Console | None" = None,
        *,
        unit: str = "samples",
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._unit = unit
        self._quiet = quiet
        self._console = console or Console(highlight=False)
        self._step = 0  # the last one done
        self._began: tuple[int, float] | None = None  # the first step seen, and when it was done: time left is told from there
        self._train: Record = {}
        self._epochs_shown: int | None = None
        self._header_shown = False
        self._next_line = 0.0  # when the next line may be printed, without a terminal
        self._live: Live | None = None
        self._say(title)
        if not quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            # Output of others is not redirected: a data worker is forked while the drawing thread may hold the console's lock,
            # and would wait for it forever at its first print.
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=FRAMES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_live()

    def step_done(self, step: int) -> None:
        """Every step. Nothing is drawn here."""
        self._step = step
        if self._began is None:
            self._began = (step, time.monotonic())

    def step(self, record: Record) -> None:
        """A `train` record."""
        self.step_done(record["step"])
        complete = (record["step"] - 1) // self._steps_per_epoch  # epochs that had ended before this step
        if self._epochs_shown is None:
            self._epochs_shown = complete  # those before a resume were shown at their time
        if complete > self._epochs_shown and self._train:
            self._show_epoch(complete, {})  # one without a test
        self._train = record
        if self._live is None and time.monotonic() >= self._next_line:
            self._say("  ".join(self._parts()))
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def tested(self, record: Record) -> None:
        """A `test` record: the row of its epoch."""
        self._show_epoch(record["step"] / self._steps_per_epoch, record)

    def message(self, text: str) -> None:
        self._say(text)

    def close(self, summary: Record, where: str = "") -> None:
        """The `end` record, as a short table, with the run's directory. The only thing that is printed when quiet."""
        self._end_live()
        rows = summary_rows(summary, self._unit) + ([("run", where)] if where else [])
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            self._console.print(f"{name:<{width}}  {text}", markup=False, highlight=False, soft_wrap=True)

    def _end_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show_epoch(self, epoch: float, test: Record) -> None:
        self._epochs_shown = int(epoch)
        columns = (*EPOCH_COLUMNS, (f"{self._unit}/s", 13))
        if not self._header_shown:
            self._header_shown = True
            self._say(_row([name for name, _ in columns], columns))
        train = self._train
        cells = (
            number_text(epoch),
            loss_text(train.get("loss")),
            loss_text(test.get("loss")),
            share_text(test.get("accuracy")),
            number_text(train.get("lr")),
            bytes_text(train.get("bytes_sent")),
            share_text(_share(train)),
            count_text(train.get("samples_per_second")),
        )
        self._say(_row(cells, columns))

    def _parts(self) -> list[str]:
        """The line, the most important first."""
        epochs = -(-self._total // self._steps_per_epoch)
        epoch = min(epochs, max(0, self._step - 1) // self._steps_per_epoch + 1)
        train = self._train
        parts = [f"epoch {epoch}/{epochs}", f"step {self._step}/{self._total}"]
        if train:
            parts.append(f"loss {loss_text(train.get('loss'))}")
        if train.get("accuracy") is not None:
            parts.append(f"accuracy {share_text(train['accuracy'])}")
        if (left := self._seconds_left()) is not None:
            parts.append(f"{duration_text(left)} left")
        if train.get("samples_per_second") is not None:
            parts.append(f"{count_text(train['samples_per_second'])} {self._unit}/s")
        if train.get("bytes_sent"):
            parts.append(f"{bytes_text(train['bytes_sent'])} sent, {share_text(_share(train))} of fp32")
        return parts

    def _seconds_left(self) -> float | None:
        step, began = self._step, self._began
        if began is None or step <= began[0]:
            return None
        return (self._total - step) * (time.monotonic() - began[1]) / (step - began[0])

    def _line(self) -> "RenderableType":
        """Called by the drawing thread: as many parts as fit, behind a bar if there is room for one."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        room = self._console.width - 1
        text = Text(fitting(self._parts(), room), no_wrap=True)
        line = Table.grid(padding=(0, 1))
        if room - len(text) - 1 < NARROWEST_BAR:
            line.add_row(text)
        else:
            width = min(WIDEST_BAR, room - len(text) - 1)
            line.add_row(ProgressBar(total=self._total, completed=self._step, width=width), text)
        return line


def _row(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    """Right-aligned, and never without a space between two."""
    return "".join(f" {cell:>{width - 1}}" for cell, (_, width) in zip(cells, columns, strict=True))


def fitting(parts: list[str], room: int) -> str:
    """The first parts, as many as there is room for, but at least one."""
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


def summary_rows(summary: Record, unit: str = "samples") -> list[tuple[str, str]]:
    """The names and texts of the final table, of what the `end` record knows."""
    best, each, share = summary.get("best_accuracy"), summary.get("bytes_per_parameter"), _share(summary)
    rows: tuple[tuple[str, str, Callable[[float | None], str], str], ...] = (
        ("test accuracy", "accuracy", share_text, "" if best is None else f" (best {share_text(best)})"),
        ("test loss", "loss", loss_text, ""),
        ("sent by a rank", "bytes_sent", bytes_text, "" if share is None else f" ({share_text(share)} of fp32)"),
        ("memory", "memory_bytes", bytes_text, "" if each is None else f" ({number_text(each)} B a parameter)"),
        ("step", "step_ms", number_text, " ms"),
        ("speed", "samples_per_second", count_text, f" {unit}/s"),
        ("time", "seconds", duration_text, ""),
    )
    return [(name, write(summary[key]) + note) for name, key, write, note in rows if summary.get(key) is not None]


def _share(record: Record) -> float | None:
    return share_of_fp32(record.get("bytes_sent"), record.get("bytes_of_fp32"))
