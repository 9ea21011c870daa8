"""Who takes part in a step: parameters with gradients or states, gathered by group and by how they are stored.

Gathering looks at every parameter and makes what kernels need of it, so it is done once and kept. Before each step a few
cheap questions tell whether it still holds: torch lets anybody change `p.data`, a group's settings, or which parameters have
gradients, at any time and without a word.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lowp.optim.arguments import own_name
from lowp.optim.family import Family, Member
from lowp.optim.kernels import Layout
from lowp.optim.sharding import LocalParameter, NoisePlace
from lowp.optim.storing import LONGEST_BLOCK, begin, block_width

# What of a group decides how its parameters are stored; and what decides rules and roundings, alike for all of a family.
_STORING = "update", "state", "state_scale", "state_rounding"
_UPDATING = "betas", "momentum", "dampening", "weight_decay", "nesterov", "clip"

Groups = list[dict[str, Any]]
States = dict[Tensor, dict[str, Any]]


@dataclass
class Families:
    """Of each group, by its place; and what they were gathered from."""

    by_group: dict[int, list[Family]]
    params: list[list[Tensor]]
    outside: list[Tensor]  # had neither gradients nor states
    states: list[dict[str, Any]]  # all of the optimizer's
    wishes: list[tuple[Any, Any]]  # of each group, when it was looked at last

    def still_hold(self, groups: Groups, states: States, layout_of: Callable[..., Layout]) -> bool:
        """Has nothing changed since `gather`?"""
        return (
            len(groups) == len(self.params)
            and all(_are_same(group["params"], known) for group, known in zip(groups, self.params, strict=True))
            and all(p.grad is None for p in self.outside)
            and _are_same([*states.values()], self.states)
            and not any(family.moved() for family in self.all())
            and not self._other_layouts(groups, layout_of)
        )

    def all(self) -> Iterator[Family]:
        return chain.from_iterable(self.by_group.values())

    def _other_layouts(self, groups: Groups, layout_of: Callable[..., Layout]) -> bool:
        """Was something set in a group that decides how parameters are stored or rounded, such as momentum or betas? (Schedules
        set these in every step.)"""
        for place, alike in self.by_group.items():
            group, known = groups[place], self.wishes[place]
            wishes = _wishes(group)
            if wishes == known:
                continue
            for family in alike:
                members = family.members if wishes[0] != known[0] else family.members[:1]
                if any(layout_of(m.parameter, group, m.name, family.layout.gradient) != family.layout for m in members):
                    return True
            self.wishes[place] = wishes
        return False


def _wishes(group: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Of storing and of updating, as they are now: lists and dicts may be changed in place."""

    def of(keys: tuple[str, ...]) -> list[Any]:
        return [copy(wish) if isinstance(wish, (list, dict)) else wish for wish in map(group.get, keys)]

    return of(_STORING), of(_UPDATING)


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """The same objects, in the same order?"""
    return len(some) == len(others) and all(map(is_, some, others))


def gather(
    groups: Groups, states: States, layout_of: Callable[..., Layout], noise_places: Mapping[Tensor, NoisePlace]
) -> Families:
    """All parameters that have gradients or states; states are begun where there are none. What is not in `noise_places` draws
    by its own number here."""
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
                member = _member(parameter, state, layout, noise_places.get(parameter, NoisePlace(number)), name)
                alike.setdefault((layout, member.placement.groups, member.placement.local.device), []).append(member)
            else:
                outside.append(parameter)
            number += 1
        found[place] = [_family(layout, members) for (layout, _, _), members in alike.items()]
    params, wishes = [[*group["params"]] for group in groups], [*map(_wishes, groups)]
    return Families(found, params, outside, [*states.values()], wishes)


def _member(parameter: Tensor, state: dict[str, Any], layout: Layout, noise: NoisePlace, name: str | None) -> Member:
    placement = LocalParameter(parameter, noise.first)
    width = block_width(parameter.shape, LONGEST_BLOCK) if layout.blocked else 0
    _fit(parameter, placement, state, layout, name)
    rest = [placement.part_of(state[key]) for key in layout.state_names]
    return Member(parameter, placement, noise.number, name, state, rest, width)


def _fit(parameter: Tensor, placement: LocalParameter, state: dict[str, Any], layout: Layout, name: str | None) -> None:
    """Kernels go through memory: a state must be of the layout's dtype, and lie in memory as its parameter does now."""
    local, dtypes = placement.local, [stored.dtype for stored in layout.states]
    names = layout.state_names[: len(dtypes) + layout.update.compensated]
    for i, (key, dtype) in enumerate(zip(names, [*dtypes, local.dtype], strict=False)):
        part = placement.part_of(state[key])
        if part.dtype != dtype:
            raise ValueError(f"{key} of {name or 'a parameter'} is {part.dtype}: it cannot become {dtype} during a run")
        if part.stride() != local.stride():
            if i in layout.blocked:
                raise ValueError(
                    f"{name or 'a parameter'} lies in memory in another order than {key}, whose blocks have scales: "
                    "convert the model before its first step"
                )
            state[key] = placement.like(torch.empty_like(local, dtype=part.dtype).copy_(part), parameter.shape)


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
