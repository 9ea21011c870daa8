"""One reduction for small buckets, another for large ones."""

from dataclasses import dataclass

from lowp.wire.plan import Shard
from lowp.wire.reductions.base import Adder, ChunkJob, Reduction, Steps
from lowp.wire.rules import Rules


@dataclass(frozen=True)
class BySize(Reduction):
    """`small` for buckets of up to `threshold` elements, where latency counts; `large` above it, where bandwidth does."""

    small: Reduction
    large: Reduction
    threshold: int = 1 << 16

    def __str__(self) -> str:
        return f"by_size({self.small}, {self.large}, {self.threshold})"

    def of_size(self, elements: int) -> Reduction:
        return self.small if elements <= self.threshold else self.large

    def reduce(self, job: ChunkJob) -> Steps:
        raise AssertionError("BySize is resolved by of_size before it is used")

    def adder(self, shard: Shard, index: int | None, rules: Rules) -> Adder:
        raise AssertionError("BySize is resolved by of_size before it is used")

    def owner(self, index: int | None, world: int) -> int:
        raise AssertionError("BySize is resolved by of_size before it is used")
