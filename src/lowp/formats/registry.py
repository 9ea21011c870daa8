"""The registered formats: what `lowp formats` lists and the conformance tests run over. A new format is one entry here."""

from lowp.formats.base import Format
from lowp.formats.block import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, BlockFormat
from lowp.formats.codebook import BNB_DYNAMIC8, DYNAMIC8, LINEAR8, MANTISSA8, NF4, STATIC8
from lowp.formats.fixed import FixedFormat
from lowp.formats.floats import (
    BF16,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E3M4,
    E4M3,
    E4M3B11FNUZ,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FP16,
    FP32,
    TF32,
    FloatFormat,
    p3109,
)
from lowp.formats.posit import PositFormat

AnyFormat = Format | BlockFormat

FORMATS: tuple[AnyFormat, ...] = (
    *(FP32, TF32, BF16, FP16, FloatFormat(6, 9)),
    *(FloatFormat(1, 6), FloatFormat(2, 5), E3M4, E4M3, E5M2, FloatFormat(6, 1), FloatFormat(7, 0)),
    *(E4M3FN, E5M2FNUZ, E4M3FNUZ, E4M3B11FNUZ, E8M0FNU, p3109(8, 3, True, True), p3109(8, 4, True, True)),
    *(E3M2FN, E2M3FN, E2M1FN, FloatFormat(3, 0)),
    *(FixedFormat(7, 8), FixedFormat(3, 4), FixedFormat(15), FixedFormat(7), FixedFormat(3), FixedFormat(1)),
    *(PositFormat(16), PositFormat(16, 1), PositFormat(8), PositFormat(8, 1), PositFormat(8, 0), PositFormat(6)),
    *(DYNAMIC8, STATIC8, MANTISSA8, LINEAR8, BNB_DYNAMIC8, NF4),
    *(MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8, NVFP4),
)
