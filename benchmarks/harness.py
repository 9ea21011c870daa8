"""What all benchmarks share: the machine and the versions, contenders that take turns, tables, and files of results.

A machine that others use too changes its speed from second to second. So contenders run in turns, a figure of one is compared
with the figure of another in the same round, and the median of these ratios counts.
"""

import fcntl
import json
import math
import os
import platform
import re
import shlex
import socket
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "numpy", "ml_dtypes", "gfloat", "qtorch", "torchvision", "transformers")

# Student's t for 95 %, by degrees of freedom from 1 on
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

Rounds = dict[str, list[float]]  # figures by contender, one a round


def machine_name(device: str) -> str:
    """The GPU's name, or the processor's with the number of them."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    names = _cpuinfo("model name")
    return f"{names[0]} x{len(names)}" if names else platform.processor() or platform.machine()


def _cpuinfo(key: str) -> list[str]:
    """What /proc/cpuinfo says of each processor; nothing where there is no such file."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return [line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key]


def _generation() -> dict[str, str]:
    """Family and model: virtual machines give processors of several generations the same name."""
    found = [*_cpuinfo("cpu family")[:1], *_cpuinfo("model")[:1]]
    return {"processor": f"family {found[0]}, model {found[1]}"} if len(found) == 2 else {}


def facts_of(device: str, threads: int | None = None) -> dict[str, Any]:
    """The machine, the versions and the command line: the head of every file of results."""
    import torch

    import lowp

    versions = {name: _version(name) for name in PACKAGES}
    return {
        "machine": machine_name(device),
        "device": device,
        "threads": torch.get_num_threads() if threads is None else threads,
        "processors": os.cpu_count() or 1,
        **_generation(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lowp": lowp.__version__,
        "command": shlex.join(["python", "-m", *_words()]),
    } | {name: version for name, version in versions.items() if version}


def _words() -> list[str]:
    """The command line after `python -m`, whether `python -m benchmarks` started the benchmark or its module was run."""
    first, *options = sys.argv
    return [*first.split(), *options] if first.startswith("benchmarks ") else ["benchmarks", Path(first).stem, *options]


def take_turns(contenders: Iterable[str], rounds: int, measure: Callable[[str], float]) -> Rounds:
    """Measure each contender once a round, forwards in one round and backwards in the next."""
    names = list(contenders)
    found: Rounds = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(measure(name))
    return found


@contextmanager
def alone() -> Iterator[None]:
    """Within it, no other benchmark measures that was started with the same file in the variable LOWP_TURNS.

    So that processes may compile beside each other and measure one after the other.
    """
    path = os.environ.get("LOWP_TURNS")
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ratio(figures: Sequence[float], base: Sequence[float]) -> float:
    """The median of `figures` over `base`, round by round."""
    return statistics.median(one / other for one, other in zip(figures, base, strict=True))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median lies, for 95 % (by their ranks: nothing is assumed of how they are distributed)."""
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[low], ordered[n - 1 - low]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval (NaN for one value)."""
    n = len(values)
    if n < 2:
        return statistics.fmean(values) if values else math.nan, math.nan
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.45 / (n - 1)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n)


def heading(title: str, facts: Mapping[str, Any]) -> list[str]:
    lines = [f"# {facts['machine']}: {title}", ""]
    return lines + [f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in facts.items()]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def file_stem(machine: str) -> str:
    """A machine's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower().replace("(r)", "")).strip("-")


def write(folder: Path, name: str, facts: Mapping[str, Any], content: Mapping[str, Any], lines: Sequence[str]) -> list[Path]:
    """`<machine>-<name>.json` and `.md`; without a name `<machine>.json` and `.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(filter(None, (file_stem(facts["machine"]), name)))
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps({"facts": dict(facts)} | dict(content), indent=1) + "\n")
    paths[1].write_text("\n".join(lines) + "\n")
    return paths


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
