"""One line for FSDP2: `lowp.fsdp.compress(model, reduce="e5m2", gather="e4m3fn")`.

`fully_shard` splits parameters over the ranks. Forward gathers them (`gather`: parameters travel in a format), backward reduces
gradients to their owners (`reduce`). Both are the first or the second half of a two-shot sum:

- reduce-scatter: encode one message for each owner, exchange, decode and add in float32, in rank order;
- all-gather: encode one's own shard once and send it to everybody. All decode the same bytes, the owner too, so that all ranks
  compute with the same parameters.

FSDP2 hands over flat tensors without names, so scales are those that need none: "local" (of each message), "block:<n>", "none".
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowp.formats.floats import FP32
from lowp.tensor.noise import Domain
from lowp.wire.codec import Codec, codec_of
from lowp.wire.collectives import communicator_for
from lowp.wire.communicator import Communicator
from lowp.wire.exchange import peaks_of
from lowp.wire.plan import Chunk, Part, Shard
from lowp.wire.pump import Pump, Task
from lowp.wire.reductions.base import Job, Steps
from lowp.wire.report import Meter, Report
from lowp.wire.rules import Rules, Stage
from lowp.wire.scaling import NONFINITE
from lowp.wire.warm_up import warm_up

PIECE = 1 << 18  # elements of a shard that travel as one message


class FsdpHandle:
    """What `compress` returns: figures, and the way back."""

    def __init__(self, modules: list[Any], seed: int) -> None:
        self._modules = modules
        self._seed = seed
        self._calls = 0
        self._meter = Meter()

    def total(self) -> Report:
        """The figures so far."""
        return self._meter.finish()

    def remove(self) -> None:
        """Let FSDP2 send as it does by itself."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs_own

        for module in self._modules:
            module.set_custom_reduce_scatter(torchs_own.DefaultReduceScatter())
            module.set_custom_all_gather(torchs_own.DefaultAllGather())

    def run(self, steps: Iterator[Steps], communicator: Communicator, what: str, plain_bytes: float) -> None:
        """Run the generators of one collective to their end."""
        link, pump = communicator.link, Pump()
        sent = link.bytes_sent
        for generator in steps:
            pump.feed(Task(link.take_number(), generator, self._meter))
        communicator.run(pump, what)
        report = self._meter.report
        report.bytes_sent += link.bytes_sent - sent
        report.bytes_of_fp32 += plain_bytes

    def rules(self, world: int) -> Rules:
        self._calls += 1
        return Rules(world=world, domain=Domain.FSDP, accumulate=FP32, seed=self._seed, step=self._calls, meter=self._meter)


def compress(
    model: nn.Module,
    *,
    reduce: Any = None,
    gather: Any = None,
    scale: str = "local",
    rounding: str = "nearest",
    seed: int = 0,
) -> FsdpHandle:
    """Let an FSDP2 model (`torch.distributed.fsdp.fully_shard`) send gradients in `reduce` and parameters in `gather`.

    Args:
        model: every module in it that `fully_shard` was called on takes part.
        reduce: the format of gradients on their way to their owners; None leaves them as they are.
        gather: the format of parameters on their way to everybody; None leaves them as they are. The owner's shard, which the
            optimizer updates, is not rounded.
        scale: "local", "block:<n>" or "none". ("aps" needs layers, which FSDP2 does not show here.)
        rounding, seed: as for `lowp.compress_gradients`.
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError("fsdp.compress takes a model that torch.distributed.fsdp.fully_shard was called on")
    if reduce is None and gather is None:
        raise ValueError("say what to compress: reduce=<format of gradients>, gather=<format of parameters>, or both")
    if scale.startswith("aps"):
        raise ValueError(f"scale={scale!r} needs to know layers, and FSDP2 shows none; take 'local', 'block:<n>' or 'none'")
    handle = FsdpHandle(modules, seed)
    device = next(model.parameters()).device
    for module in modules:
        if reduce is not None:
            codec = codec_of(reduce, rounding, scale)
            warm_up({codec}, device)
            module.set_custom_reduce_scatter(_reduce_scatter(codec, handle))
        if gather is not None:
            codec = codec_of(gather, rounding, scale)
            warm_up({codec}, device)
            module.set_custom_all_gather(_all_gather(codec, handle))
    return handle


def _pieces(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]


def _chunk(codec: Codec, start: int, size: int, world: int) -> Chunk:
    """`size` elements from `start` on, of every rank's shard."""
    shards = (Shard(r * size, (r + 1) * size, (Part(0, codec, r, start, 0, size),)) for r in range(world))
    return Chunk(0, world * size, tuple(shards))


