"""One line for DistributedDataParallel: `lowp.compress_gradients(ddp, "e5m2", scale="aps")`.

DDP calls the hook for every bucket while backward is still computing; the thread reduces it, and DDP waits for the future.
Two things cannot be done there, and are done at the very end of backward, after DDP's own last callback:

- raising an error (an exception in a future reaches the user as "Unable to cast ... to Tensor", one in the hook breaks DDP);
- skipping a step that was not finite: gradients become None, and optimizers pass over them.

So every future resolves, always, and a callback that is queued from a callback comes after DDP's. (Within `ddp.join()` a rank
without inputs calls the hook outside of any backward; there the hook itself waits for the last bucket, and may raise.)
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lowp import compat
from lowp.former_names import ARGUMENTS_OF_THE_WIRE, renamed_arguments
from lowp.wire.auto import PLAN, compress_by_plan
from lowp.wire.collectives import check_gradient
from lowp.wire.compressor import Compressor
from lowp.wire.naming import all_names
from lowp.wire.replay import completed
from lowp.wire.replicas import check_replicas
from lowp.wire.report import WireReport
from lowp.wire.settings import Settings
from lowp.wire.state import AllRanks

_OTHER_PARAMETERS = (
    "the parameters that need gradients are not those that DDP was made with: freeze or thaw them (requires_grad_) before "
    "DistributedDataParallel, and call compress_gradients after it"
)


class Handle:
    """What `compress_gradients` returns: figures, state, and the way back.

    It is a Stateful of torch.distributed.checkpoint: `dcp.save({"wire": handle, ...})`.
    """

    def __init__(
        self, ddp: DistributedDataParallel, compressor: Compressor, switch: "HookSwitch", check_replicas: bool
    ) -> None:
        self._ddp = weakref.ref(ddp)  # the model's reducer keeps us, and would keep the model, which keeps the reducer
        self._parameters = synchronised(ddp)
        self._compressor = compressor
        self._switch = switch
        self._check_replicas = check_replicas
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._bucket_names: dict[tuple[int, ...], tuple[str, ...]] = {}  # by the ids of their parameters
        self._seen = 0
        self._waiting: list[torch.futures.Future[Tensor]] = []
        self._submitted = False
        self._sent: list[tuple[Tensor, tuple[str, ...]]] = []  # buckets of a step, where errors are fed back
        self._refusal: str | None = None

    @property
    def compresses(self) -> bool:
        """False where `reduction="auto"` found that compression does not pay, and after `remove`."""
        return self._switch.handle is self and self._compressor.compresses

    @property
    def model(self) -> DistributedDataParallel | None:
        """The model whose gradients these are; None when it is gone."""
        return self._ddp()

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters, bucket by bucket, as the last step sent them."""
        return self._compressor.buckets

    def buckets_at(self, step: int) -> list[list[str]]:
        """The same for an earlier step. DDP lays gradients into other buckets after the first step."""
        return self._compressor.buckets_at(step)

    @property
    def step(self) -> int:
        return self._compressor.state.step

    def report(self) -> WireReport:
        """The last step's figures."""
        return self._compressor.report()

    def total(self) -> WireReport:
        """The figures of all steps so far."""
        return self._compressor.total()

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The step, error feedback's residuals and delayed scales, by parameter (state.py says in which form).

        Residuals differ between ranks: every rank saves its own. With `all_ranks`, which all ranks must call, every rank gets
        all of them (in host memory): then it is enough that one rank saves.
        """
        return self._compressor.state_dict(all_ranks)

    def load_state_dict(self, saved: Mapping[str, Any], step_only: bool = False) -> None:
        """Take what `state_dict` gave. A ValueError says what does not fit; then nothing is changed.

        With `step_only` residuals and delayed scales are left out: after a change of format, or of the number of ranks.
        """
        self._compressor.load_state_dict(saved, step_only)

    @property
    def all_ranks(self) -> AllRanks:
        """The same state for those who save what one rank gives: its `state_dict()` has the residuals of all ranks."""
        return AllRanks(self)

    def remove(self) -> None:
        """Stop compressing: gradients travel as DDP sends them, the thread ends, the group is given back.

        The model can be compressed again, in another format.
        """
        if self._switch.handle is self:
            self._switch.handle = None
        self._compressor.close()

    def _hook(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        parameters = tuple(map(id, bucket.parameters()))
        names = self._bucket_names.get(parameters)
        if names is None:
            names = self._bucket_names[parameters] = tuple(self._names.get(parameter, "") for parameter in parameters)
        buffer = bucket.buffer()
        if self._seen == 0:
            self._refusal, self._submitted = self._cannot_join(), False
        self._seen += len(names)
        last = self._seen >= len(self._names) or bucket.is_last()  # (which DDP does not say in a static graph's first step)
        if "" in names or (last and self._seen != len(self._names)):
            self._refusal = self._refusal or _OTHER_PARAMETERS
        if not self._compressor.compresses:
            future = allreduce_hook(self._switch.group, bucket)
        elif self._refusal is None:
            future, self._submitted = self._compressor.submit(buffer, names), True
            if self._compressor.settings.error_feedback:
                self._sent.append((buffer, names))
        else:
            future = completed(buffer)
        self._waiting.append(future)
        if last:
            self._all_sent()
        return future

    def _cannot_join(self) -> str | None:
        """What is wrong with this step within `ddp.join()`. All ranks find the same, before anything is sent."""
        ddp = self._ddp()
        if ddp is None or not compat.joins(ddp):
            return None
        if not compat.divides_by_initial_world_size(ddp):
            return (
                "compressed gradients are divided by the number of all ranks, also of those that have joined: "
                "call ddp.join(divide_by_initial_world_size=True)"
            )
        if self._check_replicas:
            return (
                "check_replicas=True cannot be used within ddp.join(): a rank that has joined no longer updates its parameters"
            )
        return None

    def _all_sent(self) -> None:
        """The last bucket of a step has been sent. When all have arrived, `_arrived` may raise."""
        waiting, self._waiting, self._seen = self._waiting, [], 0
        if self._submitted:
            self._compressor.step_done()
        if compat.backward_id() != -1:
            compat.after_backward(lambda: compat.after_backward(self._arrived))
            return
        # No backward is running: this rank has no inputs left (ddp.join) and sends zeros to match what the others send.
        torch.futures.wait_all(waiting)
        self._arrived()

    def _arrived(self) -> None:
        if self._refusal is not None:
            self._sent.clear()
            if self._submitted:
                self._compressor.step_arrived([])
            for parameter in self._parameters.values():
                parameter.grad = None
            raise ValueError(self._refusal)
        if self._compressor.compresses:
            self._give_back()
            self._compressor.step_arrived(self._parameters.values())
        else:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._compressor.uncompressed_step(gradients, self._parameters.values())
        if self._check_replicas:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            check_replicas({name: p.data for name, p in self._parameters.items()}, self._compressor.parent)
            check_replicas(gradients, self._compressor.parent, "gradient of")

    def _give_back(self) -> None:
        """DDP leaves the gradient of a parameter alone that no rank has used (find_unused_parameters=True)."""
        sent, self._sent = self._sent, []
        unused = {name for name, parameter in self._parameters.items() if parameter.grad is None} if sent else set()
        for buffer, names in sent:
            if not unused.isdisjoint(names):
                self._compressor.give_back(buffer, names, unused)


class HookSwitch:
    """The state of the one hook that a model gets from us. DDP takes one hook and never gives it back, so the hook stays.

    The hook asks here for the handle that reduces a bucket. After `remove` there is none, and DDP's own all-reduce is used.

    A copy of the model (deepcopy, torch.save and torch.load, AveragedModel) has a reducer of its own, which has no hook. That
    is so for torch's hooks as well. What is copied of the switch is off; `compress_gradients` takes the copy as a new model.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.handle: Handle | None = None

    def __reduce__(self) -> "tuple[type[HookSwitch], tuple[()]]":
        return HookSwitch, ()


