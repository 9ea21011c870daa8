"""The parameters of a group that are stored alike, and a step over all of them.

1. Find the gradients: where they are in memory. Mostly that is where they were in the last step.
2. Measure: the largest gradient of each tensor (shards agree on it). A gradient that is not finite ends the step here.
3. Numbers: keys of noise, units, scales. LARS and LAMB measure norms.
4. Update: one kernel, everything in place.

A model has hundreds of parameters, and the host must not take longer than the device: what does not change is made once, and
what may change is looked at by functions that are mapped over lists, without a line of Python for each parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lowp.optim import kernels, scales
from lowp.optim.arguments import check_gradient
from lowp.optim.kernels import Layout
from lowp.optim.rules import LAMBRule
from lowp.optim.sharding import LocalParameter, is_sharded
from lowp.tensor.carrier import F32
from lowp.tensor.lists.function import Lists, tables_on, work_of
from lowp.tensor.noise import Domain, stream_of
from lowp.tensor.table import bits_of_number

_gradient_of = attrgetter("grad")
_kind_of = attrgetter("__class__", "dtype", "layout")  # (torch sees to it that a gradient has its parameter's shape)
_step_of = itemgetter("step")


class OtherGradientDtype(Exception):
    """A gradient's dtype has changed: parameters must be gathered anew."""


@dataclass
class Member:
    """A parameter: what is on this rank of it, its number, and its states' tensors (this rank's part) in the kernel's order."""

    parameter: Tensor
    placement: LocalParameter
    number: int
    name: str | None
    state: dict[str, Any]  # the optimizer's own
    rest: list[Tensor]  # states, compensation, exponents of blocks
    width: int  # of a block


