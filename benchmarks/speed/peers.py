"""What others do for the same numbers, as candidates. A peer that is not there is recorded as such, with the reason."""

import os
import sys
import warnings
from collections.abc import Iterator

import torch
from benchmarks.speed.measure import Candidate, Stage
from benchmarks.speed.report import in_a_line

TORCH_TYPES = ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "float16")
QTORCH_FLOATS = {"e5m2": (5, 2), "e4m3": (4, 3)}
ML_DTYPES = ("float8_e5m2", "float8_e4m3fn", "float6_e3m2fn", "float4_e2m1fn", "bfloat16")


def peer_candidates(stage: Stage, missing: dict[str, str]) -> Iterator[Candidate]:
    """Every peer that runs on this device; reasons for the others go into `missing`."""
    for peer in (_torch, _qtorch, _ml_dtypes, _gfloat):
        name = peer.__name__.lstrip("_")
        try:
            yield from peer(stage)
        except Exception as error:  # a peer that is not installed, does not build or lacks a device: say so and go on
            missing[name] = in_a_line(error)


def _torch(stage: Stage) -> Iterator[Candidate]:
    """torch's casts, into memory that is there already, and back."""
    for name in TORCH_TYPES:
        dtype = getattr(torch, name)
        codes = torch.empty(stage.size, dtype=dtype, device=stage.device)
        codes.copy_(stage.x.clamp(-400, 400))
        width = 4 + dtype.itemsize
        short = name.removeprefix("float8_")
        yield Candidate("torch", short, "encode", lambda n, c=codes: c[:n].copy_(stage.x[:n]), width)
        yield Candidate("torch", short, "decode", lambda n, c=codes: stage.out[:n].copy_(c[:n]), width)


def _qtorch(stage: Stage) -> Iterator[Candidate]:
    """QPyTorch, the usual simulator: C++ (or CUDA) that it compiles when imported."""
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # where pip puts ninja
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qtorch.quant import fixed_point_quantize, float_quantize

    for name, (exponent, mantissa) in QTORCH_FLOATS.items():
        for rounding, operation in (("nearest", "quantize"), ("stochastic", "stochastic")):

            def call(n: int, e: int = exponent, m: int = mantissa, rounding: str = rounding) -> object:
                return float_quantize(stage.x[:n], e, m, rounding=rounding)

            yield Candidate("qtorch", name, operation, call)
    yield Candidate("qtorch", "fixed3.4", "quantize", lambda n: fixed_point_quantize(stage.x[:n], 8, 4, rounding="nearest"), 8)


def _ml_dtypes(stage: Stage) -> Iterator[Candidate]:
    """numpy casts, one thread."""
    if stage.device.type == "cuda":
        raise RuntimeError("works on the CPU alone")
    import ml_dtypes
    import numpy as np

    x, out = stage.x.numpy(), stage.out.numpy()
    for name in ML_DTYPES:
        dtype = getattr(ml_dtypes, name)
        with np.errstate(all="ignore"):
            codes = x.astype(dtype)

        def encode(n: int, codes: "np.ndarray" = codes) -> None:
            with np.errstate(all="ignore"):
                np.copyto(codes[:n], x[:n], casting="unsafe")

        def decode(n: int, codes: "np.ndarray" = codes) -> None:
            np.copyto(out[:n], codes[:n], casting="unsafe")

        width = 4 + codes.itemsize
        short = name.split("_")[-1]
        yield Candidate("ml_dtypes", short, "encode", encode, width)
        yield Candidate("ml_dtypes", short, "decode", decode, width)


def _gfloat(stage: Stage) -> Iterator[Candidate]:
    """gfloat's vectorised rounding, in numpy."""
    if stage.device.type == "cuda":
        raise RuntimeError("timed on the CPU alone")
    from gfloat import formats, round_ndarray

    x = stage.x.numpy()
    yield Candidate("gfloat", "e5m2", "quantize", lambda n: round_ndarray(formats.format_info_ocp_e5m2, x[:n]))
