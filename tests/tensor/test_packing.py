"""Packed codes: a little-endian bit stream along the last dimension, and nothing more than its bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowp
from lowp.formats import CodebookFormat
from lowp.tensor.kernels import built_kernel
from lowp.tensor.lists.bit_stream import CppBitStream
from lowp.tensor.packing import BitStream

# One format of each width. No built-in format has a single bit: a codebook of two entries does.
OF_WIDTH = {
    1: CodebookFormat("sign", (-1.0, 1.0)),
    2: lowp.format("int2"),
    3: lowp.format("e2m0"),
    4: lowp.format("e2m1fn"),
    5: lowp.format("e3m1"),
    6: lowp.format("e3m2fn"),
    7: lowp.format("posit7"),
    8: lowp.format("e4m3fn"),
}
every_width = pytest.mark.parametrize("bits", OF_WIDTH)


def codes_of(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)


def bytes_of_bit_string(codes: list[int], bits: int) -> list[int]:
    """Written down as a string, the first code at the right end, and cut into bytes from there."""
    string = "".join(f"{code:0{bits}b}" for code in reversed(codes))
    string = string.zfill(-(-len(string) // 8) * 8)
    return [int(string[i : i + 8], 2) for i in range(len(string) - 8, -1, -8)]


@every_width
def test_widths_are_what_they_say(bits):
    assert OF_WIDTH[bits].bits == bits


@every_width
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 16, 31, 64, 65])
def test_layout_is_that_of_a_bit_string(bits, size):
    codes = codes_of(bits, size)
    packed = lowp.pack(codes, OF_WIDTH[bits])
    assert packed.dtype == torch.uint8
    assert packed.tolist() == bytes_of_bit_string(codes.tolist(), bits)
    assert torch.equal(lowp.unpack(packed, OF_WIDTH[bits], size), codes)


@given(st.sampled_from(sorted(OF_WIDTH)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 40), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_any_shape(bits, batch, size, seed):
    codes = codes_of(bits, *batch, size, seed=seed)
    packed = lowp.pack(codes, OF_WIDTH[bits])
    assert packed.shape == (*batch, -(-size * bits // 8))
    assert torch.equal(lowp.unpack(packed, OF_WIDTH[bits], size), codes)


@every_width
def test_rows_are_packed_one_by_one(bits):
    codes = codes_of(bits, 2, 3, 13)
    packed = lowp.pack(codes, OF_WIDTH[bits])
    rows = torch.stack([lowp.pack(row, OF_WIDTH[bits]) for row in codes.view(6, 13)])
    assert torch.equal(packed.view(6, -1), rows)


@every_width
@pytest.mark.parametrize("size", [1, 5, 8, 1001])
def test_memory_is_that_of_the_bits(bits, size):
    packed = lowp.pack(codes_of(bits, 4, size), OF_WIDTH[bits])
    assert packed.untyped_storage().nbytes() == 4 * ((size * bits + 7) // 8)
    assert packed.is_contiguous()


@every_width
def test_packing_copies(bits):
    codes = codes_of(bits, 16)
    kept = codes.clone()
    lowp.unpack(lowp.pack(codes, OF_WIDTH[bits]).fill_(0), OF_WIDTH[bits], 16).fill_(1)
    assert torch.equal(codes, kept)
    packed = lowp.pack(codes, OF_WIDTH[bits])
    lowp.unpack(packed, OF_WIDTH[bits], 16).fill_(0)
    assert torch.equal(packed, lowp.pack(kept, OF_WIDTH[bits]))


@pytest.mark.parametrize("bits", [1, 3, 4, 6, 7])
def test_bits_above_the_code_are_ignored_and_the_rest_of_the_last_byte_is_zero(bits):
    codes = codes_of(8, 5)
    packed = lowp.pack(codes, OF_WIDTH[bits])
    assert torch.equal(packed, lowp.pack(codes & ((1 << bits) - 1), OF_WIDTH[bits]))
    used = 5 * bits % 8
    assert used == 0 or packed[-1].item() >> used == 0


@every_width
def test_strides_do_not_matter(bits):
    codes = codes_of(bits, 24, 10).t()
    assert torch.equal(lowp.pack(codes, OF_WIDTH[bits]), lowp.pack(codes.contiguous(), OF_WIDTH[bits]))
    packed = lowp.pack(codes, OF_WIDTH[bits]).t().contiguous().t()
    assert torch.equal(lowp.unpack(packed, OF_WIDTH[bits], 24), codes)
    broadcast = codes_of(bits, 1, 9).expand(3, 9)
    assert torch.equal(lowp.unpack(lowp.pack(broadcast, OF_WIDTH[bits]), OF_WIDTH[bits], 9), broadcast)


@pytest.mark.parametrize("name", ["int2", "e2m1fn", "e2m3fn", "posit6", "nf4", "e4m3fn"])
@pytest.mark.parametrize("size", [1, 7, 8, 33])
def test_encode_packs_and_decode_unpacks(name, size):
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    packed = lowp.encode(x, name, pack=True)
    assert torch.equal(packed, lowp.pack(lowp.encode(x, name), name))
    assert packed.shape == (3, -(-size * lowp.format(name).bits // 8))
    assert torch.equal(lowp.decode(packed, name, size=size), lowp.quantize(x, name))


@pytest.mark.other_cpu
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5), (2, 3, 1000), (3, 40_001), (1 << 18,), (4, 0), (20_000, 3)], ids=str)
def test_kernels_pack_as_plain_operations_do(bits, shape):
    codes, size = torch.randint(0, 256, shape, dtype=torch.uint8), shape[-1]  # bits above a code are there, too
    fmt = OF_WIDTH[bits]
    packed = lowp.pack(codes, fmt)
    unpacked = lowp.unpack(packed, fmt, size)
    lowp.set_kernel_policy("always")  # conftest.py says "never"
    assert torch.equal(lowp.pack(codes, fmt), packed)
    assert torch.equal(lowp.unpack(packed, fmt, size), unpacked)
    kernel = built_kernel(BitStream(bits))
    assert isinstance(kernel, CppBitStream)
    if codes.numel():  # past its end, a kernel writes nothing
        rows = codes.numel() // size
        for name, source, expected in (("pack", codes, packed), ("unpack", packed, unpacked)):
            room = torch.full((expected.numel() + 16,), 77, dtype=torch.uint8)
            kernel(name, source, room, rows, size)
            assert torch.equal(room[:-16], expected.flatten())
            assert (room[-16:] == 77).all()


@pytest.mark.parametrize("bits", [4, 6])
def test_a_compiled_function_packs(bits):
    codes, fmt = codes_of(bits, 3, 11), OF_WIDTH[bits]
    packed = torch.compile(lambda codes: lowp.pack(codes, str(fmt)), fullgraph=True)(codes)
    assert torch.equal(packed, lowp.pack(codes, fmt))
    assert torch.equal(torch.compile(lambda packed: lowp.unpack(packed, fmt, 11), fullgraph=True)(packed), codes)


def test_packed_blocks_that_are_decoded_without_their_size():
    packed = lowp.encode(torch.randn(4, 64), "mxfp4", pack=True)
    with pytest.raises(ValueError, match="packed elements need size="):
        lowp.decode(packed, "mxfp4")


def test_vmap_packs_each_row():
    codes = codes_of(4, 5, 9)
    packed = torch.func.vmap(lambda row: lowp.pack(row, "e2m1fn"))(codes)
    assert torch.equal(packed, lowp.pack(codes, "e2m1fn"))
    assert torch.equal(torch.func.vmap(lambda row: lowp.unpack(row, "e2m1fn", 9))(packed), codes)


CODES = torch.zeros(4, dtype=torch.uint8)
ERRORS = [
    (lambda: lowp.pack(CODES.int(), "e2m1fn"), TypeError, r"packing takes uint8 codes, not torch\.int32"),
    (lambda: lowp.pack(CODES[0], "e2m1fn"), ValueError, r"packing needs at least one dimension"),
    (lambda: lowp.pack(CODES.short(), "fp16"), ValueError, r"packing is for codes of up to 8 bits; fp16 has 16"),
    (lambda: lowp.pack(CODES, "mxfp4"), ValueError, r"packing is for codes of up to 8 bits; mxfp4 has"),
    (lambda: lowp.pack(CODES, "e2m1fm"), ValueError, r"unknown format 'e2m1fm'; did you mean 'e2m1fn'"),
    (lambda: lowp.unpack(CODES, "e2m1fn", 6), ValueError, r"6 codes of 4 bits are 3 bytes a row, but the rows here have 4"),
    (lambda: lowp.unpack(CODES, "e2m1fn", 9), ValueError, r"9 codes of 4 bits are 5 bytes a row, but the rows here have 4"),
    (lambda: lowp.unpack(CODES, "e4m3fn", 3), ValueError, r"3 codes of 8 bits are 3 bytes a row"),
    (lambda: lowp.unpack(CODES.char(), "e2m1fn", 8), TypeError, r"packed codes are uint8 tensors .* not torch\.int8"),
    (lambda: lowp.unpack(CODES[0], "e2m1fn", 2), TypeError, r"at least one dimension"),
    pytest.param(lambda: lowp.unpack(CODES[:0], "int4", -1), ValueError, r"size"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_speak(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
