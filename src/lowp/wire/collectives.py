"""`lowp.all_reduce`: a sum over ranks that travels in a few bits."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lowp.tensor.errors import NonFiniteGradient
from lowp.tensor.kernels import SMALL
from lowp.wire.auto import choose
from lowp.wire.chunk_scheduler import ChunkScheduler
from lowp.wire.codec import codec_for
from lowp.wire.communicator import Communicator, agree
from lowp.wire.exchange import BucketExchange, State
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions.base import Reduction
from lowp.wire.report import ONE_IN, Meter, WireReport, ring_bytes
from lowp.wire.scale_warnings import warn_of_scales
from lowp.wire.scaling import NONFINITE, divide_
from lowp.wire.settings import Settings
from lowp.wire.warm_up import warm_up
from lowp.wire.workspace import Workspaces

_communicators: "WeakKeyDictionary[Any, dict[str, Communicator]]" = WeakKeyDictionary()
_agreed: "WeakKeyDictionary[Any, set[str]]" = WeakKeyDictionary()

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def all_reduce(
    tensor: Tensor,
    format: Any,
    *,
    op: str = "sum",
    group: Any = None,
    step: int = 0,
    **settings: Any,
) -> WireReport:
    """Replace `tensor` by its sum (or mean) over the ranks, sent in `format`. All ranks get the same bits.

    Args:
        tensor: float32, float16, bfloat16, or float64 (which is rounded to float32 first).
        format: "e5m2", "e4m3fn", "int4", "topk:0.01", "adaptive:4" ...
        op: "sum" or "mean".
        settings: scale, rounding, reduction, sum_format, kahan, nonfinite, seed ... as for `lowp.compress_gradients`.
        step: for schedules, and for stochastic rounding: another number, other noise.

    All ranks pass the same arguments. They are compared where a rank asks for something for the first time.

    Returns what was sent and how long it took. (On CUDA, seconds and fractions are known of one call in 16, else they are 0:
    to know them, the host would have to wait for the device.)
    """
    chosen = Settings.of(format, **settings)
    check_gradient(tensor, "all_reduce")
    if op not in ("sum", "mean"):
        raise ValueError(f"op is 'sum' or 'mean', not {op!r}")
    if chosen.error_feedback:
        raise ValueError("error feedback needs a memory between steps: use compress_gradients")
    if not dist.is_initialized():
        raise RuntimeError("lowp.all_reduce needs torch.distributed: call torch.distributed.init_process_group first")
    communicator = communicator_for(group, tensor.device)
    _agree_once(communicator, f"{chosen.describe()} op={op} elements={tensor.numel()} dtype={tensor.dtype} step={step}")
    if communicator.rank == 0:
        warn_of_scales(chosen.codecs(), communicator.world)
    reduction = chosen.reduction
    if reduction == "auto":
        reduction = choose(communicator, chosen, tensor.device, tensor.numel(), tensor.dtype)
        if reduction is None:
            return _uncompressed(tensor, op, communicator)
    assert isinstance(reduction, Reduction)
    return _reduce(tensor, chosen, reduction, op, communicator, step)


def check_gradient(tensor: Tensor, name: str) -> None:
    """Raise for what cannot travel."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} takes a tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} takes dense tensors; sparse gradients are sent by torch.distributed itself")
    if tensor.dtype not in GRADIENT_DTYPES:
        raise TypeError(f"{name} takes float32, float16, bfloat16 or float64 tensors, not {tensor.dtype}")


def communicator_for(group: Any, device: torch.device) -> Communicator:
    parent = dist.group.WORLD if group is None else group
    if parent is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group")
    found = _communicators.setdefault(parent, {})
    if device.type not in found or found[device.type].closed:
        found[device.type] = Communicator(parent, device)
    return found[device.type]


def _agree_once(communicator: Communicator, said: str) -> None:
    """Compare what the ranks ask for the first time that they ask for it."""
    known = _agreed.setdefault(communicator.parent, set())
    if said not in known:
        agree(communicator.parent, said, "what to reduce")
        known.add(said)


def _reduce(
    tensor: Tensor, settings: Settings, reduction: Reduction, op: str, communicator: Communicator, step: int
) -> WireReport:
    codec = codec_for(settings.codec(["tensor"], 1, (), step), tensor.dtype)
    layer = Layer("tensor", tensor.numel(), codec, 0)
    if tensor.numel() >= SMALL:
        warm_up({layer.codec}, tensor.device)
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # one number may have any stride
    samples = tensor.device.type == "cpu" or communicator.reductions % ONE_IN == 0
    communicator.reductions += 1
    meter = Meter(settings.measure, samples)
    marks: list[Callable[[], Tensor]] = []
    # On CUDA the caller's stream may be another one each time; the allocator knows which memory is free on which. And what is
    # made within inference mode cannot be written to outside of it.
    keeps = tensor.device.type == "cpu" and not torch.is_inference_mode_enabled()
    workspaces = communicator.workspaces if keeps else Workspaces()
    state = State(step=step, workspaces=workspaces)
    link, sent = communicator.link, communicator.link.bytes_sent
    exchange = BucketExchange(flat, Bucket.of((layer,)), settings, reduction, link, state, meter, op == "mean", marks.append)
    scheduler = ChunkScheduler()
    exchange.start(scheduler)
    communicator.run(scheduler, f"all_reduce of {tensor.numel()} elements")
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    meter.report.elements = tensor.numel()
    meter.report.bytes_sent = link.bytes_sent - sent
    meter.report.bytes_of_fp32 = ring_bytes(4 * tensor.numel(), link.world)
    meter.report.steps = 1
    if settings.nonfinite != "propagate" and bool((marks[0]() == NONFINITE).any()):
        if settings.nonfinite == "raise":
            raise NonFiniteGradient("all_reduce: the tensor is infinite or NaN on some rank")
        tensor.detach().zero_()
        meter.report.skipped = 1
    return meter.finish()


def _uncompressed(tensor: Tensor, op: str, communicator: Communicator) -> WireReport:
    dist.all_reduce(tensor, group=communicator.parent)
    if op == "mean":
        divide_(tensor, communicator.world)
    sent = int(ring_bytes(tensor.numel() * tensor.element_size(), communicator.world))
    return WireReport(steps=1, elements=tensor.numel(), bytes_sent=sent, bytes_of_fp32=sent, notes=["uncompressed"])
