"""Packing, printed for CUDA and run by Triton's interpreter: the bytes of plain operations."""

import torch

from interpreter import needs_triton, run

OF_WIDTH = {2: "int2", 3: "e2m0", 4: "e2m1fn", 5: "e3m1", 6: "e2m3fn", 7: "posit7"}
SHAPES = [(1,), (7,), (2, 3, 16), (3, 1001), (700, 3)]


@needs_triton
def test_what_is_printed_for_cuda():
    run(__file__)


if __name__ == "__main__":
    from contextlib import nullcontext
    from unittest.mock import patch

    import lowp
    from lowp.tensor.lists.bit_stream import TritonBitStream
    from lowp.tensor.packing import BitStream

    lowp.set_kernel_policy("never")
    for bits in range(2, 8):
        fmt = OF_WIDTH[bits]
        with patch.object(torch.cuda, "device", lambda device: nullcontext()):
            kernel = TritonBitStream(BitStream(bits), torch.device("cpu"))
            for shape in SHAPES:
                codes, size = torch.randint(0, 256, shape, dtype=torch.uint8), shape[-1]
                packed = lowp.pack(codes, fmt)
                unpacked = lowp.unpack(packed, fmt, size)
                for name, source, expected in (("pack", codes, packed), ("unpack", packed, unpacked)):
                    room = torch.full((expected.numel() + 16,), 77, dtype=torch.uint8)
                    kernel(name, source, room, codes.numel() // size, size)
                    assert torch.equal(room[:-16], expected.flatten()), (name, bits, shape)
                    assert (room[-16:] == 77).all()
        print(bits, "bits", flush=True)
