"""One training run in memory: what a step does, and everything that must be saved to go on from there.

A step:

1. Every rank that this process stands for computes its gradients: its share of the step's samples, micro-batch by micro-batch.
   What it draws (dropout, say) is seeded by (seed, step, rank, micro-batch): nothing depends on what was drawn before.
2. The exchange leaves the mean of all ranks in `parameter.grad` (exchange/).
3. The optimizer takes the step, unless the loss scale leaves it out. Where a gradient is not finite nothing is changed; on
   CUDA that is found out while the next step is under way (update.py), and before anything of the step is used (`confirm`).

The order of an epoch's samples is a function of (seed, epoch); a step's samples are one stretch of it, cut into ranks' shares.
So the state is the weights, the optimizer's states, a few counters, and what the wire remembers.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp.optim.loss_scale import LossScale
from lowp.optim.optimizer import LowPrecisionOptimizer
from lowp.training.buffers import BufferCopies
from lowp.training.check import check_model
from lowp.training.data import open_data
from lowp.training.data.wrappers import chosen
from lowp.training.divergence import DIVERGED
from lowp.training.evaluation import evaluate
from lowp.training.exchange import Exchange, NoExchange, Placed, exchange_for
from lowp.training.feed import Feed, steps_in_epoch
from lowp.training.learning_rate import factor_of
from lowp.training.metrics import Metrics
from lowp.training.models import MODELS, build_model
from lowp.training.numerics import Numerics, stored_dtype, wire_settings
from lowp.training.optimizers import by_torch, draw_as_the_whole, master_weights_for, numbers_of, optimizer_for
from lowp.training.parallel import Placement, RealTeam, VirtualTeam, pipeline_model, split_model
from lowp.training.passes import Passes
from lowp.training.plugins import is_plugin, load_plugin
from lowp.training.randomness import seed_of, seed_torch
from lowp.training.recipe import Recipe
from lowp.training.recording import Recording
from lowp.training.step_clock import COMPUTE, EXCHANGE, INPUT, UPDATE, StepClock
from lowp.training.update import ANSWER_LATER, CheckedUpdate, GatedUpdate, OptimizerStep
from lowp.training.world import World


class Trainer:
    def __init__(self, recipe: Recipe, world: World, data_directory: Path | None = None) -> None:
        self.recipe, self.world = recipe, world
        device, dtype = world.device, stored_dtype(recipe.precision)
        self.data = open_data(recipe.data, device=device, dtype=dtype, directory=data_directory)
        self.steps_per_epoch = steps_in_epoch(recipe, len(self.data.train))
        self.steps = recipe.epochs * self.steps_per_epoch
        self.step = 0
        self.model = self._build_model()
        self.parameters_of_model = sum(p.numel() for p in self.model.parameters())  # whole; of a divided one, a part stays here
        numbers = numbers_of(recipe, self._trained())
        self.placement = self._place()
        if self.placement is not None:
            self.model = self.placement.module
        self.numerics = Numerics(recipe, self.model, world)
        if not self.parameters:
            raise ValueError(f"model {recipe.model.name!r} has no parameter that is trained")
        self.optimizer = optimizer_for(recipe, self.parameters)
        if self.placement is not None:
            draw_as_the_whole(self.optimizer, self.parameters, self.placement, numbers)
        self.master = master_weights_for(recipe, self.optimizer)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.factor = factor_of(recipe.learning_rate, self.steps_per_epoch, self.steps)
        self.loss_scale = self._loss_scale()
        self.exchange = self._exchange()
        self._feed = Feed(recipe, self.data.train, self.exchange.ranks)
        self._filter = load_plugin(recipe.data.filter, "data.filter") if recipe.data.filter else None
        self._metrics = Metrics(self.exchange.ranks, recipe.shares, device, lasting=self._all_ours())
        self.passes = Passes(
            recipe,
            self.model,
            self.data.classes,
            device,
            placement=self.placement,
            numerics=self.numerics,
            loss_scale=self.loss_scale,
            metrics=self._metrics,
        )
        self.clock = StepClock(device)
        self._answers_later = device.type in ANSWER_LATER and self._may_answer_later()
        self._update = self._make_update()
        self.recording = self._make_recording()
        buffers = BufferCopies(self.model)  # before the steps of even and of odd numbers
        self._buffers_before = buffers, BufferCopies(self.model) if self._answers_later else buffers

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
        return place(self.model, team, parallel.format, parallel.scale or None)

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

    def _all_ours(self) -> bool:
        """Does no code of a user's make outputs or targets?"""
        data = self.recipe.data
        return self.recipe.model.name in MODELS and not (is_plugin(data.name) or data.transform or data.filter)

    def _may_answer_later(self) -> bool:
        """May the next step begin before it is known that this one's gradients were finite? Where they were not, the weights
        are wrong meanwhile: only where nothing else than this class sees them, or learns from a step."""
        alone = isinstance(self.exchange, NoExchange) and self.placement is None
        learns = self.loss_scale is not None or self.numerics.learns or self.master is not None
        return alone and not learns and self._filter is None and not self.recipe.log.health

    def _reduce(self) -> None:
        """This step's gradients: the mean of all ranks."""
        if not self.recording.launch_step(self.step, self.step + 1 == self.steps, self.clock):
            self.exchange.reduce(self._gradients)
            self.recording.step_taken()

    def _make_update(self) -> OptimizerStep:
        """Anew where states are loaded: it may hold copies of the old ones."""
        if isinstance(self.optimizer, LowPrecisionOptimizer) and self.placement is None and not by_torch(self.recipe):
            return GatedUpdate(self.optimizer, later=self._answers_later)
        world = None if self.placement is None else self.world
        later = self._answers_later and isinstance(self.optimizer, LowPrecisionOptimizer)
        return CheckedUpdate(self.optimizer, self.parameters, world=world, later=later)

    def _make_recording(self) -> Recording:
        return Recording(
            self.recipe, self.world.device, self.data.shape, self.exchange, self._feed, self.passes, self.parameters.values()
        )

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._trained()

    def _trained(self) -> dict[str, torch.nn.Parameter]:
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

    def micro_batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's samples of this step."""
        return self._feed.micro_batches(self.step, rank)

    def _gradients(self, rank: int, last: Callable[[], None]) -> None:
        recipe = self.recipe
        self.numerics.begin(self.step, rank)
        self._metrics.begin(rank)
        for parameter in self.parameters.values():
            parameter.grad = None
        self.clock.enter(INPUT)
        batches = self.micro_batches(rank)
        self.clock.enter(COMPUTE)
        for micro, (inputs, targets) in enumerate(batches):
            seed = seed_of(recipe.seed, "forward", self.step, rank, micro)
            seed_torch(seed, self.world.device)
            if self._filter is not None:
                keep = self._filter(self.model, inputs, targets)
                inputs, targets = chosen(keep, inputs, targets, recipe.data.filter)
            if micro == recipe.micro_batches - 1:
                last()
            inputs = self.passes.laid_out(inputs)
            if not self.recording.launch_pass(inputs, targets, rank) and targets.numel():
                self._metrics.add_loss(rank, self.passes.backward(rank, inputs, targets), 1 / recipe.micro_batches)
            self._metrics.add_samples(rank, targets.numel())
            self.recording.pass_taken(seed)
        self.clock.enter(EXCHANGE)

    def train_step(self) -> None:
        """One step. Raises NonFiniteGradient or LossScaleExhausted, on all ranks, with everything as before the step of the
        number `step`: this one, or the one before it, where that was still to be confirmed."""
        if not self.model.training:  # after a test; to tell every module takes as long as some of them compute
            self.model.train()
        factor = self.factor(self.step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._buffers_before[self.step % 2].save()
        try:
            try:
                self.clock.enter(EXCHANGE)
                with self.passes.of_one_step():
                    self._reduce()
            finally:
                self._confirm()  # also where this step failed: the weights that it was given may be the cause
            self.clock.enter(UPDATE)
            if self.loss_scale is None:
                self._update.take()
            else:
                self.loss_scale.step(self.optimizer)
        except DIVERGED:
            self.numerics.agree()
            self._undo()
            raise
        self.numerics.agree()
        self.numerics.observe(self.parameters)
        self.clock.step_done()
        self.step += 1
        self._metrics.step_done()

    def confirm(self) -> None:
        """Before anything that the last step has made is used. Raises NonFiniteGradient if its gradients were not finite, with
        everything, `step` too, as before it."""
        try:
            self._confirm()
        except DIVERGED:
            self._undo()
            raise

    def _confirm(self) -> None:
        try:
            self._update.confirm()
        except DIVERGED:
            self.step -= 1
            raise

    def _undo(self) -> None:
        """Back to before the step, whose gradients were not finite. (Weights and states are as they were.)"""
        self.exchange.undo()
        self._buffers_before[self.step % 2].restore()
        self._feed.forget()
        self._metrics.forget()
        self.clock.leave()

    def take_metrics(self) -> dict[str, float]:
        """Loss and accuracy over the steps since the last call, of all ranks."""
        self.confirm()
        # Of a divided model, the end has the loss.
        return self._metrics.take(self.world, self.placement is None or self.world.rank == self.world.ranks - 1)

    def share_buffers(self) -> None:
        """Running statistics are rank 0's, as in DDP. (Of a divided model, each rank has its own layers'.)"""
        if self.placement is None:
            self.world.copy_from_first(self.model.buffers())

    def test(self) -> dict[str, float]:
        """Loss and accuracy on the test split."""
        self.confirm()
        self.share_buffers()
        self.model.eval()
        dealt = self.placement is None and self.world.ranks > 1
        return evaluate(self.passes, self.data, self.world, step=self.step, dealt=dealt, flip=self.recipe.test_flip)

    def state(self) -> dict[str, Any]:
        """What all ranks share."""
        return {
            "step": self.step,
            "counted": self._metrics.steps,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "master": None if self.master is None else self.master.state_dict(),
            "numerics": self.numerics.state_dict(),
            **(self._weights() if self.placement is None else {}),
        }

    def state_of_ranks(self) -> list[dict[str, Any]]:
        """What each of this process's ranks has for itself: of a divided model, its part."""
        first, *others = self.exchange.state_of_rank()
        first = first | self.numerics.state_of_rank() | (self._weights() if self.placement is not None else {})
        return [entry | {"sums": sums} for entry, sums in zip((first, *others), self._metrics.sums(), strict=True)]

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
        mine = [of_ranks[rank] for rank in self.exchange.ranks] if self.placement is None else [of_ranks[self.world.rank]]
        self._metrics.load([entry["sums"] for entry in mine], saved["counted"])
        self.numerics.load_state_of_ranks(mine)
        self.exchange.load_state_of_rank(of_ranks)
        self._update = self._make_update()
        self.recording = self._make_recording()
        self._feed.forget()

    def close(self) -> None:
        self.recording.forget()
        self.exchange.close()


def _is_number(kind: str | float) -> bool:
    try:
        float(kind)
    except ValueError:
        return False
    return True
