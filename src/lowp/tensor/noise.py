"""Randomness as an argument: a counter-based generator, keyed by (domain, seed, step, stream), counting elements.

Element i of a tensor draws from `permutation(key, offset + i)`. So the same call gives the same bits on every chip, eager and
compiled, after a resume, and whether a tensor is rounded whole or in pieces with their offsets.

The generator is Philox (Salmon et al., 2011) on words of 16 bits: the key is four words, made by running four-word Philox over
seed, step and stream; a draw is five rounds of two-word Philox over the index. Words of 16 bits and multipliers of 15 keep
every product below 2^31. That matters more than it seems: a 32-bit integer hash whose products wrap around is about as fast,
but signed overflow is undefined in C++, and gcc does turn such a hash into a constant in inductor's remainder loops.
For a given key the draws of 2^30 elements are all different; between keys they are unrelated, which the tests check.

**Domains.** A weight is rounded by the optimizer, then again by a simulation, and its gradient on the wire. All of them take
seed 0 by default and count steps and parameters from 0. If they drew the same numbers, one rounding would undo the other, every
time. So every consumer of noise inside lowp has a `Domain`, which is absorbed before the seed; and a domain says which numbers
make up a stream, with bits of its own for each, so that no two places of a domain have the same stream. To add a consumer is to
add a member to `Domain` and its numbers to `STREAMS`.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.tensor.backend import backend_of
from lowp.tensor.lists.tracing import record

_INDICES = 1 << 30  # elements that one key serves: an index and its offset add up without overflow
_DRAW_ROUNDS = 5  # the fewest after which every bit of the index flips every bit of the draw half of the time
_MORE_ROUNDS = 3  # until another draw for the same element looks unrelated
KEY_SIZE = _DRAW_ROUNDS + 1  # numbers in a key tensor
_MULTIPLIERS = (0x7A35, 0x6E2B)
_ROUNDS = (0x9E37, 0x79B9, 0x7F4A, 0x7C15, 0xF39C, 0xC060, 0x5CED)  # digits of the golden ratio, against symmetry

Word = int | Tensor  # 16 bits


def _word(name: str) -> int:
    """Up to eight letters as 64 bits: a number that no counter reaches, so that a domain cannot be taken for a seed."""
    return int.from_bytes(name.encode("ascii").ljust(8), "big")


class Domain(enum.IntEnum):
    """Who draws. Nothing is absorbed for USER: `lowp.Noise(seed, ...)` has given the same numbers in all versions."""

    USER = 0  # `lowp.quantize(..., seed=...)` and its kin
    USER_GRADIENT = _word("gradient")  # the gradient of `lowp.fake_quantize`
    OPTIMIZER = _word("optim")  # weights, then states: `draws` makes several numbers of one key
    MASTER = _word("master")  # `lowp.MasterWeights`
    SIMULATION = _word("simulate")  # the tensors of a simulated model
    SIMULATED_SUMS = _word("sums")  # the products inside its layers
    SIMULATED_PRODUCTS = _word("products")  # the operands of these
    WIRE = _word("wire")  # gradients on their way, real or virtual
    FSDP = _word("fsdp")  # gradients and parameters of a sharded model on their way


_PARTS_OF_A_MESSAGE = {"parameter": 31, "level": 1, "stage": 8, "rank": 24}
# What a stream consists of, and how many bits each number may have.
STREAMS: dict[Domain, dict[str, int]] = {
    Domain.USER: {"stream": 64},
    Domain.USER_GRADIENT: {"stream": 64},
    Domain.OPTIMIZER: {"parameter": 63},
    Domain.MASTER: {"parameter": 63},
    Domain.SIMULATION: {"layer": 31, "role": 4, "tensor": 28},
    Domain.SIMULATED_SUMS: {"layer": 31, "product": 32},
    Domain.SIMULATED_PRODUCTS: {"layer": 31, "operand": 32},
    Domain.WIRE: _PARTS_OF_A_MESSAGE,
    Domain.FSDP: _PARTS_OF_A_MESSAGE,
}


def stream_of(domain: Domain, *place: int) -> int:
    """The stream of one place in a domain: its numbers side by side, each in its own bits."""
    stream = 0
    for (name, bits), number in zip(STREAMS[domain].items(), place, strict=True):
        if not 0 <= number < 1 << bits:
            raise ValueError(f"stochastic rounding counts each {name} in {bits} bits, and cannot count {name} {number}")
        stream = stream << bits | number
    return stream


class KeySource:
    """A step that the host does not know when it launches: the keys of its noise lie in memory (recorded_step.py)."""

    def key(self, noise: "Noise", first: int) -> Tensor:
        """`key_tensor` of a noise with this step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Noise:
    """Which random numbers to use: a seed, a step and a stream (say, the parameter's number), and the first index.

    All are integers of up to 64 bits. `seed` and `step` may also be integer tensors of one element, so that a compiled
    training step or a CUDA graph can count without being compiled or captured again (in eager mode that is slower).

    This is a user's noise. Inside lowp it is made by `Noise.of`, which asks for a domain.
    """

    seed: int | Tensor
    step: int | Tensor | KeySource = 0
    stream: int = 0
    offset: int = 0
    domain: Domain = field(default=Domain.USER, kw_only=True)

    def __post_init__(self) -> None:
        for name, part in (("seed", self.seed), ("step", self.step), ("stream", self.stream), ("offset", self.offset)):
            if isinstance(part, Tensor) and name in ("seed", "step"):
                if part.numel() != 1 or part.is_floating_point() or part.is_complex():
                    raise TypeError(f"{name} must be an integer or an integer tensor of one element, not {part.dtype}")
            elif name == "step" and isinstance(part, KeySource):
                continue
            elif not isinstance(part, (int, torch.SymInt)):
                raise TypeError(f"{name} must be an integer, not {type(part).__name__}")
            elif not -(1 << 63) <= part < 1 << 64:
                raise ValueError(f"{name} is a number of up to 64 bits, not {part}")
        if self.offset < 0:
            raise ValueError(f"offset counts elements and cannot be {self.offset}")

    def home(self, device: torch.device) -> torch.device:
        """Where a kernel on `device` takes its key from: integers are arguments of the launch, and no copy is waited for."""
        in_memory = isinstance(self.seed, Tensor) or isinstance(self.step, (Tensor, KeySource))
        return device if in_memory else torch.device("cpu")

    @staticmethod
    def of(domain: Domain, seed: int | Tensor, step: int | Tensor | KeySource, *place: int, offset: int = 0) -> "Noise":
        """The noise of one place in a domain, which `STREAMS` describes."""
        return Noise(seed, step, stream_of(domain, *place), offset, domain=domain)


