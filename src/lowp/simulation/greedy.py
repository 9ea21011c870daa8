"""The search itself, on numbers alone: units that each have one of several formats, and a loss for every choice.

1. **Sensitivity.** Each unit alone at each narrower format, all others at the widest: what that adds to the loss.
2. **Descent.** From all-widest to all-narrowest, one unit at a time, by one format or several. Of all moves, those that should
   add least loss per saved bit (by sensitivity) are measured where they would be made, and the best of these few is made.
3. **Improvement.** Of all choices measured so far, take the best that keeps to the limits. Measure every change of one unit
   around it. If one is better, that is made. If none is, they say what two would do together: one unit gives back bits, another
   takes them. The most promising of these pairs are measured, and the best is made if it is better. This is repeated.

Every choice that was measured is kept, and none is measured twice; the answer is the best of all of them. With n units and k
formats, sensitivity takes n (k - 1) measurements, descent at most `TRIES` times as many (in practice about as many), and so
does every round of improvement.

It is greedy: it can miss what only three changes at once would show. Trying all choices takes k^n.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

TRIES = 3  # moves that are measured before one is made

Choice = tuple[int, ...]  # of every unit: the index of its format, 0 the widest
Rank = Callable[[float, float], tuple[float, ...]]  # of bits and loss; the smaller the better


class Measurements:
    """What choices cost in bits and in loss, asked from `loss_of` once each."""

    def __init__(self, elements: Sequence[int], bits: Sequence[float], loss_of: Callable[[Choice], float]) -> None:
        self.elements, self.widths = tuple(elements), tuple(bits)  # of units; of formats, widest first
        self._loss_of = loss_of
        self.losses: dict[Choice, float] = {}

    @property
    def widest(self) -> Choice:
        return (0,) * len(self.elements)

    @property
    def narrowest(self) -> Choice:
        return (len(self.widths) - 1,) * len(self.elements)

    def bits(self, choice: Choice) -> float:
        return math.fsum(n * self.widths[index] for n, index in zip(self.elements, choice, strict=True))

    def loss(self, choice: Choice) -> float:
        """Of a choice; NaN, which compares with nothing, counts as infinite."""
        if choice not in self.losses:
            loss = self._loss_of(choice)
            self.losses[choice] = math.inf if math.isnan(loss) else loss
        return self.losses[choice]

    def sensitivity(self, unit: int, index: int) -> float:
        """What a unit at a format adds to the loss, all others being at the widest."""
        return self.loss(with_unit(self.widest, unit, index)) - self.loss(self.widest)

    def measure_sensitivity(self) -> None:
        for unit in range(len(self.elements)):
            for index in range(1, len(self.widths)):
                self.sensitivity(unit, index)

    def expected_change(self, choice: Choice, unit: int, index: int) -> float:
        """Of the loss, by sensitivity, when one unit of a choice gets another format."""
        before, after = self.sensitivity(unit, choice[unit]), self.sensitivity(unit, index)
        return math.inf if math.isinf(after) else after - before

    def frontier(self) -> list[Choice]:
        """The choices that no other beats in both bits and loss: bits ascending, loss strictly descending."""
        found: list[Choice] = []
        for choice in sorted(self.losses, key=lambda choice: (self.bits(choice), self.losses[choice], choice)):
            if self.losses[choice] < (self.losses[found[-1]] if found else math.inf):
                found.append(choice)
        return found


def with_unit(choice: Choice, unit: int, index: int) -> Choice:
    return (*choice[:unit], index, *choice[unit + 1 :])


def descend(measured: Measurements) -> None:
    """Measure a path of choices from all-widest to all-narrowest."""
    choice = measured.widest
    while moves := list(_moves(measured, choice)):
        moves.sort(key=lambda move: _price(measured, choice, move, measured.expected_change(choice, *move)))
        now = measured.loss(choice)
        tried = {move: measured.loss(with_unit(choice, *move)) - now for move in moves[:TRIES]}
        choice = with_unit(choice, *min(tried, key=lambda move: _price(measured, choice, move, tried[move])))


def improve(measured: Measurements, rank: Rank, rounds: int) -> Choice:
    """The best choice by `rank`, a function of bits and loss, after so many rounds of looking around it."""

    def rank_of(choice: Choice) -> Any:
        return rank(measured.bits(choice), measured.loss(choice))

    best = min(measured.losses, key=lambda choice: (rank_of(choice), choice))
    for _ in range(rounds):
        changed = [with_unit(best, unit, index) for unit, index in _changes(measured, best)]
        found = min(changed, key=rank_of, default=best)
        if not rank_of(found) < rank_of(best):
            found = min(_promising_pairs(measured, best, rank), key=rank_of, default=best)
        if not rank_of(found) < rank_of(best):
            break
        best = found
    return min(measured.losses, key=lambda choice: (rank_of(choice), choice))  # of equals, the one that the frontier has


def _promising_pairs(measured: Measurements, choice: Choice, rank: Rank) -> list[Choice]:
    """The `TRIES` changes of two units that rank best if their losses and bits add up, as those of single changes do."""
    bits, loss = measured.bits(choice), measured.loss(choice)
    single = {}
    for unit, index in _changes(measured, choice):
        changed = with_unit(choice, unit, index)
        single[unit, index] = measured.bits(changed) - bits, measured.loss(changed) - loss
    pairs = []
    for first, second in combinations(single, 2):
        if first[0] != second[0]:
            more_bits, more_loss = (a + b for a, b in zip(single[first], single[second], strict=True))
            pairs.append((rank(bits + more_bits, loss + more_loss), first, second))
    return [with_unit(with_unit(choice, *first), *second) for _, first, second in heapq.nsmallest(TRIES, pairs)]


def _moves(measured: Measurements, choice: Choice) -> Iterator[tuple[int, int]]:
    """Demotions: (unit, the index of its new format). Units without numbers neither save nor cost anything, and stay."""
    for unit, index in _changes(measured, choice):
        if index > choice[unit]:
            yield unit, index


def _changes(measured: Measurements, choice: Choice) -> Iterator[tuple[int, int]]:
    for unit, index in enumerate(choice):
        if measured.elements[unit]:
            yield from ((unit, other) for other in range(len(measured.widths)) if other != index)


def _price(measured: Measurements, choice: Choice, move: tuple[int, int], change: float) -> tuple[float, float]:
    """Loss per saved bit; of moves that add none, the one that saves most comes first."""
    unit, index = move
    saved = measured.elements[unit] * (measured.widths[choice[unit]] - measured.widths[index])
    return (math.inf if math.isnan(change) else max(change, 0.0) / saved), -saved
