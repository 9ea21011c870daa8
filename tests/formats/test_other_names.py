"""Formats by the names that others have for them, and by torch's dtypes."""

import numpy as np
import pytest
import torch

import lowp
from lowp.formats import usual_name
from lowp.training.reading import read_recipe, with_changes
from lowp.wire.settings import Settings

DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.float8_e8m0fnu: "e8m0fnu",
    torch.float4_e2m1fn_x2: "e2m1fn",
    torch.int8: "int8",
}


@pytest.mark.parametrize(("dtype", "name"), DTYPES.items(), ids=str)
def test_dtypes(dtype, name):
    assert lowp.format(dtype) == lowp.format(str(dtype)) == lowp.format(name)
    assert usual_name(dtype) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("float32", "fp32"),
        ("half", "fp16"),
        ("Float16", "fp16"),
        ("bfloat16", "bf16"),
        ("fp8", "e4m3fn"),
        ("fp8_e4m3", "e4m3fn"),
        ("float8_e5m2", "e5m2"),
        ("float6_e3m2fn", "e3m2fn"),
        ("fp4", "e2m1fn"),
        ("e4m3", "e4m3"),  # IEEE's, another format than OCP's e4m3fn
    ],
)
def test_names_of_others(text, name):
    assert str(lowp.format(text)) == name


def test_numpys_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert str(lowp.format(np.dtype("float16"))) == "fp16"  # type: ignore[arg-type]
    assert str(lowp.format(np.dtype(ml_dtypes.float8_e4m3b11fnuz))) == "e4m3b11fnuz"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (torch.float64, ValueError, "unknown format 'float64'"),
        (torch.complex64, ValueError, "unknown format 'complex64'"),
        (8, TypeError, "a format is a name such as 'e4m3fn', a Format or a torch.dtype, not int"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_none(given, error, said):
    with pytest.raises(error, match=said):
        lowp.format(given)


def test_everywhere_a_format_is_taken():
    x = torch.randn(64)
    by_dtype, by_name = torch.float8_e4m3fn, "e4m3fn"
    assert torch.equal(lowp.quantize(x, by_dtype), lowp.quantize(x, by_name))
    assert torch.equal(lowp.decode(lowp.encode(x, by_dtype), "fp8"), lowp.quantize(x, by_name))
    assert torch.equal(lowp.fake_quantize(x, by_dtype, torch.float8_e5m2), lowp.quantize(x, by_name))
    compiled = torch.compile(lambda x: lowp.quantize(x, torch.float8_e4m3fn), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), lowp.quantize(x, by_name))
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    assert torch.equal(lowp.matmul(a, b, accumulate=torch.float16), lowp.matmul(a, b, accumulate="fp16"))
    world = lowp.VirtualWorld(2)
    assert torch.equal(world.all_reduce([x, x + 1], torch.float8_e5m2)[0], world.all_reduce([x, x + 1], "e5m2")[0])
    named = Settings.of("e5m2", layers={"last": "fp16"})
    assert Settings.of(torch.float8_e5m2, layers={"last": torch.float16}) == named
    assert Settings.of({0: "half", 5: torch.float8_e5m2}).format == {0: "fp16", 5: "e5m2"}
    model = torch.nn.Linear(4, 4)
    lowp.simulate(model, weights=torch.float8_e4m3fn, errors="fp8_e5m2", accumulate=torch.bfloat16)
    assert {role.format for role in lowp.describe(model).rows} >= {"e4m3fn", "e5m2"}
    lowp.restore(model)
    optimizer = lowp.optim.AdamW(model.bfloat16().parameters(), state=torch.bfloat16)
    assert optimizer.defaults["state"] is torch.bfloat16


def test_in_recipes():
    recipe = read_recipe("fp32", ["precision.weights=bfloat16", "wire.format=float8_e5m2", "wire.layers.last=half"])
    assert (recipe.precision.weights, recipe.wire.format, recipe.wire.layers) == ("bf16", "e5m2", {"last": "fp16"})
    changed = with_changes(recipe, **{"precision.weights": torch.float16, "wire.format": torch.bfloat16})
    assert (changed.precision.weights, changed.wire.format) == ("fp16", "bf16")
