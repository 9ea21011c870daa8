"""Who takes part in a step: parameters with gradients or states, gathered by group and by how they are stored.

Gathering looks at every parameter and makes what kernels need of it, so it is done once and kept. Before each step a few
cheap questions tell whether it still holds: torch lets anybody change `p.data`, a group's settings, or which parameters have
gradients, at any time and without a word.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.optim.arguments import own_name
from lowp.optim.family import Family, Member
from lowp.optim.kernels import Layout
from lowp.optim.rules import Rule
from lowp.optim.sharding import LocalParameter
from lowp.optim.storing import LONGEST_BLOCK, begin, block_width

Groups = list[dict[str, Any]]
States = dict[Tensor, dict[str, Any]]
Families = dict[int, list[Family]]  # by the place of the group


def gather(groups: Groups, states: States, layout_of: Callable[..., Layout]) -> Families:
    """All parameters that have gradients or states; states are begun where there are none."""
    found: Families = {}
    number = 0
    for place, group in enumerate(groups):
        alike: dict[Any, list[Member]] = {}
        for i, parameter in enumerate(group["params"]):
            if parameter.grad is not None or states.get(parameter):
                name = own_name(group, i)
                layout = layout_of(parameter, group, name, parameter.dtype if parameter.grad is None else parameter.grad.dtype)
                state = states.get(parameter, {})
                if not {"step", *layout.state_names} <= state.keys():
                    states[parameter] = state = begin(parameter, layout) | state
                member = _member(parameter, state, layout, number, name)
                alike.setdefault((layout, member.placement.groups, member.placement.local.device), []).append(member)
            number += 1
        found[place] = [_family(layout, members, states) for (layout, _, _), members in alike.items()]
    return found


def _member(parameter: Tensor, state: dict[str, Any], layout: Layout, number: int, name: str | None) -> Member:
    placement = LocalParameter(parameter)
    width = block_width(parameter.shape, LONGEST_BLOCK) if layout.blocked else 0
    rest = [placement.part_of(state[key]) for key in layout.state_names]
    return Member(parameter, placement, number, name, rest, width)


def _family(layout: Layout, members: list[Member], states: States) -> Family:
    """The bounds of all members lie together; each parameter's state has a view of its own."""
    names = [f"{layout.rule.states[i]}_bound" for i in layout.scaled]
    device = members[0].placement.local.device
    bounds = torch.zeros((len(names), len(members)), dtype=torch.int32, device=device)
    for column, member in enumerate(members):
        state = states[member.parameter]
        for row, name in enumerate(names):
            bounds[row, column] = state[name]
            state[name] = bounds[row, column]
    return Family(layout, members, bounds)


def still_holds(families: Families, groups: Groups, states: States, rule_of: Callable[..., Rule]) -> bool:
    """Has nothing changed since `gather`?"""
    return not (_newcomers(groups, states) or _moved(families) or _other_rules(families, groups, rule_of))


def _newcomers(groups: Groups, states: States) -> bool:
    return any(p.grad is not None and not states.get(p) for group in groups for p in group["params"])


def _moved(families: Families) -> bool:
    """Was a parameter given other memory (`p.data = ...`)?"""
    everyone = (member for alike in families.values() for each in alike for member in each.members)
    return any(m.placement.part_of(m.parameter).data_ptr() != m.placement.local.data_ptr() for m in everyone)


def _other_rules(families: Families, groups: Groups, rule_of: Callable[..., Rule]) -> bool:
    """Was something switched on or off in a group, such as momentum or decay?"""
    for place, alike in families.items():
        for each in alike:
            first = each.members[0]
            if rule_of(first.parameter, groups[place], first.name) != each.layout.rule:
                return True
    return False
