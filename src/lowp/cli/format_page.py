"""`lowp formats NAME`: one format in full, as a page and as JSON."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lowp.cli.figures import figures
from lowp.cli.output import console, hexadecimal, short, table, with_power
from lowp.formats import AnyFormat, BlockFormat, FloatFormat, Format
from lowp.formats.binades import binades, code_of

if TYPE_CHECKING:
    from rich.table import Table

SAMPLED_BINADES = 4  # of a wide format, from either end and around 1
MAX_LISTED_BINADES = 64  # e8m0fnu has 255 of one value each: no table to read


def document(fmt: AnyFormat, values: bool) -> dict[str, Any]:
    """Everything about a format, for JSON; with `values`, its finite values, ascending, and the value of every code."""
    known = dataclasses.asdict(figures(fmt)) | {"fields": _fields(fmt)}
    if isinstance(fmt, BlockFormat):
        return known | {"element": document(fmt.element, values), "scale": document(fmt.scale, values=False)}
    known |= {"min": fmt.min, "overflow": fmt.overflow, "special_codes": fmt.special_codes}
    if isinstance(fmt, FloatFormat):
        known |= {"min_normal": fmt.min_normal, "min_subnormal": fmt.min_subnormal}
    return known | ({"values": fmt.values, "table": fmt.table} if values else {})


def _fields(fmt: AnyFormat) -> dict[str, Any]:
    """The dataclass's own fields (not a codebook's entries, which are its values)."""
    shown = {field.name: getattr(fmt, field.name) for field in dataclasses.fields(fmt) if field.repr}  # type: ignore[arg-type]
    return {name: _plain_field(value) for name, value in shown.items()}


def _plain_field(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return str(value) if isinstance(value, Format) else value


def print_page(fmt: AnyFormat, every_value: bool) -> None:
    """The format's facts and its values. `every_value` lists them all; else only short lists of up to 8 bits are listed."""
    out = console()
    known = figures(fmt)
    number = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if every_value and number.bits > 16:
        raise ValueError(f"{number} has 2^{number.bits} codes; --values lists formats of up to 16 bits")
    out.print(f"[bold cyan]{known.name}[/]  {known.family}, {known.bits:g} bits: {known.layout}\n")
    out.print(_facts(_block_facts(fmt) if isinstance(fmt, BlockFormat) else _number_facts(fmt)))
    out.print(f"\nThe values of an element, {number}, before the scale:\n" if number is not fmt else "")
    listed = every_value or (number.bits <= 8 and len(binades(number)) <= MAX_LISTED_BINADES)
    values, legend = _all_values(number, out.width) if listed else _sampled_values(number)
    out.print(values)
    if isinstance(number, FloatFormat) and number.min_subnormal is not None:
        legend += f"\nBelow 2^{number.min_exponent}, values are subnormal: equally spaced."
    out.print(f"[dim]{legend}[/]\n")


def _facts(rows: Iterable[tuple[str, str]]) -> "Table":
    result = table()
    result.show_header = False
    result.add_column(style="dim", no_wrap=True)
    result.add_column()
    for label, text in rows:
        result.add_row(label, text)
    return result


def _number_facts(fmt: Format) -> list[tuple[str, str]]:
    """Label and text of each derived property, codes beside the values that have one."""

    def coded(value: float) -> str:
        code = code_of(value, fmt)
        return with_power(value) + (f"  [dim]{hexadecimal(code, fmt.bits)}[/]" if code is not None else "")

    known = figures(fmt)
    fields = ", ".join(f"{name}={value}" for name, value in _fields(fmt).items())
    rows = [("fields", f"{type(fmt).__name__}({fields})"), ("largest value", coded(fmt.max))]
    if fmt.signed and fmt.min != -fmt.max:
        rows.append(("most negative", short(fmt.min, 6)))
    if isinstance(fmt, FloatFormat):
        if fmt.min_normal is not None:
            rows.append(("smallest normal", coded(fmt.min_normal)))
        if fmt.min_subnormal is not None:
            rows.append(("smallest subnormal", coded(fmt.min_subnormal)))
    else:
        rows.append(("smallest above 0", coded(fmt.smallest)))
    rows.append(("epsilon", with_power(known.epsilon) if known.epsilon else "none: 1 has no next value here"))
    rows.append(("dynamic range", f"{known.dynamic_range:.2f} binades"))
    rows.append(("values", f"{fmt.count:,} finite ones in {1 << fmt.bits:,} codes"))
    rows.append(("overflow becomes", "the largest value" if fmt.overflow == fmt.max else short(fmt.overflow)))
    specials = (f"{name}=[dim]{hexadecimal(code, fmt.bits)}[/]" for name, code in fmt.special_codes.items())
    rows.append(("special codes", "  ".join(specials)))
    return rows


