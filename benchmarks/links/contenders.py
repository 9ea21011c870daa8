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
FOUR_BITS, ONE_SHOT = "lowp e2m1fn local", " one_shot"
EIGHT_BITS = (FLAT, "lowp e4m3fn local", "lowp e4m3fn local" + ONE_SHOT)


@dataclass(frozen=True)
class Collective:
    """`call` reduces a tensor in place, over all ranks. `codec` says what it should put on the wire."""

    call: Callable[[Tensor], object]
    bits: float  # an element on the wire, for the estimate of the time
    averages: bool = False  # instead of summing
    codec: tuple[str, str] | None = None  # format and scale


def fp32(x: Tensor) -> None:
    dist.all_reduce(x)


def fp16_hook(x: Tensor) -> None:
    """torch's own function: of a bucket it wants nothing but the buffer."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    fp16_compress_hook(dist.group.WORLD, SimpleNamespace(buffer=lambda: x)).wait()


def _lowp(fmt: str, scale: str, reduction: str = "two_shot") -> Callable[[Tensor], object]:
    def call(x: Tensor) -> object:
        import lowp

        return lowp.all_reduce(x, fmt, scale=scale, reduction=reduction)

    return call


COLLECTIVES: dict[str, Collective] = {
    BASE: Collective(fp32, 32),
    HALF: Collective(fp16_hook, 16, averages=True),
    FLAT: Collective(_lowp("e5m2", "aps"), 8, codec=("e5m2", "aps")),
    "lowp e4m3fn local": Collective(_lowp("e4m3fn", "local"), 8, codec=("e4m3fn", "local")),
    FOUR_BITS: Collective(_lowp("e2m1fn", "local"), 4, codec=("e2m1fn", "local")),
    EIGHT_BITS[2]: Collective(_lowp("e4m3fn", "local", "one_shot"), 8, codec=("e4m3fn", "local")),
    FOUR_BITS + ONE_SHOT: Collective(_lowp("e2m1fn", "local", "one_shot"), 4, codec=("e2m1fn", "local")),
    AUTO: Collective(_lowp("e5m2", "aps", "auto"), 8),
    HIERARCHICAL: Collective(_lowp("e5m2", "aps", "hierarchical(2)"), 8),
}
NEEDS_NODES = (HIERARCHICAL,)  # run only where a node has several ranks


def expected_bytes(name: str, elements: int, ranks: int) -> float | None:
    """What each rank sends: one shard to every other rank, twice. Whole rings and two shots agree on this."""
    contender, shard = COLLECTIVES[name], -(-elements // ranks)
    if name in (BASE, HALF):
        payload = shard * contender.bits / 8
    elif contender.codec is not None:
        from lowp.wire.codec import codec_of

        fmt, scale = contender.codec
        if name.endswith(ONE_SHOT):
            return (ranks - 1) * codec_of(fmt, scale=scale).wire_bytes(elements)
        payload = codec_of(fmt, scale=scale).wire_bytes(shard)
    else:
        return None
    return 2 * (ranks - 1) * payload


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
    FOUR_BITS: Hook(_lowp_hook("e2m1fn", "local"), 4, _lowp_remarks),
    AUTO: Hook(_lowp_hook("e5m2", "aps", "auto"), 8, _lowp_remarks),
}
