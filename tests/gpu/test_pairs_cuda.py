"""Rounding two bfloat16 numbers at once, in compiled code on a GPU: quantize's bits, whatever is around it. Run it there:

make test-gpu
"""

import pytest
import torch

import lowp
import lowp.tensor.node  # has the operator
from lowp.tensor.inductor import tell_inductor

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]

FORMATS = ["e4m3fn", "e5m2", "e3m4", "e2m1fn", "e3m2fn", "e6m1"]


@pytest.fixture(autouse=True)
def _inductor():
    import torch._inductor.lowering  # what it takes for inductor to be told

    tell_inductor()
    torch._dynamo.reset()


def rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    return torch.ops.lowp.round(x, format, "nearest")


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    got, want = got.cpu(), want.cpu()
    equal = got.view(torch.int16) == want.view(torch.int16)
    return got.dtype == want.dtype and bool((equal | (got.isnan() & want.isnan())).all())


def every_number() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def all_of(x):
    """Of a tensor; of a product, which 16 bits must round first; into a product."""
    results = []
    for format in FORMATS:
        results += [rounded(x, format), rounded(x * 0.75, format), rounded(x.relu(), format) * 2.0]
    return results


def test_every_number():
    x = every_number()
    found = iter(torch.compile(all_of, fullgraph=True)(x.cuda()))
    for format in FORMATS:
        assert same(next(found), lowp.quantize(x, format)), format
        assert same(next(found), lowp.quantize(x * 0.75, format)), format
        assert same(next(found), lowp.quantize(x.relu(), format) * 2.0), format


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 3, 5, 4)])
def test_few_numbers(shape):
    x = torch.linspace(-500, 500, max(1, torch.Size(shape).numel()), dtype=torch.bfloat16).view(shape)
    found = torch.compile(lambda x: rounded(x * 1.5, "e4m3fn"), fullgraph=True)(x.cuda())
    assert same(found, lowp.quantize(x * 1.5, "e4m3fn"))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1 << 16), (3, 1 << 14), (4096, 8), (1 << 16, 33), (1, 1)])
def test_sums(rows, columns):
    """Sums end in blocks of one number. They are of small integers, so exact."""
    x = torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.float32)

    def sums(x):
        return rounded(x.sum(-1).to(torch.bfloat16), "e5m2"), rounded(x.sum().to(torch.bfloat16), "e4m3fn")

    found = torch.compile(sums, fullgraph=True)(x.cuda())
    wanted = lowp.quantize(x.sum(-1).to(torch.bfloat16), "e5m2"), lowp.quantize(x.sum().to(torch.bfloat16), "e4m3fn")
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
