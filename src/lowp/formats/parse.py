"""From text to format and back: `str(format(text))` names the same format, and a wrong name says what was meant."""

import re
from functools import lru_cache
from typing import Any, Protocol

from lowp.formats.base import Format
from lowp.formats.block import NAMES as BLOCK_NAMES
from lowp.formats.block import BlockFormat
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import FloatFormat, Specials, p3109
from lowp.formats.posit import PositFormat
from lowp.formats.registry import FORMATS, AnyFormat
from lowp.names import did_you_mean

MAX_LENGTH = 100  # characters of a name
_NAMED = {str(entry): entry for entry in FORMATS} | {name: entry for entry, name in BLOCK_NAMES.items()}
ALIASES = {  # what others call them; "fp8" without more is what most hardware and libraries take for weights
    **dict.fromkeys(("float32", "float", "single"), "fp32"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("fp8", "float8", "fp8_e4m3", "float8_e4m3fn", "fp8_e4m3fn"), "e4m3fn"),
    "fp8_e5m2": "e5m2",
    **dict.fromkeys(("fp4", "float4", "fp4_e2m1", "float4_e2m1fn_x2"), "e2m1fn"),
    "fp6_e3m2": "e3m2fn",
    "fp6_e2m3": "e2m3fn",
}
_OF_DTYPE = re.compile(r"float\d+_(e\d+m\d+\w*)", re.ASCII)  # torch and ml_dtypes: float8_e5m2fnuz
_FLOAT = re.compile(r"e(\d+)m(\d+)(?:b(-?\d+))?(fnuz|inuz|fn|nan|finite)?(_u)?(_ns)?(_nz)?", re.ASCII)
_P3109 = re.compile(r"(?:binary|p3109_k)(\d+)p(\d+)([su])([ef])", re.ASCII)
_FIXED = re.compile(r"fixed(\d+)\.(\d+)", re.ASCII)
_INT = re.compile(r"int(\d+)", re.ASCII)
_POSIT = re.compile(r"posit(\d+)(?:_(\d+))?", re.ASCII)
_BLOCK = re.compile(r"block\(([^(),]+),(\d+),([^(),]+)(,fp32)?(,rceil)?\)", re.ASCII)
_SPECIALS = {None: Specials.IEEE, "nan": Specials.NAN_ONLY} | {s.value: s for s in Specials if s.value}


@lru_cache(maxsize=4096)
def _parse(text: str) -> AnyFormat | None:
    squeezed = _usual("".join(text.lower().split()))
    if squeezed in _NAMED:
        return _NAMED[squeezed]
    if match := _FLOAT.fullmatch(squeezed):
        exponent_bits, mantissa_bits, bias, specials, unsigned, no_subnormals, no_zero = match.groups()
        return FloatFormat(
            int(exponent_bits),
            int(mantissa_bits),
            bias=int(bias) if bias else None,
            specials=_SPECIALS[specials],
            signed=not unsigned,
            subnormals=not no_subnormals,
            zero=not no_zero,
        )
    if match := _P3109.fullmatch(squeezed):
        return p3109(int(match[1]), int(match[2]), signed=match[3] == "s", extended=match[4] == "e")
    if match := _FIXED.fullmatch(squeezed):
        return FixedFormat(int(match[1]), int(match[2]))
    if match := _INT.fullmatch(squeezed):
        return FixedFormat(int(match[1]) - 1)
    if match := _POSIT.fullmatch(squeezed):
        return PositFormat(int(match[1]), int(match[2]) if match[2] else 2)
    if match := _BLOCK.fullmatch(squeezed):
        element, scale = format(match[1]), format(match[3])
        if not isinstance(element, Format) or not isinstance(scale, FloatFormat):
            raise ValueError(f"{text!r}: the elements of a block are numbers and its scale is a float format")
        return BlockFormat(element, int(match[2]), scale, tensor_scale=bool(match[4]), rceil=bool(match[5]))
    return None


def _usual(squeezed: str) -> str:
    squeezed = squeezed.removeprefix("torch.")
    if squeezed in ALIASES:
        return ALIASES[squeezed]
    match = _OF_DTYPE.fullmatch(squeezed)
    return match[1] if match else squeezed


class DType(Protocol):
    """A number type of torch, told by its attributes: nothing here imports torch."""

    @property
    def itemsize(self) -> int: ...

    @property
    def is_floating_point(self) -> bool: ...


FormatLike = str | AnyFormat | DType  # whatever names a format


def usual_name(value: Any) -> Any:
    """A dtype (torch's, numpy's) or another library's name as the name that is usual here: torch.bfloat16 and "bfloat16" are
    "bf16". Anything else is returned as it is."""
    if type(value).__name__ == "dtype" or type(value).__module__.partition(".")[0] in ("numpy", "ml_dtypes"):
        value = str(value).removeprefix("torch.")
    if not isinstance(value, str):
        return value
    squeezed = "".join(value.lower().split())
    return value if (usual := _usual(squeezed)) == squeezed else usual


def format(text: FormatLike) -> AnyFormat:
    """The format that a text names: `e5m2`, `e4m3fn`, `bf16`, `binary8p3se`, `fixed3.4`, `int8`, `posit8_1`, `dynamic8`,
    `mxfp4`, `mxfp4_rceil`, `block(e2m1fn, 16, e4m3fn)`. A format is returned as it is. Case and spaces do not matter.

    Also what others call them: "float16", "half", "bfloat16", "fp8" (e4m3fn), "float8_e5m2", and torch's dtypes.

    An unknown name raises ValueError with the nearest names; an impossible one with what is allowed.
    """
    if isinstance(text, (Format, BlockFormat)):
        return text
    text = usual_name(text)
    if not isinstance(text, str):
        raise TypeError(f"a format is a name such as 'e4m3fn', a Format or a torch.dtype, not {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a format's name has at most {MAX_LENGTH} characters, not {len(text)}: {text[:20]!r}...")
    if (parsed := _parse(text)) is not None:
        return parsed
    if "block" in text.lower():
        shape = "block(<format>, <size>, <scale format>), and ', fp32' or ', rceil' before the bracket closes"
        raise ValueError(f"unknown format {text!r}; a block format is {shape}")
    shape = "names look like e5m2, e4m3fn, fixed3.4, int8, posit8, dynamic8, mxfp4; `lowp formats` lists them"
    raise ValueError(f"unknown format {text!r}; {did_you_mean(text, _NAMED, shape)}")


def text_of(fmt: AnyFormat) -> str:
    """The text that `format` reads as this format: for what can hold only text. ValueError where it means another one, as that
    of a codebook with the name of a registered format, or none."""
    if format(text := str(fmt)) != fmt:
        raise ValueError(f"{text!r} is the name of another format: give this one a name of its own")
    return text


def is_format(text: str) -> bool:
    """Does it name one?"""
    try:
        format(text)
    except ValueError:
        return False
    return True
