"""`matmul` and `linear`: products of matrices in a chosen arithmetic, differentiable, one call in a compiled graph.

The gradients of C = A B are products as well, in the same arithmetic: dA = dC B^T and dB = A^T dC, sums in ascending order.
Where an operand was broadcast over a batch, its gradient is one sum over (batch, row), not a sum of sums: there is no other
arithmetic that it could be taken in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.compat import constant_for_dynamo
from lowp.formats import FormatLike
from lowp.tensor.matmul import keys
from lowp.tensor.matmul.arguments import Seed, arithmetic_name, check_operands, noise_parts
from lowp.tensor.matmul.arithmetic import name_of, named
from lowp.tensor.matmul.contraction import contract
from lowp.tensor.matmul.job import MatmulJob
from lowp.tensor.noise import Domain, Noise


def matmul(
    a: Tensor,
    b: Tensor,
    multiply: FormatLike | None = None,
    accumulate: FormatLike = "fp32",
    kahan: bool = False,
    chunk: int = 1,
    quire: bool = False,
    rounding: str = "nearest",
    approximate: str | None = None,
    *,
    seed: Seed = 0,
) -> Tensor:
    """`torch.matmul(a, b)` as narrow hardware computes it: every product and every partial sum rounded, in a defined order.

    The same bits on CPU and CUDA. Gradients are computed in the same arithmetic.

    Args:
        a, b: both float32, or both bfloat16 or float16; shapes as for `torch.matmul`. The result has their dtype (rounded to
            nearest where that cannot hold the numbers of `accumulate`).
        multiply, accumulate, kahan, chunk, quire, rounding, approximate: see `lowp.Arithmetic`.
        seed: for stochastic rounding: an integer, or `lowp.Noise`. Every rounding of every element has a draw of its own.
    """
    name = arithmetic_name(multiply, accumulate, kahan, chunk, quire, rounding, approximate)
    check_operands("matmul", a, b)
    for operand, letter in ((a, "a"), (b, "b")):
        if operand.dim() == 0:
            raise ValueError(f"matmul takes vectors and matrices; {letter} is a single number")
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"matmul of {tuple(a.shape)} and {tuple(b.shape)}: {left.shape[-1]} columns meet {right.shape[-2]} rows"
        )
    _check_batches(left, right)
    result = torch.ops.lowp.matmul(left, right, None, name, *noise_parts(seed), keys.FORWARD)
    result = result.squeeze(-2) if a.dim() == 1 else result
    return result.squeeze(-1) if b.dim() == 1 else result


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    multiply: FormatLike | None = None,
    accumulate: FormatLike = "fp32",
    kahan: bool = False,
    chunk: int = 1,
    quire: bool = False,
    rounding: str = "nearest",
    approximate: str | None = None,
    *,
    seed: Seed = 0,
) -> Tensor:
    """`torch.nn.functional.linear`, computed as `matmul` does. The bias is the last addend of every sum, and exact."""
    name = arithmetic_name(multiply, accumulate, kahan, chunk, quire, rounding, approximate)
    check_operands("linear", x, weight, bias)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: an input of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: a bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    result = torch.ops.lowp.matmul(rows, weight.t(), bias, name, *noise_parts(seed), keys.FORWARD)
    return result.reshape(*x.shape[:-1], weight.shape[0])


def _check_batches(a: Tensor, b: Tensor) -> None:
    for one, other in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        if one != other and one != 1 and other != 1:
            raise ValueError(f"matmul: batches of shapes {tuple(a.shape[:-2])} and {tuple(b.shape[:-2])} do not broadcast")


@torch.library.custom_op("lowp::matmul", mutates_args=())
def _matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    arithmetic: str,
    noise: Sequence[int],
    seed: Tensor | None,
    step: Tensor | None,
    part: int,
) -> Tensor:
    """a [.., M, K], b [.., K, N], bias [N]."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.to(torch.float32).expand(*batch, *x.shape[-2:]) for x in (a, b))
    if bias is not None:
        bias = bias.to(torch.float32).expand(*batch, a.shape[-2], b.shape[-1])
    return contract(MatmulJob(left, right, bias, named(arithmetic), noise_of(noise, seed, step), part), a.dtype)


