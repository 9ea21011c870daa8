"""The kernels of an optimizer's step, each over all parameters that are stored alike: measure, square, update.

Numbers of each tensor (int32; floats as their bits), by column:

    KEY      six: the key of its noise
    UNIT     what its gradient counts in: 1 / the loss scale; negative to maximize
    scales   two for each state with one scale for the tensor: what its codes count in now; the factor for what is stored next
    norms    nine: factors that bring |w| and |step| below one, how many units a square of one has; then two integer sums of
             squares and what their roots count in
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.optim.rounding import Stored, Update, numbers_of
from lowp.optim.rules import LAMBRule, Norms, Rule, SGDRule, root
from lowp.tensor.carrier import F32, bits_of_power, exponent_above
from lowp.tensor.lists.function import ListFunction
from lowp.tensor.lists.tracing import Element
from lowp.tensor.memory import storage_of
from lowp.tensor.noise import KEY_SIZE, Draw, draws

UNIT = KEY_SIZE
_NORMS = 9


@dataclass(frozen=True)
class Layout:
    """How a parameter and what belongs to it are stored; parameters of the same layout share kernels."""

    rule: Rule
    update: Update
    gradient: torch.dtype
    states: tuple[Stored, ...]

    @property
    def scaled(self) -> tuple[int, ...]:
        """The states with one scale for the tensor."""
        return tuple(i for i, state in enumerate(self.states) if state.scale == "tensor")

    @property
    def blocked(self) -> tuple[int, ...]:
        return tuple(i for i, state in enumerate(self.states) if state.scale == "block")

    @property
    def needs_largest(self) -> bool:
        """Does a norm or a scale depend on how large gradients are?"""
        return self.rule.needs_norms or bool(self.scaled)

    @property
    def measures_weights(self) -> bool:
        """Does one of them depend on how large weights are, too?"""
        return self.rule.needs_norms or (bool(self.scaled) and isinstance(self.rule, SGDRule) and self.rule.decay)

    def scale_column(self, state: int) -> int:
        return UNIT + 1 + 2 * self.scaled.index(state)

    @property
    def norm_column(self) -> int:
        return UNIT + 1 + 2 * len(self.scaled)

    @property
    def numbers(self) -> int:
        return self.norm_column + (_NORMS if self.rule.needs_norms else 0)

    @property
    def elements(self) -> tuple[Element, ...]:
        """Weight, gradient, states, Kahan's compensation, exponents of blocks."""
        found = [Element(storage_of(self.update.dtype)), Element(storage_of(self.gradient))]
        found += [Element(state.storage) for state in self.states]
        if self.update.compensated:
            found.append(Element(storage_of(self.update.dtype)))
        return (*found, *(Element(torch.int8, of_block=True) for _ in self.blocked))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the tensors that belong to a parameter, in the order of elements: states, compensation, exponents of blocks."""
        names = self.rule.states
        blocks = (f"{names[i]}_exponents" for i in self.blocked)
        return (*names, *(["compensation"] if self.update.compensated else []), *blocks)

    @property
    def lost(self) -> int:
        return 2 + len(self.states)

    def exponents(self, state: int) -> int:
        """Which element holds the exponents of a state's blocks."""
        return 2 + len(self.states) + self.update.compensated + self.blocked.index(state)

    def weight(self, elements: Sequence[Tensor]) -> Tensor:
        return numbers_of(elements[0], self.update.dtype)

    def gradient_of(self, elements: Sequence[Tensor], numbers: Tensor) -> Tensor:
        return numbers_of(elements[1], self.gradient) * _float(numbers[UNIT])

    def tables_of(self, state: int, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first = sum(len(before.tables) for before in self.states[:state])
        return tables[first : first + len(self.states[state].tables)]

    def read_states(self, elements: Sequence[Tensor], numbers: Tensor, tables: tuple[Tensor, ...]) -> list[Tensor]:
        found = []
        for i, state in enumerate(self.states):
            unit = None
            if state.scale == "tensor":
                unit = _float(numbers[self.scale_column(i)])
            elif state.scale == "block":
                unit = normal_power(elements[self.exponents(i)].to(torch.int32) - state.top)
            found.append(state.read(elements[2 + i], unit, self.tables_of(i, tables)))
        return found


def _float(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def bits_of_normal_power(exponents: Tensor) -> Tensor:
    """2^exponent, or the nearest of them that is a normal number of float32, by its bits: a float32 tensor would be one."""
    return bits_of_power(exponents.clamp(F32.min_exponent, F32.max_exponent))


def normal_power(exponents: Tensor) -> Tensor:
    return _float(bits_of_normal_power(exponents))


def _tables(layout: Layout) -> tuple:
    return tuple(table for state in layout.states for table in state.tables)


@lru_cache(maxsize=256)
def measure(layout: Layout) -> ListFunction:
    """The largest |gradient| of each tensor, and the largest |weight| where it is needed, as the bits of float32.

    A gradient that is not finite shows: NaN's bits are above infinity's, which are above all others'.
    """
    weights = layout.measures_weights

    def function(*arguments: Any) -> list[Tensor]:
        *elements, numbers, _, _ = arguments
        gradient = numbers_of(elements[1], layout.gradient) * _float(numbers[0])
        found = [gradient.abs().view(torch.int32)]
        return [*found, layout.weight(elements).abs().view(torch.int32)] if weights else found

    elements = layout.elements[:2]
    return ListFunction(function, elements, (), 1, 0, reductions=("max", "max") if weights else ("max",), aside="most")


def _step(layout: Layout, elements: Sequence[Tensor], numbers: Tensor, s: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """What the rule takes the norm of beside the weight: the gradient, or LAMB's step."""
    gradient = layout.gradient_of(elements, numbers)
    if not isinstance(layout.rule, LAMBRule):
        return gradient
    states = layout.read_states(elements, numbers, tables)
    return layout.rule.step(layout.weight(elements), gradient, states, s)[0]


@lru_cache(maxsize=256)
def measure_step(layout: Layout) -> ListFunction:
    """The largest |step| of each tensor (LAMB), as the bits of float32."""

    def function(*arguments: Any) -> list[Tensor]:
        *elements, numbers, s, tables = arguments
        return [_step(layout, elements, numbers, s, tables).abs().view(torch.int32)]

    return ListFunction(
        function, layout.elements, (), layout.numbers, layout.rule.scalar_count, _tables(layout), reductions=("max",)
    )


@lru_cache(maxsize=256)
def square(layout: Layout) -> ListFunction:
    """Sums of squares of weights and steps, exactly.

    Each number is brought below one by a power of two, squared, and counted in units so small that the sum of the whole tensor
    just fits into 63 bits. Integers have no order of additions: threads, chips and shards agree to the last bit, and nothing
    can overflow or underflow, as sums of squares in FP16 do from |x| = 256 up and 0.0002 down.
    """

    def function(*arguments: Any) -> list[Tensor]:
        *elements, numbers, s, tables = arguments
        column = layout.norm_column
        both = layout.weight(elements), _step(layout, elements, numbers, s, tables)
        units = _float(numbers[column + 2])
        small = (x * _float(numbers[column + i]) for i, x in enumerate(both))
        return [((x * x) * units).to(torch.int64) for x in small]

    return ListFunction(
        function, layout.elements, (), layout.numbers, layout.rule.scalar_count, _tables(layout), reductions=("sum", "sum")
    )


def _norm(numbers: Tensor, column: int) -> Tensor:
    """A norm from the two halves of an integer sum of squares."""
    total = numbers[column].to(torch.float32) * 2.0**31 + numbers[column + 1].to(torch.float32)
    return root(total) * _float(numbers[column + 2])


def direction(
    layout: Layout, elements: Sequence[Tensor], numbers: Tensor, s: Tensor, tables: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weight, update and new states of every element, float32."""
    weight, gradient = layout.weight(elements), layout.gradient_of(elements, numbers)
    norms = None
    if layout.rule.needs_norms:
        norms = Norms(*(_norm(numbers, layout.norm_column + 3 + 3 * i) for i in range(2)))
    states = layout.read_states(elements, numbers, tables)
    return weight, *layout.rule.direction(weight, gradient, states, s, norms)


@lru_cache(maxsize=256)
def update(layout: Layout) -> ListFunction:
    """The step itself."""
    drawing = [*([-1] if layout.update.stochastic else []), *(i for i, state in enumerate(layout.states) if state.stochastic)]

    def function(*arguments: Any) -> list[Tensor]:
        *elements, numbers, s, tables = arguments
        weight, change, new = direction(layout, elements, numbers, s, tables)
        # The weight's noise, where it has some (-1), then that of states.
        noise: dict[int, Draw] = dict(zip(drawing, draws(numbers, weight, len(drawing)) if drawing else (), strict=True))
        lost = elements[layout.lost] if layout.update.compensated else None
        written = layout.update.apply(weight, change, lost, noise.get(-1))
        codes, exponents = [], []
        for i, (state, numbers_of_state) in enumerate(zip(layout.states, new, strict=True)):
            factor = None
            if state.scale == "tensor":
                factor = _float(numbers[layout.scale_column(i) + 1])
            elif state.scale == "block":
                largest = numbers_of_state.abs().amax(-1, keepdim=True)
                exponent = exponent_above(largest.view(torch.int32)).clamp(max=127)
                factor = normal_power(state.top - exponent)
                exponents.append(exponent.to(torch.int8))
            codes.append(state.write(numbers_of_state, factor, noise.get(i), layout.tables_of(i, tables)))
        return [written[0], *codes, *written[1:], *exponents]

    writes = tuple(i for i in range(len(layout.elements)) if i != 1)
    return ListFunction(
        function, layout.elements, writes, layout.numbers, layout.rule.scalar_count, _tables(layout), words=KEY_SIZE - 1
    )