class Family:
    """Members of one layout in one group. `bounds` has a row for each state with one scale, a column for each member."""

    def __init__(self, layout: Layout, members: list[Member], bounds: Tensor) -> None:
        self.layout = layout
        self.members = members
        self.bounds = bounds
        self.device = members[0].placement.local.device
        self.in_float32 = {layout.update.dtype, layout.gradient, *(state.dtype for state in layout.states)} == {torch.float32}
        self.parameters = [m.parameter for m in members]
        self.sharded = any(is_sharded(p) for p in self.parameters)
        self._states = [m.state for m in members]
        self._have_rows = [m.placement.local.dim() > 1 for m in members]
        names = *layout.state_names, *(f"{layout.rule.states[i]}_bound" for i in layout.scaled)
        self._tensors_of = [*map(itemgetter, names)]
        self._found = self._places()
        self._chosen: dict[tuple[int, ...], Chosen] = {}
        self._everyone = tuple(range(len(members)))

    def moved(self) -> bool:
        """Was a parameter or a state given other memory, or another order in it (`p.data = ...`, `state["exp_avg"] = ...`)?"""
        return self._places() != self._found

    def _places(self) -> tuple[list[int], list[tuple[int, ...]]] | None:
        """Where parameters and states are in memory, and how those with rows lie there; None: a state is missing."""
        parts: list[Tensor] = self.parameters
        try:
            states = chain.from_iterable([map(tensor_of, self._states) for tensor_of in self._tensors_of])
            tensors = [*parts, *states]
        except KeyError:
            return None
        if self.sharded:
            tensors = [*map(self.members[0].placement.part_of, tensors)]
            parts = tensors[: len(parts)]
        return [*map(Tensor.data_ptr, tensors)], [*map(Tensor.stride, compress(parts, self._have_rows))]

    def due(self) -> dict[int, "Chosen"]:
        """Members that have gradients, by the step that each of them takes now (mostly all of them the same)."""
        gradients = [*map(_gradient_of, self.parameters)]
        steps = [*map(_step_of, self._states)]
        if all(map(is_not, gradients, repeat(None))) and len({*steps}) == 1:
            return {steps[0] + 1: self._choose(self._everyone)}
        places: dict[int, list[int]] = {}
        for place, (gradient, step) in enumerate(zip(gradients, steps, strict=True)):
            if gradient is not None:
                places.setdefault(step + 1, []).append(place)
        return {step: self._choose(tuple(those)) for step, those in places.items()}

    def _choose(self, places: tuple[int, ...]) -> "Chosen":
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
        self.parameters = [m.parameter for m in self.members]
        self.lists: Lists | None = None  # of all that a step reads and writes; while no step is under way, without gradients
        self._sharded = family.sharded
        self._kinds = [(Tensor, self.layout.gradient, torch.strided)] * len(self.parameters)
        self._strides = [m.placement.local.stride() for m in self.members]
        self._family_bounds = family.bounds
        self._places = None if len(places) == len(family.members) else torch.tensor(places, device=self.device)
        self._units: list[float] = []
        self.cleared = False  # is there nothing of another step in what is measured?
        count = len(self.members)
        known = [
            [stream_of(Domain.OPTIMIZER, m.number) for m in self.members],
            [m.placement.offset for m in self.members],
            [scales.half_bits_for(m.placement.elements) for m in self.members],
        ]
        names = scales.Columns(self.layout).measured
        self._measured = self._zeros(len(names), count, torch.int64)
        self._rows = {name: self._measured[i : i + 1] for i, name in enumerate(names)}
        self._rows["sums"] = self._measured[-2:]
        self._rows["largest"] = self._measured[: 1 + self.layout.measures_weights]
        self.largest = self._measured[0]  # |gradient| of each member, as bits
        self.worst = torch.zeros((), dtype=torch.int64, device=self.device)  # the largest of them
        self.units = self._zeros(1, count, torch.int32)
        self.bounds = family.bounds if self._places is None else family.bounds[:, self._places]
        self.numbers = self._zeros(self.layout.numbers, count, torch.int32)
        self._no_numbers = self._zeros(0, count, torch.int32)
        work = work_of([m.placement.local.numel() for m in self.members])
        fixed = torch.tensor(known, dtype=torch.int64).to(self.device)
        self._table = Lists([[*fixed, *self._measured, self.units[0], *self.bounds, *self.numbers]], work=work)
        self._measure, self._close = kernels.measure(self.layout), scales.closing(self.layout)
        self._update = kernels.update(self.layout)

    def _zeros(self, rows: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, count), dtype=dtype, device=self.device)

    def find_gradients(self) -> None:
        """Point `lists` at them. New tensors are looked at as a whole, and one by one only if something is unusual."""
        gradients: list[Any] = [*map(_gradient_of, self.parameters)]
        usual = not self._sharded and [*map(_kind_of, gradients)] == self._kinds
        if not usual or [*map(Tensor.stride, gradients)] != self._strides:
            gradients = [self._laid_out(m) for m in self.members]
        if self.lists is None:
            rows = [[m.placement.local, gradient, *m.rest] for m, gradient in zip(self.members, gradients, strict=True)]
            widths = [max(m.width, 1) for m in self.members]
            self.lists = Lists(rows, widths if self.layout.blocked else None)
        self.lists.replace(1, gradients, [*map(Tensor.data_ptr, gradients)])

    def forget_gradients(self) -> None:
        """They belong to the user, who may free them: their addresses are enough, until the next step."""
        if self.lists is not None:
            self.lists.release(1)

    def _laid_out(self, member: Member) -> Tensor:
        """This rank's part of the gradient, laid out as the parameter is."""
        check_gradient(member.parameter)
        gradient, local = member.placement.part_of(member.parameter.grad), member.placement.local
        if gradient.dtype != self.layout.gradient:
            raise OtherGradientDtype
        return (
            gradient if gradient.stride() == local.stride() else torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
        )

    def _agree(self, name: str) -> None:
        """The ranks that hold other shards have measured something, too."""
        operation = dist.ReduceOp.SUM if name == "sums" else dist.ReduceOp.MAX
        for group in self.members[0].placement.groups:
            dist.all_reduce(self._rows[name], operation, group=group)

    @property
    def agrees(self) -> bool:
        """Do other ranks have parts of these gradients?"""
        return bool(self.members[0].placement.groups)

    def count_in(self, units: list[float]) -> None:
        """The units that gradients count in."""
        if units != self._units:
            self._units = units
            bits = [bits_of_number(float(np.float32(unit)), F32) for unit in units]
            self.units[0].copy_(torch.tensor(bits, dtype=torch.int32))

    def measure(self, worst: Tensor | None = None) -> None:
        """Find the largest gradients (and weights), in the units that gradients count in. Nothing is changed yet.

        The largest of all goes to `worst` if it is larger than what is there, or to the own one.
        """
        assert self.lists is not None
        clear, self.cleared = not self.cleared, False
        self._measure(self.lists, self.units, [], into=self._rows["largest"], aside=worst, clear=clear)
        if worst is None:
            self._agree("largest")
            torch.amax(self.largest, 0, out=self.worst)

    def number(self, constants: Sequence[int], scalars: list[float], skip: Tensor | None, told: Tensor | None = None) -> None:
        """Make `numbers` and the new bounds. What `skip` holds is written to `told`."""
        assert self.lists is not None
        layout = self.layout
        if self._places is not None:
            self.bounds.copy_(self._family_bounds[:, self._places])
        if layout.rule.needs_norms:
            scales.opening(layout)(self._table, self._no_numbers, constants)
            if isinstance(layout.rule, LAMBRule):
                kernels.measure_step(layout)(self.lists, self.numbers, scalars, into=self._rows["step"])
                self._agree("step")
                scales.with_step(layout)(self._table, self._no_numbers, constants)
            kernels.square(layout)(self.lists, self.numbers, scalars, into=self._rows["sums"])
            self._agree("sums")
        self._close(self._table, self._no_numbers, constants, skip, aside=told)
        self.cleared = True

    def update(self, scalars: list[float], skip: Tensor | None) -> None:
        assert self.lists is not None
        if self._places is not None:
            self._family_bounds[:, self._places] = self.bounds
        self._update(self.lists, self.numbers, scalars, skip)


