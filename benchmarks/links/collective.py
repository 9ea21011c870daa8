"""All-reduce of one size: contenders take turns, so that what slows the computer down meets all of them."""

import torch
import torch.distributed as dist
from benchmarks.links.clock import Clock, summarize, tried
from benchmarks.links.contenders import COLLECTIVES, expected_bytes
from torch import Tensor


def collectives(case: dict, clock: Clock, failures: dict[str, str]) -> list[dict]:
    """All-reduce of one size by each contender, `rounds` times in turn, after one call to warm up and to see the error."""
    elements, ranks = case["elements"], dist.get_world_size()
    generator = torch.Generator(clock.device).manual_seed(dist.get_rank())
    gradient = torch.randn(elements, generator=generator, device=clock.device).mul_(1e-3)
    exact, x = gradient.clone(), gradient.clone()
    dist.all_reduce(exact)
    errors, reports = {}, {}
    for name in case["contenders"]:
        contender = COLLECTIVES[name]
        call = lambda name=name: reports.__setitem__(name, COLLECTIVES[name].call(x.copy_(gradient)))  # noqa: E731
        reason = failures.get(name) or tried(call)
        if reason:
            failures[name] = reason
            continue
        errors[name] = relative_error(x.mul_(ranks) if contender.averages else x, exact)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in errors}
    for _ in range(case["rounds"]):
        for name in errors:
            x.copy_(gradient)
            rounds[name].append(clock.measure(lambda name=name: COLLECTIVES[name].call(x)))
    rows = []
    for name, figures in summarize(rounds).items():
        wanted = expected_bytes(name, elements, ranks, reports[name]) if case["one_rank_a_node"] else None
        rows.append({"contender": name, "elements": elements, "expected_bytes": wanted, "error": errors[name]} | figures)
    return rows


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())
