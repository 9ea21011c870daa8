"""One line for DistributedDataParallel: `lowp.compress_gradients(ddp, "e5m2", scale="aps")`.

DDP calls the hook for every bucket while backward is still computing; the courier carries it, and DDP waits for the future.
Two things cannot be done there, and are done at the very end of backward, after DDP's own last word:

- raising an error (an exception in a future reaches the user as "Unable to cast ... to Tensor", one in the hook breaks DDP);
- skipping a step that was not finite: gradients become None, and optimizers pass over them.

So every future resolves, always, and a callback that is queued from a callback comes after DDP's.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lowp.wire.collectives import check_gradient
from lowp.wire.compressor import Compressor
from lowp.wire.naming import all_names
from lowp.wire.replicas import check_replicas
from lowp.wire.report import Report
from lowp.wire.settings import Settings


class Handle:
    """What `compress_gradients` returns: figures, state, and the way back."""

    def __init__(self, ddp: DistributedDataParallel, compressor: Compressor, check_replicas: bool) -> None:
        self._ddp = ddp
        self._compressor = compressor
        self._check_replicas = check_replicas
        self._names = {id(parameter): name for name, parameter in _synchronised(ddp).items()}
        self._expected = len(self._names)
        self._seen = 0
        self._removed = False

    @property
    def compresses(self) -> bool:
        """False where `reduction="auto"` found that compression does not pay, and after `remove`."""
        return self._compressor.compresses and not self._removed

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters, bucket by bucket, as the last step sent them."""
        return self._compressor.buckets

    @property
    def step(self) -> int:
        return self._compressor.state.step

    def report(self) -> Report:
        """The last step's figures."""
        return self._compressor.report()

    def total(self) -> Report:
        """The figures of all steps so far."""
        return self._compressor.total()

    def state_dict(self) -> dict[str, Any]:
        """The step, error feedback's residuals and delayed scales, by parameter. Residuals differ: every rank saves its own."""
        return self._compressor.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._compressor.load_state_dict(saved)

    def remove(self) -> None:
        """Stop compressing: gradients travel as DDP sends them, the thread ends, the group is given back."""
        if not self._removed:
            self._removed = True
            self._compressor.close()

    def _hook(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        if not self.compresses:
            return allreduce_hook(self._compressor.parent, bucket)
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        future = self._compressor.submit(bucket.buffer(), names)
        self._seen += len(names)
        if self._seen == self._expected:
            self._seen = 0
            self._compressor.step_done()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._arrived))
        return future

    def _arrived(self) -> None:
        parameters = _synchronised(self._ddp)
        self._compressor.step_arrived(parameters.values())
        if self._check_replicas:
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            check_replicas({name: p.data for name, p in parameters.items()}, self._compressor.parent)
            check_replicas(gradients, self._compressor.parent, "gradient of")


def compress_gradients(
    ddp: DistributedDataParallel,
    format: Any,
    *,
    scale: str = "local",
    reduction: Any = "two_shot",
    rounding: str = "nearest",
    skip: Any = (),
    layers: Any = None,
    accumulate: Any = None,
    kahan: bool = False,
    error_feedback: bool = False,
    nonfinite: str = "propagate",
    seed: int = 0,
    measure: bool = False,
    check_replicas: bool = False,
    chunk: int | None = None,
) -> Handle:
    """Let a DistributedDataParallel model send its gradients in `format`.

    Args:
        ddp: the model. All ranks call this, with the same arguments; it is an error that names both if they do not.
        format: "e5m2", "e4m3fn", "int8", "e2m1fn" (4 bits), "posit8", "mxfp4", "topk:0.01", any format of up to 16 bits; or a
            schedule: {0: "fp16", 500: "e5m2"} (from which step on), or a function of the step.
        scale: "none", "aps" (Auto Precision Scaling: per layer, agreed between ranks), "aps_delayed" (last step's), "local"
            (each message's own), or "block:<n>".
        reduction: "two_shot" (adds in float32, two roundings), "one_shot" (one rounding; for two ranks, or small tensors),
            "ring", "tree", "sequential" (partial sums in the format), "hierarchical(k)" and "hierarchical(k, leaders)" for
            nodes of k ranks, "hybrid" (by size), or "auto": two_shot (on two ranks one_shot) if a measurement at start finds
            it faster than float32, else no compression.
        rounding: any of lowp's; "stochastic" takes `seed`.
        skip: what stays in float32: "1d" (biases and norms), "last" (the last layer that has a matrix), or name patterns such
            as "*.embedding.*". A tied parameter is found by any of its names.
        layers: formats of their own, by name pattern: {"last": "fp16", "*.attention.*": "e4m3fn"}. The first match counts.
        accumulate: the format of sums. Default: float32 in two_shot and inside nodes, else the wire's own format.
        kahan: compensate the rounding of sums.
        error_feedback: add what rounding lost to the next gradient.
        nonfinite: where a gradient is infinite or NaN on one rank, everything of that layer that travels in one message with it
            becomes NaN on all ("propagate"); or all ranks "skip" the step: gradients are None, and optimizers pass over them;
            or all "raise" NonFiniteGradient in the same step.
        measure: also measure the error against an exact sum (an extra float32 all-reduce), and count saturation in full.
        check_replicas: after every backward, make sure that parameters and gradients are the same on all ranks.
        chunk: elements that are under way together. The default suits the device; with a number of your own, "local" and
            "block" scales, which belong to messages, are the same on every device.

    Returns a handle: `report()` for the last step, `total()`, `state_dict()`, `remove()`.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"compress_gradients takes a DistributedDataParallel model, not {type(ddp).__name__}")
    settings = Settings.of(
        format,
        scale=scale,
        reduction=reduction,
        rounding=rounding,
        skip=skip,
        layers=layers,
        accumulate=accumulate,
        kahan=kahan,
        error_feedback=error_feedback,
        nonfinite=nonfinite,
        seed=seed,
        measure=measure,
        chunk=chunk,
    )
    parameters = _synchronised(ddp)
    for name, parameter in parameters.items():
        check_gradient(parameter, f"compress_gradients (parameter {name!r})")
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise TypeError(f"the gradient of {name!r} is sparse (sparse=True); only dense gradients can be compressed")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"all parameters must be on one device, not on {', '.join(map(str, devices))}")
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    compressor = Compressor(shapes, settings, group=ddp.process_group, device=devices.pop(), names=all_names(ddp.module))
    handle = Handle(ddp, compressor, check_replicas)
    if not compressor.compresses:
        return handle  # DDP's own way is the fastest for float32
    try:
        ddp.register_comm_hook(handle, _hook)
    except RuntimeError as error:
        compressor.close()
        raise RuntimeError(f"this model has a communication hook already: {error}") from None
    return handle


def _hook(handle: Handle, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # DDP looks at name and annotations
    return handle._hook(bucket)


def _synchronised(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters whose gradients DDP reduces."""
    ignored = ddp.parameters_to_ignore
    return {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}