def noise_of(numbers: Sequence[int], seed: Tensor | None, step: Tensor | None) -> Noise:
    """What `noise_parts` took apart. A tensor on the host is read there, without waiting."""
    own = [int(t) if t is not None and t.device.type == "cpu" else t for t in (seed, step)]
    parts: list[Any] = [number if tensor is None else tensor for number, tensor in zip(numbers, own, strict=False)]
    return Noise(*parts, *numbers[2:4], domain=Domain(numbers[4]))


@_matmul.register_fake
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]))


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, _, ctx.arithmetic, ctx.noise, seed, step, _ = inputs
    ctx.save_for_backward(a, b, seed, step)


def _gradients(ctx: Any, gradient: Tensor) -> tuple:
    a, b, seed, step = ctx.saved_tensors
    rest = ctx.arithmetic, list(ctx.noise), seed, step
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = _gradient_of_first(gradient, a, b, rest, keys.FIRST)
    if ctx.needs_input_grad[1]:
        of_b = _gradient_of_second(gradient, a, b, rest, keys.SECOND)
    if ctx.needs_input_grad[2]:
        of_bias = bias_gradient(gradient.flatten(0, -2), *rest)
    return of_a, of_b, of_bias, None, None, None, None, None


_matmul.register_autograd(_gradients, setup_context=_save)


def bias_gradient(rows: Tensor, arithmetic: str, noise: Any, seed: Any, step: Any) -> Tensor:
    """The sum over rows, in order: products with 1, which are exact, in an arithmetic that leaves products alone."""
    ones = rows.new_ones((1, rows.shape[0]))
    return torch.ops.lowp.matmul(ones, rows, None, of_addends(arithmetic), noise, seed, step, keys.BIAS).squeeze(0)


@constant_for_dynamo
def of_addends(arithmetic: str) -> str:
    return name_of(named(arithmetic).of_addends)


def _gradient_of_first(gradient: Tensor, a: Tensor, b: Tensor, rest: tuple, part: int) -> Tensor:
    """dC [.., M, N] times B^T [.., N, K], summed over N and over the batch dimensions in which a was broadcast."""
    summed, kept = _batch_dimensions(gradient, a)
    last = gradient.dim() - 2
    left = gradient.permute(*kept, last, *summed, last + 1)
    left = left.flatten(len(kept) + 1)
    right = _with_batch(b.mT, gradient, summed).permute(*kept, *summed, last, last + 1)
    right = right.flatten(len(kept), -2)
    return torch.ops.lowp.matmul(left, right, None, *rest, part).reshape(a.shape)


def _gradient_of_second(gradient: Tensor, a: Tensor, b: Tensor, rest: tuple, part: int) -> Tensor:
    """A^T [.., K, M] times dC [.., M, N], summed over M and over the batch dimensions in which b was broadcast."""
    summed, kept = _batch_dimensions(gradient, b)
    last = gradient.dim() - 2
    left = _with_batch(a.mT, gradient, summed).permute(*kept, last, *summed, last + 1)
    left = left.flatten(len(kept) + 1)
    right = gradient.permute(*kept, *summed, last, last + 1)
    right = right.flatten(len(kept), -2)
    return torch.ops.lowp.matmul(left, right, None, *rest, part).reshape(b.shape)


def _batch_dimensions(result: Tensor, operand: Tensor) -> tuple[list[int], list[int]]:
    """The batch dimensions of a result in which an operand was broadcast, and the others."""
    missing = result.dim() - operand.dim()
    summed = [i for i in range(result.dim() - 2) if i < missing or (operand.shape[i - missing] == 1 and result.shape[i] != 1)]
    return summed, [i for i in range(result.dim() - 2) if i not in summed]


def _with_batch(x: Tensor, result: Tensor, summed: list[int]) -> Tensor:
    """x with all batch dimensions of the result: of their size where they are summed over, else 1 will do."""
    x = x.reshape(*[1] * (result.dim() - x.dim()), *x.shape)
    return x.expand(*(result.shape[i] if i in summed else -1 for i in range(result.dim() - 2)), -1, -1)
