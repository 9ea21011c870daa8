"""Formats that are chosen once: `Uniform` for whole roles, `PerLayer` for some layers."""

import glob
from collections.abc import Mapping
from typing import Any

from torch import nn

from lowp.simulation.layers import OFF, ROLES, FormatName, Rules, Selector
from lowp.simulation.policies.policy import Policy, checked_settings
from lowp.simulation.simulation import Simulation

_PROBE = "e5m2"  # any format that is not fp32 shows where an entry has an effect


class Uniform(Policy):
    """One format for each role that is named; the others are left as they are. None or "fp32" switches a role off.

    What else `Simulation.set` takes (`scale`, ...) can be given too.
    """

    def __init__(self, **settings: Any) -> None:
        if not settings:
            raise ValueError(f"Uniform names a format for at least one of {', '.join(ROLES)}")
        self.settings = checked_settings(settings, "Uniform")

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        there = {row.role for row in simulation.formats()}
        for role in ROLES:
            if role in self.settings and role not in there:
                raise ValueError(f"Uniform({role}=...) matches nothing: {type(model).__name__} has no {role} to round")
        simulation.set(**self.settings)


class PerLayer(Policy):
    """Formats of some layers, `{pattern: {role: format}}` as in `simulate(layers=...)`; `default` is for all the others.

    `default` is a format for every role, or what `Uniform` takes as a mapping: `{role: format}`. Without it, what is not named
    is left as it is.
    """

    def __init__(self, layers: Rules, default: FormatName | Mapping[str, Any] = None) -> None:
        if not layers:
            raise ValueError("PerLayer needs an entry: {pattern: {role: format}}")
        named = default if isinstance(default, Mapping) else dict.fromkeys(ROLES if default is not None else (), default)
        self.layers: Rules = {pattern: dict(formats) for pattern, formats in layers.items()}
        self.default = checked_settings(named, "default")

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        before = simulation.state_dict()
        try:
            for pattern, formats in self.layers.items():
                self._check_has_effect(simulation, pattern, formats)
        finally:
            simulation.load_state_dict(before)
        simulation.set(**self.default, layers=self.layers)

    def _check_has_effect(self, simulation: Simulation, pattern: Selector, settings: Mapping[str, Any]) -> None:
        """Not even a match is enough: no ReLU has weights."""
        roles = [role for role in settings if role in ROLES]
        off: dict[str, Any] = dict.fromkeys(ROLES)
        simulation.set(**off, layers={pattern: dict.fromkeys(roles, _PROBE)})
        if roles and all(row.format == OFF for row in simulation.formats()):
            raise ValueError(f"PerLayer: {pattern!r} matches nothing that has {' or '.join(roles)}")


def exactly(assignment: Mapping[str, Mapping[str, FormatName]]) -> Rules:
    """Rules for an assignment, `{layer: {role: format}}`, of all layers in order of registration.

    A rule is for everything inside a module too, and the first match counts: so modules come before those around them. Names
    are taken literally, whatever shell patterns they would make.
    """
    return {glob.escape(name): dict(assignment[name]) for name in reversed(list(assignment))}
