"""`lowp predict --plot`: throughput, speed-up and efficiency against ranks, and where the time of a step goes."""

from pathlib import Path
from typing import TYPE_CHECKING

from lowp.cli.format_plot import COLOURS, empty_figure, label, save
from lowp.predict.prediction import PredictedStep, Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = (  # of a step: its name, and its colour
    ("compute", "#BBBBBB"),
    ("encode", COLOURS[4]),
    ("exposed", COLOURS[1]),
    ("decode", COLOURS[6]),
    ("idle", "#EEEEEE"),
)

MOST_MARKS = 7  # on an axis


def plot_prediction(found: Prediction, path: Path) -> None:
    if len(found.wires) > len(COLOURS):
        raise ValueError(f"{len(found.wires)} wires are too many for one picture; at most {len(COLOURS)} can be told apart")
    figure = empty_figure(width=11, height=8.4)
    (throughput, speedup), (efficiency, parts) = figure.subplots(2, 2)
    ranks = sorted({step.ranks for step in found.steps})
    alone = found.steps[0].batch / found.steps[0].times.compute
    throughput.plot(ranks, [alone * count for count in ranks], color="#999999", linewidth=1, linestyle=(0, (4, 3)))
    speedup.plot(ranks, ranks, color="#999999", linewidth=1, linestyle=(0, (4, 3)))
    for index, wire in enumerate(found.wires):
        steps = sorted((step for step in found.steps if step.wire == wire), key=lambda step: step.ranks)
        at = [step.ranks for step in steps]
        # Each line is thinner than the one before it, so that of two that coincide both can be seen.
        width = 3.2 - 2.0 * index / max(1, len(found.wires) - 1)
        style = {"color": COLOURS[index], "linewidth": width, "marker": "o", "markersize": 3.5}
        throughput.plot(at, [step.throughput for step in steps], label=wire, **style)
        speedup.plot(at, [step.speedup for step in steps], **style)
        efficiency.plot(at, [100 * step.efficiency for step in steps], **style)
    unit = f"{found.workload.unit}s/s"
    _label(throughput, "Throughput", "dashed: as many times that of one rank", unit)
    _label(speedup, "Speed-up", "over one rank; dashed: as many times as there are ranks", "times")
    speedup.set_xscale("linear")
    speedup.set_yscale("linear")
    _label(efficiency, "Efficiency", "of all ranks together", "%")
    efficiency.set_yscale("linear")
    efficiency.set_ylim(0, 104)
    for axes in (throughput, efficiency):  # marks at the ranks that were asked for, or at every second or third of many
        axes.set_xticks(ranks[:: -(-len(ranks) // MOST_MARKS)])
    _bars(parts, [step for step in found.steps if step.ranks == ranks[-1]])
    handles, names = throughput.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)), frameon=False)
    figure.suptitle(f"{found.workload.name} on {found.cluster.name}, predicted", x=0.01, ha="left", fontsize=13)
    save(figure, path)


def _label(axes: "Axes", title: str, subtitle: str, unit: str) -> None:
    label(axes, title, subtitle, "ranks", unit)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _bars(axes: "Axes", steps: list[PredictedStep]) -> None:
    """A bar for each wire, from compute to idle; what is hidden is beside it."""
    places = list(range(len(steps)))[::-1]
    left = [0.0] * len(steps)
    for name, colour in PARTS:
        lengths = [1e3 * getattr(step.times, name) for step in steps]
        axes.barh(places, lengths, left=left, height=0.62, color=colour, label=name, edgecolor="white", linewidth=0.6)
        left = [begin + length for begin, length in zip(left, lengths, strict=True)]
    hidden = [1e3 * step.times.hidden for step in steps]
    starts = [max(0.0, 1e3 * step.times.compute - length) for step, length in zip(steps, hidden, strict=True)]
    axes.barh(
        [place - 0.4 for place in places], hidden, left=starts, height=0.12, color=PARTS[2][1], alpha=0.45, label="hidden"
    )
    many = "s" if steps[0].ranks > 1 else ""
    label(axes, f"Where the time goes on {steps[0].ranks:,} rank{many}", "a step; thin: what travels meanwhile", "ms", "")
    axes.set_xscale("linear")
    axes.set_yscale("linear")
    axes.set_yticks(places, [step.wire for step in steps])
    axes.grid(False, axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=6, frameon=False, fontsize=8.5, handlelength=1.0,
                columnspacing=1.0)  # fmt: skip
