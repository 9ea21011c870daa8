"""What `lowp ablate` shows while runs are made: the whole, and each run under way.

On a terminal a few lines are drawn again and again. Elsewhere (a file, CI) there is a line for every run that has ended.
"""

import time
from typing import TYPE_CHECKING

from lowp.cli.output import table
from lowp.training.runs import Run, is_run
from lowp.training.units import duration_text, loss_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lowp.lab.ablation import StudyState
    from lowp.lab.execution import Outcome
    from lowp.lab.settings import StudyRun
    from lowp.lab.study_directory import StudyDirectory

BAR = 14  # columns
SECONDS_BETWEEN_LOOKS = 1.0


class StudyScreen:
    """Use it in a `with`, around the study."""

    def __init__(self, directory: "StudyDirectory", jobs: int, console: "Console") -> None:
        from rich.live import Live

        self._directory, self._jobs, self._console = directory, jobs, console
        self._looked, self._began = 0.0, time.perf_counter()
        self._count = 0
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "StudyScreen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: "StudyState") -> None:
        self._count = len(state.done)
        now = time.perf_counter()
        if self._live is not None and now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._live.update(self._picture(state), refresh=True)

    def ended(self, run: "StudyRun", outcome: "Outcome") -> None:
        """A line for each run that was made; on a terminal only for those that went wrong."""
        if self._live is not None and outcome.state == "finished":
            return
        self._count += 1
        what = outcome.reason
        if outcome.state == "finished":
            found = Run.read(self._directory.of(run))
            what = f"accuracy {share_text(found.accuracy)}, loss {loss_text(found.loss)}"
        total = len(self._directory.plan.runs)
        line = f"{self._count}/{total}  {run.name}  {outcome.state} in {duration_text(outcome.seconds)}  {what}"
        self._console.print(line, markup=False, soft_wrap=True)

    def _picture(self, state: "StudyState") -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar

        result = table()
        result.add_column("run", no_wrap=True)
        result.add_column("", width=BAR)
        for heading in ("epoch", "loss", "accuracy", "time"):
            result.add_column(heading, justify="right", no_wrap=True)
        for run, began in state.under_way.values():
            path = self._directory.of(run)
            found = Run.read(path) if is_run(path) else None
            epoch = (found.epoch if found is not None else None) or 0.0
            result.add_row(
                run.name,
                ProgressBar(total=run.recipe.epochs, completed=epoch, width=BAR),
                f"{epoch:.1f}/{run.recipe.epochs}",
                loss_text(None if found is None else found.train_loss),
                share_text(None if found is None else found.accuracy),
                duration_text(time.perf_counter() - began),
            )
        return Group(self._whole(state), result)

    def _whole(self, state: "StudyState") -> str:
        bad = ", ".join(f"{state.count(each)} {each}" for each in ("diverged", "failed") if state.count(each))
        left = duration_text(state.seconds_left(self._directory.plan.runs, self._jobs))
        stopping = "; stopping, runs under way are saving" if state.stopped_by else ""
        return f"{len(state.done)} of {state.total} runs done{f' ({bad})' if bad else ''}, about {left} to go{stopping}"
