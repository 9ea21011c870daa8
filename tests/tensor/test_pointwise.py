"""A quantizer as one pointwise operation for inductor: the bits of `lowp.quantize`, as operations and as assembly."""

import numpy as np
import pytest
import torch

import lowp
from lowp.formats import FORMATS
from lowp.tensor import inductor
from lowp.tensor.node import suits
from lowp.tensor.pointwise import _assembly, lowered, pointwise

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

OPERATIONS = {str(fmt): pointwise(str(fmt), "nearest", torch.float32) for fmt in FORMATS}
IN_FLOATS = [name for name, operation in OPERATIONS.items() if operation is not None and operation.float_grid is not None]


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bits drawn at random, so every exponent; numbers near one; ties of narrow formats; special ones."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (3000,), generator=generator).to(torch.int32).view(torch.float32)
    ties = torch.arange(-512, 513) / 64
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 464.0, 465.0, 57344.0, 61440.0, 1e-45, 3e38])
    x = torch.cat([bits, torch.randn(2000, generator=generator) * 4, ties, ties * 2.0**-10, ties * 2.0**8, special])
    return x.to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    equal = (got == want) & (torch.signbit(got) == torch.signbit(want))
    return got.dtype == want.dtype and bool((equal | (got.isnan() & want.isnan())).all())


SCALAR = {
    "mov": lambda a: a, "not": lambda a: ~a, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b, "neg": lambda a: -a, "abs": np.abs, "cvt": np.rint, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
COMPARE = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "neu": np.not_equal,
}


class Machine:
    """Carries out the assembly that ptx.py writes, for many numbers at once."""

    def __init__(self, x: np.ndarray) -> None:
        self.registers = {"$1": x.view(np.int32)}

    def read(self, name: str, kind: str) -> np.ndarray:
        if name.startswith("0f"):
            found = np.array(int(name[2:], 16), dtype=np.uint32).view(np.int32)
        else:
            found = self.registers[name] if name in self.registers else np.array(int(name), dtype=np.int32)
        return found.view(np.float32) if kind == "f32" else found

    def run(self, text: str) -> np.ndarray:
        with np.errstate(all="ignore"):
            for line in text.strip("{} ").split(";"):
                words = line.replace(",", " ").split()
                if not words or words[0] == ".reg":
                    continue
                operation, (target, *sources) = words[0].split("."), words[1:]
                values = [self.read(source, operation[-1]) for source in sources]
                if operation[0] == "setp":
                    result = COMPARE[operation[1]](*values)
                elif operation[0] == "selp":
                    result = np.where(values[2], values[0], values[1])
                else:
                    result = SCALAR[operation[0]](*values)
                self.registers[target] = result.view(np.int32) if result.dtype == np.float32 else result
        return self.registers["$0"].view(np.float32)


@pytest.mark.parametrize("name", IN_FLOATS)
def test_assembly(name):
    x = numbers()
    got = torch.from_numpy(Machine(x.numpy()).run(_assembly(pointwise(name, "nearest", torch.float32))))
    assert same(got, lowp.quantize(x, name))


def test_what_is_pointwise():
    assert {"e4m3fn", "e5m2", "fp16", "int8"} <= set(IN_FLOATS)
    for name, rounding in (("e4m3fn", "stochastic"), ("mxfp8_e4m3", "nearest")):
        assert pointwise(name, rounding, torch.float32) is None
    on_gpu = torch.empty(1, device="meta")  # that is not the CPU is what counts
    assert suits(on_gpu, lowp.format("e4m3fn"), "nearest")
    assert not suits(on_gpu, lowp.format("posit8"), "nearest")
    assert suits(torch.empty(1), lowp.format("posit8"), "nearest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_inductor_computes_the_same_bits(dtype, monkeypatch):
    """As on a GPU, but for the assembly: fused with what is around it, here a product that 16 bits must round, and a view."""
    asked = []

    def one_operation(x, format, rounding, saturate):
        asked.append(format)
        return lowered(x, pointwise(format, rounding, x.get_dtype(), saturate))

    monkeypatch.setattr(inductor, "_called", one_operation)
    names = ("e4m3fn", "e5m2", "e3m2fn", "e2m1fn", "e4m3fnuz", "fp16", "fixed8.8", "int8")
    cases = [(name, "nearest", name == "e5m2") for name in names] + [("e4m3fn", "nearest", True)]
    cases += [("e4m3fn", rounding, False) for rounding in ("down", "toward_zero", "nearest_away", "to_odd")]
    cases = [(name, rounding, saturate) for name, rounding, saturate in cases if not pointwise(name, rounding, dtype).tables]

    def all_of(x):
        x = (x * 0.75).view(4, -1)
        return [torch.ops.lowp.round(x, name, rounding, "", saturate) for name, rounding, saturate in cases]

    import torch._inductor.lowering  # what it takes for inductor to be told
    from torch._inductor.utils import fresh_cache

    inductor.tell_inductor()
    torch._dynamo.reset()
    x = numbers(dtype)[:8084]
    with fresh_cache():
        results = torch.compile(all_of, fullgraph=True)(x)
    for got, (name, rounding, saturate) in zip(results, cases, strict=True):
        assert same(got.flatten(), lowp.quantize(x * 0.75, name, rounding, saturate=saturate)), (name, rounding, saturate)
    assert set(asked) == {name for name, *_ in cases}
