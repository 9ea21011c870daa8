"""A quantizer as one node of a compiled graph: `lowp::round` where each number counts for itself, else `lowp::quantize`.

Otherwise (`apply_inline` in core.py) a compiler sees every operation of a quantizer. On a GPU it then fuses too little
(pointwise.py), and takes four times as long to compile. On a CPU it takes minutes: a GPT of four blocks, with quantizers on
everything, 233 seconds of processor time where the plain model takes 41: inductor's C++ code generator walks through the 120
operations of a quantizer eight times for every loop that it is part of. As one node each: 1.5 to 1.7 times the plain model's
(docs/SIMULATE.md).

Inlining the dozen operations that suffice on a GPU is no better there: 145 seconds, and steps of 2.3 times the plain model's,
because inductor's vectors pass through memory wherever a float is seen as an integer.

What inductor makes of `lowp::round` (inductor.py): on a GPU an operation that it fuses with its neighbours; on a CPU one call
of a function, which reads and writes the tensor once more at almost the speed of a copy.

Noise may come from a step that is a tensor; integers of it may change without the graph being compiled again (SymInt).

What stays inlined: on a GPU formats with tables, block formats and stochastic rounding; seeds that are tensors; tensor
subclasses such as DTensor, which do not know the operators; programs made by `torch.export`, which must run without lowp.
"""

from typing import Any

import torch
from torch import Tensor

from lowp.compat import is_traceable_wrapper_subclass
from lowp.formats import AnyFormat, BlockFormat
from lowp.formats import format as parse_format
from lowp.tensor.block_programs import block_program
from lowp.tensor.carrier import CARRIERS, FORMAT_OF_DTYPE
from lowp.tensor.inductor import tell_inductor
from lowp.tensor.noise import Domain, Noise
from lowp.tensor.ops import quantize
from lowp.tensor.pointwise import pointwise
from lowp.version import __version__

_LIBRARY = torch.library.Library("lowp", "FRAGMENT")
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout
# With lowp's version, so that inductor's cache of compiled graphs does not keep what an older one made of it.
_LIBRARY.define("round(Tensor x, str format, str rounding, str version='', bool saturate=False) -> Tensor", tags=_TAGS)
# The noise, where rounding is stochastic, has the number in `step`, or else `count`.
_LIBRARY.define(
    "quantize(Tensor x, str format, str rounding, Tensor? step, SymInt seed, SymInt stream, int domain=0, SymInt count=0, "
    "SymInt offset=0, bool saturate=False, int axis=-1) -> Tensor",
    tags=_TAGS,
)


def suits(x: Tensor, format: AnyFormat, rounding: str, noise: Noise | None = None) -> bool:
    """Is one node better than its operations, in a graph that is being compiled? On a GPU those that inductor can fuse are, and
    those of blocks that have a kernel."""
    if is_traceable_wrapper_subclass(x) or (noise is not None and isinstance(noise.seed, Tensor)):
        return False
    # A key that is made of a tensor is some hundred operations, which a compiler makes one of.
    has_kernel = rounding == "nearest" or (noise is not None and not isinstance(noise.step, Tensor))
    if isinstance(format, BlockFormat) and has_kernel and x.dtype in FORMAT_OF_DTYPE and block_program(format) is not None:
        return True
    operation = pointwise(str(format), rounding, x.dtype) if x.dtype in CARRIERS else None
    return x.device.type == "cpu" or (operation is not None and not operation.tables)


def quantize_as_node(
    x: Tensor, format: AnyFormat, rounding: str, noise: Noise | None, saturate: bool = False, axis: int = -1
) -> Tensor:
    """`quantize(x, format, rounding, seed=noise, saturate=saturate, axis=axis)`, where it `suits`."""
    tell_inductor()
    if pointwise(str(format), rounding, x.dtype) is not None:
        return torch.ops.lowp.round(x.detach(), str(format), rounding, __version__, saturate)
    noise = Noise(0, domain=Domain.USER) if noise is None else noise  # is not drawn from
    step, count = (noise.step, 0) if isinstance(noise.step, Tensor) else (None, _signed(noise.step))
    key = step, _signed(noise.seed), _signed(noise.stream), int(noise.domain), count, _signed(noise.offset)
    return torch.ops.lowp.quantize(x.detach(), str(format), rounding, *key, saturate, axis)


def _signed(number: Any) -> Any:
    """64 bits as operators take them."""
    return number - (1 << 64) if isinstance(number, int) and number >= 1 << 63 else number


def _run(
    x: Tensor,
    format: str,
    rounding: str,
    step: Tensor | None,
    seed: int,
    stream: int,
    domain: int = 0,
    count: int = 0,
    offset: int = 0,
    saturate: bool = False,
    axis: int = -1,
) -> Tensor:
    noise = None
    if rounding == "stochastic":
        # An offset of 2^63 and more was made negative, and counts elements.
        noise = Noise(seed, count if step is None else int(step), stream, offset % (1 << 64), domain=Domain(domain))
    fmt = parse_format(format)
    rounded = quantize(x, fmt, rounding, seed=noise, saturate=saturate, axis=axis)
    return rounded.contiguous() if isinstance(fmt, BlockFormat) else rounded


def _laid_out(x: Tensor, format: str, rounding: str, *_: Any) -> Tensor:
    """Where the result's elements lie: as x's, but noise and blocks are counted along rows."""
    in_rows = rounding == "stochastic" or isinstance(parse_format(format), BlockFormat)
    return torch.empty_like(x, memory_format=torch.contiguous_format if in_rows else torch.preserve_format)


def _over_a_batch(info: Any, in_dims: tuple, x: Tensor, *how: Any) -> tuple[Tensor, int]:
    """Under vmap: blocks and noise belong to one element of the batch, whatever else is in it."""
    return torch.stack([torch.ops.lowp.quantize(each, *how) for each in x.unbind(in_dims[0])]), 0


def _round(x: Tensor, format: str, rounding: str, version: str = "", saturate: bool = False) -> Tensor:
    return quantize(x, format, rounding, saturate=saturate)


_LIBRARY.impl("round", _round, "CompositeExplicitAutograd")
torch.library.register_fake("lowp::round", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_vmap(
    "lowp::round", lambda info, in_dims, x, *how: (torch.ops.lowp.round(x, *how), in_dims[0]), lib=_LIBRARY
)
_LIBRARY.impl("quantize", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lowp::quantize", _laid_out, lib=_LIBRARY)
torch.library.register_vmap("lowp::quantize", _over_a_batch, lib=_LIBRARY)
