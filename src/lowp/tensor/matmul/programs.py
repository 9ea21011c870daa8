"""The steps as lists of statements, traced once, for whoever prints them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowp.tensor.lists.tracing import Element, Program, fused, trace
from lowp.tensor.matmul.steps import Steps
from lowp.tensor.noise import KEY_SIZE


class Programs:
    """A program's elements are what joins the sum (two operands, an addend or nothing), the state, and the uniforms."""

    def __init__(self, steps: Steps, tables: tuple[Tensor, ...], device: torch.device) -> None:
        self.steps, self.tables = steps, tables
        self._device = device
        self._key_size = KEY_SIZE if steps.arithmetic.stochastic else 0

    @property
    def product_keys(self) -> int:
        """Numbers that a product takes of the keys."""
        return self.steps.roundings_of_product * self._key_size

    @property
    def sum_keys(self) -> int:
        return self.steps.roundings_of_sum * self._key_size

    @cached_property
    def multiply_add(self) -> Program:
        return self._traced(self.steps.multiply_add, [self.steps.operand_dtype] * 2, self.product_keys)

    @cached_property
    def add(self) -> Program:
        return self._traced(self.steps.add, [self.steps.carrier.dtype], self.sum_keys)

    @cached_property
    def add_exactly(self) -> Program:
        return self._traced(self.steps.add_exactly, [self.steps.carrier.dtype], self.sum_keys)

    @cached_property
    def finish(self) -> Program:
        return self._traced(self.steps.finish, [], self.steps.roundings_at_end * self._key_size)

    @property
    def functions(self) -> dict[str, tuple[Program, int]]:
        """By their names in a text; and how many numbers of each join the sum."""
        return {
            "multiply_add": (self.multiply_add, 2),
            "add": (self.add, 1),
            "add_exactly": (self.add_exactly, 1),
            "finish": (self.finish, 0),
        }

    def _traced(self, function: Callable[..., Any], joining: list[torch.dtype], numbers: int) -> Program:
        held = [self.steps.carrier.dtype] * (self.steps.states + self.steps.uniforms)
        program = trace(function, [Element(dtype) for dtype in joining + held], numbers, 0, self.tables, self._device)
        return fused(program) if self.steps.lanes.fused else program
