"""NVIDIA's assembly in Triton's interpreter, which has none: the few instructions of ours that kernels use, by numpy.

As the PTX manual says, conversions lose NaN's sign, and an approximate reciprocal may be off by a unit in the last place (here
it always is).
"""

import re

import numpy as np

MASK = np.uint64(0xFFFFFFFF)


def floats(bits):
    return (bits & MASK).astype(np.uint32).view(np.float32)


def bits_of(numbers):
    return numbers.astype(np.float32).view(np.uint32).astype(np.uint64)


def cut_product(a, b):
    """Toward zero. The product of two float32 numbers is a float64 number."""
    exact = floats(a).astype(np.float64) * floats(b).astype(np.float64)
    nearest = exact.astype(np.float32)
    return bits_of(nearest) - (np.abs(nearest.astype(np.float64)) > np.abs(exact)).astype(np.uint64)


def halves(bits):
    """The float16 numbers in a word, as float64: last axis."""
    return np.ascontiguousarray(bits & MASK).astype(np.uint32)[..., None].view(np.float16).astype(np.float64)


def word_of(numbers):
    """Rounded to float16, two a word; NaN is the one of a GPU."""
    rounded = np.where(np.isnan(numbers), np.uint16(0x7FFF), numbers.astype(np.float16).view(np.uint16))
    return np.ascontiguousarray(rounded).view(np.uint32)[..., 0].astype(np.uint64)


def float16_of(high, low):
    return word_of(np.stack([floats(low), floats(high)], -1))


def selected(a, b, selector):
    """prmt: each of the four bytes is one of eight, or where the selector says 8 more, its sign."""
    eight, found = a | b << np.uint64(32), np.zeros_like(a)
    for place in range(4):
        choice = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = eight >> np.uint64(8) * (choice & np.uint64(7)) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        found = found | np.where(choice > 7, sign, byte) << np.uint64(8 * place)
    return found


def looked_up(a, b, c, table):
    """lop3: a function of three bits, for each bit."""
    found = a & np.uint64(0)
    for number in range(8):
        if int(table) >> number & 1:
            found = found | (a if number & 4 else ~a) & (b if number & 2 else ~b) & (c if number & 1 else ~c)
    return found & MASK


def e4m3_of(high, low):
    """Two float32 numbers to codes of e4m3fn, what is too large to the largest value, NaN to that without a sign."""
    import ml_dtypes

    def code(x):
        found = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(0x7F), found).astype(np.uint64)

    return code(floats(high)) << np.uint64(8) | code(floats(low))


def flushed(numbers):
    """Subnormal numbers to zeros of their signs."""
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)


def about_reciprocal(bits):
    """A unit in the last place too much or too little, by a bit of the number's; of powers of two as well."""
    right = bits_of(flushed(1 / flushed(floats(bits))))
    normal = (floats(right) != 0) & np.isfinite(floats(right))
    return np.where(normal, right + np.where(bits >> np.uint64(5) & np.uint64(1), MASK, np.uint64(1)) & MASK, right)


_OF_NUMBERS = {
    "fma.rn.f16x2": lambda a, b, c: word_of(halves(a) * halves(b) + halves(c)),  # float64 has room for both, exactly
    "min.f16x2": lambda a, b: word_of(np.fmin(halves(a), halves(b))),
    "mul.rn.f32": lambda a, b: bits_of(floats(a) * floats(b)),
    "cvt.rn.f16x2.f32": float16_of,
    "cvt.rn.satfinite.e4m3x2.f32": e4m3_of,
    "fma.rn.f32": lambda a, b, c: bits_of(floats(a).astype(np.float64) * floats(b) + floats(c)),  # sums with +-0 alone
    "rcp.approx.ftz.f32": about_reciprocal,
    "cvt.f32.f16": lambda a: bits_of(halves(a)[..., 0]),
}

OPERATIONS = _OF_NUMBERS | {
    "shl.b32": lambda a, b: (a << b) & MASK,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a & np.uint64(0xFFFF),
    "mul.wide.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "add.u32": lambda a, b: (a + b) & MASK,
    "abs.f32": lambda a: a & np.uint64(0x7FFFFFFF),
    "abs.f16x2": lambda a: a & np.uint64(0x7FFF7FFF),
    "min.f32": lambda a, b: bits_of(np.fmin(floats(a), floats(b))),
    "mul.rz.f32": cut_product,
    "prmt.b32": selected,
    "lop3.b32": looked_up,
}


@np.errstate(all="ignore")  # NaN and infinities are numbers here
def run(text, arguments, outputs=1):
    """$0, or the list of so many; `arguments` come behind them: arrays of uint64 that hold 32 bits."""
    registers = {f"${i}": argument for i, argument in enumerate(arguments, outputs)}

    def value(name):
        if name in registers:
            return registers[name]
        return np.uint64(int(name[2:], 16) if name[:2] in ("0x", "0f") else int(name))

    for line in text.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        if operation == "mov.b64":
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest).groups()
            registers[low], registers[high] = registers[source] & MASK, registers[source] >> np.uint64(32)
            continue
        if operation == "mov.b32" and rest.endswith("}"):
            target, low, high = re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest).groups()
            registers[target] = registers[low] | registers[high] << np.uint64(16)
            continue
        if operation == "mov.b32" and rest.startswith("{"):
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest).groups()
            registers[low], registers[high] = registers[source] & np.uint64(0xFFFF), registers[source] >> np.uint64(16)
            continue
        target, *given = (name.strip() for name in rest.split(","))
        registers[target] = OPERATIONS[operation](*(value(name) for name in given))
    found = [registers[f"${i}"] for i in range(outputs)]
    return found[0] if outputs == 1 else found


def assembly(text, *arguments):
    """What `tl.inline_asm_elementwise` would give, as int32: for tensors of the interpreter."""
    import triton.language as tl

    whole = arguments[0].to(tl.int32, bitcast=True) + 0
    given = [np.ascontiguousarray(a.handle.data).view(np.uint32).astype(np.uint64) for a in arguments]
    found = np.broadcast_to(run(text, given), whole.handle.data.shape)
    whole.handle.data[...] = found.astype(np.uint32).view(np.int32)
    return whole


def packed(text, dtype, outputs, pack, *arguments):
    """The same with `pack` numbers of each argument that are neighbours in a row, whose bytes fill words; in `dtype`."""
    whole = arguments[0].to(dtype) + 0
    shape, given = np.shape(whole.handle.data), []
    for argument in arguments:
        data = np.ascontiguousarray(np.broadcast_to(argument.handle.data, shape))
        words = data.view(np.uint32).reshape(*shape[:-1], -1, pack * data.itemsize // 4).astype(np.uint64)
        given += [words[..., i] for i in range(words.shape[-1])]
    found = run(text, given, outputs)
    words = np.stack(np.broadcast_arrays(*found) if outputs > 1 else [found], -1).astype(np.uint32)
    whole.handle.data[...] = words.view(whole.handle.data.dtype).reshape(shape)
    return whole


def by_numpy(printed):
    """What is printed for an operation, with a call of `packed` in the place of assembly."""
    if "inline_asm" not in printed:
        return printed
    call = r'tl\.inline_asm_elementwise\("([^"]*)", "([^"]*)", \[(.*)\], dtype=([\w.]+), is_pure=True, pack=(\d)\)'
    text, kinds, arguments, dtype, pack = re.fullmatch(call, printed).groups()
    return f'packed("{text}", {dtype}, {kinds.count("=")}, {pack}, {arguments})'
