"""In what formats, and under what scales, the states of a parameter are kept: decided, begun, decoded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.formats.floats import FP32
from lowp.optim import kernels, scales
from lowp.optim.arguments import update_of, with_rate
from lowp.optim.family import Member, in_shape_of
from lowp.optim.kernels import Layout
from lowp.optim.rounding import Stored, Update
from lowp.optim.rules import Average, Rule
from lowp.optim.sharding import LocalParameter
from lowp.tensor.carrier import F32, FORMAT_OF_DTYPE, carrier_for, exponent_below
from lowp.tensor.lists.function import tables_on
from lowp.tensor.memory import in_large_pages, is_dense

LONGEST_BLOCK = 256
ORDER = "memory_order"  # of a parameter whose states have scales for blocks
_SHORTEST_BLOCK = 32
LONGEST_ROW = 4096  # of one block, where no divisor will do (cpp.LONGEST_BLOCK)
_SMALLEST = 4096  # elements of a parameter that is worth narrow states
_SLOW = 16  # an average that moves by less than so many units in the last place is rounded stochastically


def layout_for(parameter: Tensor, group: dict[str, Any], rule: Rule, roots: tuple[str, ...], gradient: torch.dtype) -> Layout:
    """How a parameter is stored, by its group's wishes."""
    asked = group["state"]
    if isinstance(asked, Mapping):
        unknown = asked.keys() - set(rule.states)
        if unknown:
            raise ValueError(f"state= names {', '.join(sorted(unknown))}; this optimizer has {', '.join(rule.states)}")
    wishes = [asked.get(name) if isinstance(asked, Mapping) else asked for name in rule.states]
    averages = rule.averages(with_rate(group))
    states = (
        _stored(parameter, group, wish, name, name in roots, average)
        for wish, name, average in zip(wishes, rule.states, averages, strict=True)
    )
    return Layout(rule, Update(update_of(group, parameter.dtype), parameter.dtype), gradient, tuple(states))


def _stored(parameter: Tensor, group: dict[str, Any], wish: Any, name: str, root: bool, average: Average) -> Stored:
    own = FORMAT_OF_DTYPE[parameter.dtype]
    fmt = own if wish is None else parse_format(wish)
    scale = group["state_scale"] or ("block" if fmt.bits < 16 else "tensor")
    if scale not in ("tensor", "block"):
        raise ValueError(f"unknown state_scale={scale!r}; it is 'tensor' or 'block'")
    stored = _checked(fmt, _rounding(fmt, group, average, parameter.dtype), scale, root, name)
    if stored.scale == "block" and block_width(parameter.shape, LONGEST_BLOCK) == 0:
        if fmt.bits < 16 and group["state_scale"] is None:  # too small to save anything: as precise as the weights
            return _checked(own, _rounding(own, group, average, parameter.dtype), "tensor", root, name)
        return replace(stored, scale="tensor")
    return stored


def _rounding(fmt: AnyFormat, group: dict[str, Any], average: Average, weights: torch.dtype) -> str:
    asked = group["state_rounding"]
    if asked not in (None, "nearest", "stochastic"):
        raise ValueError(f"unknown state_rounding={asked!r}; it is 'nearest' or 'stochastic'")
    if asked is not None:
        return asked
    half_a_unit = 2.0 ** -(getattr(fmt, "mantissa_bits", 0) + 1)
    slow = 1.0 - average.decay < _SLOW * half_a_unit
    return "stochastic" if slow and update_of(group, weights) != "nearest" else "nearest"


