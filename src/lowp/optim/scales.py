"""The numbers that every tensor brings to a step: keys, units, scales of states, norms. In integers throughout, in one kernel.

**Scales.** A state's scale must be known before the state is computed. It is a weighted average, so a bound on what it averages
bounds it: with M a bound on the state and G one on what comes in,

    decay M + (1 - decay) G  <=  max(M, G),      and  <=  M (1 + decay) / 2  where G <= M / 2.

The bound is kept as its logarithm, in 65536ths of a power of two: it follows a falling gradient at the state's own pace, is
within a few powers of two of the truth, needs no look at the state, and, being integers, is the same on every chip and on every
shard.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.compat import without_dispatch_modes
from lowp.optim.kernels import UNIT, Layout, bits_of_normal_power
from lowp.optim.rules import Average, LAMBRule
from lowp.tensor.carrier import exponent_above
from lowp.tensor.lists.function import ListFunction
from lowp.tensor.lists.tracing import Element
from lowp.tensor.noise import Domain, key_columns, words_of

FRACTION = 16  # bits of a logarithm after the point
UNKNOWN = -200 << FRACTION  # the bound of a state that is zero
_NEVER = -1 << 12  # an exponent that no number has


def exponent_of(number: float) -> int:
    """The least integer e with number <= 2^e."""
    if number == 0:
        return _NEVER
    mantissa, exponent = math.frexp(number)
    return exponent - (mantissa == 0.5)


def constants(averages: tuple[Average, ...], seed: int, step: int) -> list[int]:
    """A call's own integers: the words of seed and step, then four for each state.

    All are below 2^24, so float32 holds them: kernels take them as scalars, and nothing is copied to a device.
    """
    found = [int(word) for number in (seed, step) for word in words_of(number)]
    for average in averages:
        falls = math.floor(-math.log2((1 + average.decay) / 2) * (1 << FRACTION))
        norm = _NEVER if average.norm_gain is None else exponent_of(average.norm_gain)
        found += [falls, exponent_of(average.gain), exponent_of(average.weight_decay), norm]
    return found


def _length_in_bits(number: Tensor) -> Tensor:
    """Of integers of up to 63 bits: the least e with number < 2^e."""
    length = torch.zeros_like(number)
    for shift in (32, 16, 8, 4, 2, 1):
        more = (number >> shift) > 0
        length = torch.where(more, length + shift, length)
        number = torch.where(more, number >> shift, number)
    return length + (number > 0).to(torch.int64)


def stored_shift(bound: Tensor, top: int) -> Tensor:
    """By which power of two a state with this bound is multiplied."""
    above = (bound + ((1 << FRACTION) - 1)) >> FRACTION
    return (top - above).clamp(-126, 126)


@dataclass(frozen=True)
class Columns:
    """Where everything is among the arguments of the kernel that makes `numbers`: one element a tensor."""

    layout: Layout

    @property
    def measured(self) -> tuple[str, ...]:
        found = ("gradient", "weight") if self.layout.measures_weights else ("gradient",)
        if not self.layout.rule.needs_norms:
            return found
        return (*found, *(["step"] if self.measures_step else []), "sum_weight", "sum_step")

    @property
    def measures_step(self) -> bool:
        """LAMB takes the norm of its step; LARS that of the gradient, which is measured anyway."""
        return isinstance(self.layout.rule, LAMBRule)

    @property
    def step(self) -> str:
        return "step" if self.measures_step else "gradient"

    @property
    def names(self) -> tuple[str, ...]:
        """int64: streams, firsts, half_bits and what was measured; then int32: units, bounds, numbers."""
        return ("streams", "firsts", "half_bits", *self.measured, "units")

    @property
    def elements(self) -> tuple[Element, ...]:
        wide = [Element(torch.int64)] * (len(self.names) - 1)
        return (*wide, *[Element(torch.int32)] * (1 + len(self.layout.scaled) + self.layout.numbers))

    def bound(self, i: int) -> int:
        return len(self.names) + i

    def number(self, column: int) -> int:
        return len(self.names) + len(self.layout.scaled) + column


def _function(layout: Layout, write: dict[str, bool]) -> ListFunction:
    """The kernel that makes some of the numbers.

    - `open`: keys, units, present scales, and what brings weights below one.
    - `step`: what brings the step (LARS: the gradient) below one.
    - `close`: new bounds and scales, norms.
    """
    columns = Columns(layout)
    tops = [layout.states[i].top for i in layout.scaled]
    count = 8 + 4 * len(layout.states)
    targets: list[int] = []

    def function(*arguments: Any) -> list[Tensor]:
        *elements, _, s, _ = arguments
        call = [s[i].to(torch.int64) for i in range(count)]
        have = dict(zip(columns.names, elements, strict=False))
        bounds = [elements[columns.bound(i)] for i in range(len(tops))]
        results: dict[int, Tensor] = {}
        if write["open"]:
            results |= _opened(have, call, bounds, tops, columns)
        if write["step"]:
            results[columns.number(layout.norm_column + 1)] = bits_of_normal_power(-exponent_above(have[columns.step]))
        if write["close"]:
            results |= _closed(have, call, bounds, tops, columns)
            for name in ("gradient", "weight"):  # the next step's maxima begin at zero
                if name in columns.names:
                    results[columns.names.index(name)] = torch.zeros_like(have[name])
        targets[:] = list(results)
        return list(results.values())

    with without_dispatch_modes():  # what it writes is found out once, and does not concern an audit
        example = [torch.ones(1, 4, dtype=e.dtype) for e in columns.elements]
        function(*example, torch.ones(0), torch.ones(count), ())
    return ListFunction(function, columns.elements, tuple(targets), 0, count, aside="skip" if write["close"] else "")


def _opened(
    have: dict[str, Tensor], call: list[Tensor], bounds: list[Tensor], tops: list[int], columns: Columns
) -> dict[int, Tensor]:
    layout, number = columns.layout, columns.number
    keys = key_columns(Domain.OPTIMIZER, call[:4], call[4:8], have["streams"], have["firsts"])
    found = {number(i): key for i, key in enumerate(keys)}
    found[number(UNIT)] = have["units"]
    for bound, top, state in zip(bounds, tops, layout.scaled, strict=True):
        found[number(layout.scale_column(state))] = bits_of_normal_power(-stored_shift(bound, top))
    if layout.rule.needs_norms:
        column = layout.norm_column
        found[number(column)] = bits_of_normal_power(-exponent_above(have["weight"]))
        found[number(column + 2)] = bits_of_normal_power(2 * have["half_bits"])
    return found


def _closed(
    have: dict[str, Tensor], call: list[Tensor], bounds: list[Tensor], tops: list[int], columns: Columns
) -> dict[int, Tensor]:
    layout, number = columns.layout, columns.number
    found: dict[int, Tensor] = {}
    for i, (bound, top, state) in enumerate(zip(bounds, tops, layout.scaled, strict=True)):
        falls, *_ = own = call[8 + 4 * state : 12 + 4 * state]
        incoming = _incoming(have, own, layout, layout.states[state].positive) << FRACTION
        old = bound.to(torch.int64)
        fallen = torch.maximum(old - falls, incoming)
        new = torch.where(incoming <= old - (1 << FRACTION), fallen, torch.maximum(old, incoming))
        found[columns.bound(i)] = new = new.clamp(UNKNOWN, 1 << 30).to(torch.int32)
        found[number(layout.scale_column(state) + 1)] = bits_of_normal_power(stored_shift(new, top))
    if layout.rule.needs_norms:
        for i, (name, total) in enumerate((("weight", have["sum_weight"]), (columns.step, have["sum_step"]))):
            column = layout.norm_column + 3 + 3 * i
            found[number(column)] = (total >> 31).to(torch.int32)
            found[number(column + 1)] = (total & 0x7FFFFFFF).to(torch.int32)
            found[number(column + 2)] = bits_of_normal_power(exponent_above(have[name]) - have["half_bits"])
    return found


def _incoming(have: dict[str, Tensor], own: list[Tensor], layout: Layout, squared: bool) -> Tensor:
    """The exponent of a bound on what a state takes in."""
    _, gain, decay, norm_gain = own
    together = exponent_above(have["gradient"])
    if "weight" in have:  # two numbers are at most twice the larger one
        decays = (decay > _NEVER).to(torch.int64)
        together = torch.maximum(together, exponent_above(have["weight"]) + decay) + decays
    incoming = gain + together * (2 if squared else 1)
    if not layout.rule.needs_norms:
        return incoming
    root = (_length_in_bits(have["sum_weight"]) + 1 >> 1) + exponent_above(have["weight"]) - have["half_bits"]
    known = (have["sum_weight"] > 0) & (have["sum_step"] > 0) & (norm_gain > _NEVER)
    return torch.where(known, norm_gain + root, incoming)


@lru_cache(maxsize=256)
def opening(layout: Layout) -> ListFunction:
    """Before norms are measured."""
    return _function(layout, {"open": True, "step": not Columns(layout).measures_step, "close": False})


@lru_cache(maxsize=256)
def with_step(layout: Layout) -> ListFunction:
    """When LAMB's largest step is known."""
    return _function(layout, {"open": False, "step": True, "close": False})


@lru_cache(maxsize=256)
def closing(layout: Layout) -> ListFunction:
    """When everything is."""
    return _function(layout, {"open": not layout.rule.needs_norms, "step": False, "close": True})


def half_bits_for(elements: int) -> int:
    """Half the number of bits that a square below one may have, so that `elements` of them add up to less than 2^62."""
    return (62 - max(elements - 1, 1).bit_length()) // 2
