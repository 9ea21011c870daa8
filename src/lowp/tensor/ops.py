"""The public operations: quantize, encode, decode and fake_quantize.

Each call is computed in one of two ways, which give the same bits:

- *inlined*, as plain torch operations, where something must see every operation: `torch.compile`, `torch.func` transforms,
  dispatch modes, tensor subclasses. A compiler then fuses them with their neighbours. (In code compiled by `torch.compile`,
  `quantize` and `fake_quantize` are one operation of the graph where that is faster: node.py.)
- *eager*, through a precompiled kernel (number_kernels.py) on the tensor's memory, whatever its strides.
"""

from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import AnyFormat, BlockFormat, FormatLike, Rounding
from lowp.formats import format as parse_format
from lowp.tensor import block, block_kernels, kernels, number_kernels, repeated_calls
from lowp.tensor.block import BlockCodes
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.core import Operation, apply_inline, code_dtype, decode_operation, encode_operation, quantize_operation
from lowp.tensor.dynamo import format_text, in_graph, is_exporting, teach_dynamo
from lowp.tensor.interchange import PAIRS, as_codes
from lowp.tensor.memory import flat_memory, is_dense, laid_out_alike, storage_of
from lowp.tensor.noise import Domain, Noise
from lowp.tensor.packing import pack as pack_codes
from lowp.tensor.packing import unpack

Seed = int | Tensor | Noise


