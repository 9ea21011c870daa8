"""Block formats: small numbers that share a scale (OCP Microscaling 1.0, NVFP4, and any other combination)."""

import math
from dataclasses import dataclass, replace

from lowp.formats.base import Format
from lowp.formats.codebook import CodebookFormat
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, E8M0FNU, FloatFormat
from lowp.notebook import html_table

MAX_BLOCK_SIZE = 1 << 16
TENSOR_SCALE_BITS = 24  # significant bits of the one float32 scale of a whole tensor
_FLOAT64_BITS, _FLOAT64_EXPONENTS = 53, (-1022, 1023)
_FLOAT32_ROOM = 2.0**64
_FLOAT32_EXPONENTS = (-149, 127)


def significant_bits(fmt: Format) -> int:
    """How many bits the significand of any value has, at most."""
    if isinstance(fmt, FloatFormat):
        return fmt.mantissa_bits + 1
    if isinstance(fmt, CodebookFormat):
        return 24  # float32 numbers
    return fmt.bits - 1


@dataclass(frozen=True)
class BlockFormat:
    """`size` neighbouring elements along one dimension share one scale; the last block of a row may be shorter.

    A scale without mantissa follows OCP MX: 2^(exponent of the block's maximum - exponent of the element format's maximum), so
    that a maximum may saturate. With `rceil` it is the smallest power of two with which nothing saturates, as NVIDIA's
    libraries choose it. Any other scale is maximum / largest element, rounded to nearest. With `tensor_scale`, as in NVFP4, one
    float32 for the whole tensor brings the largest block's scale to the scale format's own maximum.

    Finite elements always saturate, and only finite ones decide the scale. An infinity stays one where elements have it, else
    it is NaN. NaN is an element's NaN where elements have one; else the scale's NaN, with which the whole block is NaN, as OCP
    MX reads it; where neither has one, `quantize` returns NaN for the number and `encode` refuses it.
    """

    element: Format
    size: int
    scale: FloatFormat
    tensor_scale: bool = False
    rceil: bool = False

    def _repr_html_(self) -> str:
        row = (f"{self.bits:g}", self.element, self.size, self.scale, f"{self.max:.6g}", f"{self.smallest:.6g}")
        return html_table(f"{self} (block)", ("bits", "element", "size", "scale", "max", "smallest"), [row], right=(0, 2, 4, 5))

    def __post_init__(self) -> None:
        if not isinstance(self.element, Format) or not isinstance(self.scale, FloatFormat):
            raise ValueError("a block format is block(<element format>, <size>, <float format of the scale>)")
        if not 1 <= self.size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block size {self.size} is outside 1..{MAX_BLOCK_SIZE}")
        if self.element.bits > 16:
            raise ValueError(f"elements of a block have at most 16 bits; {self.element} has {self.element.bits}")
        if self.tensor_scale and self.power_of_two_scale:
            raise ValueError("a second scale for the whole tensor adds nothing to a power-of-two scale")
        if self.rceil and not self.power_of_two_scale:
            raise ValueError(f"rceil is a rule for power-of-two scales, and {self.scale} has a mantissa")
        self._require_room_in_float64()

    def _require_room_in_float64(self) -> None:
        """Values are computed as normal numbers of float64, exactly: element x scale (x scale of the tensor)."""
        bits = significant_bits(self.element) + significant_bits(self.scale) + TENSOR_SCALE_BITS * self.tensor_scale
        lowest = math.frexp(self.element.smallest)[1] + math.frexp(self.scale.smallest)[1] - 2
        highest = math.frexp(self.element.max)[1] + math.frexp(self.scale.max)[1]
        if self.tensor_scale:
            lowest, highest = lowest + _FLOAT32_EXPONENTS[0], highest + _FLOAT32_EXPONENTS[1]
        if bits > _FLOAT64_BITS or lowest < _FLOAT64_EXPONENTS[0] or highest > _FLOAT64_EXPONENTS[1]:
            raise ValueError(f"{self.text}: elements times scales go beyond float64")

    @property
    def family(self) -> str:
        return "block"

    @property
    def bits(self) -> float:
        """Bits a value, the scale's share included (not the one scale of the whole tensor)."""
        return self.element.bits + self.scale.bits / self.size

    @property
    def power_of_two_scale(self) -> bool:
        return self.scale.mantissa_bits == 0

    @property
    def max_exponent(self) -> int:
        """The exponent of the element format's largest value."""
        return math.frexp(self.element.max)[1] - 1

    @property
    def max(self) -> float:
        return self.element.max * self.scale.max

    @property
    def scaled_max(self) -> float:
        """The largest value; where scales reach further than float32, in which numbers are scaled and added, the element's."""
        return self.max if self.max <= _FLOAT32_ROOM else self.element.max

    @property
    def smallest(self) -> float:
        return self.element.smallest * self.scale.smallest

    @property
    def dynamic_range(self) -> float:
        return math.log2(self.max) - math.log2(self.smallest)

    @property
    def epsilon(self) -> float:
        return self.element.epsilon

    @property
    def has_nan(self) -> bool:
        return self.element.has_nan or self.scale.has_nan

    @property
    def has_inf(self) -> bool:
        return self.element.has_inf

    def __str__(self) -> str:
        return NAMES.get(self) or self.text

    @property
    def text(self) -> str:
        more = ", fp32" * self.tensor_scale + ", rceil" * self.rceil
        return f"block({self.element}, {self.size}, {self.scale}{more})"


MXFP8_E4M3 = BlockFormat(E4M3FN, 32, E8M0FNU)
MXFP8_E5M2 = BlockFormat(E5M2, 32, E8M0FNU)
MXFP6_E3M2 = BlockFormat(E3M2FN, 32, E8M0FNU)
MXFP6_E2M3 = BlockFormat(E2M3FN, 32, E8M0FNU)
MXFP4 = BlockFormat(E2M1FN, 32, E8M0FNU)
MXINT8 = BlockFormat(FixedFormat(1, 6), 32, E8M0FNU)
NVFP4 = BlockFormat(E2M1FN, 16, E4M3FN, tensor_scale=True)

NAMES: dict[BlockFormat, str] = {
    MXFP8_E4M3: "mxfp8_e4m3",
    MXFP8_E5M2: "mxfp8_e5m2",
    MXFP6_E3M2: "mxfp6_e3m2",
    MXFP6_E2M3: "mxfp6_e2m3",
    MXFP4: "mxfp4",
    MXINT8: "mxint8",
    NVFP4: "nvfp4",
}
NAMES |= {replace(fmt, rceil=True): f"{name}_rceil" for fmt, name in NAMES.items() if fmt.power_of_two_scale}
