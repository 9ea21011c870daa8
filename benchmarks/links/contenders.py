"""Who runs: the collectives, and the hooks of a DDP step, each by name. lowp is imported when one of its contenders runs."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

BASE, HALF, AUTO = "fp32", "fp16 hook", "lowp e5m2 auto"
FLAT, HIERARCHICAL = "lowp e5m2 aps", "lowp e5m2 hierarchical"
ONE_SHOT = " one_shot"
EIGHT_BITS = (FLAT, "lowp e4m3fn local", "lowp e4m3fn local" + ONE_SHOT)
FOUR_BITS = tuple(
    f"lowp {name}{reduction}"
    for reduction in ("", ONE_SHOT)
    for name in ("e2m1fn local", "e2m1fn block:32", "mxfp4 local", "nvfp4 local")
)
ADAPTIVE = "lowp adaptive:4.4 local"  # which has scales of its own
BITS = {
    "adaptive:4.4": 4.4,
    "e5m2": 8,
    "e4m3fn": 8,
    "e2m1fn": 4.25,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}  # an element, for the estimate of the time


@dataclass(frozen=True)
class Collective:
    """`call` reduces a tensor in place, over all ranks, and returns lowp's report, if it is lowp's."""

    call: Callable[[Tensor], object]
    bits: float  # an element on the wire, for the estimate of the time
    averages: bool = False  # instead of summing


def fp32(x: Tensor) -> None:
    dist.all_reduce(x)


def _torch_hook(name: str) -> Callable[[Tensor], None]:
    """torch's own function: of a bucket it wants nothing but the buffer."""

    def call(x: Tensor) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        getattr(default_hooks, name)(dist.group.WORLD, SimpleNamespace(buffer=lambda: x)).wait()

    return call


def _lowp(fmt: str, scale: str, reduction: str = "two_shot") -> Collective:
    def call(x: Tensor) -> object:
        import lowp

        return lowp.all_reduce(x, fmt, scale=scale, reduction=reduction)

    return Collective(call, BITS[fmt])


def _named(name: str) -> Collective:
    """`lowp <format> <scale>[ one_shot]`."""
    _, fmt, scale, *reduction = name.split()
    return _lowp(fmt, scale, *reduction)


COLLECTIVES: dict[str, Collective] = {
    BASE: Collective(fp32, 32),
    HALF: Collective(_torch_hook("fp16_compress_hook"), 16, averages=True),
    "bf16 hook": Collective(_torch_hook("bf16_compress_hook"), 16, averages=True),
    **{name: _named(name) for name in (*EIGHT_BITS, *FOUR_BITS, ADAPTIVE)},
    AUTO: _lowp("e5m2", "aps", "auto"),
    HIERARCHICAL: _lowp("e5m2", "aps", "hierarchical(2)"),
}
NEEDS_NODES = (HIERARCHICAL,)  # run only where a node has several ranks
QUICK = (BASE, HALF, *EIGHT_BITS[:2], *FOUR_BITS[1:4], ADAPTIVE)  # with --quick: scales as by default


def expected_bytes(name: str, elements: int, ranks: int, report: object) -> float | None:
    """What each rank sends: what lowp counted, or for torch one shard to every other rank, twice."""
    if not name.startswith("lowp"):
        return 2 * (ranks - 1) * -(-elements // ranks) * COLLECTIVES[name].bits / 8
    return None if name == AUTO else float(report.bytes_sent)


@dataclass(frozen=True)
class Hook:
    """`register` sets a DDP model up; what it returns is asked for `remarks` when all is done."""

    register: Callable[[DistributedDataParallel], object]
    bits: float
    remarks: Callable[[object], str] = lambda state: ""


def _plain(ddp: DistributedDataParallel) -> None:
    pass


def _torch_fp16(ddp: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)


def _power_sgd(ddp: DistributedDataParallel) -> object:
    """Rank 1, the strongest compression that it has; it starts at the third step, the earliest that it allows.

    Its hook starts further collectives from callbacks, which gloo runs in any order: with two buckets under way, ranks wait for
    each other's wrong one for ever. So a bucket waits here until the one before it is done.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    under_way: list[Future] = []

    def one_at_a_time(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
        while under_way:
            under_way.pop().wait()
        under_way.append(powerSGD_hook(state, bucket))
        return under_way[0]

    state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, one_at_a_time)
    return state


def _power_sgd_remarks(state: object) -> str:
    rate, _, _ = state.compression_stats()
    return f"sends {rate:.0f} times fewer elements than fp32: a rank-1 approximation of each matrix, not a rounded sum"


def _lowp_hook(fmt: str, scale: str, reduction: str = "two_shot") -> Callable[[DistributedDataParallel], object]:
    def register(ddp: DistributedDataParallel) -> object:
        import lowp

        return lowp.compress_gradients(ddp, fmt, scale=scale, reduction=reduction)

    return register


def _lowp_remarks(handle: object) -> str:
    """The numbers of its report, whatever it counts."""
    report = handle.report()
    fields = vars(report) if hasattr(report, "__dict__") else {name: getattr(report, name) for name in report.__slots__}
    numbers = {name: value for name, value in fields.items() if isinstance(value, int | float | str)}
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )


HOOKS: dict[str, Hook] = {
    BASE: Hook(_plain, 32),
    HALF: Hook(_torch_fp16, 16),
    "PowerSGD, rank 1": Hook(_power_sgd, 1, _power_sgd_remarks),
    FLAT: Hook(_lowp_hook("e5m2", "aps"), 8, _lowp_remarks),
    FOUR_BITS[1]: Hook(_lowp_hook("e2m1fn", "block:32"), 4.25, _lowp_remarks),
    AUTO: Hook(_lowp_hook("e5m2", "aps", "auto"), 8, _lowp_remarks),
}