def quantize(
    x: Tensor,
    format: FormatLike,
    rounding: str = "nearest",
    *,
    saturate: bool = False,
    seed: Seed | None = None,
    axis: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Round every element of `x` to a number of `format`, exactly.

    The result has x's shape and dtype (or `out`'s). A dtype that cannot hold the format's number rounds it to nearest, as a
    cast would: codebooks in float16, say.

    Args:
        x: float64, float32, float16 or bfloat16, of any shape and strides, on any device. It is not changed unless it is `out`.
        format: a name such as "e4m3fn" or "posit8", or a format object; see `lowp.format`.
        rounding: "nearest" (ties to even), "nearest_away", "toward_zero", "up", "down", "to_odd" or "stochastic".
        saturate: clamp to the largest value, infinities too. Otherwise what is too large becomes infinity if the format has
            one, else NaN if it has that, else the largest value.
        seed: for stochastic rounding: an integer, or `Noise(seed, step, stream, offset)`. Element i draws number offset + i.
        axis: for block formats, the dimension along which blocks lie. Draws count elements in x's own order all the same.
        out: a floating-point tensor of x's shape to write to.

    NaN stays NaN, minus zero stays where the format has it. In a block format an infinity that its elements have no infinity
    for is NaN, and NaN that its elements have no code for makes the whole block NaN where the scale has one (mx, nvfp4).
    The result does not require a gradient: `fake_quantize` has a straight-through one.
    """
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        if out is not None and out.dtype != x.dtype and out.dtype in CARRIERS:  # rounded once, to what `out` can hold
            how = rounding, saturate, axis, out.dtype
            return _write(out, _quantize_to_in_graph(x, format_text(format), *how, *_seed_parts(seed)))
        as_node = not is_exporting()
        return _write(out, _quantize_in_graph(x, format_text(format), rounding, saturate, as_node, axis, *_seed_parts(seed)))
    call = ("quantize", format, rounding, saturate)
    if (ready := _ready(call, x, out, seed, axis)) is not None:
        return ready
    fmt, noise = _check(x, format, rounding, seed, "quantize")
    x = x.resolve_neg()
    if out is not None:
        _check_out(out, x.shape, x.device, CARRIERS)
    axis = _check_axis(axis, fmt)
    if isinstance(fmt, BlockFormat):
        eager = not kernels.must_be_visible(x)
        rounded = block.quantize(x.detach(), fmt, rounding, noise, saturate, axis, eager, out)
        if eager and out is None and axis == -1:
            block_kernels.remember(call, "quantize", fmt, x, rounding, saturate, "raise", False)
        if out is None or rounded is not out:
            return _write(out, rounded)
        torch.autograd.graph.increment_version(out)
        return out
    operation = quantize_operation(fmt, x.dtype, rounding, saturate, x.dtype if out is None else out.dtype)
    return _apply(operation, x, noise, operation.out_dtype, out, call=call)


def encode(
    x: Tensor,
    format: FormatLike,
    rounding: str = "nearest",
    *,
    saturate: bool = False,
    seed: Seed | None = None,
    nan: str = "raise",
    pack: bool = False,
    axis: int = -1,
    out: Tensor | None = None,
) -> Any:
    """The codes of `quantize(x, ...)`: `decode(encode(x, f), f)` has the same bits.

    Returns uint8 for formats of up to 8 bits, int16 (the bit pattern) up to 16, int32 above; with `pack=True`, the codes of
    formats under 8 bits in a bit stream along the last dimension (`lowp.pack`). A block format gives `BlockCodes`; their bytes
    are those of torch's narrow dtypes.

    Args:
        x, format, rounding, saturate, seed, axis: as for `quantize`.
        pack: has no effect on formats of 8 bits and more. `decode` must be told the `size` of what was packed. Blocks are
            packed along their axis.
        nan: what NaN becomes in a format that has none: "raise" an error (which has to look at the data, so on CUDA it waits
            for it; `out` may be written in part), "zero", or "saturate" (the largest value of its sign).
        out: a tensor of the codes' dtype and shape to write to (not for block formats).

    In a block format, NaN and infinities that its elements have neither an infinity nor a NaN for (these only without
    `saturate`) become:

    | nan=       | elements have NaN  | only the scale has NaN          | neither has NaN         |
    | ---------- | ------------------ | ------------------------------- | ----------------------- |
    | "raise"    | the element's NaN  | the scale's NaN: block all NaN  | ValueError              |
    | "zero"     | the element's NaN  | zero, the block as without it   | zero                    |
    | "saturate" | the element's NaN  | the largest element of its sign | the same                |
    """
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        codes = _encode_in_graph(x, format_text(format), rounding, saturate, nan, pack, axis, *_seed_parts(seed))
        return BlockCodes(*codes) if isinstance(codes, tuple) else _write(out, codes)
    call = ("encode", format, rounding, saturate, nan, pack)
    if (ready := _ready(call, x, out, seed, axis)) is not None:
        return BlockCodes(*ready) if isinstance(ready, tuple) else ready
    fmt, noise = _check(x, format, rounding, seed, "encode")
    x = x.resolve_neg()
    if nan not in ("raise", "zero", "saturate"):
        raise ValueError(f"unknown nan={nan!r}; it is 'raise', 'zero' or 'saturate'")
    axis = _check_axis(axis, fmt)
    strict = nan == "raise" and not fmt.has_nan
    if strict and (isinstance(fmt, BlockFormat) or kernels.must_be_visible(x)):
        _refuse_nan(x, fmt, infinities=isinstance(fmt, BlockFormat) and not fmt.has_inf and not saturate)
        strict = False
    if isinstance(fmt, BlockFormat):
        if out is not None:
            raise ValueError(f"{fmt} encodes to several tensors: out= is not for block formats")
        eager = not kernels.must_be_visible(x)
        codes = block.encode(x.detach(), fmt, rounding, noise, nan, pack, saturate, axis, eager)
        if eager and axis == -1 and (nan != "raise" or fmt.has_nan):  # else numbers must be looked at first, each time
            block_kernels.remember(call, "encode", fmt, x, rounding, saturate, nan, pack)
        return codes
    if pack and fmt.bits < 8:
        return _write(out, pack_codes(encode(x, fmt, rounding, saturate=saturate, seed=seed, nan=nan), fmt))
    if out is not None:
        _check_out(out, x.shape, x.device, (code_dtype(fmt),))
    operation = encode_operation(fmt, x.dtype, rounding, saturate, "zero" if nan == "raise" and not strict else nan)
    return _apply(operation, x, noise, code_dtype(fmt), out, strict, call)


def decode(
    codes: Tensor | BlockCodes,
    format: FormatLike,
    *,
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
    axis: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """The numbers that codes stand for, in `dtype` (or `out`'s).

    Args:
        codes: what `encode` returned for the same format; or the same bytes in torch's dtype for them: float8_e4m3fn,
            float8_e5m2, their fnuz variants, float8_e8m0fnu, float4_e2m1fn_x2 (packed), float16, bfloat16, float32.
        size: for packed codes, and only for them: the last dimension of the result. (float4_e2m1fn_x2 has two for each byte,
            unless you say otherwise.)
        axis: for block formats, the dimension along which blocks lie.
    """
    if out is not None:
        dtype = out.dtype
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        return _write(
            out, _decode_in_graph(tuple(codes) if isinstance(codes, tuple) else codes, format_text(format), dtype, size, axis)
        )
    call = ("decode", format, dtype)
    if size is None and (ready := _ready(call, codes, out, None, axis)) is not None:
        return ready
    whole_bytes = type(codes) is BlockCodes and size is None and out is None and type(axis) is int and axis == -1
    if whole_bytes and (ready := repeated_calls.run_ready_codes(call, codes)) is not None:
        return ready
    fmt = parse_format(format)
    if dtype not in CARRIERS:
        raise TypeError(f"decode gives float64, float32, float16 or bfloat16, not {dtype}")
    axis = _check_axis(axis, fmt)
    if isinstance(fmt, BlockFormat):
        eager = isinstance(codes, tuple) and not kernels.must_be_visible(codes[0])
        numbers = block.decode(codes, fmt, dtype, size, axis, eager)  # type: ignore[arg-type]  # it checks
        if eager and whole_bytes and codes[0].dtype not in PAIRS:
            block_kernels.remember(call, "decode", fmt, (codes, dtype), "nearest", True, "zero", False)
        return _write(out, numbers)
    if not isinstance(codes, Tensor) or (found := as_codes(codes, fmt)) is None:
        given = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes of {fmt} are {code_dtype(fmt)} tensors, not {given}")
    if codes.dtype in PAIRS and size is None:
        size = 2 * found.shape[-1]
    codes = found if size is None else unpack(found, fmt, size)
    if out is not None:
        _check_out(out, codes.shape, codes.device, CARRIERS)
    return _apply(decode_operation(fmt, dtype), codes, None, dtype, out, call=call if size is None else None)


def _ready(call: tuple, x: Any, out: Any, seed: Any, axis: Any) -> Tensor | None:
    """The result, where a call like this was made before and only the data are others."""
    if type(axis) is not int or axis != -1 or not (seed is None or type(seed) is int or type(seed) is Noise):
        return None
    return repeated_calls.run_ready(call, x, out, seed)


def _check(x: Tensor, format: Any, rounding: str, seed: Seed | None, name: str) -> tuple[AnyFormat, Noise | None]:
    """The format and the noise; a clear error for what cannot be."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, not {type(x).__name__}")
    if x.dtype not in CARRIERS:
        raise TypeError(f"{name} takes float64, float32, float16 or bfloat16 tensors, not {x.dtype}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} takes dense tensors, not {'nested ones' if x.is_nested else x.layout}")
    if rounding not in _MODES:
        raise ValueError(f"unknown rounding {rounding!r}; it is one of {', '.join(_MODES)}")
    if rounding != "stochastic":
        if seed is not None:
            raise ValueError(f"seed is for stochastic rounding; {rounding!r} draws nothing")
        return parse_format(format), None
    if seed is None:
        raise ValueError("stochastic rounding needs seed=: an integer or lowp.Noise(seed, step, stream, offset)")
    return parse_format(format), seed if isinstance(seed, Noise) else Noise(seed)


