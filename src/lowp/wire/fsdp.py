"""One line for FSDP2: `lowp.fsdp.compress(model, reduce="e5m2", gather="e4m3fn")`.

`fully_shard` splits parameters over the ranks. Forward gathers them (`gather`: parameters travel in a format), backward reduces
gradients to their owners (`reduce`). Both are the first or the second half of a two-shot sum:

- reduce-scatter: encode one message for each owner, send and receive, decode and add in float32, in rank order;
- all-gather: encode one's own shard once and send it to everybody. All decode the same bytes, the owner too, so that all ranks
  compute with the same parameters.

FSDP2 hands over flat tensors without names, so scales are those that need none: "local" (of each message), "block:<n>", "none".

On a mesh of two dimensions (HSDP) every shard has replicas, whose gradients are added up after the reduce-scatter. FSDP2 calls
torch's all-reduce for that and offers no place for another: these bytes are not compressed. They are counted, and `compress`
warns. A mesh of replicas alone, where nothing would be compressed, is refused.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowp import compat
from lowp.formats.floats import FP32
from lowp.tensor.noise import Domain
from lowp.version import __version__
from lowp.wire.chunk_scheduler import ChunkScheduler, Task
from lowp.wire.codec import Codec, codec_for, codec_of
from lowp.wire.collectives import communicator_for
from lowp.wire.communicator import Communicator, agree
from lowp.wire.exchange import exact_and_rest
from lowp.wire.messages import Messages
from lowp.wire.plan import Chunk, Part, Shard, cuts_for
from lowp.wire.reductions.base import ChunkJob, Steps
from lowp.wire.reductions.one_shot import OneShot
from lowp.wire.reductions.two_shot import TwoShot
from lowp.wire.report import ONE_IN, Meter, WireReport, ring_bytes
from lowp.wire.rules import Rules, Stage
from lowp.wire.scale_warnings import warn_of_scales
from lowp.wire.warm_up import warm_up
from lowp.wire.workspace import Workspaces

logger = logging.getLogger("lowp")

_handles: "WeakKeyDictionary[nn.Module, FsdpHandle]" = WeakKeyDictionary()

PieceSteps = Callable[[Chunk, Rules], Steps]


class FsdpHandle:
    """What `compress` returns: figures, state, and the way back."""

    def __init__(self, modules: list[Any], seed: int, device: torch.device | None = None) -> None:
        self._modules = modules
        self._seed = seed
        self._on_cuda = device is not None and device.type == "cuda"
        self._collectives = 0  # so far: stochastic rounding draws other noise for each
        self._workspaces: dict[int, Workspaces] = {}  # by stream
        self.step = 0
        self._meter = self._new_meter()
        self._meters: list[Meter] = []  # of steps that are over
        self._total, self._last_step = WireReport(), WireReport()
        self._in_step = False
        self._removed = False

    @property
    def compresses(self) -> bool:
        """False after `remove`."""
        return not self._removed

    def report(self) -> WireReport:
        """The last step's figures: what was gathered and reduced since the step before, up to the end of backward."""
        self._collect()
        return self._last_step

    def total(self) -> WireReport:
        """The figures so far: of gradients where `reduce` was given, of parameters where `gather` was."""
        self._collect()
        found = WireReport()
        for report in (self._total, self._meter.finish()):
            found.add(report)
        return found

    def state_dict(self) -> dict[str, int]:
        """How many steps and how many collectives there were, the same on all ranks. Nothing else is remembered."""
        return {"step": self.step, "collectives": self._collectives}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if not isinstance(saved, Mapping) or not all(isinstance(saved.get(key), int) for key in ("step", "collectives")):
            raise ValueError("this is no state of lowp.fsdp.compress: it has no step or no number of collectives")
        self.step, self._collectives = saved["step"], saved["collectives"]

    def remove(self) -> None:
        """Let FSDP2 send as it does by itself."""
        torchs_own = compat.fsdp_collectives()
        self._removed = True
        for module in self._modules:
            if _handles.get(module) is not self:
                continue  # another one's by now
            del _handles[module]
            module.set_custom_reduce_scatter(torchs_own.DefaultReduceScatter())
            module.set_custom_all_gather(torchs_own.DefaultAllGather())

    def run(
        self, steps: PieceSteps, codec: Codec, shard: Tensor, communicator: Communicator, what: str, plain_bytes: float
    ) -> None:
        """Run one collective to its end: `steps` for every piece of the ranks' shards, of which `shard` is this rank's."""
        link, scheduler, workspaces = communicator.link, ChunkScheduler(), self._workspaces_for(shard.device)
        sent, rules = link.bytes_sent, self.rules(communicator.world)

        def in_workspace(piece: Chunk) -> Steps:
            workspace = workspaces.take()
            yield from steps(piece, replace(rules, workspace=workspace))
            workspaces.give_back(workspace)

        pieces = _pieces(codec_for(codec, shard.dtype), shard.numel(), communicator.world, cuts_for(None, shard.device)[1])
        for piece in pieces:
            scheduler.add(Task(link.take_number(), in_workspace(piece), self._meter))
        communicator.run(scheduler, what)
        self.count(link.bytes_sent - sent, plain_bytes)

    def _workspaces_for(self, device: torch.device) -> Workspaces:
        """Those of the current stream: FSDP2 gathers on one and reduces on another, at the same time."""
        if torch.is_inference_mode_enabled():  # what is made within it cannot be written to outside of it
            return Workspaces()
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return self._workspaces.setdefault(stream, Workspaces())

    def count(self, sent: float, of_fp32: float) -> None:
        self._meter.report.bytes_sent += round(sent)
        self._meter.report.bytes_of_fp32 += of_fp32

    def rules(self, world: int) -> Rules:
        self._collectives += 1
        return Rules(
            world=world, domain=Domain.FSDP, sum_format=FP32, seed=self._seed, step=self._collectives, meter=self._meter
        )

    def reduces(self, elements: int) -> None:
        """Some gradients are being reduced. At the end of this backward the step is over."""
        self._meter.report.elements += elements
        if not self._in_step:
            self._in_step = True
            compat.after_backward(self._end_step)

    def _end_step(self) -> None:
        self._in_step = False
        self.step += 1
        self._meter.report.steps = 1
        self._meters.append(self._meter)
        self._meter = self._new_meter()
        if len(self._meters) > 100:  # on CUDA, to read figures is to wait for the device
            self._collect()

    def _new_meter(self) -> Meter:
        """On CUDA one step in 64 is looked at."""
        return Meter(samples=not self._on_cuda or self.step % ONE_IN == 0)

    def _collect(self) -> None:
        for meter in self._meters:
            self._last_step = meter.finish()
            self._total.add(self._last_step)
        self._meters.clear()