def _philox4(words: list[Word]) -> list[Word]:
    """Seven rounds of four-word Philox without a key: a permutation of 64 bits in which every bit depends on every other."""
    a, b, c, d = words
    for constant in _ROUNDS:
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (q >> 16) ^ b ^ constant, q & 0xFFFF, (p >> 16) ^ d ^ (constant >> 1), p & 0xFFFF
    return [a, b, c, d]


def _begin(domain: int) -> list[Word]:
    """The state before anything else is absorbed: a constant of the domain."""
    return _absorb([0, 0, 0, 0], words_of(int(domain))) if domain != Domain.USER else [0, 0, 0, 0]


def _key_words(domain: int, seed: Word, step: Word, stream: Word, block: int = 0) -> list[Word]:
    """The key for one block of 2^30 indices: domain, seed, step, stream and (but for the first) block, absorbed in turn."""
    state = _begin(domain)
    for number in (seed, step, stream, *([block] if block else [])):
        state = _absorb(state, words_of(number))
    return state


@lru_cache(maxsize=256)
def state_after(domain: int, seed: int, step: int) -> list[Word]:
    """What all streams of a step begin with. (Not to be changed.)"""
    return _absorb(_absorb(_begin(domain), words_of(seed)), words_of(step))


def key_numbers(noise: Noise, first: int) -> "list[int] | None":
    """`key_tensor` as numbers, for noise that is made of integers; None for other noise."""
    seed, step, stream, offset = noise.seed, noise.step, noise.stream, noise.offset
    if not (isinstance(seed, int) and isinstance(step, int) and isinstance(stream, int) and isinstance(offset, int)):
        return None  # tensors, or a compiler's symbols
    block, low = divmod(offset + first, _INDICES)
    key = _absorb(state_after(noise.domain, seed, step), words_of(stream))
    return _round_keys(_absorb(key, words_of(block)) if block else key, low)  # type: ignore[return-value]  # integers all


