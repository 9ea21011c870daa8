"""`lowp formats --plot`: how far apart a format's values are, and how wrong rounding can be, against magnitude."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.formats import AnyFormat, BlockFormat, Format
from lowp.formats.binades import positive_codes
from lowp.formats.gaps import error_steps, gaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_PLOT = ("e5m2", "e4m3fn", "posit8", "dynamic8", "int8", "fp16")
SUFFIXES = (".png", ".svg", ".pdf")
TEETH = 100  # binades in a picture up to which the teeth of a float's error can be told apart; beyond: the worst of each

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#222222", "#56B4E9", "#8C8C8C")


def plot_formats(formats: Sequence[AnyFormat], path: Path) -> None:
    """Both panels, one line a format, into a file."""
    check_suffix(path)
    numbers = [_with_gaps(entry) for entry in formats]
    if len(numbers) > len(COLOURS):
        raise ValueError(f"{len(numbers)} formats are too many for one picture; at most {len(COLOURS)} can be told apart")
    figure = empty_figure(width=11, height=5.4)
    spacing, error = figure.subplots(1, 2, sharex=True)
    teeth = max(entry.dynamic_range for entry in numbers) <= TEETH
    for index, fmt in enumerate(numbers):
        # Each line is thinner than the one before it, so that of two that coincide both can be seen.
        style = {"color": COLOURS[index], "linewidth": 2.6 - 1.4 * index / max(1, len(numbers) - 1), "label": str(fmt)}
        between = list(gaps(fmt))
        _steps(spacing, [(gap.low, gap.width) for gap in between], fmt.max, style)
        errors = error_steps(between, every_gap=teeth)
        _steps(error, errors, fmt.max, style)
        _walls(error, fmt, (errors[0][1], errors[-1][1]), COLOURS[index])
    label(spacing, "How far apart the values are", "from each value to the next", "magnitude", "gap")
    subtitle = "dotted: the ends of the range" if teeth else "worst of each binade; dotted: the ends of the range"
    label(error, "How wrong rounding to nearest can be", subtitle, "magnitude", "relative error")
    error.yaxis.set_major_formatter(_as_percent)
    handles, names = spacing.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(numbers), frameon=False)
    save(figure, path)


def _with_gaps(fmt: AnyFormat) -> Format:
    """The format, if it has neighbouring positive values that stay where they are."""
    if isinstance(fmt, BlockFormat):
        raise ValueError(f"{fmt} is a block format: its values move with each block's scale; plot its element, {fmt.element}")
    if len(positive_codes(fmt)) < 2:
        raise ValueError(f"{fmt} has a single positive value: there is no gap to plot")
    return fmt


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: pictures are {', '.join(SUFFIXES)}, not {path.suffix or 'without a suffix'}")


def _steps(axes: "Axes", heights: list[tuple[float, float]], end: float, style: dict[str, Any]) -> None:
    """A staircase of (start, height), the last step of which ends at `end`."""
    starts, values = zip(*heights, (end, heights[-1][1]), strict=True)
    axes.step(starts, values, where="post", solid_joinstyle="round", **style)


def _walls(axes: "Axes", fmt: Format, feet: tuple[float, float], colour: str) -> None:
    """The walls of the tub: below the smallest value and above the largest, nothing of the number is kept."""
    for wall, foot in zip((fmt.smallest, fmt.max), feet, strict=True):
        axes.plot([wall, wall], [foot, max(foot, 1.0)], color=colour, linewidth=1.2, linestyle=(0, (1, 1.5)))


def label(axes: "Axes", title: str, subtitle: str, x: str, y: str) -> None:
    """Logarithmic axes, a title over the left corner, a quiet grid."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.025, subtitle, transform=axes.transAxes, color="#666666", fontsize=9.5)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _as_percent(value: float, _position: object) -> str:
    return f"{100 * value:.9f}".rstrip("0").rstrip(".") + " %"


def empty_figure(width: float, height: float) -> "Figure":
    """A figure that belongs to no window system, so that it works without a screen; white, also on a dark page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=160)
