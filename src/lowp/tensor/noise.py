"""Randomness as an argument: a counter-based generator, keyed by (seed, step, stream), counting elements.

Element i of a tensor draws from `hash(key, offset + i)`. So the same call gives the same bits on every chip, eager and
compiled, after a resume, and whether a tensor is rounded whole or in pieces with their offsets.

The key is three rounds of splitmix64 over seed, step and stream. A draw is two rounds of a 32-bit integer hash of full
avalanche (xor-shift and multiply, bias 0.17), with half of the key mixed in before each: about a fifth of the work of
Philox, which would not leave stochastic rounding at half the speed of a copy on a CPU. For a given key and index block the
draws of 2^32 elements are a permutation; between keys they are unrelated, which the tests check.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 1 << 32


@dataclass(frozen=True)
class Noise:
    """Which random numbers to use: a seed, a step and a stream (say, the parameter's number), and the first index.

    All are integers of up to 64 bits. `seed` and `step` may also be integer tensors of one element, so that a compiled
    training step or a CUDA graph can count without being compiled or captured again.
    """

    seed: int | Tensor
    step: int | Tensor = 0
    stream: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.offset, int) and self.offset < 0:
            raise ValueError(f"offset counts elements and cannot be {self.offset}")


def _signed64(z: "int | Tensor") -> "int | Tensor":
    """Python integers wrapped to 64 bits, as tensors wrap by themselves."""
    return z if isinstance(z, Tensor) else (z + (1 << 63)) % (1 << 64) - (1 << 63)


def _splitmix64(z: "int | Tensor") -> "int | Tensor":
    """One step of splitmix64, on signed 64-bit numbers; each mask makes an arithmetic right shift a logical one."""
    z = _signed64(z + -0x61C8864680B583EB)
    z = _signed64((z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47)
    z = _signed64((z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _signed32(word: "int | Tensor") -> "int | Tensor":
    return ((word & _WORD - 1) ^ 1 << 31) - (1 << 31)


def key_words(noise: Noise, block: "int | Tensor" = 0) -> "tuple[int | Tensor, int | Tensor]":
    """The two 32-bit halves of the key, as signed numbers, for the given block of 2^32 indices."""
    z = _splitmix64(_signed64(noise.seed))
    z = _splitmix64(_signed64(z ^ noise.step))
    z = _splitmix64(_signed64(z ^ noise.stream))
    second = _signed32((z >> 32) + block * 0x9E3779B9)
    return _signed32(z), second


def key_tensor(noise: Noise, first: int, device: torch.device) -> Tensor:
    """The key for the elements from index `first` on (all within one block of 2^32): two halves and the low word of `first`."""
    block, low = divmod(noise.offset + first, _WORD)
    if torch.compiler.is_compiling():  # numbers that change from call to call must not be folded into the graph
        seed, step = (_as_int64(part, device) for part in (noise.seed, noise.step))
        noise = Noise(seed, step, noise.stream, noise.offset)
    if isinstance(noise.seed, Tensor) or isinstance(noise.step, Tensor):
        halves = [_as_int64(word, device).to(torch.int32) for word in key_words(noise, block)]
        return torch.stack([*halves, torch.tensor(_signed32(low), dtype=torch.int32, device=device)])
    return torch.tensor([*key_words(noise, block), _signed32(low)], dtype=torch.int32, device=device)


def _as_int64(value: "int | Tensor", device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device=device, dtype=torch.int64)
    return torch.full((), value, dtype=torch.int64, device=device)


def blocks(noise: Noise, count: int) -> "list[tuple[int, int]]":
    """Cut `count` elements where the index crosses into another block of 2^32: (first, end) of each piece."""
    cuts = [0]
    while cuts[-1] < count:
        index = noise.offset + cuts[-1]
        cuts.append(min(count, cuts[-1] + _WORD - index % _WORD))
    return list(zip(cuts, cuts[1:], strict=False))


def _hash32(h: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every input bit flips every output bit with probability one half."""
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * -0x7B935975
    return h ^ (h >> 16 & 0xFFFF)


def draw(key: Tensor, like: Tensor, bits: int) -> Tensor:
    """Uniform integers of `bits` bits (30, or 62 for float64), one for each element of `like` in row-major order.

    The first 30 bits are the same for both widths, so that a number rounds the same in float32 and in float64.
    """
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).reshape(like.shape)
    word = _hash32(_hash32((index + key[2]) ^ key[0]) + key[1])
    high = word & 0x3FFFFFFF
    if bits == 30:
        return high
    low = _hash32(word + -0x61C88647)
    return high.to(torch.int64) << 32 | low.to(torch.int64) & 0xFFFFFFFF