def signed(number: int) -> int:
    """64 bits as torch and graphs hold them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def words_of(number: Word) -> list[Word]:
    """64 bits as four words."""
    return [number >> shift & 0xFFFF for shift in (0, 16, 32, 48)]


def _absorb(state: list[Word], words: Sequence[Word]) -> list[Word]:
    return _philox4([word ^ more for word, more in zip(state, words, strict=True)])


def key_columns(domain: Domain, seed: Sequence[Word], step: Sequence[Word], streams: Tensor, firsts: Tensor) -> list[Tensor]:
    """`key_tensor` for many tensors at once, from the words of seed and step, their streams and their first indices (int64)."""
    return _key_after(_absorb(_absorb(_begin(domain), seed), step), streams, firsts)


def key_of_numbers(begun: Tensor, seed: Tensor, step: Tensor, stream: Tensor, first: Tensor) -> list[Tensor]:
    """`key_numbers` of a noise's numbers (int64, as words side by side) and of `begun(domain)`: what C++ is printed from."""
    return _key_after(_absorb(_absorb(words_of(begun), words_of(seed)), words_of(step)), stream, first)


@lru_cache(maxsize=64)
def begun(domain: int) -> int:
    """The state before anything else is absorbed, in 64 bits."""
    return sum(word << shift for word, shift in zip(_begin(domain), (0, 16, 32, 48), strict=True))  # type: ignore[misc]


def _key_after(state: list[Word], streams: Tensor, firsts: Tensor) -> list[Tensor]:
    block, low = firsts >> 30, firsts & (_INDICES - 1)
    state = _absorb(state, words_of(streams))
    later = _absorb(state, words_of(block))
    key: list[Word] = [torch.where(block == 0, early, late) for early, late in zip(state, later, strict=True)]
    return [word.to(torch.int32) for word in _round_keys(key, low)]  # type: ignore[union-attr]  # tensors all


def keys_of_streams(streams: Tensor, firsts: Tensor, columns: Tensor, state: Sequence[Word]) -> Tensor:
    """One number of a key for each stream, its first index (int64) and a column of `key_tensor`, after `state_after`: int32.

    Words of 16 bits, in integers of 32, which no product leaves.
    """
    block, low = firsts >> 30, (firsts & (_INDICES - 1)).to(torch.int32)
    early = _absorb([state[i] for i in range(4)], [word.to(torch.int32) for word in words_of(streams)])  # type: ignore[union-attr]  # tensors
    late = _absorb(early, [word.to(torch.int32) for word in words_of(block)])  # type: ignore[union-attr]
    first, *others = _round_keys([torch.where(block == 0, *words) for words in zip(early, late, strict=True)], low)
    for column, number in enumerate(others, 1):
        first = torch.where(columns == column, number, first)
    return first  # type: ignore[return-value]  # tensors all


def key_tensor(noise: Noise, first: int, device: torch.device) -> Tensor:
    """The keys of the rounds for elements from index `first` on (all of one block), and the index of `first` in its block."""
    if (numbers := key_numbers(noise, first)) is not None:
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    if isinstance(noise.step, KeySource):
        return noise.step.key(noise, first)
    if isinstance(noise.seed, Tensor) or isinstance(noise.step, Tensor):
        block, low = divmod(noise.offset + first, _INDICES)
        key = _key_words(noise.domain, _as_int64(noise.seed, device), _as_int64(noise.step, device), noise.stream, block)
        return torch.stack([_as_int64(word, device) for word in _round_keys(key, low)]).to(torch.int32)
    return _key_of_integers(noise.domain, noise.seed, noise.step, noise.stream, noise.offset + first, device)  # SymInts


def _round_keys(key: list[Word], low: Word) -> list[Word]:
    return [*(key[i % 4] ^ constant for i, constant in enumerate(_ROUNDS[:_DRAW_ROUNDS])), low]


@torch.library.custom_op("lowp::noise_key", mutates_args=())
def _key_of_integers(domain: int, seed: int, step: int, stream: int, first: int, device: torch.device) -> Tensor:
    """A compiled function's changing integers: one small call in its graph; the arithmetic would be a hundred operations."""
    return key_tensor(Noise(seed, step, stream, first, domain=Domain(domain)), 0, device)


@_key_of_integers.register_fake
def _(domain: int, seed: int, step: int, stream: int, first: int, device: torch.device) -> Tensor:
    return torch.empty(KEY_SIZE, dtype=torch.int32, device=device)


def _as_int64(value: "int | Tensor", device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device=device, dtype=torch.int64)
    return torch.full((), value, dtype=torch.int64, device=device)


def in_one_block(noise: Noise, count: int) -> bool:
    return noise.offset % _INDICES + count <= _INDICES


def blocks(noise: Noise, count: int) -> "list[tuple[int, int]]":
    """Cut `count` elements where the index crosses into another block of 2^30: (first, end) of each piece."""
    cuts = [0]
    while cuts[-1] < count:
        index = noise.offset + cuts[-1]
        cuts.append(min(count, cuts[-1] + _INDICES - index % _INDICES))
    return list(pairwise(cuts))


