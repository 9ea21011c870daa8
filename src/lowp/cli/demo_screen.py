"""What `lowp demo` shows while its ranks train: a row for each training, drawn from the runs' directories.

The ranks print nothing. This process, which has only to wait for them, reads their metrics.jsonl a few times a second, as `lowp
runs` would. So a rank never waits for a screen, and no two processes write on one.

Without a terminal (a file, CI) nothing can be drawn over: there is a line for every test, as it comes.
"""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lowp.cli.demo_recipes import Variant
from lowp.cli.output import table
from lowp.training.runs import Run, is_run
from lowp.training.units import UNKNOWN, bytes_text, count_text, loss_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

SECONDS_BETWEEN_LOOKS = 0.25
BAR = 14  # columns
ENDED = ("finished", "stopped", "diverged")  # a directory that is just being made has no state yet
FIGURES = ("loss", "accuracy", "images/s", "sent", "of fp32")


class Screen:
    """Use it in a `with`, around whatever waits for the ranks."""

    def __init__(self, folder: Path, variants: list[Variant], console: "Console") -> None:
        from rich.live import Live

        self._paths = [folder / variant.recipe.name for variant in variants]
        self._labels = [variant.label for variant in variants]
        self._epochs = variants[0].recipe.epochs
        self._runs: list[Run | None] = [None] * len(variants)
        self._tests_told = [0] * len(variants)
        self._console = console
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lowp demo screen", daemon=True)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(self._table(), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(SECONDS_BETWEEN_LOOKS)
            self._look()  # once more when it is over: the last test came after the last look

    def _look(self) -> None:
        for index, path in enumerate(self._paths):
            if not self._ended(index) and is_run(path):
                self._runs[index] = Run.read(path)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            self._tell_new_tests()

    def _table(self) -> "Table":
        result = table()
        result.add_column("training", no_wrap=True)
        result.add_column("", width=BAR)
        for heading in FIGURES:
            result.add_column(heading, justify="right", no_wrap=True)
        for index, (label, run) in enumerate(zip(self._labels, self._runs, strict=True)):
            if run is None:
                begins = index == 0 or self._ended(index - 1)
                result.add_row(label, "[dim]starting ...[/]" if begins else "", style=None if begins else "dim")
            else:
                result.add_row(label, self._bar(run), *self._figures(run))
        return result

    def _ended(self, index: int) -> bool:
        run = self._runs[index]
        return run is not None and run.state in ENDED

    def _bar(self, run: Run) -> "RenderableType":
        from rich.progress_bar import ProgressBar

        return ProgressBar(total=self._epochs, completed=run.epoch or 0.0, width=BAR)

    @staticmethod
    def _figures(run: Run) -> list[str]:
        return [
            loss_text(run.train_loss),
            share_text(run.accuracy),
            count_text(run.samples_per_second),
            bytes_text(run.bytes_sent),
            UNKNOWN if run.share_of_fp32 is None else f"{100 * run.share_of_fp32:.3g} %",
        ]

    def _tell_new_tests(self) -> None:
        width = max(len(label) for label in self._labels)
        for index, (label, run) in enumerate(zip(self._labels, self._runs, strict=True)):
            for test in run.of_kind("test")[self._tests_told[index] :] if run is not None else []:
                self._tests_told[index] += 1
                epoch = f"epoch {test['epoch']:.0f}/{self._epochs}"
                figures = f"test loss {loss_text(test['loss'])}, accuracy {share_text(test['accuracy'])}"
                self._console.print(f"{label:<{width}}  {epoch}  {figures}", markup=False, soft_wrap=True)
