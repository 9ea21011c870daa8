"""Who takes part in a step: parameters with gradients or states, gathered by group and by how they are stored.

Gathering looks at every parameter and makes what kernels need of it, so it is done once and kept. Before each step a few
cheap questions tell whether it still holds: torch lets anybody change `p.data`, a group's settings, or which parameters have
gradients, at any time and without a word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
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


@dataclass
class Families:
    """Of each group, by its place; and what they were gathered from."""

    by_group: dict[int, list[Family]]
    params: list[list[Tensor]]
    outside: list[Tensor]  # had neither gradients nor states
    states: list[dict[str, Any]]  # all of the optimizer's

    def still_hold(self, groups: Groups, states: States, rule_of: Callable[..., Rule]) -> bool:
        """Has nothing changed since `gather`?"""
        return (
            len(groups) == len(self.params)
            and all(_are_same(group["params"], known) for group, known in zip(groups, self.params, strict=True))
            and all(p.grad is None for p in self.outside)
            and _are_same([*states.values()], self.states)
            and not any(family.moved() for family in self.all())
            and not self._other_rules(groups, rule_of)
        )

    def all(self) -> Iterator[Family]:
        return chain.from_iterable(self.by_group.values())

    def _other_rules(self, groups: Groups, rule_of: Callable[..., Rule]) -> bool:
        """Was something switched on or off in a group, such as momentum or decay?"""
        for place, alike in self.by_group.items():
            for each in alike:
                first = each.members[0]
                if rule_of(first.parameter, groups[place], first.name) != each.layout.rule:
                    return True
        return False


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """The same objects, in the same order?"""
    return len(some) == len(others) and all(map(is_, some, others))


def gather(groups: Groups, states: States, layout_of: Callable[..., Layout]) -> Families:
    """All parameters that have gradients or states; states are begun where there are none."""
    found: dict[int, list[Family]] = {}
    outside: list[Tensor] = []
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
            else:
                outside.append(parameter)
            number += 1
        found[place] = [_family(layout, members) for (layout, _, _), members in alike.items()]
    return Families(found, [[*group["params"]] for group in groups], outside, [*states.values()])


def _member(parameter: Tensor, state: dict[str, Any], layout: Layout, number: int, name: str | None) -> Member:
    placement = LocalParameter(parameter)
    width = block_width(parameter.shape, LONGEST_BLOCK) if layout.blocked else 0
    rest = [placement.part_of(state[key]) for key in layout.state_names]
    return Member(parameter, placement, number, name, state, rest, width)


def _family(layout: Layout, members: list[Member]) -> Family:
    """The bounds of all members lie together; each parameter's state has a view of its own."""
    names = [f"{layout.rule.states[i]}_bound" for i in layout.scaled]
    device = members[0].placement.local.device
    bounds = torch.zeros((len(names), len(members)), dtype=torch.int32, device=device)
    for column, member in enumerate(members):
        for row, name in enumerate(names):
            bounds[row, column] = member.state[name]
            member.state[name] = bounds[row, column]
    return Family(layout, members, bounds)
