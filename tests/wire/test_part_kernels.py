"""Kernels over all parts of a message give the bytes of the codec's own operations, which work part by part."""

import pytest
import torch
from ranks import run

from lowp.tensor.kernels import building, set_kernel_policy
from lowp.wire.codec import codec_of
from lowp.wire.messages import Messages
from lowp.wire.part_kernels import encode_function
from lowp.wire.plan import Layer, chunks_of
from lowp.wire.rules import wanted_of_total

SIZES = (1, 7, 16, 33, 1000, 0, 2049)
WITH_KERNEL = [  # format, rounding, scale: every way to pack, every kind of header
    ("e5m2", "nearest", "aps"),
    ("e4m3fn", "nearest", "local"),
    ("e2m1fn", "nearest", "block:32"),
    ("e5m4", "nearest", "none"),
    ("e3m0", "stochastic", "local"),
    ("fp32", "nearest", "none"),
    ("mxfp4", "nearest", "local"),
    ("nvfp4", "nearest", "none"),
    ("nvfp4", "nearest", "local"),
]
MORE = [
    (format, rounding, scale)
    for format in ("e5m2", "e4m3fn", "e2m1fn", "int4", "int8", "e3m2fn", "e5m4", "fp16", "bf16", "fp32", "posit8", "nf4")
    for rounding in ("nearest", "stochastic")
    for scale in ("none", "local", "block:16", "block:64")
] + [
    (format, "nearest", scale)
    for format in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxint8", "block(e2m1fn, 16, e4m3fn)")
    for scale in ("none", "local")
]


def numbers_of(count):
    """Numbers of many magnitudes, both zeros, subnormals."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(6).exp()
    x[::7], x[1::11], x[2::13] = 0.0, -0.0, 1e-42
    return x


def next_to_ties(count):
    """Blocks of 16 whose numbers are the midpoints between elements of nvfp4 times the block's unit, or next to these."""
    generator = torch.Generator().manual_seed(count)
    blocks = -(-count // 16)
    tensor_scale = torch.tensor(2687.9 / 2688)  # of the part, if its largest number is 2687.9
    scale = torch.randint(1, 448, (blocks, 1), generator=generator).to(torch.float32)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    chosen = midpoints[torch.randint(0, 8, (blocks, 16), generator=generator)]
    x = chosen * scale * tensor_scale
    x = (x.view(torch.int32) + torch.randint(-1, 2, x.shape, generator=generator)).to(torch.int32).view(torch.float32)
    x[:, 0] = (6 * scale * tensor_scale)[:, 0]
    x[0, 0] = 2687.9
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1
    return (x * signs).view(-1)[:count]


def cut(codec, shards=3):
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate(SIZES))
    (chunk,) = chunks_of(layers, shards, (1 << 20, 700))
    return Messages(chunk.shards, lambda part: part.codec, [shard.start for shard in chunk.shards])


def work(codec, x, messages, device, noises):
    """The bytes of three ranks, their sum and its maxima, and the largest header bytes: everything back on the CPU."""
    x = x.to(device)
    factors = torch.tensor([2.0**i for i in range(len(SIZES))], device=device) if codec.scale.shared else None
    peaks = torch.arange(messages.parts, device=device).to(torch.uint8)
    buffer = torch.zeros(3, messages.length, dtype=torch.uint8, device=device)
    for rank in range(3):
        own = x.roll(rank) if rank else x
        messages.encode(own, buffer[rank], factors, peaks, noises)
    total = torch.zeros(x.numel(), dtype=torch.float32, device=device)
    flat = buffer.view(-1)
    maxima = messages.decode(flat, total, None, 3, 3, messages.length, wanted_of_total)
    found = [buffer, total.view(torch.int32), messages.peaks(flat, 3, messages.length), *(m for m in maxima if m is not None)]
    return [each.cpu() for each in found]


@pytest.fixture
def policy():
    yield
    set_kernel_policy("auto")


