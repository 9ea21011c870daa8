"""Which links to make, what to run on each, and how long it will take, roughly."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.links.bars import SIZE
from benchmarks.links.contenders import BASE, COLLECTIVES, FLAT, HALF, HIERARCHICAL, HOOKS, NEEDS_NODES, QUICK
from benchmarks.links.ddp_step import PARAMETERS, WARM_UP
from benchmarks.links.namespaces import LOOPBACK, Topology, bits_per_second, link

START_SECONDS = 25  # namespaces, the check of the rate, importing torch, joining
KERNEL_SECONDS = 3  # of the first calls of each of lowp's contenders
ELEMENT_SECONDS = 15e-9  # what the processors need for an element, for each rank that shares them
COMPUTE_SECONDS = 0.3  # of the model in a DDP step
LOOPBACK_BITS = 4e9


@dataclass(frozen=True)
class Job:
    """One network, and the cases that its ranks go through."""

    topology: Topology
    rate: str
    cases: tuple[dict, ...]

    @property
    def plan(self) -> dict:
        return {"interface": self.topology.interface, "device": "cpu", "cases": self.cases}

    def estimate(self) -> float:
        return START_SECONDS + sum(self._case_seconds(case) for case in self.cases)

    def _case_seconds(self, case: dict) -> float:
        table, rounds = (
            (COLLECTIVES, case["rounds"] + 1) if case["kind"] == "collective" else (HOOKS, WARM_UP + 2 * case["rounds"])
        )
        elements = case.get("elements", PARAMETERS)
        speed = LOOPBACK_BITS if self.rate == LOOPBACK else bits_per_second(self.rate)
        ranks = self.topology.ranks
        seconds = 0.0
        for name in case["contenders"]:
            wire = 2 * (ranks - 1) / ranks * elements * table[name].bits / speed
            seconds += rounds * (wire + ranks * elements * ELEMENT_SECONDS)
            seconds += KERNEL_SECONDS * name.startswith("lowp")
            seconds += case["rounds"] * 2 * COMPUTE_SECONDS * (case["kind"] == "ddp")
        return seconds


def jobs(options: argparse.Namespace) -> list[Job]:
    """Each rate with each number of ranks; the DDP step with the fewest ranks; 2 x 2 ranks where a link is shaped."""
    chosen = []
    for rate in options.rates:
        for ranks in options.ranks:
            topology = link(rate, ranks)
            cases = []
            if "collective" in options.sections:
                names = QUICK if options.quick else [name for name in COLLECTIVES if name not in NEEDS_NODES]
                cases += [_collective(names, 1 << size, topology, options) for size in options.sizes]
            if "ddp" in options.sections and ranks == min(options.ranks):
                cases.append({"kind": "ddp", "contenders": _only(HOOKS, options.only), "rounds": options.rounds})
            if cases:
                chosen.append(Job(topology, rate, tuple(cases)))
        if "nodes" in options.sections and rate != LOOPBACK:
            topology = Topology((rate, rate), ranks_per_node=2)
            elements = min(SIZE, 1 << max(options.sizes))
            case = _collective([BASE, HALF, FLAT, HIERARCHICAL], elements, topology, options)
            chosen.append(Job(topology, rate, (case,)))
    return chosen


def _collective(names: Iterable[str], elements: int, topology: Topology, options: argparse.Namespace) -> dict:
    return {
        "kind": "collective",
        "contenders": _only(names, options.only),
        "elements": elements,
        "rounds": options.rounds,
        "one_rank_a_node": topology.ranks_per_node == 1,
    }


def _only(names: Iterable[str], pattern: str | None) -> list[str]:
    """fp32 always runs: the others are compared with it."""
    return [name for name in names if name == BASE or pattern is None or re.search(pattern, name)]
