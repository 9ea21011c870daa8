"""The picture of `lowp tour`: which layers a format keeps, and what becomes of small updates."""

from pathlib import Path

from matplotlib.axes import Axes

from lowp.cli.format_plot import COLOURS, empty_figure, label, save
from lowp.cli.tour_experiments import SCALES, UPDATE, UPDATES, USABLE_DB, Accumulated, Surveyed

SHOWN = {"bf16": 5, "fp16": 7, "e5m2": 0, "e4m3fn": 1, "posit8": 2, "dynamic8": 3, "mxfp4": 4}  # and its colour


def plot_tour(surveyed: list[Surveyed], accumulated: list[Accumulated], path: Path) -> None:
    figure = empty_figure(width=11, height=5.4)
    layers, updates = figure.subplots(1, 2)
    _plot_layers([entry for entry in surveyed if str(entry.fmt) in SHOWN], layers)
    _plot_updates(accumulated, updates)
    save(figure, path)


def _plot_layers(surveyed: list[Surveyed], axes: Axes) -> None:
    for entry in surveyed:
        name = str(entry.fmt)
        kept = [max(0.0, layer.sqnr_db or 0.0) for layer in entry.plain]
        axes.plot(SCALES, kept, color=COLOURS[SHOWN[name]], marker="o", markersize=4, linewidth=1.8, label=name)
    axes.axhspan(0, USABLE_DB, color="#F2F2F2", zorder=0)
    subtitle = "unscaled; grey: more noise than a tenth of the signal"
    label(axes, "Which layers a format keeps", subtitle, "scale of the layer's gradient", "SQNR (dB)")
    axes.set_yscale("linear")
    axes.set_ylim(bottom=0)
    axes.invert_xaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)


def _plot_updates(accumulated: list[Accumulated], axes: Axes) -> None:
    steps = range(UPDATES + 1)
    for index, (entry, colour) in enumerate(zip(accumulated, (COLOURS[5], COLOURS[0]), strict=True)):
        mean, spread = entry.stochastic, entry.spread
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(steps, mean, color=colour, linewidth=1.8, label=f"{entry.name}, stochastic")
        dashes = (5 * index, (5, 5))  # in each other's gaps: both stall at the same weight
        axes.plot(steps, entry.nearest, color=colour, linewidth=2.2, linestyle=dashes, label=f"{entry.name}, nearest")
    axes.plot(steps, [1 + step * UPDATE for step in steps], color=COLOURS[1], linewidth=1.0, label="exact")
    subtitle = f"a weight of 1 takes {UPDATES} updates of {UPDATE:g}; band: standard deviation"
    label(axes, "What becomes of small updates", subtitle, "updates", "weight")
    axes.set_xscale("linear")
    axes.set_yscale("linear")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
