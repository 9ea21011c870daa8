"""Messages: their length, what they say, and what they cannot say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowp
from lowp.formats import FORMATS
from lowp.wire import scaling
from lowp.wire.codec import (
    Codec,
    PartLayout,
    check_format,
    codec_of,
    pack_codes,
    packed_bytes,
    total_codec,
    unpack_codes,
)
from lowp.wire.scaling import SCALES, bound_bytes


def travels(fmt):
    try:
        check_format(fmt)
    except ValueError:
        return False
    return True


WIRE_FORMATS = [fmt for fmt in FORMATS if travels(fmt)]


def numbers(count, magnitude=1.0):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * magnitude
    x[::7] = 0.0
    x[1::11] = -0.0
    return x


def sent(codec, x, **extra):
    message = torch.full((codec.wire_bytes(x.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(x, message, peak=torch.zeros(1, dtype=torch.uint8), **extra)
    out = torch.empty_like(x)
    codec.decode(message, out)
    return out


@pytest.mark.parametrize("bits", range(1, 8))
def test_codes_are_packed_without_loss(bits):
    for count in (1, 2, 7, 8, 9, 63, 64, 65, 1001):
        codes = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
        packed = pack_codes(codes, bits)
        assert packed.numel() == packed_bytes(count, bits)
        assert torch.equal(unpack_codes(packed, bits, count), codes)
        assert packed.numel() <= math.ceil(count / 128) * 16 * bits


@pytest.mark.parametrize("fmt", WIRE_FORMATS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 65, 300])
def test_without_scale_a_message_says_what_quantize_says(fmt, count):
    x = numbers(count, 3.0)
    wanted = lowp.quantize(x, fmt, saturate=True)
    assert torch.equal(sent(Codec(fmt, scale=scaling.Scale("none")), x), wanted)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-5, 1.0, 1e9, 1e37])
@pytest.mark.parametrize("fmt", WIRE_FORMATS, ids=str)
def test_local_scale_is_the_largest_power_of_two_that_fits(fmt, magnitude):
    x = numbers(301, magnitude)
    top = x.abs().max().item()
    shift = math.floor(math.log2(fmt.scaled_max / top)) if not math.isinf(fmt.scaled_max / top) else 126
    while top * 2.0**shift > fmt.scaled_max:
        shift -= 1
    while top * 2.0 ** (shift + 1) <= fmt.scaled_max:
        shift += 1
    shift = max(-126, min(126, shift))
    wanted = lowp.quantize(x * 2.0**shift, fmt, saturate=True) * 2.0**-shift
    assert torch.equal(sent(Codec(fmt, scale=scaling.Scale("local")), x), wanted)


@pytest.mark.parametrize("scale", ["local", "block:32"])
@pytest.mark.parametrize("fmt", WIRE_FORMATS, ids=str)
def test_scaled_numbers_arrive_whatever_their_size(fmt, scale):
    for magnitude in (1e-20, 0.3, 1.0, 3.0, 4.0, 100.0, 1e20):
        found = sent(Codec(fmt, scale=scaling.scale_of(scale)), torch.full((64,), magnitude))
        assert (found / magnitude - 1).abs().max() < 1  # int2 has 0 and 1


@given(st.floats(2.0**-110, 3.299999965482712e38, width=32), st.integers(1, 1024))
def test_bounds_are_those_of_the_paper(number, world):
    bound = bound_bytes(torch.tensor([number]), world).item() - 116
    assert 2.0**bound >= number * world > 2.0 ** (bound - 1)


def test_bounds_of_what_has_no_logarithm():
    found = bound_bytes(torch.tensor([0.0, math.inf, math.nan, 1e-45]), 4)
    assert found.tolist() == [0, 255, 255, 1]


@pytest.mark.parametrize("block", [1, 16, 64, 1000])
def test_blocks_have_scales_of_their_own(block):
    x = numbers(130) * 10.0 ** torch.arange(130).div(20, rounding_mode="floor")
    codec = codec_of("e4m3fn", scale=f"block:{block}")
    wanted = torch.cat([sent(codec_of("e4m3fn", scale="local"), piece.clone()) for piece in x.split(block)])
    assert torch.equal(sent(codec, x), wanted)
    assert codec.wire_bytes(130) >= 130 + math.ceil(130 / block)


@pytest.mark.parametrize("name", ["topk:0.1", "topk:0.25:e4m3fn", "topk:0.01:int8"])
def test_top_k_sends_the_largest(name):
    codec = codec_of(name)
    x = numbers(401)
    kept = math.ceil(codec.keep * 401)
    out = sent(codec, x)
    assert int((out != 0).sum()) == kept
    threshold = x.abs().sort(descending=True).values[kept - 1]
    assert torch.equal(out != 0, x.abs() >= threshold)
    assert codec.wire_bytes(401) < 4 * 401


def test_top_k_of_equal_numbers_takes_the_first():
    out = sent(codec_of("topk:0.5"), torch.ones(10))
    assert out.tolist() == [1.0] * 5 + [0.0] * 5


def test_sums_of_top_k_have_room_for_some_ranks():
    assert [total_codec(codec_of("topk:0.1:e4m3fn"), world).kept(1000) for world in (1, 2, 3, 50)] == [100, 200, 200, 200]
    assert [total_codec(codec_of("topk:0.1:e4m3fn:4"), world).kept(1000) for world in (2, 5)] == [200, 1000]  # dense is shorter
    every = codec_of("topk:0.1:e4m3fn:all")
    assert total_codec(every, 3).kept(1000) == 300
    assert total_codec(every, 50).keep == 1.0


@pytest.mark.parametrize("text", ["topk:0.01:fp32", "topk:0.5:e4m3fn:1", "topk:0.01:e4m3fn:all"])
def test_top_k_is_printed_as_it_is_written(text):
    assert str(codec_of(text)) == f"{text}/local"
    assert codec_of(str(codec_of(text)).removesuffix("/local")) == codec_of(text)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_numbers_that_are_not_finite_are_never_numbers(scale):
    for bad in (math.inf, -math.inf, math.nan):
        x = numbers(40)
        x[17] = bad
        codec = Codec(lowp.format("int8"), scale=scale)
        message = torch.zeros(codec.wire_bytes(40), dtype=torch.uint8)
        codec.encode(x, message, peak=bound_bytes(scaling.largest(x).reshape(1), 1))
        out, peak = torch.empty(40), torch.zeros(1, dtype=torch.uint8)
        codec.decode(message, out, peak)
        if scale.shared:  # the mark travels beside the numbers (with aps, before them)
            assert scale.agreed or peak.item() == 255
        else:
            assert out[17].isnan()
            assert peak.item() == 255


@pytest.mark.parametrize("fmt", ["e5m2", "e4m3fn", "int8", "e2m1fn", "posit8", "e3m2fn"])
def test_large_scales_give_the_same_codes(fmt):
    """Numbers that are 2^100 times smaller get a scale that is 2^100 times larger: the header differs, the codes do not."""
    codec = codec_of(fmt, "nearest", "local")
    numbers = torch.randn(101, generator=torch.Generator().manual_seed(5))
    messages = []
    for power in (0, -100):
        message = torch.zeros(codec.wire_bytes(101), dtype=torch.uint8)
        codec.encode(numbers * 2.0**power, message)
        messages.append(message)
    length = PartLayout.of(codec, 101).header
    assert torch.equal(messages[0][:length], messages[1][:length])
    assert messages[1][length] - messages[0][length] == 100


def test_stochastic_messages_draw_the_noise_of_their_place():
    x = numbers(500)
    codec = codec_of("e4m3fn", "stochastic", "none")
    whole = sent(codec, x, noise=lowp.Noise(1, 2, 3, 0))
    later = sent(codec, x[200:].clone(), noise=lowp.Noise(1, 2, 3, 200))
    assert torch.equal(whole[200:], later)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e8m0fnu", "signs"),
        ("tf32", "16 bits"),
        ("topk:2", "fraction"),
        ("topk:x", "topk:<fraction>"),
        ("topk:0.1:e4m3fn:some", "topk:<fraction>"),
        ("topk:0.1:e4m3fn:0", "room for at least one"),
        ("topk:0.1:e4m3fn:2:2", "topk:<fraction>"),
        ("e4m3fm", "did you mean"),
    ],
)
def test_formats_that_cannot_travel(text, message):
    with pytest.raises(ValueError, match=message):
        codec_of(text)
