"""quantize, encode and decode of block formats as descriptions of kernels: what is computed, in stages.

A stage is a traced function of stored bits: of a tensor (`tensor_scale_of`), of each block (`block_scale_of`, `unit_of`) or of
each element (`element_of`, `value_of`). The loops around them are printed in C++ (lists/blocks.py) or in Triton
(lists/triton_blocks.py). Two kinds have more stages, for elements that `element_of` is in doubt about: stochastic rounding
(`settled`), and quotients in float32 on a GPU (`exact_scale_of`, `exact_element_of`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowp.tensor import block_draws, block_quotients, block_steps
from lowp.tensor.block_programs import BlockProgram
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.core import code_storage
from lowp.tensor.lists.tracing import Element, Program, shortcut, trace
from lowp.tensor.noise import KEY_SIZE


@dataclass(frozen=True, eq=False)
class BlockOperation:
    """One kernel: "quantize", "encode" or "decode" by a program, of numbers of `dtype`; are codes of elements packed, and is
    rounding stochastic?"""

    kind: str
    program: BlockProgram
    dtype: torch.dtype
    packed: bool = False
    stochastic: bool = False

    @property
    def storage(self) -> torch.dtype:
        return CARRIERS[self.dtype].storage

    @property
    def element_storage(self) -> torch.dtype:
        return code_storage(self.program.fmt.element)

    @property
    def scale_storage(self) -> torch.dtype:
        return code_storage(self.program.fmt.scale)

    @property
    def by_quotients(self) -> bool:
        """On a GPU: are blocks computed by block_quotients.py, and those with a doubt again?"""
        return self.kind != "decode" and not self.stochastic and block_quotients.suits(self.program)

    def stages(self, device: torch.device, on_gpu: bool) -> dict[str, Program]:
        """The functions, traced on a device, for C++ or for a GPU."""

        def stage(function: Callable[..., Sequence[Tensor]], *dtypes: torch.dtype, keys: int = 0) -> Program:
            def call(*arguments: Tensor) -> Sequence[Tensor]:
                return function(*arguments[: len(dtypes) + (keys > 0)])  # the key behind the others

            return trace(call, [Element(dtype) for dtype in dtypes], keys, 0, [], device)

        whole = [torch.float32] * self.program.fmt.tensor_scale
        # Numbers in units that are powers of two take fewer operations as floats, unless codes are made of them.
        narrow = self.dtype == torch.float16 or (self.dtype == torch.bfloat16 and self.kind == "decode")
        in_floats = self.program.fmt.power_of_two_scale and not narrow and self.kind != "encode"
        by_steps = not on_gpu and block_steps.suits(self.program.fmt) and not in_floats
        rounds_once = by_steps and self.kind == "decode" and self.dtype == torch.float32 and bool(whole)
        by_products = rounds_once and self.program.exact_in_float32
        if self.stochastic:
            return self._stochastic_stages(stage, whole, by_steps and not self.program.fmt.power_of_two_scale)
        carry, element, value = (
            (self._steps, self._element_by_steps, self._value_by_steps)
            if by_steps
            else (self._units, self._element_of, self._value_of)
        )

        def block_scale_of(*arguments: Tensor) -> list[Tensor]:
            marked, poisoned, code = self._scale_of(*arguments)
            return [marked, poisoned, *carry(code, *arguments[2:])]

        def unit_of(code: Tensor, *whole: Tensor) -> list[Tensor]:
            if by_products:
                return [self.program.scale_value(code.to(torch.int32)), *whole]
            return carry(code.to(torch.int32), *whole)

        if self.kind == "decode":
            value = self._value_by_products if by_products else value
            of_blocks = stage(unit_of, self.scale_storage, *whole)
            return {
                "unit_of": of_blocks,
                "value_of": stage(value, self.element_storage, *(v.dtype for v in of_blocks.results)),
            }
        of_blocks = stage(block_scale_of, torch.int32, torch.int32, *whole)
        found = {
            "block_scale_of": of_blocks,
            "element_of": stage(element, self.storage, *(v.dtype for v in of_blocks.results[2:])),
        }
        if on_gpu and self.by_quotients:
            found = self._quotient_stages(stage, found)
        if self.program.fmt.tensor_scale:
            found["tensor_scale_of"] = stage(self._tensor_scale_of, torch.int32)
        return found

    def _quotient_stages(self, stage: Callable[..., Program], exact: dict[str, Program]) -> dict[str, Program]:
        """What blocks carry: which of them are in doubt, and what their elements need."""
        program = self.program

        def block_scale_of(finite: Tensor, largest: Tensor, whole: Tensor) -> list[Tensor]:
            code, *carried = block_quotients.scale(program, self._as_float32(finite), whole)
            return [*self._marked(code, largest), *carried]

        def element_of(stored: Tensor, own: Tensor, inverse: Tensor, whole: Tensor) -> list[Tensor]:
            x = stored.view(self.dtype)
            if self.kind == "quantize":
                value, unsure = block_quotients.rounded(program, x, own, inverse, whole)
                return [value.view(self.storage), unsure]
            code, unsure = block_quotients.code(program, x, inverse)
            return [code.to(self.element_storage), unsure]

        floats = [torch.float32] * 3
        return {
            "block_scale_of": stage(block_scale_of, torch.int32, torch.int32, torch.float32),
            "element_of": stage(element_of, self.storage, *floats),
            "exact_scale_of": exact["block_scale_of"],
            "exact_element_of": exact["element_of"],
        }

    def _stochastic_stages(self, stage: Callable[..., Program], whole: list[torch.dtype], by_steps: bool) -> dict[str, Program]:
        """The code of the block's scale is carried first: for those that are in doubt."""
        program, few = self.program, self.kind == "quantize" and by_steps
        units = int(self.kind == "quantize" and not few)

        def block_scale_of(*arguments: Tensor) -> list[Tensor]:
            marked, poisoned, code = self._scale_of(*arguments)
            carried = [program.unit(code, *arguments[2:])] if units else []
            if few:
                carried = block_steps.multiples(program.fmt, program.scale_value(code), arguments[2:], self.dtype)
            return [marked, poisoned, code, *carried, *block_draws.inverse(program, code, *arguments[2:])]

        def element_of(stored: Tensor, *more: Tensor) -> list[Tensor]:
            *carried, key = more
            x, inverses = stored.view(self.dtype), 1 if program.fmt.power_of_two_scale else 2
            element, unsure = block_draws.drawn(program, x, key, *carried[len(carried) - inverses :])
            if few:
                result = block_steps.value_of(program, x, element, carried[: len(carried) - inverses]).view(self.storage)
            elif self.kind == "quantize":
                result = program.value_of(x, element, carried[0]).view(self.storage)
            else:
                result = program.code_of(x, element).to(self.element_storage)
            return [result, unsure]

        def settled(stored: Tensor, code: Tensor, *more: Tensor) -> list[Tensor]:
            *own, key = more
            return [block_draws.settled(program, self.kind, stored.view(self.dtype), code, own, key)]

        of_blocks = stage(block_scale_of, torch.int32, torch.int32, *whole)
        found = {
            "block_scale_of": of_blocks,
            "element_of": stage(element_of, self.storage, *(v.dtype for v in of_blocks.results[3:]), keys=KEY_SIZE),
            "settled": stage(settled, self.storage, torch.int32, *whole, keys=KEY_SIZE),
        }
        if whole:
            found["tensor_scale_of"] = stage(self._tensor_scale_of, torch.int32)
        return found

    def _as_float32(self, magnitude: Tensor) -> Tensor:
        """Magnitudes whose bits in `dtype` are given in int32."""
        return CARRIERS[self.dtype].store(magnitude).view(self.dtype).to(torch.float32)

    def _tensor_scale_of(self, largest: Tensor) -> list[Tensor]:
        return [self.program.tensor_scale(self._as_float32(largest))]

    def _scale_of(self, finite: Tensor, largest: Tensor, *whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stored code of the scale, whether the block is all NaN, and the code as if it were not, from a block's largest finite
        magnitude and its largest magnitude of all."""
        program, size = self.program, self._as_float32(finite)
        if self.lowest_whole is None:
            code = program.scale(size, *whole)
        else:  # quotients in float64, of which C++ is slow to make vectors, for those that float32 leaves in doubt
            code = shortcut(
                lambda: program.scale_about(size, *whole)[0],
                lambda: program.scale(size, *whole),
                lambda: program.scale_about(size, *whole)[1],
                finite,
            )
        return *self._marked(code, largest), code

    def _marked(self, code: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The codes that are stored of blocks' scales, and which blocks are all NaN."""
        poisoned = torch.zeros_like(code, dtype=torch.bool)
        if self.program.can_poison:
            poisoned = self.program.is_poisoned(self._as_float32(largest).view(torch.int32))
        return self.program.poisoned_code(code, poisoned).to(self.scale_storage), poisoned

    # What blocks hand to their elements: the unit and its inverse, or where few elements exist, all steps between them.

    def _units(self, code: Tensor, *whole: Tensor) -> list[Tensor]:
        unit = self.program.unit(code, *whole)
        return [unit] if self.kind == "decode" else [unit, self.program.inverse(code, *whole)]

    def _element_of(self, stored: Tensor, unit: Tensor, inverse: Tensor) -> list[Tensor]:
        x = stored.view(self.dtype)
        if self.kind == "quantize":
            return [self.program.rounded(x, unit, inverse).view(self.storage)]
        return [self.program.code(x, inverse).to(self.element_storage)]

    def _value_of(self, code: Tensor, unit: Tensor) -> list[Tensor]:
        return [self.program.value(code.to(torch.int32), unit, self.dtype).view(self.storage)]

    def _value_by_products(self, code: Tensor, scale: Tensor, whole: Tensor) -> list[Tensor]:
        return [self.program.value(code.to(torch.int32), scale, self.dtype, whole).view(self.storage)]

    def _steps(self, code: Tensor, *whole: Tensor) -> list[Tensor]:
        fmt, scale = self.program.fmt, self.program.scale_value(code)
        if self.kind == "decode":
            return block_steps.foreign_multiples(fmt, scale, whole, self.dtype)
        multiples = block_steps.multiples(fmt, scale, whole, self.dtype) if self.kind == "quantize" else []
        return [*block_steps.steps(fmt, scale, whole, self.dtype), *multiples]

    def _element_by_steps(self, stored: Tensor, *carried: Tensor) -> list[Tensor]:
        x = stored.view(self.dtype)
        if self.kind == "encode":
            return [block_steps.code(self.program, x, carried).to(self.element_storage)]
        half = len(carried) // 2
        return [block_steps.rounded(self.program, x, carried[:half], carried[half:]).view(self.storage)]

    def _value_by_steps(self, code: Tensor, *multiples: Tensor) -> list[Tensor]:
        return [block_steps.value(self.program, code.to(self.storage), multiples, self.dtype).view(self.storage)]

    @property
    def lowest_whole(self) -> float | None:
        """On a CPU: the least scale of a tensor that the kernel is exact with; None: any."""
        fmt = self.program.fmt
        rounds_once = self.kind == "decode" and self.dtype == torch.float32
        limited = fmt.tensor_scale and block_steps.suits(fmt) and not rounds_once
        return block_steps.lowest_whole(fmt) if limited else None


@lru_cache(maxsize=1024)
def block_operation(
    kind: str, program: BlockProgram, dtype: torch.dtype, packed: bool = False, stochastic: bool = False
) -> BlockOperation:
    """The same object for the same arguments, by which its kernel is found."""
    return BlockOperation(kind, program, dtype, packed, stochastic)
