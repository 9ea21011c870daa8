"""`conv2d`: a convolution is a product of matrices, of the kernel with patches of the image.

    result    [C_out, (c, kh, kw)] times [(c, kh, kw), positions], for each image and group
    image     its gradient: the same, with the gradient of the result in place of the image (zeros between its pixels where
              the stride skips, and around it), and sums over (c_out, kh, kw): each element is one sum, not a scatter of
              partial ones
    kernel    its gradient: [(c, kh, kw), (image, position)] times [(image, position), C_out]

Patches repeat every pixel kh * kw times, so they are made in pieces of some tens of megabytes: a few images at a time, for
the kernel's gradient a few channels. Padding is ordinary zeros put around the image first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.formats import FormatLike
from lowp.tensor.matmul import keys
from lowp.tensor.matmul.arguments import Seed, arithmetic_name, check_operands, noise_parts
from lowp.tensor.matmul.arithmetic import named
from lowp.tensor.matmul.contraction import contract
from lowp.tensor.matmul.job import MatmulJob
from lowp.tensor.matmul.product import bias_gradient, noise_of

_PATCH_ELEMENTS = 1 << 24  # of one piece


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
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
    """`torch.nn.functional.conv2d` of images [N, C, H, W] (or one, [C, H, W]), computed as `matmul` does.

    Sums run over (channel, row, column) of the kernel; zeros of the padding take part; the bias is the last addend.
    """
    name = arithmetic_name(multiply, accumulate, kahan, chunk, quire, rounding, approximate)
    check_operands("conv2d", x, weight, bias)
    steps, spread = _pair(stride, "stride", 1), _pair(dilation, "dilation", 1)
    _check_shapes(x, weight, bias, groups)
    images = x if x.dim() == 4 else x.unsqueeze(0)
    padded = F.pad(images, _padding(padding, weight, steps, spread))
    for axis, size in enumerate(_positions(padded, weight.shape[2:], steps, spread)):
        if size < 1:
            reach = spread[axis] * (weight.shape[2 + axis] - 1) + 1
            raise ValueError(f"conv2d: a kernel that reaches over {reach} pixels does not fit {padded.shape[2 + axis]}")
    result = torch.ops.lowp.conv2d(padded, weight, bias, steps, spread, groups, name, *noise_parts(seed))
    return result if x.dim() == 4 else result.squeeze(0)


def _pair(given: Any, name: str, least: int) -> list[int]:
    pair = [given, given] if isinstance(given, int) else list(given)
    if len(pair) != 2 or any(not isinstance(size, int) or size < least for size in pair):
        raise ValueError(f"conv2d: {name} is an integer of at least {least}, or two, not {given!r}")
    return pair


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    if x.dim() not in (3, 4) or weight.dim() != 4:
        raise ValueError(
            f"conv2d takes images [N, C, H, W] or [C, H, W] and a weight [C_out, C / groups, kh, kw], "
            f"not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    channels, outputs = x.shape[-3], weight.shape[0]
    if groups < 1 or channels % groups or outputs % groups or channels // groups != weight.shape[1]:
        raise ValueError(f"conv2d: {channels} channels in {groups} groups do not fit a weight of shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"conv2d: a bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}")


def _padding(padding: Any, weight: Tensor, stride: list[int], dilation: list[int]) -> list[int]:
    """Zeros left, right, above, below."""
    if not isinstance(padding, str):
        rows, columns = _pair(padding, "padding", 0)
        return [columns, columns, rows, rows]
    if padding not in ("same", "valid"):
        raise ValueError(f"conv2d: unknown padding {padding!r}; it is 'same', 'valid', an integer or two")
    if padding == "valid":
        return [0, 0, 0, 0]
    if stride != [1, 1]:
        raise ValueError(f"conv2d: padding='same' is for a stride of 1, not {stride}")
    rows, columns = (spread * (size - 1) for spread, size in zip(dilation, weight.shape[2:], strict=True))
    return [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2]


def _positions(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How often the kernel fits, in both directions."""
    sizes = zip(x.shape[2:], kernel, stride, dilation, strict=True)
    return [(size - spread * (width - 1) - 1) // step + 1 for size, width, step, spread in sizes]


def _patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Views [n, c, kh, kw, oh, ow] of images: no copy yet."""
    n, c, row, column = x.stride()
    size = (*x.shape[:2], *kernel, *_positions(x, kernel, stride, dilation))
    return x.as_strided(size, (n, c, row * dilation[0], column * dilation[1], row * stride[0], column * stride[1]))


@torch.library.custom_op("lowp::conv2d", mutates_args=())
def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    arithmetic: str,
    noise: Sequence[int],
    seed: Tensor | None,
    step: Tensor | None,
) -> Tensor:
    patches = _patches(x, weight.shape[2:], stride, dilation)
    rest = named(arithmetic), noise_of(noise, seed, step), keys.FORWARD
    result = _kernel_times_patches(_by_group(weight, groups), patches, bias, groups, rest)
    return result.reshape(x.shape[0], weight.shape[0], *patches.shape[4:])


def _by_group(weight: Tensor, groups: int) -> Tensor:
    """[groups, C_out / groups, (c, kh, kw)]"""
    return weight.flatten(1).unflatten(0, (groups, weight.shape[0] // groups))


def _kernel_times_patches(kernel: Tensor, patches: Tensor, bias: Tensor | None, groups: int, rest: tuple) -> Tensor:
    """[groups, M, K] times patches [n, (groups, ...), kh, kw, oh, ow], a few images at a time: [n, groups, M, positions]."""
    images, positions = patches.shape[0], patches.shape[4] * patches.shape[5]
    m, k = kernel.shape[1:]
    result = kernel.new_empty((images, groups, m, positions))
    each = max(1, _PATCH_ELEMENTS // max(1, groups * k * positions))
    kernel = kernel.to(torch.float32)
    for first in range(0, images, each):
        piece = patches[first : first + each].to(torch.float32)
        b = piece.reshape(piece.shape[0], groups, k, positions)
        a = kernel.expand(piece.shape[0], -1, -1, -1)
        last = None if bias is None else bias.to(torch.float32).reshape(groups, m, 1).expand(*b.shape[:2], m, positions)
        job = MatmulJob(a, b, last, *rest, first=first * groups * m * positions)
        result[first : first + each] = contract(job, result.dtype)
    return result


@_conv2d.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, stride: Any, dilation: Any, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], *_positions(x, weight.shape[2:], stride, dilation)))


@torch.library.custom_op("lowp::conv2d_of_image", mutates_args=())
def _of_image(
    gradient: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    arithmetic: str,
    noise: Sequence[int],
    seed: Tensor | None,
    step: Tensor | None,
) -> Tensor:
    """The image's gradient [n, c, *size].

    Kernel element (i, j) reaches the pixel (h, w) from the result at ((h - i * dilation) / stride, ...) where that is one:
    so the gradient, with zeros between its pixels, is read through patches whose rows and columns count backwards.
    """
    n, outputs, rows, columns = gradient.shape
    reach = [spread * (width - 1) for spread, width in zip(dilation, weight.shape[2:], strict=True)]
    spaced = gradient.new_zeros((n, outputs, size[0] + reach[0], size[1] + reach[1]))
    spaced[:, :, reach[0] :: stride[0], reach[1] :: stride[1]][:, :, :rows, :columns] = gradient
    patches = _patches(spaced, weight.shape[2:], (1, 1), dilation).flip(2, 3)
    own = weight.shape[1]
    kernel = weight.unflatten(0, (groups, outputs // groups)).transpose(1, 2).flatten(2)  # [groups, c, (c_out, kh, kw)]
    rest = named(arithmetic), noise_of(noise, seed, step), keys.FIRST
    return _kernel_times_patches(kernel, patches, None, groups, rest).reshape(n, groups * own, *size)


@_of_image.register_fake
def _(gradient: Tensor, weight: Tensor, size: Any, stride: Any, dilation: Any, groups: int, *_: Any) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[1] * groups, *size))


@torch.library.custom_op("lowp::conv2d_of_kernel", mutates_args=())
def _of_kernel(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    arithmetic: str,
    noise: Sequence[int],
    seed: Tensor | None,
    step: Tensor | None,
) -> Tensor:
    """The kernel's gradient [C_out, c / groups, kh, kw], a few channels at a time."""
    n, outputs, rows, columns = gradient.shape
    own, positions = x.shape[1] // groups, rows * columns
    area = kernel[0] * kernel[1]
    b = gradient.to(torch.float32).reshape(n, groups, outputs // groups, positions)
    b = b.permute(1, 0, 3, 2).reshape(groups, n * positions, outputs // groups)
    patches = _patches(x, kernel, stride, dilation)
    result = gradient.new_empty((groups, own * area, outputs // groups))
    each = max(1, _PATCH_ELEMENTS // max(1, area * n * positions))
    rest = named(arithmetic), noise_of(noise, seed, step), keys.SECOND
    for group in range(groups):
        for first in range(0, own, each):
            last = min(first + each, own)
            piece = patches[:, group * own + first : group * own + last].to(torch.float32)
            a = piece.permute(1, 2, 3, 0, 4, 5).reshape((last - first) * area, n * positions)
            index = (group * own + first) * area * (outputs // groups)
            result[group, first * area : last * area] = contract(MatmulJob(a, b[group], None, *rest, first=index), result.dtype)
    return result.transpose(1, 2).reshape(outputs, own, *kernel)


@_of_kernel.register_fake
def _(gradient: Tensor, x: Tensor, kernel: Any, stride: Any, dilation: Any, groups: int, *_: Any) -> Tensor:
    return gradient.new_empty((gradient.shape[1], x.shape[1] // groups, *kernel))


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.dilation, ctx.groups, ctx.arithmetic, ctx.noise, seed, step = inputs
    ctx.save_for_backward(x, weight, seed, step)


def _gradients(ctx: Any, gradient: Tensor) -> tuple:
    x, weight, seed, step = ctx.saved_tensors
    geometry = list(ctx.stride), list(ctx.dilation), ctx.groups
    rest = ctx.arithmetic, list(ctx.noise), seed, step
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.lowp.conv2d_of_image(gradient, weight, list(x.shape[2:]), *geometry, *rest)
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.lowp.conv2d_of_kernel(gradient, x, list(weight.shape[2:]), *geometry, *rest)
    if ctx.needs_input_grad[2]:
        of_bias = bias_gradient(gradient.permute(0, 2, 3, 1).flatten(0, 2), *rest)
    return of_x, of_weight, of_bias, *[None] * 7


_conv2d.register_autograd(_gradients, setup_context=_save)
