"""Kernels that pack codes of less than a byte, and take them apart again (packing.py says how they lie): C++ and Triton.

Rows are independent: each begins with a byte of its own.
"""

import ctypes

import torch
from torch import Tensor

from lowp.tensor.lists import cpp, triton
from lowp.tensor.lists.preamble import preamble
from lowp.tensor.packing import BitStream, group, packed_size

# BITS is a macro. Eight codes fill BITS bytes: one instruction gathers the low bits of eight bytes, one spreads them.
EIGHT_CODES = r"""
INLINE uint64_t low_bits(uint64_t bytes) {  // of eight bytes, one after the other
#if defined(__BMI2__)
    return _pext_u64(bytes, ((1ull << BITS) - 1) * 0x0101010101010101ull);
#else
    uint64_t r = 0; for (int i = 0; i < 8; i++) r |= (bytes >> 8 * i & ((1ull << BITS) - 1)) << BITS * i; return r;
#endif
}
INLINE uint64_t in_bytes(uint64_t bits) {
#if defined(__BMI2__)
    return _pdep_u64(bits, ((1ull << BITS) - 1) * 0x0101010101010101ull);
#else
    uint64_t r = 0; for (int i = 0; i < 8; i++) r |= (bits >> BITS * i & ((1ull << BITS) - 1)) << 8 * i; return r;
#endif
}
INLINE uint64_t load_bits(const uint8_t* p) {  // BITS bytes; the pieces meet in a register, not in memory
    uint32_t low; uint16_t high;
    if (BITS == 4) { memcpy(&low, p, 4); return low; }
    if (BITS == 6) { memcpy(&low, p, 4); memcpy(&high, p + 4, 2); return low | (uint64_t)high << 32; }
    uint64_t r = 0; for (int i = 0; i < BITS; i++) r |= (uint64_t)p[i] << 8 * i; return r;
}
INLINE void store_bits(uint8_t* p, uint64_t bits) {
    const uint32_t low = bits; const uint16_t high = bits >> 32;
    if (BITS == 4) memcpy(p, &low, 4);
    else if (BITS == 6) { memcpy(p, &low, 4); memcpy(p + 4, &high, 2); }
    else for (int i = 0; i < BITS; i++) p[i] = bits >> 8 * i;
}
"""
_PIECE = 1 << 14  # codes
_WORTH_THREADS = 1 << 17  # codes
_CPP = r"""
template <class Work> INLINE void in_pieces(long rows, long length, long threads, const Work& work) {
    const long in_row = (length + PIECE - 1) / PIECE, bytes_in_row = (length * BITS + 7) / 8;
    #pragma omp parallel for num_threads(threads) if(threads > 1 && rows * length >= WORTH_THREADS)
    for (long piece = 0; piece < rows * in_row; piece++) {
        const long row = piece / in_row, first = piece % in_row * PIECE;
        work(row * length + first, row * bytes_in_row + first / 8 * BITS, length - first < PIECE ? length - first : PIECE);
    }
}
extern "C" void pack(const uint8_t* codes, uint8_t* packed, long rows, long length, long threads) {
    in_pieces(rows, length, threads, [=](long code, long byte, long count) __attribute__((always_inline)) {
        const uint8_t* from = codes + code; uint8_t* to = packed + byte;
        for (; count >= 8; count -= 8, from += 8, to += BITS) {
            uint64_t eight; memcpy(&eight, from, 8);
            store_bits(to, low_bits(eight));
        }
        uint64_t rest = 0;
        memcpy(&rest, from, count);
        rest = low_bits(rest);
        memcpy(to, &rest, (count * BITS + 7) / 8);
    });
}
extern "C" void unpack(const uint8_t* packed, uint8_t* codes, long rows, long length, long threads) {
    in_pieces(rows, length, threads, [=](long code, long byte, long count) __attribute__((always_inline)) {
        const uint8_t* from = packed + byte; uint8_t* to = codes + code;
        for (; count >= 8; count -= 8, from += BITS, to += 8) {
            const uint64_t eight = in_bytes(load_bits(from));
            memcpy(to, &eight, 8);
        }
        uint64_t rest = 0;
        memcpy(&rest, from, (count * BITS + 7) / 8);
        rest = in_bytes(rest);
        memcpy(to, &rest, count);
    });
}
"""


