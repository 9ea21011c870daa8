"""The picture of `lowp demo`: what each training learned, step by step, and for how many bytes."""

from pathlib import Path
from typing import TYPE_CHECKING

from lowp.cli.demo_recipes import Variant
from lowp.cli.format_plot import COLOURS, empty_figure, label, save
from lowp.cli.runs_plot import bytes_at
from lowp.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = (  # colour, width, dashes: fp32 lies under those that are as good
    (COLOURS[5], 3.2, "-"),
    (COLOURS[1], 2.0, "-"),
    (COLOURS[0], 2.0, "-"),
    (COLOURS[2], 1.6, "-"),
    (COLOURS[3], 2.0, (0, (4, 2))),
)


def plot_demo(variants: list[Variant], runs: list[Run], path: Path) -> None:
    figure = empty_figure(width=11, height=5.4)
    steps, sent = figure.subplots(1, 2, sharey=True)
    for variant, run, (colour, width, dashes) in zip(variants, runs, STYLES, strict=True):
        tests = run.of_kind("test")
        at = [test["step"] for test in tests]
        accuracies = [100 * test["accuracy"] for test in tests]
        style = {"color": colour, "linewidth": width, "linestyle": dashes, "marker": "o", "markersize": 4}
        steps.plot(at, accuracies, label=variant.label, **style)
        sent.plot([count / 1e6 for count in bytes_at(run, at)], accuracies, **style)
    _label(steps, "Test accuracy by step", "the same steps, with other numbers", "steps")
    _label(sent, "Test accuracy by bytes sent", "further left is cheaper", "MB sent by a rank")
    sent.set_xscale("log")
    sent.xaxis.set_major_formatter("{x:g}")
    sent.set_ylabel("")
    handles, names = steps.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(runs), frameon=False)
    save(figure, path)


def _label(axes: "Axes", title: str, subtitle: str, x: str) -> None:
    label(axes, title, subtitle, x, "accuracy (%)")
    axes.set_xscale("linear")
    axes.set_yscale("linear")
