"""Floating point of any split, and the five ways in which such formats spend codes on special values."""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

from lowp.formats.base import Format

MAX_EXPONENT_BITS = 8
MAX_MANTISSA_BITS = 23
MAX_BIAS = 255


class Specials(enum.Enum):
    """Which codes are infinities and NaNs. The value is the suffix in the format's text."""

    IEEE = ""  # the largest exponent is reserved: mantissa 0 is infinity, the rest NaN
    NAN_ONLY = "fn"  # no infinities; the one code of all ones is NaN
    FNUZ = "fnuz"  # no infinities and no minus zero: its code is the only NaN
    NONE = "finite"  # every code is a number
    EXTENDED = "inuz"  # IEEE P3109: infinity is the largest code, NaN that of minus zero (unsigned: the one after infinity)


@dataclass(frozen=True)
class FloatFormat(Format):
    """Sign, exponent and mantissa. `bias=None` means 2^(exponent_bits-1) - 1, one more for fnuz and inuz.

    The formats of IEEE P3109, binary<k>p<p> with k bits and p of precision, are: signed and extended `se`, e<k-p>m<p-1>inuz;
    signed and finite `sf`, e<k-p>m<p-1>fnuz; unsigned and extended `ue`, e<k-p+1>m<p-1>inuz_u; unsigned and finite `uf`, the
    same with `fn` and the bias of P3109.

    Without subnormals, exponent 0 is an ordinary binade, except that code 0 is zero. `signed=False` drops the sign
    bit; `zero=False` (scales such as e8m0fnu) makes code 0 an ordinary number too.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    subnormals: bool = True
    specials: Specials = Specials.IEEE
    signed: bool = True
    zero: bool = True

    def __post_init__(self) -> None:
        e, m = self.exponent_bits, self.mantissa_bits
        if not 1 <= e <= MAX_EXPONENT_BITS or not 0 <= m <= MAX_MANTISSA_BITS:
            raise ValueError(
                f"impossible split e{e}m{m}: e<X>m<Y> takes X from 1 to {MAX_EXPONENT_BITS} exponent bits "
                f"and Y from 0 to {MAX_MANTISSA_BITS} mantissa bits"
            )
        if self.specials is Specials.FNUZ and not self.signed:
            raise ValueError("an fnuz format keeps NaN in the code of minus zero, so it cannot be unsigned")
        if self._nan_is_minus_zero and not self.zero:
            raise ValueError(
                f"an {self.specials.value} format keeps NaN in the code of minus zero, so it cannot do without zero"
            )
        if self.subnormals and not self.zero:
            raise ValueError("a format without zero has no subnormals")
        if self.bias is None:
            default = (1 << (e - 1)) - 1 + (self.specials in (Specials.FNUZ, Specials.EXTENDED))
            object.__setattr__(self, "bias", default)
        elif not -MAX_BIAS <= self.bias <= MAX_BIAS:
            raise ValueError(f"bias {self.bias} is outside -{MAX_BIAS}..{MAX_BIAS}")
        if self.max_code < 1:
            raise ValueError(f"e{e}m{m} with these special values has no finite number but zero")

    @property
    def family(self) -> str:
        return "float"

    @property
    def _nan_is_minus_zero(self) -> bool:
        return self.specials is Specials.FNUZ or (self.specials is Specials.EXTENDED and self.signed)

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def min_exponent(self) -> int:
        """The exponent of the lowest binade, which subnormals share."""
        return (1 if self.subnormals else 0) - self.bias  # type: ignore[operator]

    @property
    def max_code(self) -> int:
        """The code, and rank, of the largest finite value."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials is Specials.IEEE:
            return ((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1
        if self.specials is Specials.EXTENDED:
            return top - 1 if self.signed else top - 2
        return top - 1 if self.specials is Specials.NAN_ONLY else top

    def value(self, code: int) -> float:
        sign_bit = 1 << (self.bits - 1) if self.signed else 0
        magnitude = code & ~sign_bit
        sign = -1.0 if code & sign_bit else 1.0
        if self._nan_is_minus_zero and code == sign_bit:
            return math.nan
        if magnitude > self.max_code:
            return math.copysign(math.inf, sign) if magnitude == self.inf_code else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if magnitude == 0 and self.zero:
            return sign * 0.0
        if exponent == 0 and self.subnormals:
            return sign * math.ldexp(mantissa, self.min_exponent - self.mantissa_bits)
        significand = mantissa + (1 << self.mantissa_bits)
        return sign * math.ldexp(significand, exponent - self.bias - self.mantissa_bits)  # type: ignore[operator]

    @cached_property
    def max(self) -> float:
        return self.value(self.max_code)

    @property
    def min(self) -> float:
        return -self.max if self.signed else (0.0 if self.zero else self.smallest)

    @property
    def smallest(self) -> float:
        return self.value(1 if self.zero else 0)

    @property
    def min_normal(self) -> float | None:
        """The smallest value with a full mantissa; None where every finite value is subnormal (e1m<Y>)."""
        code = 1 << self.mantissa_bits if self.subnormals else int(self.zero)
        return self.value(code) if code <= self.max_code else None

    @property
    def min_subnormal(self) -> float | None:
        """The smallest subnormal; None where there are none."""
        return self.value(1) if self.subnormals and self.mantissa_bits else None

    @property
    def epsilon(self) -> float:
        if not self.smallest <= 1.0 < self.max:
            return math.nan
        gap = math.ldexp(1.0, max(0, self.min_exponent) - self.mantissa_bits)  # 1 may lie among the subnormals
        return gap if gap <= 1.0 else math.nan

    @property
    def count(self) -> int:
        return (1 + self.signed) * self.max_code + 1

    @property
    def inf_code(self) -> int | None:
        return self.max_code + 1 if self.specials in (Specials.IEEE, Specials.EXTENDED) else None

    @cached_property
    def nan_code(self) -> int | None:
        """The quiet NaN: for IEEE formats the one whose first mantissa bit is set, as hardware makes it."""
        if self.specials is Specials.IEEE:
            return self.max_code + 1 + (1 << (self.mantissa_bits - 1)) if self.mantissa_bits else None
        if self._nan_is_minus_zero:
            return 1 << (self.bits - 1)
        if self.specials is Specials.EXTENDED:
            return self.max_code + 2
        return self.max_code + 1 if self.specials is Specials.NAN_ONLY else None

    @property
    def has_zero(self) -> bool:
        return self.zero

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and self.zero and not self._nan_is_minus_zero

    def __str__(self) -> str:
        return NAMES.get(self) or self.text

    @property
    def text(self) -> str:
        """The systematic name: e<X>m<Y>, b<bias> where unusual, the specials' suffix, then _u _ns _nz for what is missing."""
        ordinary = FloatFormat(self.exponent_bits, self.mantissa_bits, specials=self.specials, signed=True)
        bias = f"b{self.bias}" if self.bias != ordinary.bias else ""
        flags = "_u" * (not self.signed) + "_ns" * (not self.subnormals) + "_nz" * (not self.zero)
        body = f"e{self.exponent_bits}m{self.mantissa_bits}{bias}"
        if self.specials is Specials.EXTENDED and not bias and self.subnormals:
            return f"binary{self.bits}p{self.mantissa_bits + 1}{'s' if self.signed else 'u'}e"
        text = f"{body}{self.specials.value}{flags}"
        return f"{body}nan{flags}" if text in NAMES.values() else text


def p3109(bits: int, precision: int, signed: bool, extended: bool) -> FloatFormat:
    """binary<bits>p<precision> of IEEE P3109: bias 2^(exponent bits - 1), one zero, one NaN; `extended`: with infinities."""
    exponent_bits = bits - precision + (not signed)
    if not 1 <= exponent_bits <= MAX_EXPONENT_BITS or not 1 <= precision <= MAX_MANTISSA_BITS + 1:
        raise ValueError(
            f"impossible binary{bits}p{precision}: precision is from 1 to {MAX_MANTISSA_BITS + 1} bits, and from 1 to "
            f"{MAX_EXPONENT_BITS} must be left for the exponent, beside a sign"
        )
    finite = Specials.FNUZ if signed else Specials.NAN_ONLY
    specials = Specials.EXTENDED if extended else finite
    return FloatFormat(exponent_bits, precision - 1, bias=1 << (exponent_bits - 1), specials=specials, signed=signed)


FP32 = FloatFormat(8, 23)
TF32 = FloatFormat(8, 10)
BF16 = FloatFormat(8, 7)
FP16 = FloatFormat(5, 10)
E5M2 = FloatFormat(5, 2)
E4M3 = FloatFormat(4, 3)
E3M4 = FloatFormat(3, 4)
E4M3FN = FloatFormat(4, 3, specials=Specials.NAN_ONLY)
E5M2FNUZ = FloatFormat(5, 2, specials=Specials.FNUZ)
E4M3FNUZ = FloatFormat(4, 3, specials=Specials.FNUZ)
E4M3B11FNUZ = FloatFormat(4, 3, bias=11, specials=Specials.FNUZ)
E8M0FNU = FloatFormat(8, 0, specials=Specials.NAN_ONLY, subnormals=False, signed=False, zero=False)
E3M2FN = FloatFormat(3, 2, specials=Specials.NONE)
E2M3FN = FloatFormat(2, 3, specials=Specials.NONE)
E2M1FN = FloatFormat(2, 1, specials=Specials.NONE)

# Formats that the field knows by a name of their own. The "fn" of the OCP 4- and 6-bit types means that they have no
# special values at all, while the "fn" of e4m3fn leaves it a NaN: hence names, not a rule.
NAMES: dict[FloatFormat, str] = {
    FP32: "fp32",
    TF32: "tf32",
    BF16: "bf16",
    FP16: "fp16",
    E4M3FN: "e4m3fn",
    E5M2FNUZ: "e5m2fnuz",
    E4M3FNUZ: "e4m3fnuz",
    E4M3B11FNUZ: "e4m3b11fnuz",
    E8M0FNU: "e8m0fnu",
    E3M2FN: "e3m2fn",
    E2M3FN: "e2m3fn",
    E2M1FN: "e2m1fn",
}