_Switch = _HookSwitch = HookSwitch  # its names in models that were saved before

_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, HookSwitch]" = weakref.WeakKeyDictionary()


@renamed_arguments(ARGUMENTS_OF_THE_WIRE)
def compress_gradients(
    ddp: DistributedDataParallel,
    format: Any,
    *,
    scale: str | None = None,
    reduction: Any = "two_shot",
    rounding: str = "nearest",
    skip: Any = (),
    layers: Any = None,
    sum_format: Any = None,
    kahan: bool = False,
    error_feedback: bool = False,
    nonfinite: str = "propagate",
    seed: int = 0,
    measure: bool = False,
    check_replicas: bool = False,
    chunk: int | None = None,
    max_error: float | None = None,
    cluster: Any = None,
) -> Handle:
    """Let a DistributedDataParallel model send its gradients in `format`.

    Args:
        ddp: the model, or torch.compile's wrapper around it. All ranks call this, with the same arguments; it is an error that
            names both if they do not.
        format: "e5m2", "e4m3fn", "int8", "e2m1fn" (4 bits), "mxfp4", "topk:0.01", "adaptive:4", any of up to 16 bits; or a
            schedule: {0: "fp16", 500: "e5m2"} (from which step on), or a function of the step. "plan": the first steps travel
            in float32 and are timed; then format, scale and reduction are chosen as `lowp plan` does. "fp32": uncompressed;
            gradients of 16 bits travel in their own 16 bits.
        scale: "none", "aps" (Auto Precision Scaling: per layer, agreed between ranks), "aps_delayed" (last step's), "local"
            (each message's own), or "block:<n>" (each n numbers' own). Default, for each format by itself: "block:32" if it has
            fewer than 8 bits, else "local"; "local" also for block formats and top-k.
        reduction: "two_shot" (adds in float32, two roundings), "one_shot" (one rounding; for two ranks, or small tensors),
            "ring", "tree", "sequential" (partial sums in the format), "hierarchical(k)", "hierarchical(k, gather)" (for top-k
            on few nodes) and "hierarchical(k, leaders)" for nodes of k ranks, "by_size" ("tree" for small buckets,
            "two_shot" for large ones), or "auto": the one that is predicted to be the fastest from a measurement at start; no
            compression, if none is faster than float32.
        rounding: any of lowp's; "stochastic" takes `seed`.
        skip: what stays uncompressed: "1d" (biases and norms), "last" (the last layer that has a matrix), or name patterns such
            as "*.embedding.*". A tied parameter is found by any of its names.
        layers: formats of their own, by name pattern: {"last": "fp16", "*.attention.*": "e4m3fn"}. The first match counts.
        sum_format: the format of sums. Default: float32 in two_shot and inside nodes, else the wire's own format.
        kahan: compensate the rounding of sums.
        error_feedback: add what rounding lost to the next gradient.
        nonfinite: where a gradient is infinite or NaN on one rank, everything of that layer that travels in one message with it
            becomes NaN on all ("propagate"); or all ranks "skip" the step: gradients are None, and optimizers pass over them;
            or all "raise" NonFiniteGradient in the same step.
        measure: also measure the error against an exact sum (an extra float32 all-reduce), and count saturation in full.
        check_replicas: after every backward, make sure that parameters and gradients are the same on all ranks.
        chunk: elements that are under way together. The default suits the device; with a number of your own, "local" and
            "block" scales, which belong to messages, are the same on every device.
        max_error, cluster: for "plan": the largest relative error of a step's gradients, .1 if none is given; a cluster (a
            TOML file of `lowp calibrate`, say) that is taken instead of a measurement.

    Returns a handle: `report()` for the last step, `total()`, `state_dict()`, `remove()`.
    """
    ddp = _checked(ddp)
    others: dict[str, Any] = {
        "rounding": rounding,
        "skip": skip,
        "layers": layers,
        "sum_format": sum_format,
        "kahan": kahan,
        "error_feedback": error_feedback,
        "nonfinite": nonfinite,
        "seed": seed,
        "measure": measure,
        "chunk": chunk,
    }
    if isinstance(format, str) and format == PLAN:
        if scale is not None or reduction != "two_shot":
            raise ValueError(f"{'scale' if scale is not None else 'reduction'}: is the plan's to choose")
        return compress_by_plan(ddp, max_error, cluster, others | {"check_replicas": check_replicas})
    if max_error is not None or cluster is not None:
        raise ValueError(f"{'cluster' if max_error is None else 'max_error'}: is for the format 'plan'")
    settings = Settings.of(format, scale=scale, reduction=reduction, **others)
    parameters = synchronised(ddp)
    for name, parameter in parameters.items():
        check_gradient(parameter, f"compress_gradients (parameter {name!r})")
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise TypeError(f"the gradient of {name!r} is sparse (sparse=True); only dense gradients can be compressed")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"all parameters must be on one device, not on {', '.join(map(str, devices))}")
    names = all_names(ddp.module)
    compressor = Compressor(parameters, settings, group=ddp.process_group, device=devices.pop(), names=names)
    switch = _switches.get(ddp) or HookSwitch(ddp.process_group)
    handle = Handle(ddp, compressor, switch, check_replicas)
    if not compressor.compresses and nonfinite == "propagate" and not check_replicas:
        return handle  # DDP's own way is the fastest for float32
    try:
        switch_to(ddp, handle, switch)
    except RuntimeError:
        compressor.close()
        raise
    return handle


