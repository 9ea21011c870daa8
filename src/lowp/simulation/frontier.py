"""What a search found: the frontier of bits against loss, and the assignment on it that was asked for."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lowp.simulation.policies.fixed import PerLayer, exactly
from lowp.simulation.simulate import simulate
from lowp.simulation.simulation import Simulation

if TYPE_CHECKING:
    from os import PathLike

    from rich.table import Table

Assignment = dict[str, dict[str, str]]  # layer -> role -> format


@dataclass(frozen=True)
class Point:
    """One assignment: what it takes, and what it loses."""

    mean_bits: float  # for each number
    total_bits: float
    loss: float
    assignment: Assignment


@dataclass(frozen=True)
class Sensitivity:
    """What one unit alone adds to the loss in one format, all others being in the widest."""

    layers: tuple[str, ...]
    roles: tuple[str, ...]
    elements: int
    format: str
    added_loss: float


@dataclass(frozen=True)
class SearchResult:
    """`chosen` is the answer, `frontier` all the other ones that no assignment beats: bits ascending, loss descending."""

    chosen: Point
    frontier: tuple[Point, ...]
    sensitivity: tuple[Sensitivity, ...]
    reference_loss: float  # of the model as it is
    evaluations: int  # of all batches: what the search cost
    settings: Mapping[str, Any]  # rounding, scale and seed, as `simulate` takes them

    @property
    def assignment(self) -> Assignment:
        return self.chosen.assignment

    @property
    def policy(self) -> PerLayer:
        """The assignment as a policy. It has no scale or rounding of its own: `apply` uses those of the search."""
        return PerLayer(exactly(self.assignment))

    def apply(self, model: nn.Module) -> Simulation:
        """Simulate a model in the formats found, rounded and scaled as they were in the search."""
        return simulate(model, layers=exactly(self.assignment), **self.settings)

    def table(self) -> str:
        """The frontier and the assignment as plain text; a rich console prints the result itself in colours."""
        return "\n\n".join(_plain(headings, rows) for headings, rows in (self._frontier_rows(), self._assignment_rows()))

    __str__ = table

    def __rich__(self) -> "Table":
        from rich.table import Table

        grid = Table.grid(padding=(0, 0, 1, 0))
        for title, (headings, rows) in (("frontier", self._frontier_rows()), ("formats", self._assignment_rows())):
            table = Table(title=title, title_justify="left")
            for number, heading in enumerate(headings):
                table.add_column(heading, justify="right" if number and title == "frontier" else "left")
            for row in rows:
                table.add_row(*row, style="bold green" if row[0] == _CHOSEN else None)
            grid.add_row(table)
        return grid

    def _frontier_rows(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [
                _CHOSEN if point == self.chosen else "",
                f"{point.mean_bits:.3f}",
                f"{point.total_bits / 8:,.0f}",
                f"{point.loss:.6g}",
                f"{point.loss - self.reference_loss:+.3g}",
            ]
            for point in self.frontier
        ]
        return ["", "bits/number", "bytes", "loss", "added"], rows

    def _assignment_rows(self) -> tuple[list[str], list[list[str]]]:
        roles = list(dict.fromkeys(role for formats in self.assignment.values() for role in formats))
        return ["layer", *roles], [
            [layer, *(formats.get(role, "") for role in roles)] for layer, formats in self.assignment.items() if formats
        ]

    def plot(self, path: "str | PathLike[str]") -> None:
        """The frontier as a picture, in the format that the path's ending says; needs matplotlib."""
        try:
            figures: Any = importlib.import_module("matplotlib.figure")
        except ImportError:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from None
        figure = figures.Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.step([point.mean_bits for point in self.frontier], [point.loss for point in self.frontier], "o-", where="post")
        axes.plot([self.chosen.mean_bits], [self.chosen.loss], "s", markersize=9, label="chosen")
        axes.axhline(self.reference_loss, linestyle=":", color="gray", label="as it is")
        axes.set(xlabel="bits a number", ylabel="loss")
        axes.legend()
        figure.savefig(path)


_CHOSEN = "->"


def _plain(headings: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (headings, *rows)
    )