_MODES = tuple(mode.value for mode in Rounding)


def _check_out(out: Tensor, shape: torch.Size, device: torch.device, dtypes: Any) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}")
    if out.shape != shape or out.device != device or out.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"out must be {allowed} of shape {tuple(shape)} on {device}, not {out.dtype} of {tuple(out.shape)} on {out.device}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out= does not support tensors that require a gradient")


def _refuse_nan(x: Tensor, fmt: AnyFormat, infinities: bool = False) -> None:
    """Raise if any element is NaN, or infinite. The maximum is NaN if one element is: one pass, no mask in memory."""
    message = f"x holds NaN{' or an infinity' if infinities else ''} and {fmt} has none; say nan='zero' or nan='saturate'"
    if x.numel() == 0 or x.is_meta:
        return
    if type(x) in (Tensor, torch.nn.Parameter) and compat.is_functorch_wrapped_tensor(x):
        raise ValueError(f"inside torch.func transforms NaN cannot be looked for; {fmt} has none: say nan='zero' or 'saturate'")
    bad = ~x.detach().abs().amax().isfinite() if infinities else x.detach().amax().isnan()
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        compat.assert_async(~bad, message)
    elif bool(bad):
        raise ValueError(message)


def _check_axis(axis: int, fmt: AnyFormat) -> int:
    if not isinstance(axis, int | torch.SymInt):  # a compiler's where it changes from call to call: one graph for each value
        raise TypeError(f"axis is a dimension's number, not {axis!r}")
    axis = int(axis)
    if axis != -1 and not isinstance(fmt, BlockFormat):
        raise ValueError(f"axis is for block formats; in {fmt} every number stands alone")
    return axis