def switch_to(ddp: DistributedDataParallel, handle: Any, switch: "HookSwitch | None" = None) -> "HookSwitch":
    """From now on this one's `_hook` is called with every bucket."""
    switch = switch or _switches.get(ddp) or HookSwitch(ddp.process_group)
    if ddp not in _switches:
        try:
            ddp.register_comm_hook(switch, reduce_bucket)
        except RuntimeError as error:
            raise RuntimeError(f"this model has another communication hook already: {error}") from None
        _switches[ddp] = switch
    switch.handle = handle
    return switch


def adopt_switch(ddp: DistributedDataParallel, switch: HookSwitch) -> None:
    """Somebody else has registered `reduce_bucket`, or a hook that calls it, with this switch."""
    switch.group = ddp.process_group
    _switches[ddp] = switch


def reduce_bucket(switch: HookSwitch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # DDP looks at the annotations
    """The hook."""
    return allreduce_hook(switch.group, bucket) if switch.handle is None else switch.handle._hook(bucket)


_hook = reduce_bucket  # its name in models that were saved before


def _checked(model: Any) -> DistributedDataParallel:
    """The DDP model, out of torch.compile's wrapper, if it can be compressed now."""
    wrapped = compat.uncompiled(model)
    if not isinstance(wrapped, DistributedDataParallel):
        found = type(wrapped).__name__
        raise TypeError(f"compress_gradients takes a DistributedDataParallel model, not {found}; {_where(wrapped)}")
    if wrapped in _switches and _switches[wrapped].handle is not None:
        raise RuntimeError("the gradients of this model are compressed already: call remove() on the handle of that first")
    if compat.has_no_buckets(wrapped):
        raise RuntimeError("torch._dynamo.config.optimize_ddp = 'python_reducer' has no buckets: compress_gradients needs them")
    return wrapped


def _where(model: Any) -> str:
    """Where the wrapped model is to be found in trainers that wrap it themselves."""
    from torch.distributed.fsdp import FSDPModule  # half a second, for an error

    if isinstance(model, FSDPModule):
        return "for FSDP2 take lowp.fsdp.compress"
    if type(model).__module__.startswith("deepspeed."):
        return "DeepSpeed reduces gradients by itself and offers no place for this (docs/INTEGRATIONS.md)"
    return (
        "trainers keep the wrapped one in trainer.model_wrapped (transformers, while it trains) or trainer.strategy.model "
        "(Lightning), or return it from accelerator.prepare(model) and ray.train.torch.prepare_model(model); "
        "lowp.integrations has a class for each"
    )


def synchronised(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters whose gradients DDP reduces."""
    ignored = ddp.parameters_to_ignore
    return {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}
