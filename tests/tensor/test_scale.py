"""One `Scale` and one parser for the wire and for simulated models (tensor/scale.py), one largest magnitude (fitting.py)."""

import math

import pytest
import torch

from lowp.simulation import scales
from lowp.simulation.scales import simulated_scale
from lowp.tensor.fitting import largest
from lowp.tensor.scale import Scale, parse_scale
from lowp.wire import scaling


def test_there_is_one_class():
    assert scaling.Scale is scales.Scale is Scale
    assert scaling.largest is largest


@pytest.mark.parametrize(
    ("text", "wire", "simulated"),
    [
        ("none", Scale("none"), Scale("none")),
        ("aps", Scale("aps"), Scale("aps")),
        ("aps_delayed", Scale("aps_delayed"), None),
        ("local", Scale("local"), None),
        ("tensor", None, Scale("tensor")),
        ("channel", None, Scale("channel")),
        ("block:32", Scale("block", 32), Scale("block", 32)),
        ("delayed", None, Scale("delayed", 16)),
        ("delayed:4", None, Scale("delayed", 4)),
        ("calibrated", None, Scale("calibrated")),
        ("block", None, None),
        ("block:<n>", None, None),
        ("aps:3", None, None),
    ],
)
def test_each_user_accepts_its_kinds(text, wire, simulated):
    for parse, expected in ((scaling.scale_of, wire), (simulated_scale, simulated)):
        if expected is None:
            with pytest.raises(ValueError, match=rf"scale '{text}'"):
                parse(text)
        else:
            assert parse(text) == parse(expected) == expected
            assert parse(str(expected)) == expected


@pytest.mark.parametrize("size", ["0", "-1", "65537", "1.5", "²", "9" * 5000, ""])
def test_a_size_out_of_range_is_named(size):
    with pytest.raises(ValueError, match=r"block:<n> takes n from 1 to 65536"):
        parse_scale(f"block:{size}", scaling.KINDS)


def test_a_scale_of_another_user_is_refused():
    with pytest.raises(ValueError, match=r"^unknown scale 'local'; "):
        simulated_scale(Scale("local"))
    with pytest.raises(ValueError, match=r"^unknown scale 'lokal'; did you mean 'local'\?$"):
        scaling.scale_of("lokal")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_largest_magnitude(dtype):
    x = torch.tensor([[1.0, -3.0, 0.5], [2.0, -0.25, -0.0]], dtype=dtype)
    assert largest(x).item() == 3
    assert largest(x, axis=0).tolist() == [[3.0], [2.0]]
    assert largest(x, axis=1, finite=True).tolist() == [[2.0, 3.0, 0.5]]
    for zero in (torch.zeros(3), torch.tensor([-0.0]), torch.zeros(0)):
        assert math.copysign(1, largest(zero.to(dtype)).item()) == 1
    x[0, 0] = math.nan
    x[1, 0] = -math.inf
    assert math.isnan(largest(x).item())
    assert largest(x, finite=True).item() == 3
    assert largest(x[1]).item() == math.inf
    assert largest(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    batched = torch.func.vmap(largest)(torch.tensor([[1.0, -2.0], [0.0, 4.0]], dtype=dtype))
    assert batched.tolist() == [2.0, 4.0]
