"""Against collectives that were measured on shaped links, with the library's speeds of codecs and nothing fitted to them.

benchmarks/results/amd-epyc-x2-wire.json: gloo, 2 ranks, and 2 x 2 ranks on two nodes, at 200 Mbit/s and 1 Gbit/s. Ranks and the
kernel's network share two cores, so that on fast links the processor counts, and that of four ranks most.
"""

import json
import statistics
from pathlib import Path

import pytest

from lowp.predict.cluster import Cluster, Device, LinkLevel
from lowp.predict.prediction import predict_collective

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "amd-epyc-x2-wire.json"
RATES = {"200mbit": 25e6, "1gbit": 125e6}
HEADERS = 0.993  # of TCP, in frames of 9,000 bytes
MESSAGE = 3e-4  # seconds: a chunk's four messages cost 1 to 2.5 ms of this processor (docs/LOG.md)
WIRES = {
    "fp32": "fp32",
    "fp16 hook": "fp16",
    "lowp e5m2 hierarchical": "e5m2/local@hierarchical(2)",
}


def machine(row):
    network = LinkLevel("network", RATES[row["rate"]] * HEADERS, 2e-4, MESSAGE, shared=1 if row["ranks"] == 2 else 2)
    inside = LinkLevel("loopback", 3e9, 1e-4, MESSAGE, ranks=2)
    return Cluster("shaped", Device("EPYC", "cpu"), (network,) if row["ranks"] == 2 else (inside, network))


def wire(contender):
    if contender in WIRES:
        return WIRES[contender]
    _, name, *scale = contender.split()
    return name if "adaptive" in name else "/".join([name, *scale])


ROWS = json.loads(RESULTS.read_text())["rows"]


def error(row):
    times = predict_collective(row["elements"], machine(row), wire(row["contender"]), row["ranks"])
    return times.step / statistics.median(row["seconds"]) - 1


def test_measured_collectives():
    found = {(row["link"], row["contender"]): error(row) for row in ROWS}
    assert len(found) == 24
    assert statistics.median(abs(each) for each in found.values()) <= 0.03
    assert max(abs(each) for each in found.values()) <= 0.1


@pytest.mark.parametrize("link", sorted({row["link"] for row in ROWS}))
def test_the_order_of_contenders(link):
    """What is faster by more than a tenth is predicted to be faster."""
    rows = [row for row in ROWS if row["link"] == link]
    measured = {row["contender"]: statistics.median(row["seconds"]) for row in rows}
    predicted = {row["contender"]: (1 + error(row)) * measured[row["contender"]] for row in rows}
    for one in measured:
        for other in measured:
            if measured[one] < 0.9 * measured[other]:
                assert predicted[one] < predicted[other], (one, other)


def test_one_rank_needs_nothing():
    assert predict_collective(1 << 20, "ethernet-1g", "e5m2", 1).step == 0
