"""Studies for tests: tiny ones that are run, and directories that look as if one had been."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lowp.lab.settings import StudyPlan, plan_of_study
from lowp.lab.study import read_study
from lowp.lab.study_directory import StudyDirectory
from lowp.training.json_lines import JsonLines
from lowp.training.rundir import RunDirectory
from lowp.training.toml import to_toml

TESTS = Path(__file__).parents[1]

# 4 steps of a tiny model
TINY = """
base = "fp32"
[set]
epochs = 1
batch = 32
threads = 1
device = "cpu"
data = { limit = 128 }
model = { options = { hidden = [4] } }
log = { every = 2 }
"""


def write_study(folder: Path, body: str, head: str = "seeds = 2", name: str = "tiny") -> Path:
    """A study's file: top-level keys, the tiny run, and what follows."""
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n{head}\n{TINY}\n{body}\n')
    return path


def plan_of(path: Path) -> StudyPlan:
    return plan_of_study(read_study(path))


def start(*arguments: object, cwd: Path) -> subprocess.Popen:
    """`lowp ARGUMENTS`, in a process group of its own."""
    command = [sys.executable, "-m", "lowp", *map(str, arguments)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS / "lab")]),
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen, seconds: float = 280) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def pretend(path: Path, plan: StudyPlan, accuracy: Any, health: bool = False) -> None:
    """A study's directory as `lowp ablate` leaves it. `accuracy(setting, seed)` is a run's figure, or the state that it ended
    in."""
    with StudyDirectory.open(path, plan, resume=False) as directory:
        for run in plan.runs:
            figure = accuracy(run.setting.name, run.seed)
            pretend_run(directory.of(run), to_toml(run.recipe), figure, health=health and run.seed == plan.study.seeds[0])


def pretend_run(
    path: Path, recipe: str, figure: float | str, share: float = 0.25, epochs: int = 3, health: bool = False
) -> None:
    with RunDirectory.create(path, recipe, {"time": "2026-11-15T17:00:00+00:00"}, resume=False) as directory:
        lines = JsonLines(directory.metrics)
        for record in metrics(figure, share, epochs):
            lines.write(record)
        lines.close()
        if health:
            directory.health.write_text("".join(json.dumps(record) + "\n" for record in health_records()))
        state, message = ("finished", "") if isinstance(figure, float) else (figure, f"{figure} in step 40")
        directory.set_status(state=state, step=40 * epochs, epoch=float(epochs), message=message)


def metrics(figure: float | str, share: float, epochs: int) -> list[dict[str, Any]]:
    value = figure if isinstance(figure, float) else 0.1
    found: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        step = 40 * epoch
        sent = {"bytes_sent": int(400_000 * share) * step, "bytes_of_fp32": 400_000 * step}
        where = {"step": step, "epoch": float(epoch), "loss": 2.0 - value * epoch / epochs}
        times = {"input": 0.2, "compute": 10.0, "exchange": 4.0, "update": 1.0}
        train = {
            "kind": "train",
            "lr": 0.1,
            "accuracy": value,
            "samples_per_second": 1e4,
            "seconds": 0.02 * step,
            "times_ms": times,
        }
        found += [train | where | sent, {"kind": "test", "accuracy": value * (epoch + 3) / (epochs + 3)} | where]
    if isinstance(figure, float):
        memory = {"weights": 400_000, "gradients": 400_000, "states": 400_000}
        machine = {"ranks": 1, "virtual_ranks": 8, "device": "cpu", "parameters": 100_000, "step_ms": 15.2}
        end = {
            "accuracy": value,
            "best_accuracy": value,
            "memory": memory,
            "memory_bytes": 1_200_000,
            "bytes_per_parameter": 12.0,
        }
        found.append(
            found[-1] | sent | {"kind": "end", "seconds": 2.4, "samples_per_second": 1e4, "times_ms": times} | machine | end
        )
    else:
        where = {"layer": "layers.2", "rank": 3}
        found.append({"kind": "event", "step": 40, "message": f"{figure} in step 40", **where})
    return found


def health_records() -> list[dict[str, Any]]:
    """Of two layers, three roles and three steps."""
    return [
        {
            "step": step, "layer": layer, "role": role, "format": "e5m2", "elements": 512, "sampled": 512,
            "underflow": 0.01 * step / 40, "overflow": 0.0, "zeros": 0.1, "nonfinite": 0,
            "sqnr_db": 20.0 + place, "largest": 2.0**place, "smallest": 2.0**-20,
            "exponents": {str(exponent - place): 2 * (exponent + 21) for exponent in range(-20, 2)},
        }
        | ({"lost_updates": 0.2, "unchanged": 0.1} if role == "updates" else {})
        for step in (40, 80, 120)
        for layer in ("layers.0", "layers.2")
        for place, role in enumerate(("weights", "gradients", "updates", "activations"))
    ]  # fmt: skip
