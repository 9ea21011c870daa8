"""What `lowp tour` says about its experiments. The sentences hold the numbers that were just computed."""

from rich.console import Console

from lowp.cli.fidelity import Fidelity
from lowp.cli.output import percent, table, tidy
from lowp.cli.tour_experiments import LAYER, SCALES, UPDATE, UPDATES, USABLE_DB, WEIGHTS, Accumulated, Surveyed


def print_survey(found: list[Surveyed], out: Console) -> None:
    out.print(
        "[bold]1. Gradients do not fit into 8 bits, until they are scaled[/]\n\n"
        f"{len(SCALES)} layers of {LAYER} Gaussian numbers, of scale 1, 0.1, 0.01 ... {tidy(f'{SCALES[-1]:g}')}, as\n"
        "gradients shrink on their way back through a network. Which layers stay usable\n"
        f"(noise under a tenth of the signal: {USABLE_DB:g} dB of SQNR or more), and what share of\n"
        "the numbers becomes 0 (under) or is too large (over)?\n"
    )
    result = table()
    result.add_column("\nformat", no_wrap=True)
    result.add_column("\nbits", justify="right")
    for group in ("as is", "scaled"):
        for heading in (f"{group}\nusable", "\nSQNR", "\nunder", "\nover"):
            result.add_column(heading, justify="right", no_wrap=True)
    for entry in found:
        scaled = _cells(entry.scaled) if entry.scaled else []
        result.add_row(str(entry.fmt), f"{entry.fmt.bits:g}", *_cells(entry.plain), *scaled)
    out.print(result)
    eight = [entry for entry in found if entry.fmt.bits == 8 and entry.scaled]
    best_plain = max(Surveyed.usable(entry.plain) for entry in eight)
    worst_scaled = min(Surveyed.usable(entry.scaled or []) for entry in eight)
    out.print(
        f"\nAs they are, 8 bits keep at most {best_plain} of {len(SCALES)} layers. One power of two a layer keeps\n"
        f"{worst_scaled}, for one byte a layer. Block formats (mx, nv) bring a scale with every 16 or\n"
        "32 numbers and need no other; over means there: more than the block's largest.\n"
    )


def _cells(layers: list[Fidelity]) -> list[str]:
    total = sum(layers, Fidelity())
    mean = sum(layer.sqnr_db or 0.0 for layer in layers) / len(layers)
    return [f"{Surveyed.usable(layers)}/{len(layers)}", f"{mean:.1f}", percent(total.underflow), percent(total.overflow)]


def print_accumulation(found: list[Accumulated], out: Console) -> None:
    out.print(
        "[bold]2. Small updates vanish, unless rounding is random[/]\n\n"
        f"A weight of 1 takes {UPDATES} updates of {UPDATE:g}, and each sum is rounded. Stochastic\n"
        f"rounding goes up with a probability equal to the distance covered. Shown: the\n"
        f"mean of {WEIGHTS} weights, ± their standard deviation.\n"
    )
    result = table()
    result.add_column("\nupdates", justify="right")
    result.add_column("\nexact", justify="right")
    for entry in found:
        for heading in (f"{entry.name}\nnearest", "\nstochastic"):
            result.add_column(heading, justify="right", no_wrap=True)
    for step in range(0, UPDATES + 1, UPDATES // 4):
        cells = [(f"{entry.nearest[step]:g}", f"{entry.stochastic[step]:.3f} ± {entry.spread[step]:.3f}") for entry in found]
        result.add_row(str(step), f"{1 + step * UPDATE:g}", *(cell for pair in cells for cell in pair))
    out.print(result)
    to_nearest = ", ".join(f"{entry.name} {entry.nearest[-1]:g}" for entry in found)
    stochastic = ", ".join(f"{entry.name} {entry.stochastic[-1]:.2f}" for entry in found)
    out.print(f"\nIt should reach {1 + UPDATES * UPDATE:g}. To nearest: {to_nearest}. Stochastic: {stochastic}.\n")
