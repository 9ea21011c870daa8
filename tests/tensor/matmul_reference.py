"""The scalar reference of matrix products in narrow arithmetic: exact, slow, straight from the definition.

Numbers are `Fraction`s. What a Fraction cannot be (a zero with its sign, an infinity, NaN) stays a float. `reference.round`
is the one rounding; it takes a Fraction as well as a float, so every rounding here is one rounding of an exact number.
Arrays are float64 numpy arrays, as containers: they hold every number of every dtype and format, and compute nothing.

An `arithmetic` is anything with the fields of `lowp.Arithmetic`:

    multiply       the format that products are rounded to; None: they stay exact
    accumulate     the format that sums are rounded to
    kahan          are sums compensated?
    chunk          how many consecutive products are summed on their own before they join the sum
    quire          is the exact sum of all products rounded once instead?
    rounding       how both roundings round
    approximate    None, or "integer_add": the bits of the product are the sum of the bits of the factors

A gradient is the same kind of sum with other factors: each function here says which pairs of factors an element sums, and in
which order. `dot` does the rest.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import product as every
from typing import Any

import numpy as np

from lowp.formats import Format, Rounding, format, reference

Exact = Fraction | float  # a Fraction is never zero; a float is a zero, an infinity or NaN
Pairs = Iterable[tuple[float, float]]
Size = int | tuple[int, int]

ONE = 0x3F800000  # the bits of 1.0 in float32
SMALLEST_NORMAL = 0x00800000
INFINITY = 0x7F800000


# Exact arithmetic


def exact(x: float) -> Exact:
    return Fraction(x) if math.isfinite(x) and x != 0 else float(x)


def add(x: Exact, y: Exact, rounding: str) -> Exact:
    """x + y without rounding. The rounding still decides the sign of a zero: minus in "down", where signs differ."""
    zero = -0.0 if rounding == Rounding.DOWN else 0.0
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return (x + y) or zero
    if not (math.isfinite(x) and math.isfinite(y)):
        return float(x) + float(y)  # as IEEE has it: inf - inf is NaN
    if x == 0 and y == 0:
        return x if math.copysign(1, x) == math.copysign(1, y) else zero
    return y if x == 0 else x


def exact_product(a: float, b: float) -> Exact:
    x, y = exact(a), exact(b)
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    return float(x) * float(y)  # one is a zero, an infinity or NaN: so is the product, as IEEE has it


def integer_add_product(a: float, b: float) -> Exact:
    """The product whose bits are those of the magnitudes added as integers, less those of 1 (arXiv 2012.03458)."""
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    a_bits, b_bits = (struct.unpack("<I", struct.pack("<f", abs(x)))[0] for x in (a, b))
    a_is_zero, b_is_zero = a_bits < SMALLEST_NORMAL, b_bits < SMALLEST_NORMAL  # subnormals count as zero
    if math.isinf(a) or math.isinf(b):
        return math.nan if a_is_zero or b_is_zero else sign * math.inf
    bits = a_bits + b_bits - ONE
    if a_is_zero or b_is_zero or bits < SMALLEST_NORMAL:
        return sign * 0.0
    if bits >= INFINITY:
        return sign * math.inf
    return exact(sign * struct.unpack("<f", struct.pack("<I", bits))[0])


def rounded(x: Exact, fmt: str | Format, rounding: str) -> Exact:
    return exact(reference.round(x, format(fmt), rounding))


def neighbours(x: Exact, fmt: str | Format) -> tuple[float, float]:
    """What one stochastic rounding may make of x: the value below and the value above (the same twice where x is exact)."""
    return reference.round(x, format(fmt), Rounding.DOWN), reference.round(x, format(fmt), Rounding.UP)


# One element: a sum of products


def product(a: float, b: float, arithmetic: Any) -> Exact:
    p = integer_add_product(a, b) if arithmetic.approximate == "integer_add" else exact_product(a, b)
    return p if arithmetic.multiply is None else rounded(p, arithmetic.multiply, arithmetic.rounding)


def running_sum(addends: Sequence[Exact], arithmetic: Any) -> Exact:
    """The addends one after the other, each sum rounded; with `kahan`, what each step lost is put into the next."""

    def plus(x: Exact, y: Exact) -> Exact:
        return rounded(add(x, y, arithmetic.rounding), arithmetic.accumulate, arithmetic.rounding)

    s: Exact = 0.0
    c: Exact = 0.0
    for x in addends:
        if arithmetic.kahan:
            y = plus(x, -c)
            t = plus(s, y)
            c = plus(plus(t, -s), -y)
            s = t
        else:
            s = plus(s, x)
    return s


def quire_sum(addends: Sequence[Exact], arithmetic: Any) -> Exact:
    """The exact sum, rounded once. A sum of zero is +0 whatever the addends' signs and the rounding."""
    total: Exact = 0.0
    for x in addends:
        total = add(total, x, Rounding.NEAREST)
    return rounded(total, arithmetic.accumulate, arithmetic.rounding)


