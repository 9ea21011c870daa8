"""Products in narrow arithmetic on a GPU: the bits of the CPU, chosen lanes without a word from the host."""

import pytest
import torch

import lowp
from lowp.tensor.matmul import conv2d, linear, matmul
from lowp.tensor.matmul.lanes import choices
from waiting import no_host_waits

# torch's compilers warn about themselves.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning"),
]

OPTIONS = (
    {"accumulate": "fp32"},
    {"accumulate": "e5m2"},
    {"accumulate": "e4m3fn", "multiply": "e5m2"},
    {"accumulate": "fp16", "kahan": True, "chunk": 8},
    {"accumulate": "bf16", "rounding": "down"},
    {"accumulate": "posit8"},
    {"accumulate": "posit8_1"},  # one column: see posit.rank
    {"accumulate": "posit16_1", "quire": True},
    {"accumulate": "fixed8.8", "approximate": "integer_add"},
    {"accumulate": "nf4"},
    {"accumulate": "e5m2", "multiply": "posit8", "kahan": True, "chunk": 5, "rounding": "stochastic"},
)


@pytest.fixture(autouse=True)
def _kernels():
    lowp.set_kernel_policy("auto")


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    equal = (x == y) & (torch.signbit(x) == torch.signbit(y))
    return x.dtype == y.dtype and x.shape == y.shape and bool((equal | (x.isnan() & y.isnan())).all())


def numbers(*shape: int, scale: float = 1.0, format: str | None = "e5m2") -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    return x if format is None else lowp.quantize(x, format)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_products_have_the_bits_of_the_cpu(options):
    """Tails, a broadcast batch, and numbers that lead to each of the lanes."""
    for left, right in (
        ((1, 1), (1, 1)),
        ((3, 17), (17, 65)),
        ((65, 3), (3, 1)),
        ((128, 96), (96, 1)),
        ((2, 1, 70, 33), (3, 33, 300)),
    ):
        for scale, format in ((1.0, "e5m2"), (1e3, "e5m2"), (1.0, None), (1e-30, None)):
            a, b = numbers(*left, scale=scale, format=format), numbers(*right, scale=scale, format=format)
            assert same(matmul(a.cuda(), b.cuda(), **options).cpu(), matmul(a, b, **options)), (left, right, scale, format)


@pytest.mark.parametrize("options", OPTIONS[1:7], ids=str)
def test_gradients_have_the_bits_of_the_cpu(options):
    found = []
    for device in ("cpu", "cuda"):
        given = [
            numbers(*shape).to(device).requires_grad_() for shape in ((9, 20), (7, 20), (7,), (4, 4, 6, 5), (8, 2, 3, 2), (8,))
        ]
        loss = (
            linear(*given[:3], **options).sum()
            + conv2d(*given[3:], stride=(2, 1), padding=1, groups=2, **options).square().sum()
        )
        found.append([x.cpu() for x in torch.autograd.grad(loss, given)])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_nobody_waits_for_the_device():
    a, b = numbers(64, 64).cuda(), numbers(64, 64).cuda()
    assert len(choices(lowp.tensor.matmul.Arithmetic(accumulate="e5m2"))) == 3
    for _ in range(2):  # kernels are built in a first call, and tables go to the device
        matmul(a, b, accumulate="e5m2")
        matmul(a, b, accumulate="posit8", quire=True)
    with no_host_waits():
        matmul(a, b, accumulate="e5m2")
        matmul(a, b, accumulate="posit8", quire=True)


def test_compiled_graphs_have_the_same_bits():
    def product(x, weight, step):
        return linear(x, weight, accumulate="e5m2", rounding="stochastic", seed=lowp.Noise(1, step))

    x, weight, step = numbers(5, 9).cuda(), numbers(6, 9).cuda(), torch.tensor(3)
    assert same(torch.compile(product, fullgraph=True)(x, weight, step), product(x, weight, step))
