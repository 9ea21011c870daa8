"""What lowp does, as candidates: every registered float of up to 8 bits, and the other families, in each operation."""

import re
from collections.abc import Iterator

import torch
from benchmarks.speed.measure import Candidate, Stage

import lowp
from lowp.tensor.packing import packed_size

# The speed that each operation should reach, as a ratio to copy_, by family.
BARS = {
    "cpu": {
        "float": {"quantize": 0.9, "stochastic": 0.45, "encode": 0.8, "decode": 1.0},
        "codebook": {"quantize": 0.3},
        "posit": {"quantize": 0.3},
        "block": {"quantize": 0.5, "encode": 0.5, "decode": 0.5},
    },
    "cuda": {
        "float": {"quantize": 0.93, "stochastic": 0.75, "encode": 0.93, "decode": 0.93},
        "codebook": {"quantize": 0.3},
        "posit": {"quantize": 0.3},
    },
}
# On CUDA, and with --quick, families other than floats are stood for by these: building kernels takes most of the time.
SOME = ("posit16", "posit8", "dynamic8", "nf4", "int8", "fixed3.4", "mxfp8_e4m3", "mxfp4", "nvfp4")
FEW = ("e5m2", "e4m3fn", "e8m0fnu", "e2m1fn", "posit8", "dynamic8", "int8", "mxfp4")
ROW = 1024  # block formats take rows; this is the length of one


def formats(device: torch.device, quick: bool, only: str | None) -> list[lowp.Format | lowp.BlockFormat]:
    """Floats of up to 8 bits first, then the other families, in the order of the registry."""
    small_floats = [f for f in lowp.FORMATS if f.family == "float" and f.bits <= 8]
    chosen = small_floats + [f for f in lowp.FORMATS if f.family != "float"]
    if quick:
        chosen = [f for f in chosen if str(f) in FEW]
    elif device.type == "cuda":
        chosen = [f for f in chosen if f in small_floats or str(f) in SOME]
    return [f for f in chosen if only is None or re.search(only, str(f))]


def lowp_candidates(fmt: lowp.Format | lowp.BlockFormat, stage: Stage) -> Iterator[Candidate]:
    """quantize to nearest, stochastically, encode and decode, all into memory that is there already."""
    if isinstance(fmt, lowp.BlockFormat):
        yield from _block_candidates(fmt, stage)
        return
    bars = BARS[stage.device.type].get(fmt.family, {})
    x, out = stage.x, stage.out
    code_bytes = 1 if fmt.bits <= 8 else 2
    dtype = torch.uint8 if code_bytes == 1 else torch.int16
    # Every code, in no order: decoding by look-up must not profit from neighbours in a cache line
    codes = torch.randint(0, 1 << fmt.bits, (stage.size,), device=stage.device).to(dtype)
    # Formats without NaN look for it first unless told what it becomes, which is one more pass over x
    nan = "raise" if fmt.has_nan else "saturate"

    def quantize(n: int) -> object:
        return lowp.quantize(x[:n], fmt, out=out[:n])

    def stochastic(n: int) -> object:
        return lowp.quantize(x[:n], fmt, "stochastic", seed=lowp.Noise(1, step=n), out=out[:n])

    def encode(n: int) -> object:
        return lowp.encode(x[:n], fmt, nan=nan, out=codes[:n])

    def decode(n: int) -> object:
        return lowp.decode(codes[:n], fmt, out=out[:n])

    name = str(fmt)
    yield Candidate("lowp", name, "quantize", quantize, 8, bars.get("quantize"))
    yield Candidate("lowp", name, "stochastic", stochastic, 8, bars.get("stochastic"))
    yield Candidate("lowp", name, "decode", decode, 4 + code_bytes, bars.get("decode"))
    yield Candidate("lowp", name, "encode", encode, 4 + code_bytes, bars.get("encode"))
    if fmt.bits < 8:
        yield from _packed_candidates(fmt, nan, stage)
    if name == "e2m1fn":
        looking = Candidate("lowp", name, "encode, nan=raise", lambda n: lowp.encode(x[:n], fmt, out=codes[:n]), 5)
        yield looking


def _packed_candidates(fmt: lowp.Format, nan: str, stage: Stage) -> Iterator[Candidate]:
    """Codes in a bit stream, by two kernels: whole bytes are in memory between them, and are not counted."""
    name, traffic = str(fmt), 4 + fmt.bits / 8
    packed = torch.randint(0, 256, (packed_size(stage.size, fmt.bits),), device=stage.device).to(torch.uint8)

    def encode(n: int) -> object:
        return lowp.encode(stage.x[:n], fmt, nan=nan, pack=True)

    def decode(n: int) -> object:
        return lowp.decode(packed[: packed_size(n, fmt.bits)], fmt, size=n, out=stage.out[:n])

    yield Candidate("lowp", name, "encode, packed", encode, traffic)
    yield Candidate("lowp", name, "decode, packed", decode, traffic)


def _block_candidates(fmt: lowp.BlockFormat, stage: Stage) -> Iterator[Candidate]:
    """Codes and decoded numbers are new tensors, so that memory for them is part of the time."""
    name = str(fmt)
    encoded = lowp.encode(stage.x[: ROW * 16].view(-1, ROW), fmt, nan="saturate")
    scale = encoded.tensor_scale

    def quantize(n: int) -> object:
        return lowp.quantize(stage.x[:n].view(-1, ROW), fmt, out=stage.out[:n].view(-1, ROW))

    def stochastic(n: int) -> object:
        x, out = (each[:n].view(-1, ROW) for each in (stage.x, stage.out))
        return lowp.quantize(x, fmt, "stochastic", seed=lowp.Noise(1, step=n), out=out)

    def encode(n: int) -> object:
        return lowp.encode(stage.x[:n].view(-1, ROW), fmt, nan="saturate")

    elements = torch.randint(0, 1 << fmt.element.bits, (stage.size,), device=stage.device).to(torch.uint8)
    scales = torch.randint(100, 120, (stage.size // fmt.size,), device=stage.device).to(encoded.scales.dtype)

    def decode(n: int) -> object:
        codes = lowp.BlockCodes(elements[:n].view(-1, ROW), scales[: n // fmt.size].view(-1, ROW // fmt.size), scale)
        return lowp.decode(codes, fmt)

    bars = BARS[stage.device.type].get("block", {})
    yield Candidate("lowp", name, "quantize", quantize, 8, bars.get("quantize"), unit=ROW)
    yield Candidate("lowp", name, "stochastic", stochastic, 8, unit=ROW)
    yield Candidate("lowp", name, "encode", encode, 5, bars.get("encode"), unit=ROW)
    yield Candidate("lowp", name, "decode", decode, 5, bars.get("decode"), unit=ROW)