class _ShardedParameters:
    """The parameters of one `fully_shard`: over how many ranks they are sharded, and how many replicas every shard has."""

    def __init__(self, module: Any) -> None:
        self._group = compat.fsdp_parameters(module)  # None for a module without parameters of its own
        mesh = None if self._group is None else self._group.mesh_info
        self.shards: int = getattr(mesh, "shard_mesh_size", 1)
        self.ranks = getattr(mesh, "shard_process_group", None)
        self.replicas: int = getattr(mesh, "replicate_mesh_size", 1)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """In which parameters are gathered and gradients reduced, where torch's MixedPrecisionPolicy says another one."""
        policy = getattr(self._group, "mp_policy", None)
        return {getattr(policy, name) for name in ("param_dtype", "reduce_dtype") if getattr(policy, name, None) is not None}

    @property
    def adds_replicas(self) -> bool:
        """Are replicas added up now? (See torch's set_requires_all_reduce.)"""
        return self.replicas > 1 and self._group.all_reduce_grads


def compress(
    model: nn.Module,
    *,
    reduce: Any = None,
    gather: Any = None,
    scale: str | None = None,
    rounding: str = "nearest",
    seed: int = 0,
) -> FsdpHandle:
    """Let an FSDP2 model (`torch.distributed.fsdp.fully_shard`) send gradients in `reduce` and parameters in `gather`.

    Args:
        model: every module in it that `fully_shard` was called on takes part.
        reduce: the format of gradients on their way to their owners; None leaves them as they are.
        gather: the format of parameters on their way to everybody; None leaves them as they are. The owner's shard, which the
            optimizer updates, is not rounded.
        scale: "local", "block:<n>" or "none"; default as for `lowp.compress_gradients`: "block:32" for formats of fewer than 8
            bits, else "local". ("aps" needs layers, which FSDP2 does not show here.)
        rounding, seed: as for `lowp.compress_gradients`.
    """
    from torch.distributed.fsdp import FSDPModule

    if (scale is not None and not isinstance(scale, str)) or not isinstance(seed, int):
        raise TypeError(f"fsdp.compress: scale is a name and seed a whole number, not {scale!r} and {seed!r}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError("fsdp.compress takes a model that torch.distributed.fsdp.fully_shard was called on")
    if reduce is None and gather is None:
        raise ValueError("say what to compress: reduce=<format of gradients>, gather=<format of parameters>, or both")
    if scale is not None and scale.startswith("aps"):
        raise ValueError(
            f"scale={scale!r} needs to know layers, and FSDP2 shows none; take 'local', 'block:<n>', 'none', or leave it out: "
            "formats of fewer than 8 bits have 'block:32', all others 'local'"
        )
    if any(module in _handles for module in modules):
        raise RuntimeError("this model is compressed already: call remove() on the handle of that first")
    wanted = {"reduce": reduce, "gather": gather}
    codecs = {kind: codec_of(format, rounding, scale) for kind, format in wanted.items() if format is not None}
    groups = {module: _ShardedParameters(module) for module in modules}
    _check_replicas(groups.values(), reduces=reduce is not None)
    device = next(model.parameters()).device
    handle = FsdpHandle(modules, seed, device)
    dtypes = {p.dtype for p in model.parameters()}.union(*(group.dtypes for group in groups.values()))
    for kind, codec in codecs.items():  # sums are added up as one_shot's are; what is gathered is decoded as two_shot's
        reduction = OneShot() if kind == "reduce" else TwoShot()
        warm_up({codec}, device, reduction=reduction, world=max(group.shards for group in groups.values()), dtypes=dtypes)
    if dist.get_rank() == 0:
        warn_of_scales(codecs.values(), dist.get_world_size())
    said = f"version={__version__} modules={len(modules)} seed={seed} " + " ".join(f"{k}={c.format}" for k, c in codecs.items())
    said += f" scale={scale} rounding={rounding}"
    for process_group in dict.fromkeys(group.ranks for group in groups.values() if group.ranks is not None):
        agree(process_group, said, "how to compress")
    for module, group in groups.items():
        _handles[module] = handle
        module.set_custom_reduce_scatter(_reduce_scatter(codecs.get("reduce"), handle, group))
        if gather is not None:
            module.set_custom_all_gather(_all_gather(codecs["gather"], handle))
    return handle


def _check_replicas(groups: Collection[_ShardedParameters], reduces: bool) -> None:
    """Raise where nothing would be compressed, warn where not everything will be."""
    replicas = max(group.replicas for group in groups)
    if replicas > 1 and all(group.shards == 1 for group in groups):
        raise ValueError(
            f"fsdp.compress: this mesh has {replicas} replicas and shards nothing, so that FSDP2 sends nothing that could be "
            "compressed; take DistributedDataParallel and lowp.compress_gradients"
        )
    if replicas > 1 and reduces and dist.get_rank() == 0:
        logger.warning(
            "fsdp.compress: gradients are compressed on their way to their owners; between the %d replicas of each shard FSDP2 "
            "adds them up by itself, uncompressed (these bytes are counted)",
            replicas,
        )


@lru_cache(maxsize=4096)
def _pieces(codec: Codec, size: int, world: int, longest: int) -> tuple[Chunk, ...]:
    """Shards of `size` elements, one after the other in memory, cut alike: of each, a piece travels as one message.

    There is one of each kind: the tables of messages are kept with it.
    """
    return tuple(_piece(codec, start, min(start + longest, size), size, world) for start in range(0, size, longest))


def _piece(codec: Codec, start: int, stop: int, size: int, world: int) -> Chunk:
    """Elements `start` to `stop` of every rank's shard."""
    shards = (Shard(r * size + start, r * size + stop, (Part(r, codec, r, start, 0, stop - start),)) for r in range(world))
    return Chunk(0, world * size, tuple(shards))


def _reduce_scatter(codec: Codec | None, handle: FsdpHandle, parameters: _ShardedParameters) -> Any:
    torchs_own = compat.fsdp_collectives()
    if codec is None:

        class CountedReduceScatter(torchs_own.DefaultReduceScatter):
            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **named: Any) -> Any:
                handle.reduces(input_tensor.numel())
                return super().__call__(output_tensor, input_tensor, *more, **named)

        return CountedReduceScatter()

    class CompressedReduceScatter(_Room, torchs_own.ReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
            """FSDP2 cannot be left in the middle: after a failure the gradients are zero, and backward raises at its end."""
            handle.reduces(input_tensor.numel())
            if parameters.adds_replicas:
                size = output_tensor.numel()
                sent, of_fp32 = ring_bytes(size * output_tensor.element_size(), parameters.replicas), 4 * size
                handle.count(sent, ring_bytes(of_fp32, parameters.replicas))
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
    link, world = communicator.link, communicator.world
    exact, rest = exact_and_rest(world if op == dist.ReduceOp.AVG else 1)

    def steps(piece: Chunk, rules: Rules) -> Steps:
        buffers = ChunkJob(piece, source, output, rules, chunk := link.for_chunk()).write_to_owners()
        yield chunk.send_receive(buffers.sent, buffers.received)
        mine, flat, stride = piece.shards[link.rank], buffers.rows.view(-1), buffers.rows.shape[1]
        messages, (part,) = rules.messages(mine, Stage.ADDEND), mine.parts
        units = _units(messages, flat, exact, world, stride, rules)
        with rules.timed("decode", source.device):
            own = output[part.start : part.start + part.size]
            messages.decode(flat, own, units, rest, world, stride, workspace=rules.workspace)

    plain = (world - 1) / world * 4 * source.numel()
    handle.run(steps, codec, output, communicator, "reduce-scatter of gradients", plain)


@lru_cache(maxsize=256)
def _usual_units(divisor: int, count: int, device: torch.device) -> Tensor:
    """Kept, and not to be written to."""
    return torch.full((count,), 1.0 / divisor, dtype=torch.float32, device=device)


def _units(messages: Messages, buffer: Tensor, divisor: int, count: int, stride: int, rules: Rules) -> Tensor:
    """By what the sums of messages are multiplied. NaN where some number was not finite: not all formats can say so."""
    usual = _usual_units(divisor, rules.world, buffer.device)
    room = rules.workspace.empty((rules.world,), torch.float32, buffer.device)
    return messages.units(buffer, usual, count, stride, rules.workspace, room)


def _all_gather(codec: Codec, handle: FsdpHandle) -> Any:
    torchs_own = compat.fsdp_collectives()

    class CompressedAllGather(_Room, torchs_own.AllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
            _gather_from_owners(output_tensor, input_tensor, codec, group, handle)

    return CompressedAllGather()


def _gather_from_owners(output: Tensor, source: Tensor, codec: Codec, group: Any, handle: FsdpHandle) -> None:
    if not source.is_floating_point():
        raise TypeError(
            "parameters of several dtypes in one FSDP2 group travel as raw bytes: give each dtype its own fully_shard"
        )
    communicator = communicator_for(group, source.device)
    link, world = communicator.link, communicator.world

    def steps(piece: Chunk, rules: Rules) -> Steps:
        mine, chunk = piece.shards[link.rank], link.for_chunk()
        gathered, (part,) = ChunkJob(piece, source, output, rules, chunk).buffers(Stage.ADDEND), mine.parts
        own = source[part.start : part.start + part.size]
        rules.encode(rules.messages(mine, Stage.ADDEND), own, gathered[link.rank], Stage.ADDEND, link.rank, peaks_of=world)
        yield chunk.share(gathered.rows, gathered.lengths)
        units = _units(gathered.messages, gathered.buffer, 1, 1, 0, rules)
        with rules.timed("decode", source.device):
            gathered.messages.decode(gathered.buffer, output, units, workspace=rules.workspace)

    plain = (world - 1) * 4 * source.numel()
    handle.run(steps, codec, source, communicator, "all-gather of parameters", plain)


class _Room:
    """Where FSDP2 puts what is to be sent."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _raise_after_backward(error: Exception) -> None:
    def complain() -> None:
        raise error

    compat.after_backward(lambda: compat.after_backward(complain))
