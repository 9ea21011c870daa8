"""`describe(model)`: what every layer of a simulated model is rounded to, as a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lowp.notebook import html_table
from lowp.simulation.layers import OFF, PRODUCTS, SUMS, SimulatedLayer
from lowp.simulation.modules import LAYER

_UNKNOWN = "?"  # how many elements an output has, before the model has run


class Described(NamedTuple):
    """One role of one layer."""

    layer: str
    type: str
    role: str
    format: str
    scale: str
    elements: int | None


@dataclass(frozen=True)
class Description:
    """A table of rows. Iterate over it, print it, or `show()` it with colours where rich is installed."""

    model: str
    rows: tuple[Described, ...]

    def __iter__(self) -> Iterator[Described]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return self._title()
        lines = [Described._fields, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(Described._fields))]
        return "\n".join([self._title(), *(_aligned(line, widths) for line in lines)])

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.table import Table

        if not self.rows:
            return self._title()
        table = Table(title=self._title(), title_justify="left")
        for name in Described._fields:
            table.add_column(name, justify="right" if name == "elements" else "left")
        for cells in self._cells():
            table.add_row(*cells, style="dim" if cells[Described._fields.index("format")] == OFF else None)
        return table

    def _repr_html_(self) -> str:
        return html_table(self._title(), Described._fields, self._cells(), right=(Described._fields.index("elements"),))

    def show(self) -> None:
        """Print it."""
        try:
            from rich import print as print_table
        except ImportError:
            print_table = print
        print_table(self)

    def _title(self) -> str:
        if not self.rows:
            return f"{self.model} is not simulated: it computes as it is."
        return f"{self.model}, simulated: {len({row.layer for row in self.rows})} layers"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """What the table says: names of a layer once, and no scale for what is not rounded."""
        before = None
        for row in self.rows:
            names = ("", "") if row.layer == before else (row.layer, row.type)
            before = row.layer
            yield (*names, row.role, row.format, row.scale, _UNKNOWN if row.elements is None else f"{row.elements:,}")


def describe(model: nn.Module) -> Description:
    """The table of a model: layer, type, role, format, scale and elements of everything that could be rounded.

    Of activations, errors and sums, `elements` is the number that the last pass gave (one that was not compiled); None before.
    The scale of what is left alone, and of block formats that bring their own, is "none".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe takes an nn.Module, not {type(model).__name__}")
    found = [vars(module).get(LAYER) for module in model.modules()]
    rows = tuple(row for layer in found if layer is not None for row in _rows(layer))
    return Description(_class_name(model), rows)


def _class_name(model: nn.Module) -> str:
    return getattr(type(model), "_lowp_original", type(model)).__name__


def _rows(layer: SimulatedLayer) -> list[Described]:
    rows = [_row(layer, role) for role in layer.tensor_roles]
    if SUMS in layer.roles:
        arithmetic = OFF if layer.arithmetic is None else str(layer.arithmetic)
        rows.append(Described(layer.name, layer.kind.__name__, SUMS, arithmetic, "none", layer.elements.get("activations")))
    if layer.products is not None:
        rows.append(Described(layer.name, layer.kind.__name__, PRODUCTS, str(layer.products), "none", None))
    return rows


def _row(layer: SimulatedLayer, role: str) -> Described:
    plan = layer.plans[role]
    is_scaled = plan is not None and (plan.scale != "none" or plan.format != layer.formats[role])  # the latter: in blocks
    return Described(
        layer.name,
        layer.kind.__name__,
        role,
        layer.formats[role] or OFF,
        str(layer.scales[role]) if is_scaled else "none",
        layer.elements.get(role),
    )


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    *texts, number = zip(cells, widths, strict=True)
    return "  ".join([*(text.ljust(width) for text, width in texts), number[0].rjust(number[1])])
