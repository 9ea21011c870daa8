"""`lowp runs --plot`: what the runs learned, against the steps they took and against the bytes they sent."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli.format_plot import COLOURS, check_suffix, empty_figure, label, save
from lowp.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = (  # key of a test record, title, subtitle, axis, factor
    ("accuracy", "Test accuracy", "higher is better", "accuracy (%)", 100.0),
    ("loss", "Test loss", "lower is better", "loss", 1.0),
)


def plot_runs(runs: Sequence[Run], path: Path) -> None:
    """Accuracy above, loss below; against steps on the left, against bytes on the right if anything was sent."""
    check_suffix(path)
    drawn = [run for run in runs if run.of_kind("test")]
    if not drawn:
        raise ValueError("there is nothing to plot: none of the runs has been tested yet")
    if len(drawn) > len(COLOURS):
        raise ValueError(f"{len(drawn)} runs are too many for one picture; at most {len(COLOURS)} can be told apart")
    sent = any(run.bytes_sent for run in drawn)
    figure = empty_figure(width=11 if sent else 6, height=8)
    panels = figure.subplots(2, 2 if sent else 1, sharex="col", sharey="row", squeeze=False)
    for row, (key, title, subtitle, unit, factor) in zip(panels, CURVES, strict=True):
        for index, run in enumerate(drawn):
            # Each line is thinner than the one before it, so that of two that coincide both can be seen.
            width = 3.0 - 1.8 * index / max(1, len(drawn) - 1)
            _draw(row, run, key, factor, {"color": COLOURS[index], "linewidth": width, "label": run.name})
        for axes, against in zip(row, ("steps", "MB sent by a rank"), strict=False):
            label(axes, title, subtitle, against, unit)
            axes.set_xscale("linear")
            axes.set_yscale("linear")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(drawn)), frameon=False)
    save(figure, path)


def _draw(row: "Sequence[Axes]", run: Run, key: str, factor: float, style: dict[str, Any]) -> None:
    tests = [test for test in run.of_kind("test") if test.get(key) is not None]
    heights = [factor * test[key] for test in tests]
    steps = [test["step"] for test in tests]
    row[0].plot(steps, heights, marker="o", markersize=4, **style)
    if len(row) > 1 and run.bytes_sent:
        row[1].plot([sent / 1e6 for sent in bytes_at(run, steps)], heights, marker="o", markersize=4, **style)


def bytes_at(run: Run, steps: Sequence[int]) -> list[float]:
    """What a rank had sent by each step. A test record does not say: it lies between two that do, and steps send alike."""
    import numpy as np

    known = {0: 0} | {record["step"]: record["bytes_sent"] for record in run.records if record.get("bytes_sent") is not None}
    known = dict(sorted(known.items()))
    return np.interp(steps, list(known), list(known.values())).tolist()
