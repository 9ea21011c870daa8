"""Every script of examples/, started as examples/README.md says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wire.ranks import free_port

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def start(tmp_path, *command: str, folder: Path = ROOT, seconds: float = 120) -> str:
    """What the command prints. Its processes end with it, and meet on this machine alone."""
    paths = [ROOT / "tests" / "examples_site", ROOT / "src"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": str(free_port()),
        "RAY_TMPDIR": "/tmp",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_two_ranks(tmp_path, script: str) -> str:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    return start(tmp_path, *launcher, f"examples/{script}")


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def is_compressed(text: str) -> bool:
    return 3.5 < number(r"([\d.]+) x fewer", text) < 4.1


def test_two_lines_are_the_difference():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_before.py", "ddp_after.py"))
    new = [line for line in after if line not in before]
    assert len(new) == 2
    assert [line for line in after if line not in new] == before


def test_ddp_before_and_after(tmp_path):
    loss = r"after training: ([\d.]+)"
    before, after = (number(loss, on_two_ranks(tmp_path, name)) for name in ("ddp_before.py", "ddp_after.py"))
    assert before < 0.2
    assert after != before  # something was rounded
    assert abs(after - before) < 0.02


def test_fsdp2(tmp_path):
    out = on_two_ranks(tmp_path, "fsdp2.py")
    assert number(r"-> ([\d.]+)", out) < 1.6
    assert is_compressed(out)


@pytest.mark.parametrize(
    ("script", "loss", "most"),
    [
        ("with_accelerate.py", r"last batch: ([\d.]+)", 0.5),
        ("with_transformers.py", r"mean loss of 40 steps: ([\d.]+)", 3.0),
    ],
)
def test_trainers_under_torchrun(tmp_path, script, loss, most):
    out = on_two_ranks(tmp_path, script)
    assert number(loss, out) < most
    assert is_compressed(out)


def test_lightning(tmp_path):
    out = start(tmp_path, sys.executable, "examples/with_lightning.py")
    assert number(r"last batch: ([\d.]+)", out) < 0.5
    assert is_compressed(out)


@pytest.mark.slow  # Ray takes half a minute to start, to notice a dead worker and to start again
def test_ray(tmp_path):
    out = start(tmp_path, sys.executable, "examples/with_ray.py", seconds=240)
    assert number(r"last batch: ([\d.]+)", out) < 0.8
    assert is_compressed(out)
    assert number(r"began at epoch (\d)", out) in {1, 2}  # Ray may not have taken note of the last checkpoint


def test_pure_fp16(tmp_path):
    out = start(tmp_path, sys.executable, "examples/pure_fp16.py")
    first, last = number(r"loss ([\d.]+)", out), number(r"-> ([\d.]+)", out)
    assert last < first / 2


def test_simulate_and_search(tmp_path):
    out = start(tmp_path, sys.executable, "examples/simulate_and_search.py")
    plain, narrow = number(r"fp32: +([\d.]+)", out), number(r"e5m2: +([\d.]+)", out)
    assert narrow != plain
    assert narrow < 1.3 * plain
    assert "transformer.h.0" in out


def test_a_recipe_of_ones_own(tmp_path):
    command = (sys.executable, "-m", "lowp", "train", "own_recipe.toml", "--ranks", "2", "--out", str(tmp_path / "run"))
    out = start(tmp_path, *command, folder=EXAMPLES)
    assert number(r"test accuracy +([\d.]+) %", out) > 90


def test_every_script_is_in_the_readme_and_is_tested():
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.toml")]:
        if path.name != "ruff.toml":
            assert f"[{path.name}]({path.name})" in readme
            assert path.name in tests or path.name == "own_recipe.py"
