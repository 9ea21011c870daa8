"""What the ranks of test_nccl.py do: each function is called on every rank, and returns what the test looks at.

Sums are compared bit for bit with those of a virtual world, on the same device and on the CPU. The ranks share that work: each
checks the cases whose number it is given. A digest shows that all ranks have the same bits.
"""

import hashlib
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.wire.compressor import Compressor
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange

MAGNITUDES = (1e-3, 1.0, 1e-30, 3e5, 0.0, 1e-7)
NAN_BITS = 0x7FC00000  # payloads of NaN differ between devices


def canonical_bits(numbers: Tensor) -> Tensor:
    numbers = numbers.detach().float().cpu().reshape(-1)
    return torch.where(numbers.isnan(), NAN_BITS, numbers.view(torch.int32))


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(canonical_bits(tensor).numpy().tobytes())
    return found.hexdigest()[:16]


# Sums


class Bucket(NamedTuple):
    """A layer for each codec: its format and its size. `turn` says with which magnitude the layers begin."""

    turn: int
    reduction: str
    scale: str
    variant: dict
    codecs: tuple[str, ...]
    sizes: tuple[int, ...]
    chunk: int | None = 300  # elements; None: as many as suit the device, so that a CPU gives other bits
    policy: str = "never"  # of kernels

    @property
    def shapes(self) -> dict[str, torch.Size]:
        sizes = itertools.islice(itertools.cycle(self.sizes), self.turn % len(self.sizes), None)
        return {f"layer{i}": torch.Size([size]) for i, size in zip(range(len(self.codecs)), sizes, strict=False)}

    @property
    def settings(self) -> Settings:
        layers = dict(zip(self.shapes, self.codecs, strict=True))
        return Settings.of("e5m2", scale=self.scale, reduction=self.reduction, layers=layers, chunk=self.chunk, **self.variant)

    @property
    def steps(self) -> int:
        """Two where something is remembered."""
        return 2 if self.scale == "aps_delayed" or "error_feedback" in self.variant else 1

    def gradients(self, rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        magnitudes = itertools.islice(itertools.cycle(MAGNITUDES), self.turn % len(MAGNITUDES), None)
        return {
            name: (torch.randn(shape, generator=generator) * magnitude).to(device)
            for (name, shape), magnitude in zip(self.shapes.items(), magnitudes, strict=False)
        }


def sums(device: torch.device, bucket: Bucket, checker: int) -> tuple[str, list[str]]:
    """This rank's digest, and what differs from a virtual world (where this rank is the one that checks)."""
    lowp.set_kernel_policy(bucket.policy)
    world, rank = dist.get_world_size(), dist.get_rank()
    compressor = Compressor(bucket.shapes, bucket.settings, device=device)
    found = [compressor.reduce(bucket.gradients(rank, step, device)) for step in range(bucket.steps)]
    compressor.close()
    wrong: list[str] = []
    if rank == checker % world:
        wrong = _differences(found, bucket, device)
        if bucket.chunk is not None and device.type != "cpu":
            lowp.set_kernel_policy("never")
            wrong += _differences(found, bucket, torch.device("cpu"))
    return digest([tensor for step in found for tensor in step.values()]), wrong


def _differences(found: Sequence[Mapping[str, Tensor]], bucket: Bucket, device: torch.device) -> list[str]:
    world, wrong = dist.get_world_size(), []
    exchange = VirtualExchange(world, bucket.shapes, bucket.settings)
    for step, sums in enumerate(found):
        wanted = exchange.reduce(lambda rank, step=step: bucket.gradients(rank, step, device))
        for (name, real), codec in zip(sums.items(), bucket.codecs, strict=True):
            differing = int((canonical_bits(real) != canonical_bits(wanted[name])).sum())
            if differing:
                wrong.append(f"{codec}, step {step}: {differing} of {real.numel()} differ from virtual ranks on {device}")
    return wrong


# DDP


def model(width: int = 96, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))


def ddp_steps(
    device: torch.device, format: str, options: Mapping[str, Any], policy: str = "never", steps: int = 3
) -> tuple[int, str, list[str]]:
    """Some steps with several buckets: how many, a digest of the gradients, and what differs from a virtual world.

    The virtual world gets the gradients that the hook got, from all ranks. With kernels, later steps are recorded on CUDA.
    """
    lowp.set_kernel_policy(policy)
    world, rank = dist.get_world_size(), dist.get_rank()
    ddp = DistributedDataParallel(model().to(device), bucket_cap_mb=0.03)
    sent: list[Tensor] = []
    register = ddp.register_comm_hook

    def register_recording(state: object, hook: Any) -> None:
        def recording(state, bucket):
            sent.append(bucket.buffer().clone())
            return hook(state, bucket)

        register(state, recording)

    with mock.patch.object(ddp, "register_comm_hook", register_recording):
        handle = lowp.compress_gradients(ddp, format, **options)
    shapes = {name: parameter.shape for name, parameter in ddp.module.named_parameters()}
    exchange = VirtualExchange(world, shapes, Settings.of(format, **options))
    wrong, found = [], []
    for step in range(steps):
        sent.clear()
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp(torch.randn(8, 96, generator=generator).to(device)).square().mean().backward()
        everybody = [_gathered(flat) for flat in sent]
        exchange.buckets = handle.buckets
        wanted = exchange.reduce(lambda r, everybody=everybody: _split(everybody, r, handle.buckets, shapes))
        gradients = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
        found += gradients.values()
        wrong += [
            f"{name} in step {step} differs from virtual ranks"
            for name, gradient in gradients.items()
            if not torch.equal(canonical_bits(gradient), canonical_bits(wanted[name]))
        ]
    buckets = len(handle.buckets)
    seen = handle._compressor._replays._seen.values()
    if device.type == "cuda" and policy != "never" and not any(each.replayed for each in seen):
        wrong.append("nothing was recorded")
    handle.remove()
    lowp.set_kernel_policy("never")
    return buckets, digest(found), wrong