def total(addends: Sequence[Exact], arithmetic: Any, bias: float | None = None) -> float:
    """All addends and then the bias, which is an addend of the outer sum where there are chunks."""
    last = [] if bias is None else [exact(bias)]
    if arithmetic.quire:
        return float(quire_sum([*addends, *last], arithmetic))
    if arithmetic.chunk > 1:
        starts = range(0, len(addends), arithmetic.chunk)
        addends = [running_sum(addends[start : start + arithmetic.chunk], arithmetic) for start in starts]
    return float(running_sum([*addends, *last], arithmetic))


def dot(a: Iterable[float], b: Iterable[float], arithmetic: Any, bias: float | None = None) -> float:
    """One element of a product: a number of the accumulate format."""
    return total([product(float(x), float(y), arithmetic) for x, y in zip(a, b, strict=True)], arithmetic, bias)


def dot_of_pairs(pairs: Pairs, arithmetic: Any, bias: float | None = None) -> float:
    pairs = list(pairs)
    return dot([a for a, _ in pairs], [b for _, b in pairs], arithmetic, bias)


def in_dtype(values: np.ndarray, dtype: str | Format) -> np.ndarray:
    """Results as a tensor holds them: rounded to nearest where its dtype (fp32, bf16, fp16) is narrower than the sums."""
    return np.array([reference.round(float(x), format(dtype)) for x in values.flat]).reshape(values.shape)


# Matrix products


def _with_matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Vectors as matrices of one row (a) or one column (b), and the batch that both are broadcast to."""
    a = a[None, :] if a.ndim == 1 else a
    b = b[:, None] if b.ndim == 1 else b
    return a, b, np.broadcast_shapes(a.shape[:-2], b.shape[:-2])


def _own(at: tuple[int, ...], operand: np.ndarray) -> tuple[int, ...]:
    """Where an element of the broadcast batch comes from in an operand."""
    sizes = operand.shape[:-2]
    return tuple(0 if size == 1 else i for i, size in zip(at[len(at) - len(sizes) :], sizes, strict=True))


def matmul(a: np.ndarray, b: np.ndarray, arithmetic: Any) -> np.ndarray:
    """Shapes as torch.matmul has them."""
    left, right, batch = _with_matrices(a, b)
    result = np.empty((*batch, left.shape[-2], right.shape[-1]))
    for *at, m, n in np.ndindex(result.shape):
        row, column = left[_own(tuple(at), left)][m, :], right[_own(tuple(at), right)][:, n]
        result[(*at, m, n)] = dot(row, column, arithmetic)
    return result.reshape(batch + a.shape[:-1][-1:] + b.shape[1:][-1:])  # without the row or column that a vector was given


def matmul_gradients(a: np.ndarray, b: np.ndarray, d: np.ndarray, arithmetic: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of a and b, where d is the gradient of the result. An operand used by several batch elements sums over them as well."""
    left, right, batch = _with_matrices(a, b)
    (rows, inner), columns = left.shape[-2:], right.shape[-1]
    d = d.reshape(*batch, rows, columns)
    of_left, of_right = defaultdict(list), defaultdict(list)
    for at in np.ndindex(batch):
        here, there = _own(at, left), _own(at, right)
        for m, k, n in every(range(rows), range(inner), range(columns)):  # n ascends for each (m, k), and m for each (k, n)
            of_left[(*here, m, k)].append((d[(*at, m, n)], right[(*there, k, n)]))
            of_right[(*there, k, n)].append((left[(*here, m, k)], d[(*at, m, n)]))
    gradients = []
    for operand, matrices, pairs in ((a, left, of_left), (b, right, of_right)):
        values = [dot_of_pairs(pairs[index], arithmetic) for index in np.ndindex(matrices.shape)]
        gradients.append(np.array(values).reshape(operand.shape))
    return gradients[0], gradients[1]


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, arithmetic: Any) -> np.ndarray:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values = [
        dot(row, weight[n], arithmetic, None if bias is None else float(bias[n])) for row in rows for n in range(len(weight))
    ]
    return np.array(values).reshape(*x.shape[:-1], len(weight))