def check(format, rounding, scale, dtype=torch.float32, device="cpu", numbers=numbers_of):
    import lowp

    codec = codec_of(format, rounding, scale)
    assert encode_function(codec, dtype) is not None, "there is no kernel"
    most = torch.finfo(dtype).max  # of what is not finite, bytes may differ
    x, messages = numbers(sum(SIZES)).clamp(-most, most).to(dtype), cut(codec)

    def noises(part):
        return lowp.Noise(3, 4, part.number, part.start)

    set_kernel_policy("never")
    plain = work(codec, x, messages, "cpu", noises)
    set_kernel_policy("auto")
    with building():
        printed = work(codec, x, messages, device, noises)
    for left, right in zip(plain, printed, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("format", "rounding", "scale"), WITH_KERNEL)
def test_kernels_give_the_same_bytes(policy, format, rounding, scale):
    check(format, rounding, scale)


def test_numbers_next_to_ties(policy):
    check("nvfp4", "nearest", "local", numbers=next_to_ties)


def check_fold(format, rounding, scale, device="cpu"):
    """One pass from messages to the message of their sum, against decoding, then encoding."""
    import lowp

    codec = codec_of(format, rounding, scale)
    messages, x = cut(codec), numbers_of(sum(SIZES)).to(device)
    set_kernel_policy("auto")

    def noises(part):
        return lowp.Noise(3, 4, part.number, part.start)

    buffer = torch.zeros(3, messages.length, dtype=torch.uint8, device=device)
    peaks = torch.arange(messages.parts, device=device).to(torch.uint8)
    with building():
        for rank in range(3):
            messages.encode(x.roll(rank), buffer[rank], None, peaks, noises)
        total = torch.zeros(x.numel(), device=device)
        messages.decode(buffer.view(-1), total, messages=3, stride=messages.length)
        wanted, found = (torch.zeros(messages.length, dtype=torch.uint8, device=device) for _ in range(2))
        messages.encode(total, wanted, None, messages.peaks(buffer.view(-1), 3, messages.length), noises)
        done = messages.fold(buffer.view(-1), found, 3, messages.length, noises)
    assert done == (device != "cpu" or not any(codec.measures))
    assert not done or torch.equal(found, wanted)


@pytest.mark.parametrize(("format", "rounding", "scale"), WITH_KERNEL)
def test_a_sum_is_encoded_as_it_is_added(policy, format, rounding, scale):
    check_fold(format, rounding, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients(policy, dtype):
    check("e5m2", "nearest", "aps", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "rounding", "scale"), MORE)
def test_more_kernels_give_the_same_bytes(policy, format, rounding, scale):
    check(format, rounding, scale)


def test_what_has_no_kernel_is_done_part_by_part(policy):
    for format, scale in (("topk:.1", "local"), ("e4m3fn", "block:24"), ("e4m3fn", "block:1024")):
        assert encode_function(codec_of(format, "nearest", scale), torch.float32) is None


CASES = [  # with kernels that other tests here have built: format, settings
    ("e5m2", {"scale": "aps", "reduction": "two_shot"}),
    ("e4m3fn", {"scale": "local", "reduction": "one_shot"}),
    ("e4m3fn", {"scale": "local", "reduction": "ring"}),
    ("e2m1fn", {"scale": "block:32", "reduction": "hierarchical(2)"}),
    ("mxfp4", {"scale": "local", "reduction": "two_shot"}),
    ("nvfp4", {"scale": "none", "reduction": "tree"}),
    ("topk:0.1", {"reduction": "two_shot"}),
    ("topk:0.05:e4m3fn", {"scale": "local", "reduction": "hierarchical(2, gather)"}),
]


def gradient_of(rank):
    return numbers_of(sum(SIZES)).roll(13 * rank) * 0.5**rank


def sums(rank):
    """Of real ranks whose every operation is a kernel."""
    import lowp

    set_kernel_policy("always")
    found = []
    for format, settings in CASES:
        x = gradient_of(rank)
        lowp.all_reduce(x, format, **settings)
        found.append(x)
    return found


def test_real_ranks_with_kernels_are_virtual_ones_without():
    import lowp

    real = run(sums, 3, timeout=240, group_timeout=200)
    for number, (format, settings) in enumerate(CASES):
        expected = lowp.VirtualWorld(3).all_reduce(gradient_of, format, **settings)
        for rank in range(3):
            assert torch.equal(real[rank][number].view(torch.int32), expected.view(torch.int32)), (format, settings, rank)