def _write(out: Tensor | None, result: Tensor) -> Tensor:
    if out is None:
        return result
    _check_out(out, result.shape, result.device, CARRIERS if result.dtype in CARRIERS else (result.dtype,))
    return out.copy_(result)


def _apply(
    operation: Operation,
    x: Tensor,
    noise: Noise | None,
    dtype: torch.dtype,
    out: Tensor | None,
    strict: bool = False,
    call: tuple | None = None,
) -> Tensor:
    if kernels.must_be_visible(x):
        return _write(out, apply_inline(operation, x.detach().view(storage_of(x.dtype)), noise).view(dtype))
    x = x.detach()
    if noise is not None:
        x = x.contiguous()  # noise counts elements in row-major order
    elif not is_dense(x):
        x = x.clone()  # laid out as `torch.empty_like(x)`, which is what compilers are told of the result (node.py)
    result = out if out is not None and _writes_in_place(x, out) else torch.empty_like(x, dtype=dtype)
    stored = flat_memory(x, storage_of(x.dtype))
    check = (lambda start, stop: _refuse_nan(stored[start:stop].view(x.dtype), operation.fmt)) if strict else None
    number_kernels.run(operation, stored, noise, flat_memory(result, storage_of(dtype)), check)
    if call is not None:
        repeated_calls.remember(call, operation, x, out, noise)
    if out is None:
        return result
    if result is not out:
        return out.copy_(result)
    torch.autograd.graph.increment_version(out)
    return out


def _writes_in_place(x: Tensor, out: Tensor) -> bool:
    """May a kernel write to `out` while it reads `x` (dense)? They must be laid out alike, and apart or exactly the same."""
    if not laid_out_alike(x, out):
        return False
    same = out.data_ptr() == x.data_ptr() and out.dtype == x.dtype
    return same or not compat.overlaps(x, out)


@in_graph
def _quantize_in_graph(
    x: Tensor, format: FormatLike, rounding: str, saturate: bool, as_node: bool, axis: int, *seed: Any
) -> Tensor:
    """`quantize`, as one node of the graph (node.py) if `as_node` and if it suits."""
    if as_node:
        from lowp.tensor import node  # which imports this module

        fmt, noise = _check(x, format, rounding, _seed_of(seed), "quantize")
        axis = _check_axis(axis, fmt)
        if node.suits(x, fmt, rounding, noise):
            return node.quantize_as_node(x.resolve_neg(), fmt, rounding, noise, saturate, axis)
    return quantize(x, format, rounding, saturate=saturate, axis=axis, seed=_seed_of(seed))


@in_graph
def _quantize_to_in_graph(
    x: Tensor, format: str, rounding: str, saturate: bool, axis: int, dtype: torch.dtype, *seed: Any
) -> Tensor:
    """`quantize` to another dtype than x's."""
    out = torch.empty_like(x, dtype=dtype)
    return quantize(x, format, rounding, saturate=saturate, axis=axis, seed=_seed_of(seed), out=out)


@in_graph
def _encode_in_graph(x: Tensor, format: str, rounding: str, saturate: bool, nan: str, pack: bool, axis: int, *seed: Any) -> Any:
    return encode(x, format, rounding, saturate=saturate, nan=nan, pack=pack, axis=axis, seed=_seed_of(seed))