def _checked(format: AnyFormat, rounding: str, scale: str, positive: bool, name: str) -> Stored:
    """A `Stored`, or a clear error for what cannot hold a state."""
    if isinstance(format, BlockFormat):
        raise ValueError(f"state format {format}: blocks are made here; give the element format and state_scale='block'")
    if not format.signed:
        raise ValueError(f"state format {format} has no sign, and {name} needs one")
    if format.bits < 8:
        raise ValueError(f"state format {format} is too narrow: {name} needs at least 8 bits")
    if format.bits > 16 and format != FP32:
        raise ValueError(f"state format {format} has {format.bits} bits: states are kept in up to 16, or in fp32")
    if carrier_for(format, torch.float32) is not F32:
        raise ValueError(f"state format {format} reaches beyond float32, in which updates are computed")
    range_of = exponent_below(format.max) - exponent_below(format.smallest)
    if positive and range_of < 12:
        raise ValueError(
            f"state format {format} is too narrow: it spans {range_of} powers of two, and {name}, which holds squares, needs 12"
        )
    return Stored(format, rounding if format != FP32 else "nearest", "none" if format == FP32 else scale, positive)


def block_width(shape: torch.Size, longest: int) -> int:
    """The length of blocks of one scale: the largest divisor of a row (what is under the first dimension) up to `longest`.

    Blocks do not cross rows, so that a parameter sharded by rows has the same blocks as the whole one. Rows without such a
    divisor are one block. 0: too small to be worth it (vectors; and what is short has one scale for the tensor).
    """
    if len(shape) < 2:
        return 0
    row = shape[1:].numel()
    if row < _SHORTEST_BLOCK or shape.numel() < _SMALLEST:
        return 0
    divisor = next(width for width in range(min(longest, row), 0, -1) if row % width == 0)
    if divisor >= _SHORTEST_BLOCK:
        return divisor
    return row if row <= LONGEST_ROW else 0


def begin(parameter: Tensor, layout: Layout) -> dict[str, Any]:
    """A parameter's states before its first step."""
    placement = LocalParameter(parameter)
    local = placement.local
    if not is_dense(local):
        raise ValueError(f"a parameter of shape {tuple(local.shape)} and strides {local.stride()} is not dense")
    state: dict[str, Any] = {"step": 0}
    for name, stored in zip(layout.rule.states, layout.states, strict=True):
        state[name] = placement.like(_zeros_like(local, stored.dtype), parameter.shape)
        if stored.scale == "tensor":
            state[f"{name}_bound"] = torch.tensor(scales.UNKNOWN, dtype=torch.int32, device=local.device)
        elif stored.scale == "block":
            per_row = parameter.shape[1:].numel() // block_width(parameter.shape, LONGEST_BLOCK)
            rows = torch.full((local.shape[0], per_row), -126, dtype=torch.int8, device=local.device)
            state[f"{name}_exponents"] = placement.like(rows, torch.Size((parameter.shape[0], per_row)))
    if layout.blocked:
        state[ORDER] = _order_in_memory(local)
    if layout.update.compensated:
        state["compensation"] = placement.like(_zeros_like(local, local.dtype), parameter.shape)
    return state


def _order_in_memory(local: Tensor) -> int:
    """Which dimensions lie how, as a number of two digits each: blocks with a scale follow each other in memory. (A state holds
    numbers and tensors, which every checkpoint can.)"""
    longer = [d for d in range(local.dim()) if local.shape[d] > 1]
    return int("0" + "".join(f"{d + 1:02}" for d in sorted(longer, key=local.stride, reverse=True)))


def _zeros_like(local: Tensor, dtype: torch.dtype) -> Tensor:
    return in_large_pages(torch.empty_like(local, dtype=dtype)).zero_()


def decoded(member: Member, layout: Layout, bounds: Tensor) -> dict[str, Tensor]:
    """A member's states as numbers (float32), read as a step reads them. `bounds` are its own."""
    local = member.placement.local
    update = kernels.update(layout)
    no_gradient = torch.empty(0, dtype=layout.gradient, device=local.device)
    elements = update.shaped([local, no_gradient, *member.rest], member.width)
    numbers = torch.zeros(layout.numbers, dtype=torch.int32, device=local.device)
    for i, bound in zip(layout.scaled, bounds, strict=True):
        numbers[layout.scale_column(i)] = kernels.bits_of_normal_power(-scales.stored_shift(bound, layout.states[i].top))
    states = layout.read_states(elements, numbers, tables_on(update, local.device))
    return {name: in_shape_of(state, local) for name, state in zip(layout.rule.states, states, strict=True)}
