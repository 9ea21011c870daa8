"""Which arithmetic: what multiplies, what adds, and how often sums are rounded.

For one element of a result, with products over k = 0 .. K - 1 (R rounds to `accumulate`, P to `multiply`):

    product     p = P(a * b), or exact without `multiply`: the sum then is a fused multiply-add
    plain       s = R(s + p), one after the other
    chunk = c   t = R(t + p) over groups of c products, then s = R(s + t)
    kahan       y = R(p - lost); t = R(s + y); lost = R(R(t - s) - y); s = t, for every such sum
    quire       the exact sum of all products, rounded once

Each R and each P is one rounding of the exact number. A bias is one more addend, the last.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lowp.formats import BlockFormat, Format, FormatLike, Rounding
from lowp.formats import format as parse_format
from lowp.names import did_you_mean

APPROXIMATIONS = ("integer_add",)
_MODES = tuple(mode.value for mode in Rounding)


@dataclass(frozen=True)
class Arithmetic:
    """How matrices are multiplied. Formats are names or format objects, with a sign and a zero; not block formats.

    Args:
        multiply: the format of products; None leaves them exact.
        accumulate: the format of every partial sum.
        kahan: sums are compensated.
        chunk: how many products are summed before their sum joins the whole.
        quire: the sum is exact and rounded once.
        rounding: as for `lowp.quantize`, for products and sums.
        approximate: "integer_add" replaces a product by the sum of the operands' bits (arXiv 2012.03458).
    """

    multiply: FormatLike | None = None
    accumulate: FormatLike = "fp32"
    kahan: bool = False
    chunk: int = 1
    quire: bool = False
    rounding: str = "nearest"
    approximate: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate", _number_format(self.accumulate, "accumulate"))
        if self.multiply is not None:
            object.__setattr__(self, "multiply", _number_format(self.multiply, "multiply"))
        if not isinstance(self.chunk, int) or isinstance(self.chunk, bool) or self.chunk < 1:
            raise ValueError(f"chunk counts products: an integer of at least 1, not {self.chunk!r}")
        if self.quire and self.kahan:
            raise ValueError("a quire holds exact sums: there is nothing for kahan to compensate")
        if self.quire and self.chunk > 1:
            raise ValueError(f"a quire holds the exact sum of all products: chunk={self.chunk} has no meaning beside it")
        if self.rounding not in _MODES:
            raise ValueError(
                f"unknown rounding {self.rounding!r}; it is one of {', '.join(_MODES)}{_near(self.rounding, _MODES)}"
            )
        object.__setattr__(self, "rounding", str(Rounding(self.rounding).value))
        if self.approximate is not None and self.approximate not in APPROXIMATIONS:
            known = ", ".join(map(repr, APPROXIMATIONS))
            hint = _near(self.approximate, APPROXIMATIONS)
            raise ValueError(f"unknown approximate={self.approximate!r}; it is None or {known}{hint}")

    @property
    def mode(self) -> Rounding:
        return Rounding(self.rounding)

    @property
    def stochastic(self) -> bool:
        return self.mode is Rounding.STOCHASTIC

    @property
    def sum_format(self) -> Format:
        """`accumulate`, parsed."""
        assert isinstance(self.accumulate, Format)
        return self.accumulate

    @property
    def product_format(self) -> Format | None:
        """`multiply`, parsed."""
        assert self.multiply is None or isinstance(self.multiply, Format)
        return self.multiply

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments of `matmul`, `linear` and `conv2d`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def of_addends(self) -> "Arithmetic":
        """The same sums of numbers that are no products: a bias's gradient."""
        return Arithmetic(None, self.accumulate, self.kahan, self.chunk, self.quire, self.rounding)

    def __str__(self) -> str:
        """Short, for a table; `parse` reads it."""
        words = [str(self.accumulate)]
        words += [name for name in ("quire", "kahan") if getattr(self, name)]
        words += [self.approximate] if self.approximate else []
        parts = [" ".join(words)]
        parts += [f"multiply {self.multiply}"] if self.multiply is not None else []
        parts += [f"chunk {self.chunk}"] if self.chunk > 1 else []
        parts += [f"rounding {self.rounding}"] if self.rounding != "nearest" else []
        return ", ".join(parts)

    @staticmethod
    def parse(text: str) -> "Arithmetic":
        """The arithmetic that a text names: "e5m2, multiply e4m3fn, chunk 64"."""
        head, *parts = text.split(", ")
        accumulate, *words = head.split(" ")
        options: dict[str, Any] = {name: True for name in words if name in ("quire", "kahan")}
        options |= {"approximate": words[-1]} if words and words[-1] in APPROXIMATIONS else {}
        options |= dict(part.split(" ", 1) for part in parts)
        options["chunk"] = int(options.get("chunk", 1))
        return Arithmetic(accumulate=accumulate, **options)


def _number_format(given: Any, role: str) -> Format:
    parsed = parse_format(given)
    if isinstance(parsed, BlockFormat):
        raise ValueError(f"{role}={parsed} is a block format: products and sums are single numbers")
    if not parsed.signed:
        raise ValueError(f"{role}={parsed} has no negative numbers, which products and sums need")
    if not parsed.has_zero or (parsed.family == "codebook" and 0.0 not in parsed.values):
        raise ValueError(f"{role}={parsed} has no zero, which products and sums need")
    return parsed


def _near(given: str, known: tuple[str, ...]) -> str:
    return f"; {hint}" if (hint := did_you_mean(str(given), known)) else ""


_named: dict[str, Arithmetic] = {}


def name_of(arithmetic: Arithmetic) -> str:
    """A text by which a graph can hold an arithmetic, and `named` find it again."""
    text = str(arithmetic)
    if _named.setdefault(text, arithmetic) != arithmetic:
        raise ValueError(f"two different arithmetics are both called {text!r}: give their formats names of their own")
    return text


def named(text: str) -> Arithmetic:
    """The arithmetic of a name (of another process too, if its formats have texts)."""
    if text not in _named:
        _named[text] = Arithmetic.parse(text)
    return _named[text]