@in_graph
def _decode_in_graph(codes: Any, format: str, dtype: torch.dtype, size: int | None, axis: int) -> Tensor:
    return decode(BlockCodes(*codes) if isinstance(codes, tuple) else codes, format, dtype=dtype, size=size, axis=axis)


def _seed_parts(seed: Seed | None) -> tuple:
    """A seed as plain numbers and tensors, which a graph can hold."""
    return (seed.seed, seed.step, seed.stream, seed.offset, int(seed.domain)) if isinstance(seed, Noise) else (seed,)


def _seed_of(parts: tuple) -> Seed | None:
    return Noise(*parts[:4], domain=Domain(parts[4])) if len(parts) > 1 else parts[0]


class _FakeQuantize(torch.autograd.Function):
    """quantize forward; the gradient passes straight through, itself quantized on the way.

    `forward` and `backward` are arguments of `_quantize_in_graph`; None leaves a tensor alone.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: tuple | None, backward: tuple | None) -> Tensor:
        return x.view_as(x) if forward is None else _quantize_in_graph(x, *forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.backward_arguments = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # Straight through once more: second derivatives exist, and are rounded as the gradient is.
        return _FakeQuantize.apply(gradient, ctx.backward_arguments, None), None, None  # type: ignore[return-value]


def fake_quantize(
    x: Tensor,
    forward: FormatLike | None = None,
    backward: FormatLike | None = None,
    rounding: str = "nearest",
    *,
    backward_rounding: str | None = None,
    saturate: bool = False,
    seed: Seed | None = None,
) -> Tensor:
    """`quantize(x, forward)` whose gradient passes straight through, quantized to `backward` if that is given.

    Args:
        forward, backward: formats of the value and of its gradient; None leaves them alone.
        rounding, backward_rounding: how; the gradient rounds as the value does unless told otherwise.
        saturate: for both.
        seed: for stochastic rounding. The gradient has noise of its own (`Domain.USER_GRADIENT`): the two are independent.
    """
    backward_rounding = backward_rounding or rounding
    if torch.compiler.is_dynamo_compiling() and teach_dynamo():
        formats = [None if format is None else format_text(format) for format in (forward, backward)]
        return _fake_quantize_in_graph(
            x, *formats, rounding, backward_rounding, saturate, not is_exporting(), *_seed_parts(seed)
        )
    return _fake_quantize(x, forward, backward, rounding, backward_rounding, saturate, False, seed)


@in_graph
def _fake_quantize_in_graph(
    x: Tensor, forward: Any, backward: Any, rounding: str, backward_rounding: str, saturate: bool, as_node: bool, *seed: Any
) -> Tensor:
    """One call in Dynamo's graph: an autograd function that Dynamo sees is traced twice, into two graphs inside the graph."""
    return _fake_quantize(x, forward, backward, rounding, backward_rounding, saturate, as_node, _seed_of(seed))


def _as_it_is(part: Any) -> Any:
    """A seed or a step: a tensor may have counted on before the backward pass."""
    return part.clone() if isinstance(part, Tensor) else part


def _fake_quantize(
    x: Tensor, forward: Any, backward: Any, rounding: str, backward_rounding: str, saturate: bool, as_node: bool, seed: Any
) -> Tensor:
    for mode in (rounding, backward_rounding):  # mistakes in what backward will do are found here, not there
        _check(x, "fp32", mode, seed if mode == "stochastic" else None, "fake_quantize")
    if seed is not None and "stochastic" not in (rounding, backward_rounding):
        raise ValueError(f"seed is for stochastic rounding; {rounding!r} draws nothing")
    noise = seed if isinstance(seed, Noise) or seed is None else Noise(seed)
    other = noise
    if noise is not None:
        other = Noise(_as_it_is(noise.seed), _as_it_is(noise.step), noise.stream, noise.offset, domain=Domain.USER_GRADIENT)
    arguments: list[tuple | None] = []
    for format, mode, drawn in ((forward, rounding, noise), (backward, backward_rounding, other)):
        drawn = drawn if mode == "stochastic" else None
        arguments.append(None if format is None else (parse_format(format), mode, saturate, as_node, -1, drawn))
    return _FakeQuantize.apply(x, *arguments)  # type: ignore[return-value]
