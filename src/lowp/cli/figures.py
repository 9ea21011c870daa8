"""The figures of a format: one definition for the table, the JSON and the README."""

import math
from dataclasses import dataclass
from itertools import groupby

from lowp.formats import FORMATS, AnyFormat, BlockFormat, CodebookFormat, FixedFormat, FloatFormat, Format, PositFormat

FAMILIES = tuple(dict.fromkeys(entry.family for entry in FORMATS))


@dataclass(frozen=True)
class Figures:
    """What a table says about a format. None: there is no such thing."""

    name: str
    family: str
    layout: str  # its fields, in words
    bits: float
    max: float
    smallest: float
    epsilon: float | None
    dynamic_range: float  # in binades
    count: int | None
    specials: tuple[str, ...]


def figures(fmt: AnyFormat) -> Figures:
    return Figures(
        name=str(fmt),
        family=fmt.family,
        layout=layout(fmt),
        bits=fmt.bits,
        max=fmt.max,
        smallest=fmt.smallest,
        epsilon=None if math.isnan(fmt.epsilon) else fmt.epsilon,
        dynamic_range=fmt.dynamic_range,
        count=fmt.count if isinstance(fmt, Format) else None,
        specials=specials(fmt),
    )


def specials(fmt: AnyFormat) -> tuple[str, ...]:
    """What the format has beside ordinary numbers, and what it lacks that one would expect."""
    number = fmt.element if isinstance(fmt, BlockFormat) else fmt
    marks = {
        "inf": fmt.has_inf,
        "NaN": fmt.has_nan,
        "-0": number.has_negative_zero,
        ">=0 only": number.has_zero and not number.signed,
        ">0 only": not number.has_zero,
    }
    return tuple(mark for mark, present in marks.items() if present)


def layout(fmt: AnyFormat) -> str:
    """How the bits are spent, in a few words."""
    match fmt:
        case FloatFormat():
            sign = "sign, " if fmt.signed else ""
            return f"{sign}{fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa, bias {fmt.bias}"
        case FixedFormat():
            return f"sign, {fmt.integer_bits} before the point, {fmt.fraction_bits} after"
        case PositFormat():
            return f"sign, regime, up to {fmt.exponent_size} exponent, fraction"
        case CodebookFormat():
            return f"table of {len(fmt.entries)} entries"
        case BlockFormat():
            whole = ", fp32 scale per tensor" if fmt.tensor_scale else ""
            return f"{fmt.size} x {fmt.element}, {fmt.scale} scale{whole}"
        case _:
            return f"{fmt.bits} bits"


def by_family(formats: tuple[AnyFormat, ...] = FORMATS) -> list[tuple[str, list[Figures]]]:
    """The registered formats' figures, in groups, in the registry's order."""
    ordered = sorted(formats, key=lambda entry: FAMILIES.index(entry.family))
    return [(family, [figures(entry) for entry in group]) for family, group in groupby(ordered, key=lambda entry: entry.family)]


def of_family(family: str) -> tuple[AnyFormat, ...]:
    """The registered formats of one family; a wrong name raises with the right ones."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; the families are {', '.join(FAMILIES)}")
    return tuple(entry for entry in FORMATS if entry.family == family)
