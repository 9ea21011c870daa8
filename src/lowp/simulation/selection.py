"""Which layers an entry of `layers=` is for. Its key is a pattern (names.py has the grammar), a class, subclasses included, or
a predicate, which is asked about every module. Keys are looked up once, when formats are set: what is kept are names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowp.names import covers, matches_nothing, written
from lowp.simulation.layers import ALL_ROLES, PRODUCTS, ROLES, SUMS, Rules, Selector, SimulatedLayer, checked_roles
from lowp.simulation.scales import Scale, checked_scales

Modules = Callable[[], Mapping[str, nn.Module]]  # all modules of the model, by name


@dataclass(frozen=True)
class Rule:
    """One entry: the layers that it is for, and what it says about them."""

    layers: frozenset[str]
    formats: Mapping[str, str | None]
    scales: Mapping[str, Scale]

    def state(self) -> dict[str, Any]:
        """As plain data."""
        scales = {role: str(scale) for role, scale in self.scales.items()}
        return {"layers": sorted(self.layers), "formats": dict(self.formats), "scales": scales}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], layers: Sequence[SimulatedLayer]) -> "Rule":
        unknown = set(state["layers"]) - {layer.name for layer in layers}
        if unknown:
            raise ValueError(f"the saved simulation has formats for {min(unknown)!r}, which this model does not have")
        formats = checked_roles(state["formats"], "the saved simulation")
        return cls(frozenset(state["layers"]), formats, checked_scales(state["scales"], ROLES, "the saved simulation"))


def selected(rules: Rules | None, layers: Sequence[SimulatedLayer], modules: Modules) -> list[Rule]:
    """The entries of `layers=`, in order."""
    found = []
    for key, entry in (rules or {}).items():
        if not isinstance(entry, Mapping):
            raise TypeError(f"layers[{written(key)}] is a mapping of roles to formats, not {entry!r}")
        names = frozenset(layer.name for layer in _matching(key, layers, modules))
        if not names:
            raise ValueError(f"layers: {matches_nothing(key, [layer.name for layer in layers])}")
        where = f"layers[{written(key)}]"
        scales = checked_scales(entry["scale"], ROLES, f"{where}['scale']") if "scale" in entry else {}
        formats = checked_roles({role: name for role, name in entry.items() if role != "scale"}, where)
        if formats.get(SUMS) is not None and not any(SUMS in layer.roles for layer in layers if layer.name in names):
            raise ValueError(f"{where}: nothing there multiplies matrices, so that there are no sums to accumulate")
        if formats.get(PRODUCTS) is not None and not any(PRODUCTS in layer.roles for layer in layers if layer.name in names):
            raise ValueError(f"{where}: nothing there multiplies matrices, so that there are no operands to round")
        found.append(Rule(names, formats, scales))
    return found


def ends(layers: Sequence[SimulatedLayer]) -> Rule:
    """The entry that leaves the first and the last layer with a matrix as they are."""
    with_matrix = [layer.name for layer in layers if layer.has_matrix]
    return Rule(frozenset({*with_matrix[:1], *with_matrix[-1:]}), dict.fromkeys(ALL_ROLES), {})


def _matching(key: Selector, layers: Sequence[SimulatedLayer], modules: Modules) -> list[SimulatedLayer]:
    if isinstance(key, type):
        return [layer for layer in layers if any(issubclass(kind, key) for _, kind in layer.lineage)]
    if not isinstance(key, str):
        if not callable(key):
            raise TypeError(f"layers: a key is a name, a pattern, a class or a predicate, not {key!r}")
        matched = {name for name, module in modules().items() if key(name, module)}
        return [layer for layer in layers if any(name in matched for name, _ in layer.lineage)]
    named = [layer for layer in layers if any(_is_called(name, kind, key) for name, kind in layer.lineage)]
    if named or key not in ("first", "last"):
        return named
    with_matrix = [layer for layer in layers if layer.has_matrix]
    return with_matrix[:1] if key == "first" else with_matrix[-1:]


def _is_called(name: str, kind: type, pattern: str) -> bool:
    return covers(pattern, name or kind.__name__) or kind.__name__ == pattern