@dataclass
class Step:
    """One step of some members: measured first, then done."""

    chosen: Chosen
    constants: list[int]  # of the kernel that makes numbers
    scalars: list[float]  # of the update
    units: list[float]

    def measure(self, worst: Tensor | None = None, check: bool = True) -> None:
        """Without `check`, only where a norm or a scale needs it."""
        self.chosen.count_in(self.units)
        if check or self.chosen.layout.needs_largest:
            self.chosen.measure(worst)

    def number(self, skip: Tensor | None, told: Tensor | None = None) -> None:
        self.chosen.number(self.constants, self.scalars, skip, told)

    def update(self, skip: Tensor | None) -> None:
        """Unless something was not finite."""
        self.chosen.update(self.scalars, skip)
        for member in self.chosen.members:
            member.state["step"] += 1

    def undo_count(self) -> None:
        """The step did not happen."""
        self.chosen.cleared = False
        for member in self.chosen.members:
            member.state["step"] -= 1

    def intended(self) -> Tensor:
        """What the step would add to the (only) member's weights, float32, on whole tensors. Nothing is changed."""
        chosen, layout = self.chosen, self.chosen.layout
        self.measure()
        before = chosen.bounds.clone()
        chosen.number(self.constants, self.scalars, chosen.worst)
        chosen.bounds.copy_(before)
        assert chosen.lists is not None
        member = chosen.members[0]
        update = kernels.update(layout)
        elements = update.shaped(chosen.lists.rows[0], member.width)
        tables = tables_on(update, chosen.device)
        scalars = torch.tensor(self.scalars, dtype=torch.float32).to(chosen.device, non_blocking=True)
        _, change, _ = kernels.direction(layout, elements, chosen.numbers[:, 0], scalars, tables)
        chosen.forget_gradients()
        return in_shape_of(change, member.placement.local)


def in_shape_of(flat: Tensor, like: Tensor) -> Tensor:
    """Numbers in the order of `like`'s memory as a tensor of its shape."""
    return torch.as_strided(flat.contiguous(), like.shape, like.stride()) if like.numel() else flat.view(like.shape)
