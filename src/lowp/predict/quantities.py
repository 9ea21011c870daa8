"""Numbers with units, as text: "100 Gbit/s", "5 us", "141 GB".

A plain number is refused wherever it could mean two things: 100 may be gigabits or megabytes. Prefixes are decimal (kB, MB,
GB); KiB, MiB and GiB are powers of two. `b` alone is refused, because it may be a bit or a byte.
"""

import math
import re
from dataclasses import dataclass

from lowp.names import did_you_mean

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL.items()}
_TEXT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*)?")


@dataclass(frozen=True)
class Unit:
    """What is measured: the factor of every name of a unit, and examples for errors."""

    what: str
    factors: dict[str, float]
    examples: str


SECONDS = Unit(
    "a time", {"ps": 1e-12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}, "'5 us' or '1.2 ms'"
)
SIZE = Unit("a size", _BYTES, "'141 GB' or '512 MiB'")
RATE = Unit("a bandwidth", {f"{name}/s": factor for name, factor in (_BYTES | _BITS).items()}, "'100 Gbit/s' or '12.5 GB/s'")
FLOPS = Unit("a speed", {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}, "'19.5 TFLOP/s'")


def quantity(value: object, unit: Unit) -> float:
    """The number in seconds, bytes, bytes a second or operations a second. ValueError says what is wrong with it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write {unit.what} as {unit.examples}")
    found = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is not {unit.what}; write it as {unit.examples}")
    number, name = float(found[1]), found[2]
    if name is None:
        raise ValueError(f"{value!r} has no unit; write {unit.what} as {unit.examples}")
    if name not in unit.factors:
        hint = did_you_mean(name, unit.factors, f"write it as {unit.examples}")
        raise ValueError(f"{value!r}: {name!r} is no unit of {unit.what}; {hint}")
    if math.isinf(number * unit.factors[name]):
        raise ValueError(f"{value!r} is too large")
    return number * unit.factors[name]


def exact_text(value: float, unit: Unit) -> str:
    """The text that `quantity` reads as this very number, in the unit in which it is shortest."""
    texts = [f"{value / factor:.6g} {name}" for name, factor in unit.factors.items()]
    exact = [text for text in texts if "e" not in text.split()[0] and quantity(text, unit) == value]
    base = next(name for name, factor in unit.factors.items() if factor == 1.0)
    return min(exact, key=len, default=f"{value!r} {base}")


def rate_text(bytes_per_second: float) -> str:
    """For tables: links in bits, as they are sold, up to 400 Gbit/s; what is faster in bytes."""
    bits = 8 * bytes_per_second
    return _scaled(bits, "bit/s") if bits <= 4.005e11 else _scaled(bytes_per_second, "B/s")


def seconds_text(seconds: float) -> str:
    """Three digits: 0 s, 12.3 us, 1.05 ms, 2.41 s."""
    if seconds == 0:
        return "0 s"
    for name, factor in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * factor:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds:.3g} s"


def _scaled(value: float, name: str) -> str:
    prefix = max((p for p in _DECIMAL if _DECIMAL[p] <= value * 1.0005), key=lambda p: _DECIMAL[p], default="")
    return f"{_tidy(value / _DECIMAL[prefix])} {prefix}{name}"


def _tidy(value: float) -> str:
    """Three digits, but whole numbers below a thousand as they are."""
    return f"{round(value)}" if math.isclose(value, round(value), rel_tol=1e-9) and value < 1000 else f"{value:.3g}"
