"""Results that depended on earlier calls, on names alone, or on where a call is made."""

import subprocess
import sys

import pytest
import torch

import lowp
from lowp.formats import BlockFormat

NF4_BY_NAME = lowp.CodebookFormat("nf4", tuple(float(i) for i in range(-8, 8)))


@pytest.mark.parametrize("turned", [False, True])
def test_codebooks_that_differ_in_the_sign_of_zero_are_two(turned: bool) -> None:
    name = f"zeros{turned}"  # not in any cache yet
    books = [lowp.CodebookFormat(name, entries) for entries in ((0.0, -0.0, 1.0, -1.0), (-0.0, 0.0, 1.0, -1.0))]
    assert books[0] != books[1]
    for book in reversed(books) if turned else books:
        codes = lowp.encode(torch.tensor([0.0, -0.0, 1.0]), book)
        assert codes.tolist() == [lowp.formats.reference.encode(x, book) for x in (0.0, -0.0, 1.0)]
        assert torch.signbit(lowp.decode(torch.arange(2, dtype=torch.uint8), book)).tolist() == [
            str(entry) == "-0.0" for entry in book.entries[:2]
        ]


def test_a_codebook_with_the_name_of_another_format_is_not_taken_for_it() -> None:
    x = torch.tensor([[3.2, -7.9, 0.1]])
    assert lowp.quantize(x, NF4_BY_NAME).tolist() == [[3.0, -8.0, 0.0]]
    for function in (lowp.quantize, lowp.encode, lowp.fake_quantize):
        with pytest.raises(Exception, match="name of another format"):
            torch.compile(lambda x, f=function: f(x, NF4_BY_NAME), backend="eager", fullgraph=True)(x)
    blocks = BlockFormat(NF4_BY_NAME, 32, lowp.format("e8m0fnu"))
    for how in (
        {"weights": NF4_BY_NAME},
        {"activations": lowp.CodebookFormat("fp32", NF4_BY_NAME.entries)},
        {"accumulate": NF4_BY_NAME},
        {"accumulate": lowp.Arithmetic(multiply=NF4_BY_NAME)},
        {"products": blocks},
    ):
        with pytest.raises(ValueError, match="name of another format"):
            lowp.simulate(torch.nn.Sequential(torch.nn.Linear(3, 3)), **how)


def test_decode_on_a_cpu_whatever_the_default_device() -> None:
    """The second call wrote to an address on the default device. A process of its own: it may end there."""
    code = """if True:
        import torch, lowp
        lowp.set_kernel_policy("always")
        codes = lowp.encode(torch.randn(4, 64), "mxfp4")
        numbers = [lowp.decode(codes, "mxfp4") for _ in range(2)]
        with torch.device("meta"):
            numbers.append(lowp.decode(codes, "mxfp4"))
        assert all(torch.equal(each, numbers[0]) for each in numbers)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["dynamic8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_out_of_a_wider_dtype_is_rounded_once_in_compiled_code_too(name: str, dtype: torch.dtype) -> None:
    x = (torch.arange(64) / 64 - 0.5).to(dtype)
    expected = lowp.quantize(x, name, out=torch.empty(64))
    out = torch.empty(64)
    torch.compile(lambda x, out: lowp.quantize(x, name, out=out), backend="aot_eager", fullgraph=True)(x, out)
    assert torch.equal(out, expected)


def test_a_traced_function_does_not_return_memory_that_nobody_wrote_to() -> None:
    code = """if True:
        import torch, lowp
        lowp.set_kernel_policy("always")
        x = torch.tensor([1.03, 2.07, 3.3, -9.9])
        expected = [lowp.quantize(x, "e4m3fn") for _ in range(2)][1]
        try:
            traced = torch.jit.trace(lambda x: lowp.quantize(x, "e4m3fn"), torch.ones(4), check_trace=False)
        except RuntimeError:  # torch.jit cannot see the bits of a float as integers
            raise SystemExit(0)
        assert torch.equal(traced(x), expected)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_noise_of_a_gradient_is_that_of_its_forward_pass() -> None:
    def gradient(moves_on: bool) -> torch.Tensor:
        x, step = torch.ones(1000, requires_grad=True), torch.tensor(5)
        y = lowp.fake_quantize(x, "e4m3fn", "e5m2", "stochastic", seed=lowp.Noise(1, step))
        step.add_(moves_on)
        y.backward(torch.linspace(-1, 1, 1000))
        return x.grad

    assert torch.equal(gradient(True), gradient(False))
