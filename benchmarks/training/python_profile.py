"""Where a step's time goes in Python: cProfile around a whole run of lowp, and around the bare loop.

Each side runs twice, the second time longer: what the longer run took more is steps, and all that happens once a run (reading
data, building kernels, saving) has gone. The profiler adds about as much to a call of Python as a short call takes, so its
figures are for comparing lines, not for adding up to a step. Own time of a function is without the functions it calls; of a
built-in one it is the work itself. Threads other than the main one do not show, only that it waits for them.
"""

import cProfile
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from benchmarks.harness import free_port
from benchmarks.training import bare
from benchmarks.training.cases import Case
from benchmarks.training.segments import world_of

from lowp.training.run import run

LISTED = 25

Counts = dict[tuple[str, int, str], tuple[int, float, float]]  # (file, line, name): calls, own seconds, seconds with callees


def profiled(case: Case, ranks: int, device: str, steps: int, data: Path | None) -> dict[str, Any]:
    """Rank 0's functions on both sides, those with the most own time first."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, ranks, device, steps, data, Path(folder), free_port())
        torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        return json.loads((Path(folder) / "profile.json").read_text())


def _rank(rank: int, case: Case, ranks: int, device: str, steps: int, data: Path | None, folder: Path, port: int) -> None:
    with world_of(rank, ranks, device, port) as world:
        in_epoch = sum(stretch.steps for stretch in bare.train(case, 1, world, data))
        more = max(1, round(steps / in_epoch))

        def lowp(epochs: int) -> None:
            recipe = case.recipe(epochs=epochs, ranks=ranks, device=device)
            run(recipe, folder / f"run-{epochs}", data=data, quiet=True, world=world)

        sides: dict[str, Callable[[int], Any]] = {"lowp": lowp, "bare": lambda epochs: bare.train(case, epochs, world, data)}
        found = {}
        for side, train in sides.items():
            short, long = (_counts(train, epochs) for epochs in (1, 1 + more))
            found[side] = _functions(short, long, more * in_epoch)
        if world.first:
            (folder / "profile.json").write_text(json.dumps({"steps": more * in_epoch, "sides": found}))


def _counts(train: Callable[[int], Any], epochs: int) -> Counts:
    profile = cProfile.Profile()
    with redirect_stdout(io.StringIO()):
        profile.runcall(train, epochs)
    profile.create_stats()
    return {function: (calls, own, whole) for function, (_, calls, own, whole, _) in profile.stats.items()}


def _functions(short: Counts, long: Counts, steps: int) -> list[dict[str, Any]]:
    rows = []
    for function, numbers in long.items():
        before = short.get(function, (0, 0.0, 0.0))
        calls, own, with_callees = (after - other for after, other in zip(numbers, before, strict=True))
        if calls > 0:
            file, line, name = function
            where = name if file == "~" else f"{_short(file)}:{line} {name}"
            each = {"calls": calls / steps, "own_us": 1e6 * own / steps, "us": 1e6 * with_callees / steps}
            rows.append({"function": where, "ours": "/lowp/" in file} | each)
    return sorted(rows, key=lambda row: -row["own_us"])


def _short(file: str) -> str:
    """From the package on."""
    parts = Path(file).parts
    starts = [place for place, part in enumerate(parts) if part in ("lowp", "torch", "benchmarks")]
    return "/".join(parts[starts[-1] :] if starts else parts[-2:])
