"""Optimizers' kernels, printed for CUDA and run by Triton's interpreter: the bits of plain operations.

Left out are a chip's own conversions, which the interpreter does not have: tests/gpu/test_optim_cuda.py has these. Assembly is
interpreted too (tests/assembly.py).
Weights are float16: the interpreter truncates where it should round to bfloat16.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))


from interpreter import needs_triton, run

CASES = [("AdamW", "kahan", None), ("AdamW", "stochastic", "e4m3fn"), ("SGD", "kahan", "dynamic8")]
SHAPES = [(9, 512), (33,), (40, 128), (4, 1152), (1,), (5, 1000)]  # blocks of 256, 128, 192 and 250; vectors
CHUNK, STEPS = 512, 3  # small, so that there are several chunks, of several steps, the last of them not full
taken = set()  # numbers of steps, and what was in assembly


class Interpreted:
    """What `_TritonListKernel` does, on a CPU."""

    def __init__(self, what, device):
        from lowp.tensor import backend
        from lowp.tensor.lists import triton
        from lowp.tensor.lists.function import tables_on
        from lowp.tensor.lists.tracing import trace

        self._what, self._tables = what, list(tables_on(what, device))
        with patch.dict(backend.PRINTED, cpu=backend.TRITON):
            program = trace(what.function, what.elements, what.numbers, what.scalars, self._tables, device)
        self._places = list(program.scalars)
        with patch.object(triton, "_look_up", lambda s: None), patch.object(triton, "expression", without_assembly):
            text = triton.source(program, what.elements, what.writes, what.reductions, len(self._tables), what.aside)
        # The interpreter leaves Python's numbers as they are.
        head = "    chunk = tl.program_id(0)\n"
        text = text.replace(
            head, head + "".join(f"    {v.name} = tl.full([], {v.name}, tl.float32)\n" for v in program.scalars.values())
        )
        self._run = triton.build("from assembly import assembly\n" + text)

    def __call__(self, lists, numbers, scalars, skip, reduced):
        from lowp.tensor.lists.function import LIMIT

        nothing, aside = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
        arrays = [torch.from_numpy(array) for array in lists.arrays]
        shared = [float(scalars[place]) for place in self._places]
        for chunks in lists.cut_for_cuda(self._what.of_blocks, bool(self._what.writes)):
            taken.add(chunks.steps)
            self._run[(len(chunks.tensors),)](
                *arrays, numbers, lists.tensors, lists.columns, *shared, *self._tables,
                reduced if self._what.reductions else nothing, nothing if skip is None else skip, aside, LIMIT,
                torch.from_numpy(chunks.tensors.copy()), torch.from_numpy(chunks.starts.copy()),
                SIZE=chunks.size, ROWS=chunks.rows, STEPS=chunks.steps, ALIGNED=lists.aligned,
            )  # fmt: skip
        if self._what.aside == "most":
            assert int(aside) == int(reduced[0].max())
        elif self._what.aside == "skip":
            assert int(aside) == (0 if skip is None else int(skip))


def without_assembly(s):
    from lowp.tensor.grid_words import stochastic_rank_in_assembly
    from lowp.tensor.lists import triton
    from lowp.tensor.noise import philox_in_assembly

    if s.operation.startswith(("philox", "stochastic_rank")):
        taken.add(s.operation.split()[0])
        is_rank, keys = "rank" in s.operation, len(s.arguments) - 1
        text = stochastic_rank_in_assembly(s.operation) if is_rank else philox_in_assembly(s.operation, keys)
        return f'assembly("{text}", {", ".join(argument.name for argument in s.arguments)})'
    if s.operation == "sum_cut":
        a, b = (f"{argument.name}.to(tl.float64)" for argument in s.arguments)
        return f"(tl.floor({a} + {b}) + 8388608.0).to(tl.float32)"
    return (
        EXPRESSION(s)
        if s.operation != "look_up"
        else triton._argument(s.arguments[1], torch.int32).join((f"tl.load(table{s.arguments[0]} + ", ")"))
    )


def steps(name, update, state, policy):
    import lowp

    lowp.set_kernel_policy(policy)
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).half()) for shape in SHAPES]
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(lowp.optim, name)(parameters, lr=0.05, update=update, state=state, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * 0.1).half()
            parameter.grad[..., 0] = 0
        optimizer.step()
    found = [p.detach() for p in parameters]
    for p in parameters:
        found += [v for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return found


def check(name, update, state):
    from lowp.tensor.lists import function

    plain = steps(name, update, state, "never")
    with (
        patch.object(function, "_build", Interpreted),
        patch.multiple(function, _CUDA_CHUNK=CHUNK, _CUDA_BLOCKS=CHUNK, _CUDA_REDUCED=CHUNK),
        patch.multiple(function, _CUDA_STEPS=STEPS, _CUDA_BLOCK_STEPS=STEPS),
        patch.object(function, "_CUDA_PROGRAMS", 1),
    ):
        printed = steps(name, update, state, "always")
    assert STEPS in taken
    for a, b in zip(plain, printed, strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (a.shape, a.dtype)


@needs_triton
def test_what_is_printed_for_cuda():
    run(__file__)


if __name__ == "__main__":
    from lowp.tensor.lists import triton

    EXPRESSION = triton.expression
    for case in CASES:
        print(*case, flush=True)
        check(*case)
    assert {"philox0", "philox1", "stochastic_rank"} <= taken