def _gathered(flat: Tensor) -> list[Tensor]:
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return everybody


def _split(everybody: list[list[Tensor]], rank: int, buckets: list[list[str]], shapes: Mapping[str, torch.Size]) -> dict:
    return {
        name: piece.view(shapes[name])
        for flats, names in zip(everybody, buckets, strict=True)
        for name, piece in zip(names, flats[rank].split([shapes[n].numel() for n in names]), strict=True)
    }


# FSDP2


def fsdp_steps(device: torch.device, reduce: str | None, gather: str | None, scale: str) -> dict[str, float]:
    """The largest relative error of each kind of collective, against what was handed to it, rounded.

    With scale "none" a message decodes to the numbers rounded to the format, and the error must be 0.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    lowp.set_kernel_policy("never")
    world, rank = dist.get_world_size(), dist.get_rank()
    net = model().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {"reduce": [], "gather": []}
    setters = {"reduce": FSDPModule.set_custom_reduce_scatter, "gather": FSDPModule.set_custom_all_gather}

    def recording(kind: str):
        return lambda module, collective: setters[kind](module, _Recorded(collective, calls[kind]))

    with (
        mock.patch.object(FSDPModule, "set_custom_reduce_scatter", recording("reduce")),
        mock.patch.object(FSDPModule, "set_custom_all_gather", recording("gather")),
    ):
        lowp.fsdp.compress(net, reduce=reduce, gather=gather, scale=scale)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        net(torch.randn(8, 96, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    errors = {}
    for kind, format in (("reduce", reduce), ("gather", gather)):
        for output, source in calls[kind] if format else ():
            rounded = lowp.quantize(source, format) if scale == "none" else source
            if kind == "gather":
                wanted = torch.cat(_gathered(rounded))
            else:
                wanted = torch.zeros_like(output)
                for theirs in _gathered(rounded):
                    wanted += theirs.view(world, -1)[rank]
                wanted /= world
            error = float((output - wanted).norm() / wanted.norm().clamp_min(1e-30))
            errors[kind] = max(error, errors.get(kind, 0.0))
    return errors


class _Recorded:
    """A collective of FSDP2 that keeps what it was given and what it gave."""

    def __init__(self, collective: Any, calls: list[tuple[Tensor, Tensor]]) -> None:
        self._collective, self._calls = collective, calls
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **named: Any) -> Any:
        source = input_tensor.clone()
        work = self._collective(output_tensor, input_tensor, *more, **named)
        if work is not None:
            work.wait()
        self._calls.append((output_tensor.clone(), source))
        return work


# Faults


def said(function: Any, *arguments: Any, **settings: Any) -> str:
    try:
        function(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def not_finite(device: torch.device, nonfinite: str) -> dict[str, Any]:
    """The last rank has a NaN in one of two layers. Afterwards a step of finite numbers works."""
    lowp.set_kernel_policy("never")
    world, rank = dist.get_world_size(), dist.get_rank()
    compressor = Compressor({"first": (70,), "second": (50,)}, "e2m1fn", nonfinite=nonfinite, device=device)
    gradients = {"first": torch.full((70,), rank + 1.0, device=device), "second": torch.ones(50, device=device)}
    if rank == world - 1:
        gradients["second"][7] = torch.nan
    sums: dict[str, Tensor] = {}
    text = said(lambda: sums.update(compressor.reduce(gradients)))
    found = {"said": text, "skipped": compressor.report().skipped}
    found |= {name: bool(tensor.isfinite().all()) for name, tensor in sums.items()}
    after = compressor.reduce({"first": gradients["first"], "second": torch.ones(50, device=device)})
    compressor.close()
    return found | {"after": after["second"].tolist() == [1.0] * 50}


def disagreement(device: torch.device) -> list[str]:
    """Rank 0 asks for something else than the other ranks. Afterwards a sum works."""
    lowp.set_kernel_policy("never")
    ours: tuple[dict[str, Any], ...] = ({"format": "int8"}, {"scale": "aps"}, {"reduction": "ring"}, {"chunk": 100})
    texts = []
    for settings in ours:
        asked = {"format": "e5m2", **(settings if dist.get_rank() == 0 else {})}
        texts.append(said(Compressor, {"weight": (8,)}, device=device, **asked))
    texts.append(said(lowp.all_reduce, torch.ones(10 + (dist.get_rank() == 0), device=device), "e5m2"))
    numbers = torch.ones(10, device=device)
    lowp.all_reduce(numbers, "e5m2")
    return [*texts, str(numbers.tolist() == [dist.get_world_size()] * 10)]


def killed(device: torch.device, victim: int, how: str) -> dict[str, Any]:
    """One rank is killed between two steps; the others tell what they saw."""
    lowp.set_kernel_policy("never")
    if how == "ddp":
        ddp = DistributedDataParallel(model().to(device), bucket_cap_mb=0.03)
        lowp.compress_gradients(ddp, "e5m2", scale="aps")
    began = time.monotonic()
    for step in range(1000):
        if step == 5 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            if how == "ddp":
                ddp(torch.ones(4, 96, device=device)).square().mean().backward()
            else:
                lowp.all_reduce(torch.ones(1000, device=device), "e5m2")
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            ranks = getattr(error, "ranks", None)
            return {"kind": type(error).__name__, "text": str(error), "ranks": ranks, "took": time.monotonic() - began}
    return {"kind": "nothing", "text": "", "ranks": None, "took": time.monotonic() - began}