def _block_facts(fmt: BlockFormat) -> list[tuple[str, str]]:
    whole = "one float32 for the whole tensor" if fmt.tensor_scale else "none"
    share = f"{fmt.element.bits} + {fmt.scale.bits}/{fmt.size}"
    return [
        ("element", f"{fmt.element}, {fmt.element.bits} bits, up to {short(fmt.element.max)}"),
        ("block", f"{fmt.size} neighbours along the last dimension"),
        ("scale of a block", f"{fmt.scale}, {fmt.scale.bits} bits, {short(fmt.scale.smallest)} to {short(fmt.scale.max)}"),
        ("scale of the tensor", whole),
        ("bits a value", f"{share} = {fmt.bits:g}"),
        ("largest value", f"{short(fmt.max)}" + (", times the tensor's scale" if fmt.tensor_scale else "")),
        ("smallest above 0", f"{short(fmt.smallest)}" + (", times the tensor's scale" if fmt.tensor_scale else "")),
        ("range in one block", f"{fmt.element.dynamic_range:.2f} binades"),
        ("range of all blocks", f"{fmt.dynamic_range:.2f} binades"),
    ]


def _all_values(fmt: Format, width: int) -> tuple["Table", str]:
    """Every positive value, a row or more a binade, in columns of equal width."""
    groups = binades(fmt)
    digits = 3 if fmt.bits <= 8 else 6  # enough to tell neighbours apart
    texts = [[short(fmt.value(code), digits) for code in group.codes] for group in groups]
    codes = [_code_ranges(group.codes, fmt.bits) for group in groups]
    column = max(len(text) for row in texts for text in row)
    room = max(1, (width - max(map(len, codes)) - 9) // (column + 1))
    per_line = 1 << (room.bit_length() - 1)  # a power of two, so that the lines of neighbouring binades align
    result = table()
    result.add_column("binade", justify="right", no_wrap=True)
    result.add_column("codes", style="dim", no_wrap=True)
    result.add_column("positive values", no_wrap=True)
    for group, row, code_text in zip(groups, texts, codes, strict=True):
        padded = [text.rjust(column) for text in row]
        lines = [" ".join(padded[start : start + per_line]) for start in range(0, len(padded), per_line)]
        result.add_row(f"2^{group.exponent}", code_text, "\n".join(lines))
    return result, f"Values below 1 with {digits} digits; --json has all."


def _sampled_values(fmt: Format) -> tuple["Table", str]:
    """Some binades of a wide format: how many values each has, how far apart, and its first and last."""
    groups = binades(fmt)
    around_one = next((i for i, group in enumerate(groups) if group.exponent >= 0), 0)
    n = SAMPLED_BINADES
    shown = sorted(
        {*range(n), *range(around_one - 1, around_one + n - 1), *range(len(groups) - n, len(groups))} & {*range(len(groups))}
    )
    result = table()
    for heading in ("binade", "codes", "values", "gap", "first", "last"):
        result.add_column(heading, justify="left" if heading == "codes" else "right", no_wrap=True)
    previous = -1
    for index in shown:
        if index != previous + 1:
            result.add_row("...")
        group, previous = groups[index], index
        ends = [short(fmt.value(group.codes[end]), 8) for end in (0, -1)]
        codes = _code_ranges(group.codes, fmt.bits)
        result.add_row(f"2^{group.exponent}", codes, f"{len(group.codes):,}", short(group.gap or None), *ends)
    return result, f"{len(shown)} of {len(groups)} binades." + (" --values lists every value." if fmt.bits <= 16 else "")


def _code_ranges(codes: Sequence[int], bits: int) -> str:
    """Codes in hexadecimal, runs as first..last: 08..0f, 7f."""
    digits = -(-bits // 4)
    if isinstance(codes, range):
        runs = [(codes[0], codes[-1])]
    else:
        starts = [i for i in range(len(codes)) if i == 0 or codes[i] != codes[i - 1] + 1]
        runs = [(codes[i], codes[j - 1]) for i, j in zip(starts, [*starts[1:], len(codes)], strict=True)]
    return ", ".join(f"{a:0{digits}x}" if a == b else f"{a:0{digits}x}..{b:0{digits}x}" for a, b in runs)
