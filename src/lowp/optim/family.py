"""The parameters of a group that are stored alike, and a step over all of them.

1. Measure: the largest gradient of each tensor (shards agree on it). A gradient that is not finite ends the step here.
2. Numbers: keys of noise, units, scales. LARS and LAMB measure norms.
3. Update: one kernel, everything in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lowp.optim import kernels, scales
from lowp.optim.kernels import Layout
from lowp.optim.rules import LAMBRule
from lowp.optim.sharding import LocalParameter
from lowp.tensor.carrier import F32
from lowp.tensor.lists.function import Lists, tables_on
from lowp.tensor.noise import Domain, stream_of
from lowp.tensor.table import bits_of_number


@dataclass
class Member:
    """A parameter: what is on this rank of it, its number, and its states' tensors (this rank's part) in the kernel's order."""

    parameter: Tensor
    placement: LocalParameter
    number: int
    name: str | None
    rest: list[Tensor]  # states, compensation, exponents of blocks
    width: int  # of a block


class Family:
    """Members of one layout in one group. `bounds` has a row for each state with one scale, a column for each member."""

    def __init__(self, layout: Layout, members: list[Member], bounds: Tensor) -> None:
        self.layout = layout
        self.members = members
        self.bounds = bounds
        self.device = members[0].placement.local.device
        self._chosen: dict[tuple[int, ...], Chosen] = {}

    def choose(self, places: tuple[int, ...]) -> "Chosen":
        """Some of the members, made ready for kernels; kept, since it is mostly all of them."""
        if places not in self._chosen:
            self._chosen[places] = Chosen(self, places)
        return self._chosen[places]


class Chosen:
    """The members of a family that take part in a step, and the memory that its kernels share."""

    def __init__(self, family: Family, places: tuple[int, ...]) -> None:
        self.layout = family.layout
        self.device = family.device
        self.members = [family.members[place] for place in places]
        self._family_bounds = family.bounds
        self._places = None if len(places) == len(family.members) else torch.tensor(places, device=self.device)
        self._lists: tuple[Lists, Lists] | None = None
        self._units: list[float] = []
        columns = scales.Columns(self.layout)
        count = len(self.members)
        self._columns = {name: self._zeros(1, count, torch.int64)[0] for name in columns.names[:-1]}
        self.units = self._zeros(1, count, torch.int32)
        self.bounds = family.bounds if self._places is None else family.bounds[:, self._places]
        self.numbers = self._zeros(self.layout.numbers, count, torch.int32)
        self._fill("streams", [stream_of(Domain.OPTIMIZER, m.number) for m in self.members])
        self._fill("firsts", [m.placement.offset for m in self.members])
        self._fill("half_bits", [scales.half_bits_for(m.placement.elements) for m in self.members])
        work = sum(m.placement.local.numel() for m in self.members)
        self.table = Lists([[*self._columns.values(), self.units[0], *self.bounds, *self.numbers]], work=work)

    def _zeros(self, rows: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, count), dtype=dtype, device=self.device)

    def _fill(self, name: str, values: Sequence[int]) -> None:
        self._columns[name].copy_(torch.tensor(values, dtype=torch.int64))

    def know(self, names: Sequence[str], measured: Tensor) -> None:
        """Take over what was measured, agreed upon with the ranks that hold other shards."""
        operation = dist.ReduceOp.SUM if names[0].startswith("sum") else dist.ReduceOp.MAX
        for group in self.members[0].placement.groups:
            dist.all_reduce(measured, operation, group=group)
        for name, row in zip(names, measured, strict=True):
            self._columns[name].copy_(row)

    @property
    def largest(self) -> Tensor:
        """The largest |gradient| of each member, as bits."""
        return self._columns["gradient"]

    def lists(self) -> tuple[Lists, Lists]:
        """For `measure` (weight and gradient), and for the rest."""
        gradients = [self._gradient(m) for m in self.members]
        if self._lists is None:
            rows = [[m.placement.local, gradient, *m.rest] for m, gradient in zip(self.members, gradients, strict=True)]
            widths = [max(m.width, 1) for m in self.members]
            self._lists = Lists([row[:2] for row in rows]), Lists(rows, widths if self.layout.blocked else None)
        else:
            pointers = [gradient.data_ptr() for gradient in gradients]
            for lists in self._lists:
                lists.replace(1, gradients, pointers)
        return self._lists

    def _gradient(self, member: Member) -> Tensor:
        """This rank's part of the gradient, laid out as the parameter is."""
        gradient, local = member.parameter.grad, member.placement.local
        if type(gradient) is not Tensor:
            gradient = member.placement.part_of(gradient)
        return (
            gradient if gradient.stride() == local.stride() else torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
        )

    def count_in(self, units: list[float]) -> None:
        """What gradients count in."""
        if units != self._units:
            self._units = units
            bits = [bits_of_number(float(np.float32(unit)), F32) for unit in units]
            self.units[0].copy_(torch.tensor(bits, dtype=torch.int32))

    def fetch_bounds(self) -> None:
        if self._places is not None:
            self.bounds.copy_(self._family_bounds[:, self._places])

    def keep_bounds(self) -> None:
        if self._places is not None:
            self._family_bounds[:, self._places] = self.bounds


