"""A call gives the same bits whatever was called before: kernels and ready calls are kept by all that their results depend on.

Many calls that differ in one argument, in several orders, against plain operations.
"""

import random
from itertools import product

import pytest
import torch

import lowp
from lowp.formats import BlockFormat, Rounding

MODES = [mode.value for mode in Rounding]
NAMES = ("int8", "e2m1fn", "mxfp4", "nvfp4")


def numbers(seed):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed)) * 10 ** torch.linspace(-3, 3, 96)
    x[seed % 4, ::7] = -0.0
    x[0, seed] = float("inf")
    x[1, seed] = float("nan")
    return x


def settings_of(rounding, **others):
    return others | {"rounding": rounding, "seed": lowp.Noise(3, step=4) if rounding == "stochastic" else None}


def calls():
    """(what is called, format, arguments): all roundings of some, and others at random."""
    found = [("quantize", name, settings_of(mode)) for name, mode in product(NAMES, MODES)]
    found += [("encode", name, settings_of(mode, nan="zero")) for name, mode in product(NAMES, MODES)]
    flags = product((False, True), ("zero", "saturate"), (False, True))
    more = [
        ("encode", name, settings_of(mode, saturate=saturate, nan=nan, pack=pack))
        for name, mode, (saturate, nan, pack) in product(NAMES, ("nearest", "up", "stochastic"), list(flags))
    ]
    more += [("quantize", name, settings_of(mode, saturate=True)) for name, mode in product(NAMES, MODES)]
    more += [("decode", name, {"dtype": dtype}) for name, dtype in product(NAMES, (torch.float32, torch.bfloat16))]
    return found + random.Random(0).sample(more, 40)


def result_of(call, data):
    what, name, arguments = call
    if what != "decode":
        return getattr(lowp, what)(data, name, **arguments)
    return lowp.decode(lowp.encode(data, name, nan="zero"), name, **arguments)


def same(a, b):
    if isinstance(a, tuple):
        return all((x is None and y is None) or same(x, y) for x, y in zip(a, b, strict=True))
    if a.is_floating_point():
        kind = torch.int32 if a.dtype == torch.float32 else torch.int16
        a, b = (x.view(kind).masked_fill(x.isnan(), 12345) for x in (a, b))
    return torch.equal(a, b)


@pytest.fixture(scope="module")
def expected():
    lowp.set_kernel_policy("never")
    return {(place, seed): result_of(call, numbers(seed)) for place, call in enumerate(calls()) for seed in range(3)}


@pytest.mark.parametrize("order", range(4))
def test_a_call_does_not_depend_on_those_before(expected, order):
    lowp.set_kernel_policy("always")  # which forgets the ready calls
    made, each = list(expected), calls()
    random.Random(order).shuffle(made)
    for place, seed in made:
        what, name, _ = each[place]
        found = result_of(each[place], numbers(seed))
        assert same(found, expected[place, seed]), (each[place], seed)
        assert isinstance(found, tuple) == (what == "encode" and isinstance(lowp.format(name), BlockFormat))