def _poison(peaks: Tensor) -> Tensor:
    """NaN for a message of which some number was not finite: formats without NaN cannot say so by themselves."""
    return torch.where(peaks == NONFINITE, math.nan, 1.0)


def _reduce_scatter(codec: Codec, handle: FsdpHandle) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class CompressedReduceScatter(_Room, ReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
            """FSDP2 cannot be left in the middle: after a failure the gradients are zero, and backward raises at its end."""
            try:
                _reduce_to_owner(output_tensor, input_tensor, codec, group, op, handle)
            except Exception as error:
                output_tensor.zero_()
                _raise_after_backward(error)

    return CompressedReduceScatter()


def _reduce_to_owner(output: Tensor, source: Tensor, codec: Codec, group: Any, op: Any, handle: FsdpHandle) -> None:
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise ValueError(
            f"compressed gradients can be summed or averaged, not reduced by {op}; see set_force_sum_reduction_for_comms"
        )
    communicator = communicator_for(group, source.device)
    link, rules = communicator.link, handle.rules(communicator.world)
    world, divisor = link.world, link.world if op == dist.ReduceOp.AVG else 1
    rows = source.view(world, -1)

    def steps(start: int, stop: int) -> Steps:
        chunk = _chunk(codec, start, stop - start, world)
        numbers = rows[:, start:stop].to(torch.float32).reshape(-1)
        job = Job(chunk, numbers, peaks_of(numbers, chunk, world), rules, link.for_chunk())
        sent = {rank: job.write(rank, Stage.ADDEND) for rank in range(world)}
        received = {rank: sent[rank] if rank == link.rank else job.room(link.rank, Stage.ADDEND) for rank in range(world)}
        yield job.link.exchange(sent, received)
        messages = [received[rank] for rank in range(world)]
        total = rules.fold_messages(messages, chunk.shards[link.rank], Stage.ADDEND, range(world))
        output[start:stop] = total.numbers.div_(divisor) * _poison(total.peaks)

    plain = (world - 1) / world * 4 * source.numel()
    pieces = _pieces(output.numel())
    handle.run((steps(*piece) for piece in pieces), communicator, "reduce-scatter of gradients", plain)


def _all_gather(codec: Codec, handle: FsdpHandle) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class CompressedAllGather(_Room, AllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
            _gather_from_owners(output_tensor, input_tensor, codec, group, handle)

    return CompressedAllGather()


def _gather_from_owners(output: Tensor, source: Tensor, codec: Codec, group: Any, handle: FsdpHandle) -> None:
    if not source.is_floating_point():
        raise TypeError(
            "parameters of several dtypes in one FSDP2 group travel as raw bytes: give each dtype its own fully_shard"
        )
    communicator = communicator_for(group, source.device)
    link, rules = communicator.link, handle.rules(communicator.world)
    rows = output.view(link.world, -1)

    def steps(start: int, stop: int) -> Steps:
        chunk = _chunk(codec, start, stop - start, link.world)
        numbers = torch.zeros(chunk.size, dtype=torch.float32, device=source.device)
        mine = chunk.shards[link.rank]
        numbers[mine.start : mine.stop] = source[start:stop]
        job = Job(chunk, numbers, peaks_of(numbers, chunk, link.world), rules, link.for_chunk())
        message = job.write(link.rank, Stage.ADDEND)
        messages = {r: message if r == link.rank else job.room(r, Stage.ADDEND) for r in range(link.world)}
        yield job.link.exchange(dict.fromkeys(range(link.world), message), messages)
        for rank, arrived in messages.items():
            shard = chunk.shards[rank]
            load = rules.read(arrived, shard, Stage.ADDEND, numbers[shard.start : shard.stop])
            load.numbers.mul_(_poison(load.peaks))
        rows[:, start:stop] = numbers.view(link.world, -1)

    plain = (link.world - 1) * 4 * source.numel()
    pieces = _pieces(source.numel())
    handle.run((steps(*piece) for piece in pieces), communicator, "all-gather of parameters", plain)


class _Room:
    """Where FSDP2 puts what is to be sent."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _raise_after_backward(error: Exception) -> None:
    engine = torch.autograd.Variable._execution_engine

    def complain() -> None:
        raise error

    engine.queue_callback(lambda: engine.queue_callback(complain))