@dataclass
class Step:
    """One step of some members: measured first, then done."""

    chosen: Chosen
    call: Tensor
    scalars: list[float]
    units: list[float]
    lists: Lists = field(init=False)  # of all that the step reads and writes; `measure` finds where the gradients are

    def measure(self) -> Tensor:
        """The largest gradient of all (bits; not below infinity's if something is not finite). Nothing is changed yet."""
        chosen, layout = self.chosen, self.chosen.layout
        chosen.count_in(self.units)
        small, self.lists = chosen.lists()
        measured = kernels.measure(layout)(small, chosen.units, [])
        chosen.know(scales.Columns(layout).measured[: measured.shape[0]], measured)
        return chosen.largest.amax()

    def _number(self, worst: Tensor) -> None:
        """Make `chosen.numbers` and the new bounds."""
        chosen, layout = self.chosen, self.chosen.layout
        chosen.fetch_bounds()
        if layout.rule.needs_norms:
            scales.opening(layout)(chosen.table, self.call, [])
            if isinstance(layout.rule, LAMBRule):
                chosen.know(["step"], kernels.measure_step(layout)(self.lists, chosen.numbers, self.scalars))
                scales.with_step(layout)(chosen.table, self.call, [])
            chosen.know(["sum_weight", "sum_step"], kernels.square(layout)(self.lists, chosen.numbers, self.scalars))
        scales.closing(layout)(chosen.table, self.call, [], worst)

    def do(self, worst: Tensor) -> None:
        """The update, unless something was not finite."""
        self._number(worst)
        self.chosen.keep_bounds()
        kernels.update(self.chosen.layout)(self.lists, self.chosen.numbers, self.scalars, worst)

    def intended(self) -> Tensor:
        """What the step would add to the (only) member's weights, float32, on whole tensors. Nothing is changed."""
        worst, chosen, layout = self.measure(), self.chosen, self.chosen.layout
        before = chosen.bounds.clone()
        self._number(worst)
        chosen.bounds.copy_(before)
        member = chosen.members[0]
        update = kernels.update(layout)
        elements = update.shaped(self.lists.rows[0], member.width)
        tables = tables_on(update, chosen.device)
        scalars = torch.tensor(self.scalars, dtype=torch.float32).to(chosen.device, non_blocking=True)
        _, change, _ = kernels.direction(layout, elements, chosen.numbers[:, 0], scalars, tables)
        return in_shape_of(change, member.placement.local)


def in_shape_of(flat: Tensor, like: Tensor) -> Tensor:
    """Numbers in the order of `like`'s memory as a tensor of its shape."""
    return torch.as_strided(flat.contiguous(), like.shape, like.stride()) if like.numel() else flat.view(like.shape)
