"""One training run in memory: what a step does, and everything that must be saved to go on from there.

A step:

1. Every rank that this process stands for computes its gradients: its share of the step's samples, micro-batch by micro-batch.
   What it draws (dropout, say) is seeded by (seed, step, rank, micro-batch): nothing depends on what was drawn before.
2. The exchange leaves the mean of all ranks in `parameter.grad` (exchange/).
3. The optimizer takes the step, unless the loss scale leaves it out.

The order of an epoch's samples is a function of (seed, epoch); a step's samples are one stretch of it, cut into ranks' shares.
So the state is the weights, the optimizer's states, a few counters, and what the wire remembers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp.optim.loss_scale import LossScale
from lowp.train.buffers import BufferCopies
from lowp.train.check import check_model
from lowp.train.data import open_data
from lowp.train.data.base import Request
from lowp.train.data.order import epoch_order, shares
from lowp.train.data.wrappers import chosen
from lowp.train.divergence import DIVERGED
from lowp.train.exchange import Exchange, Placed, exchange_for
from lowp.train.learning_rate import factor_of
from lowp.train.loss import CrossEntropy
from lowp.train.models import build_model
from lowp.train.numerics import Numerics, stored_dtype, wire_settings
from lowp.train.optimizers import master_weights_for, optimizer_for
from lowp.train.parallel import Placement, RealTeam, VirtualTeam, pipeline_model, split_model
from lowp.train.plugins import blamed, load_plugin
from lowp.train.randomness import seed_of, seed_torch
from lowp.train.recipe import Recipe
from lowp.train.world import World

TEST_SAMPLES = 1000  # in a test batch of images; fixed, so that a test's numbers do not depend on the ranks
TEST_CHARACTERS = 16384  # in one of text


class Trainer:
    def __init__(self, recipe: Recipe, world: World, data_directory: Path | None = None) -> None:
        self.recipe, self.world = recipe, world
        device, dtype = world.device, stored_dtype(recipe.precision)
        self.data = open_data(recipe.data, device=device, dtype=dtype, directory=data_directory)
        self._passes = -(-recipe.batch // len(self.data.train))  # through the data in an epoch; 1, but for huge batches
        self.steps_per_epoch = self._passes * len(self.data.train) // recipe.batch
        self.steps = recipe.epochs * self.steps_per_epoch
        self.step = 0
        self.model = self._build_model()
        self.placement = self._place()
        if self.placement is not None:
            self.model = self.placement.module
        self.numerics = Numerics(recipe, self.model, world)
        if not self.parameters:
            raise ValueError(f"{self._model_name} has no parameter that is trained")
        self.optimizer = optimizer_for(recipe, self.parameters)
        self.master = master_weights_for(recipe, self.optimizer)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.factor = factor_of(recipe.learning_rate, self.steps_per_epoch, self.steps)
        self.loss_scale = self._loss_scale()
        self.exchange = self._exchange()
        self._cross_entropy = CrossEntropy(recipe.model.name, recipe.data.name, self.data.classes)
        self._forward = torch.compile(self.model) if recipe.model.compile else self.model
        self._filter = load_plugin(recipe.data.filter, "data.filter") if recipe.data.filter else None
        self._buffers_before = BufferCopies(self.model)
        # Sums of each rank since the last `take_metrics`. Scalars, not one tensor: an audit for 16 bits lets scalars pass.
        self._losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.exchange.ranks]
        self._correct = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.exchange.ranks]
        self._predictions = [0 for _ in self.exchange.ranks]
        self._counted = 0  # steps in these sums
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None
        self._streamed: tuple[int, int] | None = None  # the (step, rank) that the stream gives next

    @property
    def _model_name(self) -> str:
        return f"model {self.recipe.model.name!r}"

    def _build_model(self) -> torch.nn.Module:
        settings = self.recipe.model
        seed_torch(seed_of(self.recipe.seed, "weights"), self.world.device)
        model = build_model(settings.name, shape=self.data.shape, classes=self.data.classes, options=settings.options)
        check_model(self.recipe, model)
        model.to(self.world.device, stored_dtype(self.recipe.precision))
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
        self.world.copy_from_first(t.detach() for t in (*model.parameters(), *model.buffers()))
        return model

    def _place(self) -> Placement | None:
        """Divide the model among the ranks, where the recipe says so; None if every rank has all of it."""
        parallel = self.recipe.parallel
        if parallel.kind == "data":
            return None
        team = RealTeam() if self.world.ranks > 1 else VirtualTeam(self.recipe.virtual_ranks)
        place = split_model if parallel.kind == "split" else pipeline_model
        return place(self.model, team, parallel.format, parallel.scale)

    def _exchange(self) -> Exchange:
        if self.placement is not None:
            return Placed(self.placement)
        return exchange_for(
            self.model,
            self.parameters,
            wire_settings(self.recipe, self.steps_per_epoch),
            self.recipe.wire.bucket_mb * 1e6,
            rank=self.world.rank,
            ranks=self.world.ranks,
            virtual_ranks=self.recipe.virtual_ranks,
            device=self.world.device,
        )

    def _loss_scale(self) -> LossScale | None:
        kind = self.recipe.precision.loss_scale
        if kind == "none":
            return None
        return LossScale(float(kind) if _is_number(kind) else kind, model=self.model)

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def wire(self) -> str:
        """In what gradients travel now."""
        wire = self.recipe.wire
        past = [
            p.wire for p in self.recipe.precision.schedule if p.wire is not None and p.epoch * self.steps_per_epoch < self.step
        ]
        return f"{past[-1] if past else wire.format} {wire.scale}"

    def _requests(self, first: int) -> Iterator[Request]:
        """The micro-batches of this process's ranks, from a step on to the end of its epoch."""
        recipe = self.recipe
        epoch, begin = divmod(first, self.steps_per_epoch)
        passes = range(epoch * self._passes, (epoch + 1) * self._passes)
        order = torch.cat([epoch_order(len(self.data.train), recipe.seed, number) for number in passes])
        for step in range(begin, self.steps_per_epoch):
            table = shares(order, step, recipe.batch, recipe.shares, recipe.accumulate)
            for rank in self.exchange.ranks:
                for micro, indices in enumerate(table[rank]):
                    yield Request(indices, (recipe.seed, epoch, step, rank, micro))

    def micro_batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's samples of this step. Asked for in order they were fetched ahead; a second time, they are fetched again."""
        count = self.recipe.accumulate
        if rank == self.exchange.ranks.start and (self._batches is None or self._streamed != (self.step, rank)):
            self._batches = self.data.train.stream(self._requests(self.step))
            self._streamed = (self.step, rank)
        if self._streamed == (self.step, rank) and self._batches is not None:
            self._streamed = (self.step, rank + 1) if rank + 1 in self.exchange.ranks else self._first_of_next()
            return [next(self._batches) for _ in range(count)]
        skipped = (rank - self.exchange.ranks.start) * count
        return list(self.data.train.stream(islice(self._requests(self.step), skipped, skipped + count)))

    def _first_of_next(self) -> tuple[int, int] | None:
        after = self.step + 1
        return (after, self.exchange.ranks.start) if after % self.steps_per_epoch else None

    def _gradients(self, rank: int, last: Callable[[], None]) -> None:
        recipe, place = self.recipe, rank - self.exchange.ranks.start
        self.numerics.begin(self.step, rank)
        for parameter in self.parameters.values():
            parameter.grad = None
        for micro, (inputs, targets) in enumerate(self.micro_batches(rank)):
            seed_torch(seed_of(recipe.seed, "forward", self.step, rank, micro), self.world.device)
            if self._filter is not None:
                keep = self._filter(self.model, inputs, targets)
                inputs, targets = chosen(keep, inputs, targets, recipe.data.filter)
            if micro == recipe.accumulate - 1:
                last()
            if targets.numel():
                loss = self._backward(self._laid_out(inputs), targets, place)
                self._losses[place].add_(loss, alpha=1 / recipe.accumulate)
            self._predictions[place] += targets.numel()

    def _backward(self, inputs: Tensor, targets: Tensor, place: int) -> Tensor:
        """Forward and backward of one micro-batch; its loss."""
        if self.placement is not None:
            return self.placement.forward_backward(inputs, targets, partial(self._loss, place), self._scaled)
        with self._autocast():
            loss = self._loss(place, self._outputs(inputs), targets)
        self._scaled(loss).backward()
        return loss.detach()

    def _outputs(self, inputs: Tensor) -> Tensor:
        """What the model makes of a batch; what goes wrong inside is the model's error, in one line."""
        with blamed(self._model_name):
            return self._forward(inputs)

    def _loss(self, place: int, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self._cross_entropy(logits, targets, self.recipe.label_smoothing)
        self._correct[place].add_((logits.detach().argmax(-1) == targets).sum())
        return loss

    def _scaled(self, loss: Tensor) -> Tensor:
        share = loss / self.recipe.accumulate if self.recipe.accumulate > 1 else loss
        return share if self.loss_scale is None else self.loss_scale.scale(share)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.numerics.autocast
        return nullcontext() if dtype is None else torch.autocast(self.world.device.type, dtype)

    def _weights_cast_once(self) -> AbstractContextManager[Any]:
        """Around the passes of one step: autocast keeps the weights that it has cast until the outermost context ends, so that
        all micro-batches and virtual ranks share them. It is switched off here, as backward passes are taken without it."""
        return nullcontext() if self.numerics.autocast is None else torch.autocast(self.world.device.type, enabled=False)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous(memory_format=torch.channels_last) if self.recipe.model.channels_last else inputs

    def train_step(self) -> None:
        """One step. Raises NonFiniteGradient or LossScaleExhausted, on all ranks, before anything is changed."""
        if not self.model.training:  # after a test; to tell every module takes as long as some of them compute
            self.model.train()
        factor = self.factor(self.step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._buffers_before.save()
        try:
            with self._weights_cast_once():
                self.exchange.reduce(self._gradients)
            if self.loss_scale is None:
                self.numerics.check_gradients(self.optimizer, self.parameters, divided=self.placement is not None)
                self.optimizer.step()
            else:
                self.loss_scale.step(self.optimizer)
        except DIVERGED:
            self.numerics.agree()
            self._undo()
            raise
        self.numerics.agree()
        self.numerics.observe(self.parameters)
        self.step += 1
        self._counted += 1

    def _undo(self) -> None:
        """Back to before the step, whose gradients were not finite. (The optimizer has changed nothing.)"""
        self.exchange.undo()
        self._buffers_before.restore()
        self._batches = None
        self._forget_sums()

    def _forget_sums(self) -> None:
        for number in (*self._losses, *self._correct):
            number.zero_()
        self._predictions = [0 for _ in self.exchange.ranks]
        self._counted = 0

    def take_metrics(self) -> dict[str, float]:
        """Loss and accuracy over the steps since the last call, of all ranks; the same numbers for real and virtual ones."""
        table = torch.zeros(self.recipe.shares, 3, dtype=torch.float64)
        if self.placement is None or self.world.rank == self.world.ranks - 1:  # of a divided model, the end has the loss
            for rank, row in zip(
                self.exchange.ranks, zip(self._losses, self._correct, self._predictions, strict=True), strict=True
            ):
                table[rank] = torch.tensor([float(number) for number in row], dtype=torch.float64)
        losses, correct, predictions = (sum(column.tolist()) for column in self.world.sum(table).unbind(1))
        steps = max(1, self._counted)
        self._forget_sums()
        return {"loss": losses / (self.recipe.shares * steps), "accuracy": correct / max(1.0, predictions)}

    def share_buffers(self) -> None:
        """Running statistics are rank 0's, as in DDP. (Of a divided model, each rank has its own layers'.)"""
        if self.placement is None:
            self.world.copy_from_first(self.model.buffers())

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Loss and accuracy on the test split. Its batches are dealt out to the ranks, and added up in their order."""
        self.share_buffers()
        self.model.eval()
        size = len(self.data.test)
        length = TEST_SAMPLES if self.data.kind == "image" else max(1, TEST_CHARACTERS // self.data.shape[0])
        starts = range(0, size, length)
        dealt = self.placement is None and self.world.ranks > 1
        mine = [i for i in range(len(starts)) if not dealt or i % self.world.ranks == self.world.rank]
        asked = (Request(torch.arange(starts[i], min(size, starts[i] + length)), ("test", i)) for i in mine)
        table = torch.zeros(len(starts), 3, dtype=torch.float64)
        for i, (inputs, targets) in zip(mine, self.data.test.stream(asked), strict=True):
            self.numerics.begin(self.step, i)  # noise of a test batch is its own, whoever computes it
            logits = self._predict(self._laid_out(inputs))
            loss, correct = self._cross_entropy(logits, targets, 0.0), (logits.argmax(-1) == targets).sum()
            table[i] = torch.tensor([float(loss) * targets.numel(), int(correct), targets.numel()], dtype=torch.float64)
        total = self.world.sum(table) if dealt else table
        losses, correct, predictions = (sum(column.tolist()) for column in total.unbind(1))
        return {"loss": losses / predictions, "accuracy": correct / predictions}

    def _predict(self, inputs: Tensor) -> Tensor:
        if self.placement is not None:
            return self.placement.evaluate(inputs)
        with self._autocast():
            return self._outputs(inputs)

    def state(self) -> dict[str, Any]:
        """What all ranks share."""
        return {
            "step": self.step,
            "counted": self._counted,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "master": None if self.master is None else self.master.state_dict(),
            "numerics": self.numerics.state_dict(),
            **(self._weights() if self.placement is None else {}),
        }

    def state_of_ranks(self) -> list[dict[str, Any]]:
        """What each of this process's ranks has for itself: of a divided model, its part."""
        first, *others = self.exchange.state_of_rank()
        first = first | self.numerics.state_of_rank() | (self._weights() if self.placement is not None else {})
        sums = zip(self._losses, self._correct, self._predictions, strict=True)
        return [e | {"sums": (float(a), int(b), c)} for e, (a, b, c) in zip((first, *others), sums, strict=True)]

    def _weights(self) -> dict[str, Any]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state(self, saved: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
        weights = saved if self.placement is None else of_ranks[self.world.rank]
        self.step = saved["step"]
        self.model.load_state_dict(weights["model"])
        self.optimizer.load_state_dict(weights["optimizer"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(saved["loss_scale"])
        if self.master is not None:
            self.master.load_state_dict(saved["master"])
        self.numerics.load_state_dict(saved["numerics"])
        self._counted = saved["counted"]
        mine = [of_ranks[rank] for rank in self.exchange.ranks] if self.placement is None else [of_ranks[self.world.rank]]
        for place, entry in enumerate(mine):
            loss, correct, self._predictions[place] = entry["sums"]
            self._losses[place].fill_(loss)
            self._correct[place].fill_(correct)
        self.numerics.load_state_of_ranks(mine)
        self.exchange.load_state_of_rank(of_ranks)
        self._batches = None

    def close(self) -> None:
        self.exchange.close()


def _is_number(kind: str | float) -> bool:
    try:
        float(kind)
    except ValueError:
        return False
    return True
