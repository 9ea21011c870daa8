"""NVIDIA's assembly in Triton's interpreter, which has none: the few instructions of ours that kernels use, by numpy."""

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


OPERATIONS = {
    "shl.b32": lambda a, b: (a << b) & MASK,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mov.b32": lambda a: a,
    "mul.wide.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "add.u32": lambda a, b: (a + b) & MASK,
    "abs.f32": lambda a: a & np.uint64(0x7FFFFFFF),
    "min.f32": lambda a, b: bits_of(np.fmin(floats(a), floats(b))),
    "mul.rz.f32": cut_product,
}


def run(text, arguments):
    """$0, from $1 on: arrays of uint64 that hold 32 bits."""
    registers = {f"${i}": argument for i, argument in enumerate(arguments, 1)}

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
        target, *given = (name.strip() for name in rest.split(","))
        values = [value(name) for name in given]
        if operation == "lop3.b32":
            assert values.pop() == 0x96, "only a ^ b ^ c"
            registers[target] = values[0] ^ values[1] ^ values[2]
        else:
            registers[target] = OPERATIONS[operation](*values)
    return registers["$0"]


def assembly(text, *arguments):
    """What `tl.inline_asm_elementwise` would give, as int32: for tensors of the interpreter."""
    import triton.language as tl

    whole = arguments[0].to(tl.int32, bitcast=True) + 0
    given = [np.ascontiguousarray(a.handle.data).view(np.uint32).astype(np.uint64) for a in arguments]
    found = np.broadcast_to(run(text, given), whole.handle.data.shape)
    whole.handle.data[...] = found.astype(np.uint32).view(np.int32)
    return whole
