"""The tables of `lowp predict`."""

from typing import TYPE_CHECKING

from lowp.cli.output import console, literal, table, tidy
from lowp.predict.prediction import PredictedStep, Prediction
from lowp.predict.quantities import rate_text, seconds_text
from lowp.training.units import UNKNOWN, bytes_text, count_text

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 96  # columns of terminal from which encoding and decoding have room each for itself
LEGEND = (
    "Times in ms. compute + coding (encode and decode) + exposed + idle (slower ranks) is the step; hidden is what travels "
    "while somebody computes."
)


def print_prediction(found: Prediction) -> None:
    out = console()
    first, cluster = found.steps[0], found.cluster
    links = ", ".join(f"{level.name} {rate_text(level.bandwidth)}" for level in cluster.levels) or "no links"
    out.print(
        f"[bold cyan]{literal(first.model)}[/]  {found.workload.parameters:,} parameters, {first.batch:,} "
        f"{found.workload.unit}s a rank, {seconds_text(first.times.compute)} of computation a step"
    )
    out.print(f"[bold cyan]{literal(cluster.name)}[/]  {literal(f'{cluster.device.name}; {links}')}\n")
    for wire in found.wires:
        steps = [step for step in found.steps if step.wire == wire]
        out.print(f"[bold]{literal(wire)}[/]  {literal(steps[-1].reduction)}")
        out.print(_by_ranks(steps, found.workload.unit, out.width >= WIDE))
        out.print()
    last = [step for step in found.steps if step.ranks == found.steps[-1].ranks]
    if len(last) > 1:
        out.print(_side_by_side(last))
        out.print()
    most = max(found.steps, key=lambda step: step.memory.total)
    whose = f" (most: {literal(most.wire)} on {most.ranks:,})" if len(found.steps) > 1 else ""
    out.print(_memory(most, whose, cluster.device.memory))
    out.print(f"[dim]{LEGEND}[/]")


def _by_ranks(steps: list[PredictedStep], unit: str, wide: bool) -> "Table":
    result = table()
    coding = ("encode", "decode") if wide else ("coding",)
    for heading in ("ranks", f"{unit}s/s", "speed-up", "eff.", "step", "compute", *coding, "exposed", "idle", "hidden"):
        result.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        times = step.times
        coded = (times.encode, times.decode) if wide else (times.encode + times.decode,)
        result.add_row(
            f"{step.ranks}",
            count_text(step.throughput) if step.throughput < 999_999.5 else f"{step.throughput / 1e6:.4g} M",
            _times(step.speedup),
            _percent(step.efficiency),
            *(_milliseconds(each) for each in (step.step, times.compute, *coded, times.exposed, times.idle, times.hidden)),
        )
    return result


def _side_by_side(steps: list[PredictedStep]) -> "Table":
    """All wires on the most ranks, beside the first of them."""
    result = table()
    result.add_column(f"on {steps[0].ranks:,} ranks", overflow="fold")
    for heading in ("sent", "messages", "encode", "decode", "step", f"x {steps[0].wire}"):
        result.add_column(literal(heading), justify="right", no_wrap=True)
    for step in steps:
        result.add_row(
            literal(step.wire),
            bytes_text(step.bytes_sent),
            count_text(step.messages),
            *(_milliseconds(each) for each in (step.times.encode, step.times.decode, step.step)),
            f"{steps[0].step / step.step:.2f}",
        )
    return result


def _memory(step: PredictedStep, whose: str, room: float | None) -> str:
    needs = step.memory
    roles = {"weights": needs.weights, "gradients": needs.gradients, "state": needs.state, "messages": needs.wire}
    shown = ", ".join(f"{role} {bytes_text(size)}" for role, size in roles.items())
    activations = UNKNOWN if needs.activations is None else bytes_text(needs.activations)
    answer = "" if room is None else f" of {bytes_text(room)}: {'it fits' if step.fits else '[red]it does not fit[/]'}"
    return f"Memory of a rank{whose}: {bytes_text(needs.total)}{answer} ({shown}, activations {activations})."


def _milliseconds(seconds: float) -> str:
    """Below ten seconds, at most five characters."""
    value = 1e3 * seconds
    digits = next((digits for below, digits in ((0.0995, 3), (9.995, 2), (99.95, 1)) if value < below), 0)
    return "0" if value < 5e-3 else f"{value:,.{digits}f}"


def _times(speedup: float) -> str:
    """Four digits, and no exponent where there is room for none."""
    return tidy(f"{speedup:.1e}") if speedup < 1e-3 else f"{speedup:,.0f}" if speedup >= 999.95 else f"{speedup:.4g}"


def _percent(fraction: float) -> str:
    return "<.01 %" if 0 < fraction < 1e-4 else f"{100 * fraction:.3g} %" if fraction >= 0.01 else f"{100 * fraction:.2f} %"
