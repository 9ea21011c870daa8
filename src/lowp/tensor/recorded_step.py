"""Keys of stochastic rounding for a CUDA graph: computed before each of its launches, and read from memory by its kernels.

A graph holds the arguments of its launches, so a key that a kernel takes as an argument would be the same in every step. What
is recorded takes its noise from `Noise.of(domain, seed, step, ...)` with a `RecordedStep` for the step:

1. Until `recording`, a key is computed on the host and copied to the device: the same kernels run as will be recorded. How many
   are asked for is counted.
2. While it records, each key that is asked for is a place in memory, and what it is made of is noted. Memory is there before:
   with deterministic algorithms torch fills what it allocates, and a graph would do so in every launch.
3. `fill(step)`, before each launch, writes all of these keys for that step: one launch for each domain and seed.

To compute keys in the graph, from a step in memory, was the other way: a launch for each of them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowp.tensor.elementwise import Elementwise
from lowp.tensor.noise import KEY_SIZE, KeySource, Noise, key_tensor, keys_of_streams, signed, state_after

_APART = 8  # int32 from one key to the next: each begins at a multiple of 16 bytes

KEYS = Elementwise(lambda *arguments: [keys_of_streams(*arguments)], (torch.int64,) * 3, (torch.int32,), 4, long=True)
"""`keys_of_streams` of flat tensors, in one launch."""


@dataclass
class _RecordedKeys:
    """The keys of one domain and seed, and the streams and indices that they belong to."""

    memory: Tensor
    streams: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    arguments: list[Tensor] = field(default_factory=list)  # of `KEYS`


class RecordedStep(KeySource):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording = False
        self._asked: Counter[tuple[int, int]] = Counter()  # for keys of a domain and seed, since the last recording
        self._keys: dict[tuple[int, int], _RecordedKeys] = {}
        self.now = 0  # the step, while nothing is recorded

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, keys are places in memory; those of an earlier recording are forgotten. There is room for as many as were
        asked for since then: at least one pass must have been taken."""
        shapes = {kind: (count, _APART) for kind, count in self._asked.items()}
        self._keys = {
            k: _RecordedKeys(torch.empty(shape, dtype=torch.int32, device=self._device)) for k, shape in shapes.items()
        }
        self._asked.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def key(self, noise: Noise, first: int) -> Tensor:
        assert isinstance(noise.seed, int)
        kind = int(noise.domain), noise.seed
        if not self._recording:
            self._asked[kind] += 1
            return key_tensor(replace(noise, step=self.now), first, self._device)
        keys = self._keys.get(kind)
        if keys is None or len(keys.streams) == len(keys.memory):
            raise RuntimeError("more keys of noise were asked for than in the passes before")
        keys.streams.append(signed(noise.stream))
        keys.firsts.append(noise.offset + first)
        return keys.memory[len(keys.streams) - 1, :KEY_SIZE]

    def fill(self, step: int) -> None:
        """Write the keys that were asked for while `recording`."""
        for (domain, seed), keys in self._keys.items():
            if not keys.arguments:
                columns = [column % KEY_SIZE for column in range(_APART)] * len(keys.streams)
                wide = ([each for each in numbers for _ in range(_APART)] for numbers in (keys.streams, keys.firsts))
                keys.arguments = [torch.tensor(numbers, dtype=torch.int64, device=self._device) for numbers in (*wide, columns)]
            if keys.streams:
                KEYS(keys.arguments, [keys.memory[: len(keys.streams)].view(-1)], state_after(domain, seed, step))
