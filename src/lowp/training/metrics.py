"""Loss and accuracy of the steps since the last line of the log, as sums on the device: to read them is to wait for it."""

import math
from typing import Any

import torch
from torch import Tensor

from lowp.training.world import World

KEPT = 32  # micro-batches whose predictions wait to be counted together
KEPT_PREDICTIONS = 1 << 20  # at most, a byte each
KEPT_LOGITS = 1 << 18  # at most, where logits wait themselves


class Metrics:
    """Sums for each rank that this process stands for (`ranks`), of `shares` in all.

    `lasting`: logits and targets stay as they are after their step. Those of a user's model or data set may not.
    """

    def __init__(self, ranks: range, shares: int, device: torch.device, lasting: bool = False) -> None:
        self._ranks, self._shares, self._lasting = ranks, shares, lasting
        # Scalars, not one tensor: an audit for 16 bits lets scalars pass.
        self._losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in ranks]
        self._correct = [torch.zeros((), dtype=torch.int64, device=device) for _ in ranks]
        self._right: list[list[Tensor]] = [[] for _ in ranks]  # true where a prediction was right; not in `_correct` yet
        self._predicted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ranks]  # logits and targets; not in `_right` yet
        self._waiting: list[list[tuple[Tensor, float]]] = [[] for _ in ranks]  # losses and shares; not in `_losses` yet
        self._predictions = [0 for _ in ranks]
        self.steps = 0  # in these sums
        self._counted: set[int] = set()  # ranks of the step under way
        self._again = False  # is the pass under way counted already?
        # Of one pass, where a graph leaves them
        self._recorded_loss = torch.zeros((), dtype=torch.float64, device=device)
        self._recorded_correct = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, rank: int) -> None:
        """A rank's passes begin. Where an exchange has them taken twice, in one step, the first ones count."""
        self._again = rank in self._counted
        self._counted.add(rank)

    def step_done(self) -> None:
        self.steps += 1
        self._counted, self._again = set(), False

    def add_loss(self, rank: int, loss: Tensor, share: float) -> None:
        """On a CPU losses wait too, to be added one by one, in their order, as numbers: an operation of torch takes longer.

        Only where the share is a power of two: then a product is exact, and it does not matter whether a chip rounds it.
        """
        if self._again:
            return
        place = rank - self._ranks.start
        if loss.is_cpu and math.frexp(share)[0] == 0.5:
            self._waiting[place].append((loss, share))
            if len(self._waiting[place]) >= KEPT:
                self._add_losses(place)
        else:
            self._losses[place].add_(loss, alpha=share)

    def _add_losses(self, place: int) -> None:
        waiting, self._waiting[place] = self._waiting[place], []
        total = float(self._losses[place])
        for loss, share in waiting:
            total += float(loss) * share
        self._losses[place].fill_(total)

    def add_predictions(self, rank: int, logits: Tensor, targets: Tensor) -> None:
        """Counted some steps at a time: two small operations fewer in a step, and of small logits four."""
        if self._again:
            return
        place = rank - self._ranks.start
        right, predicted = self._right[place], self._predicted[place]
        if self._lasting and logits.numel() <= KEPT_LOGITS // KEPT:
            predicted.append((logits.detach(), targets))
        else:
            right.append(logits.detach().argmax(-1) == targets)
        waiting = len(right) + len(predicted)
        if waiting >= KEPT or waiting * targets.numel() >= KEPT_PREDICTIONS:
            self._count(place)

    def record(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """In a graph: whose pass it is, is not known in it. `add_recorded` follows each launch."""
        self._recorded_loss.copy_(loss)
        self._recorded_correct.copy_((logits.argmax(-1) == targets).sum())

    def add_recorded(self, rank: int) -> None:
        if self._again:
            return
        place = rank - self._ranks.start
        self._losses[place].add_(self._recorded_loss)
        self._correct[place].add_(self._recorded_correct)

    def add_samples(self, rank: int, predictions: int) -> None:
        if not self._again:
            self._predictions[rank - self._ranks.start] += predictions

    def _count(self, place: int) -> None:
        right, self._right[place] = self._right[place], []
        predicted, self._predicted[place] = self._predicted[place], []
        if predicted:
            logits, targets = (torch.cat(each) for each in zip(*predicted, strict=True))
            right.append(logits.argmax(-1) == targets)
        if right:
            self._correct[place].add_(torch.cat([each.flatten() for each in right]).sum())

    def sums(self) -> list[tuple[float, int, int]]:
        """(losses, right predictions, predictions) of each rank here."""
        for place in range(len(self._ranks)):
            self._count(place)
            self._add_losses(place)
        rows = zip(self._losses, self._correct, self._predictions, strict=True)
        return [(float(losses), int(correct), predictions) for losses, correct, predictions in rows]

    def load(self, sums: list[Any], steps: int) -> None:
        self.forget()
        for place, (losses, correct, predictions) in enumerate(sums):
            self._losses[place].fill_(losses)
            self._correct[place].fill_(correct)
            self._predictions[place] = predictions
        self.steps = steps

    def forget(self) -> None:
        for number in (*self._losses, *self._correct):
            number.zero_()
        self._right = [[] for _ in self._ranks]
        self._predicted = [[] for _ in self._ranks]
        self._waiting = [[] for _ in self._ranks]
        self._predictions = [0 for _ in self._ranks]
        self.steps = 0
        self._counted, self._again = set(), False

    def take(self, world: World, counts: bool) -> dict[str, float]:
        """The means over all ranks, the same for real and virtual ones; sums begin anew. `counts`: has this process numbers?"""
        table = torch.zeros(self._shares, 3, dtype=torch.float64)
        if counts:
            for rank, row in zip(self._ranks, self.sums(), strict=True):
                table[rank] = torch.tensor(row, dtype=torch.float64)
        losses, correct, predictions = (sum(column.tolist()) for column in world.sum(table).unbind(1))
        steps = max(1, self.steps)
        self.forget()
        return {"loss": losses / (self._shares * steps), "accuracy": correct / max(1.0, predictions)}
