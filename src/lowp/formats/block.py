"""Block formats: small numbers that share a scale (OCP Microscaling 1.0, NVFP4, and any other combination)."""

import math
from dataclasses import dataclass

from lowp.formats.base import Format
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, E8M0FNU, FloatFormat

MAX_BLOCK_SIZE = 1 << 16


@dataclass(frozen=True)
class BlockFormat:
    """`size` neighbouring elements along the last dimension share one scale; the last block of a row may be shorter.

    A scale without mantissa follows OCP MX: 2^(exponent of the block's maximum - exponent of the element format's maximum).
    Any other scale is maximum / largest element, rounded to nearest. With `tensor_scale`, as in NVFP4, one float32 for the
    whole tensor brings the largest block's scale to the scale format's own maximum. Finite elements always saturate; infinities
    and NaN become what they become in the element format.
    """

    element: Format
    size: int
    scale: FloatFormat
    tensor_scale: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.element, Format) or not isinstance(self.scale, FloatFormat):
            raise ValueError("a block format is block(<element format>, <size>, <float format of the scale>)")
        if not 1 <= self.size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block size {self.size} is outside 1..{MAX_BLOCK_SIZE}")
        if self.element.bits > 16:
            raise ValueError(f"elements of a block have at most 16 bits; {self.element} has {self.element.bits}")
        if self.tensor_scale and self.power_of_two_scale:
            raise ValueError("a second scale for the whole tensor adds nothing to a power-of-two scale")

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
        return self.max

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
        return self.element.has_nan

    @property
    def has_inf(self) -> bool:
        return self.element.has_inf

    def __str__(self) -> str:
        return NAMES.get(self) or self.text

    @property
    def text(self) -> str:
        return f"block({self.element}, {self.size}, {self.scale}{', fp32' if self.tensor_scale else ''})"


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
