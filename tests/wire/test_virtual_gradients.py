"""How a virtual world takes the gradients that it is given."""

import pytest
import ranks
import torch

import lowp
from lowp.wire.virtual import VirtualExchange


def test_gradients_are_found_by_their_names():
    a, b = torch.ones(4), torch.full((4,), 10.0)
    found = lowp.VirtualWorld(2).all_reduce([{"a": a, "b": b}, {"b": b, "a": a}], "fp16")
    assert torch.equal(found["a"], 2 * a)
    assert torch.equal(found["b"], 2 * b)


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="rank 1 has gradients of b"):
        lowp.VirtualWorld(2).all_reduce([{"a": torch.ones(4)}, {"b": torch.ones(4)}], "fp16")


@pytest.mark.parametrize("format", ["fp32", "fp16", "e4m3fn"])
def test_several_dtypes_are_those_of_real_ranks(format):
    """Float32 numbers beside float16 ones stay float32."""
    gradients = {"a": torch.full((4,), 3.0, dtype=torch.float16), "b": torch.linspace(1e5, 2e5, 5)}
    with ranks.alone():
        compressor = lowp.Compressor(gradients, format)
        real = compressor.reduce(gradients)
        compressor.close()
    virtual = VirtualExchange(1, {name: g.shape for name, g in gradients.items()}, format).reduce(lambda rank: gradients)
    assert all(torch.equal(real[name], virtual[name]) and real[name].dtype == virtual[name].dtype for name in gradients)