def linear_gradients(
    x: np.ndarray, weight: np.ndarray, d: np.ndarray, arithmetic: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of x, weight and bias."""
    count = math.prod(x.shape[:-1])
    rows, d_rows = x.reshape(count, x.shape[-1]), d.reshape(count, len(weight))
    of_x = [dot(d_row, weight[:, k], arithmetic) for d_row in d_rows for k in range(x.shape[-1])]
    of_weight = [dot(d_rows[:, n], rows[:, k], arithmetic) for n, k in np.ndindex(weight.shape)]
    return np.array(of_x).reshape(x.shape), np.array(of_weight).reshape(weight.shape), bias_gradient(d_rows, arithmetic)


def bias_gradient(d_rows: np.ndarray, arithmetic: Any) -> np.ndarray:
    """The sum over rows, which are addends as they are: there is no product to round."""
    return np.array([total([exact(float(x)) for x in d_rows[:, n]], arithmetic) for n in range(d_rows.shape[1])])


# Convolution


class Window:
    """Where a 2-D convolution looks: output o and tap k of the kernel meet at input o * stride + k * dilation - before."""

    def __init__(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> None:
        self.stride, self.dilation = _pair(stride), _pair(dilation)
        self.kernel, self.image = weight.shape[2:], x.shape[2:]
        self.inputs, self.outputs = x.shape[1] // groups, weight.shape[0] // groups  # channels of one group
        extent = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        if isinstance(padding, str):  # "same": an odd one goes to the end
            around = extent if padding == "same" else [0, 0]
            self.before = [pad // 2 for pad in around]
        else:
            self.before = list(_pair(padding))
            around = [2 * pad for pad in self.before]
        sides = zip(self.image, around, extent, self.stride, strict=True)
        self.result = tuple((size + pad - e - 1) // s + 1 for size, pad, e, s in sides)

    def input(self, x: np.ndarray, n: int, channel: int, out: tuple[int, ...], tap: tuple[int, ...]) -> float:
        """What a tap of the kernel sees: outside of the image, zero."""
        at = [o * s + k * d - b for o, s, k, d, b in zip(out, self.stride, tap, self.dilation, self.before, strict=True)]
        inside = all(0 <= i < size for i, size in zip(at, self.image, strict=True))
        return float(x[n, channel, at[0], at[1]]) if inside else 0.0

    def output(self, d: np.ndarray, n: int, channel: int, at: tuple[int, ...], tap: tuple[int, ...]) -> float:
        """The gradient of the output that a tap links to an input: zero where the stride skips it or there is none."""
        steps = [i + b - k * d for i, b, k, d in zip(at, self.before, tap, self.dilation, strict=True)]
        if any(step % s for step, s in zip(steps, self.stride, strict=True)):
            return 0.0
        out = [step // s for step, s in zip(steps, self.stride, strict=True)]
        inside = all(0 <= o < size for o, size in zip(out, self.result, strict=True))
        return float(d[n, channel, out[0], out[1]]) if inside else 0.0


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def conv2d(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, arithmetic: Any, **geometry: Any) -> np.ndarray:
    """Every element sums over (input channel of its group, kh, kw)."""
    window = Window(x, weight, **geometry)
    result = np.empty((len(x), len(weight), *window.result))
    for n, channel, *out in np.ndindex(result.shape):
        first = channel // window.outputs * window.inputs
        pairs = [
            (window.input(x, n, first + c, tuple(out), tuple(tap)), float(weight[(channel, c, *tap)]))
            for c, *tap in np.ndindex(weight.shape[1:])
        ]
        result[(n, channel, *out)] = dot_of_pairs(pairs, arithmetic, None if bias is None else float(bias[channel]))
    return result


def conv2d_gradients(
    x: np.ndarray, weight: np.ndarray, d: np.ndarray, arithmetic: Any, **geometry: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of x: sums over (output channel of its group, kh, kw). Of the weight: over (image, oh, ow). Of the bias: the same."""
    window = Window(x, weight, **geometry)
    of_x, of_weight = np.empty(x.shape), np.empty(weight.shape)
    for n, channel, *at in np.ndindex(x.shape):
        first, within = channel // window.inputs * window.outputs, channel % window.inputs
        pairs = [
            (window.output(d, n, first + o, tuple(at), tuple(tap)), float(weight[(first + o, within, *tap)]))
            for o, *tap in np.ndindex((window.outputs, *window.kernel))
        ]
        of_x[(n, channel, *at)] = dot_of_pairs(pairs, arithmetic)
    for channel, c, *tap in np.ndindex(weight.shape):
        source = channel // window.outputs * window.inputs + c
        pairs = [
            (float(d[(n, channel, *out)]), window.input(x, n, source, tuple(out), tuple(tap)))
            for n, *out in np.ndindex((len(x), *window.result))
        ]
        of_weight[(channel, c, *tap)] = dot_of_pairs(pairs, arithmetic)
    return of_x, of_weight, bias_gradient(d.transpose(0, 2, 3, 1).reshape(-1, len(weight)), arithmetic)