def _philox2(low: Tensor, high: Tensor, key: Tensor, rounds: range) -> tuple[Tensor, Tensor]:
    """Two-word Philox: a permutation of the 32 bits for every key."""
    if backend_of(low).assembly:
        return _philox2_in_assembly(low, high, key, rounds)
    for number in rounds:
        product = low * _MULTIPLIERS[number % 2]
        low, high = (product >> 16) ^ high ^ key[number % _DRAW_ROUNDS], product & 0xFFFF
    return low, high


def _philox2_in_assembly(low: Tensor, high: Tensor, key: Tensor, rounds: range) -> tuple[Tensor, Tensor]:
    """The same for kernels that are printed for CUDA (lists/triton.py): 32 bits in, 32 bits out."""
    keys = (key[number % _DRAW_ROUNDS] << 16 for number in rounds)
    found = record(f"philox{rounds[0] % 2}", torch.int32, (high << 16) | low, *keys)
    return found & 0xFFFF, (found >> 16) & 0xFFFF


def philox_in_assembly(operation: str, rounds: int) -> str:
    """PTX: $1 permuted, to $0, with as many keys from $2 on as there are rounds, in the upper halves of registers.

    Words are kept there too. A product with a word has 64 bits then, and the halves that are asked for are its two registers:
    three instructions a round instead of four, and two of these by the units that multiply, which have less to do than those
    for bits. (LLVM takes the same apart again where it is written in Triton.)
    """
    lines = [".reg .b32 low, high, upper", ".reg .b64 product", "shl.b32 low, $1, 16", "and.b32 high, $1, 0xFFFF0000"]
    for number in range(rounds):
        multiplier = _MULTIPLIERS[(number + int(operation[-1])) % 2]
        lines += [
            f"mul.wide.u32 product, low, {multiplier}",
            "mov.b64 {low, upper}, product",
            "shl.b32 upper, upper, 16",
            f"lop3.b32 upper, upper, high, ${2 + number}, 0x96",
            "mov.b32 high, low",
            "mov.b32 low, upper",
        ]
    return "{ " + "; ".join([*lines, "shr.u32 low, low, 16", "or.b32 $0, low, high"]) + "; }"


def draw(key: Tensor, like: Tensor, bits: int) -> Tensor:
    """Uniform integers of `bits` bits (30, or 62 for float64), one for each element of `like` in row-major order.

    The first 30 bits are the same for both widths, so that a number rounds the same in float32 and in float64.
    """
    low, high = _first_words(key, like)
    first = (high << 14) + (low >> 2)
    if bits == 30:
        return first
    low, high = _philox2(low, high, key, range(_DRAW_ROUNDS))
    return (first.to(torch.int64) << 32) + (high.to(torch.int64) << 16) + low.to(torch.int64)


class Draw(NamedTuple):
    """A number of 30 bits for each element, in two parts: rounding to 16 bits mostly needs the upper one alone.

    `word` are 16 bits that no other draw's word has a part of, for rounding to fewer bits.
    """

    upper: Tensor  # 16 bits
    lower: Tensor  # 14 bits
    word: Tensor
    top13: Tensor  # of `upper`, which float16 needs: `upper >> 3`, made in fewer operations

    @property
    def number(self) -> Tensor:
        return (self.upper << 14) + self.lower


def draws(key: Tensor, like: Tensor, count: int) -> list[Draw]:
    """`count` numbers of 30 bits for each element: `draw`'s, then its halves exchanged; then the same of a further permutation.

    Rounding to 16 bits looks at a draw's upper half or little more, so exchanging them makes another one for nothing.
    """
    low, high = _first_words(key, like)
    found: list[Draw] = []
    first = _DRAW_ROUNDS
    while True:
        found.append(Draw(high, low >> 2, high, high >> 3))
        other = ((high & 1) << 15) + ((low >> 2) << 1) + (high >> 15)
        found.append(Draw(other, (high >> 1) & 0x3FFF, low, ((high & 1) << 12) + (low >> 4)))  # 15 bits and 15
        if len(found) >= count:
            return found[:count]
        low, high = _philox2(low, high, key, range(first, first + _MORE_ROUNDS))
        first += _MORE_ROUNDS


def _first_words(key: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).reshape(like.shape) + key[_DRAW_ROUNDS]
    return _philox2(
        index & 0xFFFF, (index >> 16) & 0xFFFF, key, range(_DRAW_ROUNDS)
    )  # (which tells a printer that it is 16 bits)