class CppBitStream:
    """`pack` and `unpack` rows of `length` codes, from a tensor into another."""

    def __init__(self, stream: BitStream) -> None:
        sizes = f"#define BITS {stream.bits}\n#define PIECE {_PIECE}\n#define WORTH_THREADS {_WORTH_THREADS}"
        text = "\n".join([preamble(), sizes, EIGHT_CODES, _CPP])
        arguments = [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 3]
        self._run = {name: cpp.build_parallel(text, arguments, name) for name in ("pack", "unpack")}

    def __call__(self, name: str, source: Tensor, target: Tensor, rows: int, length: int) -> None:
        self._run[name](source.data_ptr(), target.data_ptr(), rows, length, torch.get_num_threads())


_GROUPS = 512  # of codes, a program


def triton_source(bits: int) -> str:
    """The text of a module with `run`, which packs or (UNPACKS) takes apart: a thread makes whole groups of codes. Each row
    has so many programs."""
    codes, group_bytes = group(bits)
    word = "tl.int64" if group_bytes > 3 else "tl.int32"
    code_there = [f"place * {codes} + {i} < length" for i in range(codes)]
    byte_there = [f"place * {group_bytes} + {i} < bytes_in_row" for i in range(group_bytes)]
    lines = [
        *triton.IMPORTS,
        "@triton.jit",
        "def run(codes, packed, programs, length, bytes_in_row, UNPACKS: tl.constexpr, GROUPS: tl.constexpr):",
        "    row, first = tl.program_id(0) // programs, tl.program_id(0) % programs",
        "    place = first.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)",
        f"    code = codes + row.to(tl.int64) * length + place * {codes}",
        f"    byte = packed + row.to(tl.int64) * bytes_in_row + place * {group_bytes}",
        f"    word = tl.zeros([GROUPS], {word})",
        "    if UNPACKS:",
        *(
            f"        word |= (tl.load(byte + {i}, mask={mask}, other=0).to({word}) & 255) << {8 * i}"
            for i, mask in enumerate(byte_there)
        ),
        *(
            f"        tl.store(code + {i}, (word >> {bits * i} & {(1 << bits) - 1}).to(tl.uint8), mask={mask})"
            for i, mask in enumerate(code_there)
        ),
        "    else:",
        *(
            f"        word |= (tl.load(code + {i}, mask={mask}, other=0).to({word}) & {(1 << bits) - 1}) << {bits * i}"
            for i, mask in enumerate(code_there)
        ),
        *(
            f"        tl.store(byte + {i}, (word >> {8 * i} & 255).to(tl.uint8), mask={mask})"
            for i, mask in enumerate(byte_there)
        ),
    ]
    return "\n".join(lines) + "\n"


class TritonBitStream:
    def __init__(self, stream: BitStream, device: torch.device) -> None:
        self._bits, self._kernel = stream.bits, triton.build(triton_source(stream.bits))
        example = torch.zeros(8, dtype=torch.uint8, device=device)
        self("pack", example, torch.empty_like(example), 1, 1)  # what cannot be compiled is found out here

    def __call__(self, name: str, source: Tensor, target: Tensor, rows: int, length: int) -> None:
        codes, packed = (source, target) if name == "pack" else (target, source)
        programs = -(-length // (group(self._bits)[0] * _GROUPS))
        sizes = programs, length, packed_size(length, self._bits)
        with torch.cuda.device(source.device):
            self._kernel[(rows * programs,)](codes, packed, *sizes, UNPACKS=name == "unpack", GROUPS=_GROUPS, num_warps=4)


def build(stream: BitStream, device: torch.device) -> CppBitStream | TritonBitStream:
    return CppBitStream(stream) if device.type == "cpu" else TritonBitStream(stream, device)
