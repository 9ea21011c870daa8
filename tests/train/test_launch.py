"""Starting: what is refused before a process starts, Ctrl-C at every moment, threads, and ranks from Python."""

import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from lowp.training import launch, run
from lowp.training.divergence import Diverged
from lowp.training.launch import RanksFailed
from lowp.training.reading import read_recipe
from lowp.training.rundir import RunDirectory, RunError
from lowp.training.world import threads_of_a_rank
from train import training
from train.training import SOURCE, TESTS, arguments, ranks_of, until

SMALL = ["epochs=1", "data.limit=192", "batch=48", "model.options.hidden=[12]", "device=cpu"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with training.server(tmp_path_factory.mktemp("processes")) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_goes_on(server):
    yield
    server.clear()


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(threads)


# Refused before a process starts.


def interpreters_log(folder: Path) -> Path:
    """Every Python that finds this folder on its path writes a line into the file."""
    (folder / "sitecustomize.py").write_text(f"open({str(folder / 'started')!r}, 'a').write('one\\n')\n")
    return folder / "started"


def test_a_directory_is_refused_before_processes_start(server, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("seed = 1\n")
    started = interpreters_log(tmp_path)
    words = arguments("fp32", tmp_path / "run", "--ranks", "2")
    said = server.run(words, code=2, PYTHONPATH=f"{tmp_path}:{SOURCE}:{TESTS}")
    assert said.splitlines() == [
        f"lowp: {tmp_path}/run holds a run already: go on with it by --resume, or choose another --out"
    ]
    assert not started.exists()


# Ctrl-C.


def interrupted(process, line: str = "lowp: interrupted") -> None:
    """One line, exit code 130, and nobody left of its session."""
    assert process.wait() == 130, process.said
    assert process.said.splitlines() == [line]


def test_ctrl_c_while_torch_is_imported(server, tmp_path):
    process = server.interpreter(arguments("fp32", tmp_path / "run"))
    until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send(signal.SIGINT)
    interrupted(process)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moment", ["just started", "importing"])
def test_ctrl_c_while_ranks_start(moment, server, tmp_path):
    """Their Python may not have got to its first line yet."""
    process = server.start(arguments("fp32", tmp_path / "run", "--ranks", "2"), PYTHONPATH=f"{SOURCE}:{TESTS}")
    ranks = until(lambda: [rank for rank in ranks_of(process) if b"\0-c\0" in Path(f"/proc/{rank}/cmdline").read_bytes()])
    if moment == "importing":
        until(lambda: "libtorch" in Path(f"/proc/{ranks[0]}/maps").read_text())
    process.send(signal.SIGINT)
    interrupted(process)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def never_ending(shape, classes):
    """A model whose first step takes as long as the test, as if it built kernels; it says that it has begun."""

    class Waiting(torch.nn.Flatten):
        def forward(self, x):
            Path(os.environ["LOWP_TEST_BEGUN"]).touch()
            time.sleep(100)
            return super().forward(x)

    return torch.nn.Sequential(Waiting(), torch.nn.Linear(math.prod(shape), classes))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_the_first_step(ranks, server, tmp_path):
    """There is nothing to save: it is not waited for."""
    words = arguments("fp32", tmp_path / "run", "--ranks", str(ranks), "--quiet", model__name="train.test_launch:never_ending")
    begun = tmp_path / "begun"
    process = server.start(words, LOWP_TEST_BEGUN=str(begun), PYTHONPATH=f"{SOURCE}:{TESTS}")
    until(begun.exists)
    process.send(signal.SIGINT)
    interrupted(process, f"lowp: interrupted; go on with: lowp train {tmp_path}/run --resume")


@pytest.mark.slow
def test_ctrl_c_twice_ends_ranks_that_do_not_stop(server, tmp_path):
    """Once asks them to finish their step; a rank that hangs in it does not."""
    words = arguments("fp32", tmp_path / "run", "--ranks", "2", "--quiet", epochs=300, log__every=1)
    process = server.start(words, PYTHONPATH=f"{SOURCE}:{TESTS}")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send(signal.SIGINT)
    interrupted(process, f"lowp: interrupted; go on with: lowp train {tmp_path}/run --resume")
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


# Threads.


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_are_utf8_whatever_the_locale_is(ranks, tmp_path):
    """The recipe that ranks read, and the one that a resume reads."""
    recipe, keys = tmp_path / "mine.toml", '\ndata.limit = 192\nmodel.options.hidden = [12]\ndevice = "cpu"\n'
    recipe.write_text(f'description = "Größe"\nbatch = 48\nepochs = 1\nthreads = 0{keys}', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONWARNDEFAULTENCODING": "1"}
    command = [sys.executable, "-m", "lowp", "train", str(recipe), "--ranks", str(ranks), "--out", str(tmp_path / "run")]
    for more in ([], ["--resume"]):
        environment = training._environment() | ascii_only
        done = subprocess.run([*command, *more], env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        ours = [line for line in done.stderr.splitlines() if b"EncodingWarning" in line and b"src/lowp" in line]
        assert not ours
    assert tomllib.loads((tmp_path / "run/recipe.toml").read_text(encoding="utf-8"))["description"] == "Größe"


def test_threads_of_a_rank(monkeypatch):
    """The recipe's, else OMP_NUM_THREADS, else the cores divided by the ranks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert [threads_of_a_rank(0, ranks) for ranks in (1, 4, 100)] == [12, 3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert [threads_of_a_rank(recipe, 4) for recipe in (0, 7)] == [5, 7]
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match=f"OMP_NUM_THREADS is '{wrong}', not a number of threads"):
            threads_of_a_rank(0, 1)


def test_one_process_honours_omp_num_threads(server, tmp_path):
    server.run(arguments("fp32", tmp_path / "run", threads=0), OMP_NUM_THREADS="3")
    assert tomllib.loads((tmp_path / "run/recipe.toml").read_text())["threads"] == 3


def test_a_resumed_run_keeps_its_threads(tmp_path, monkeypatch):
    """They are in its recipe.toml; what the environment says now does not count, what the recipe says does."""
    recipe, seen, train = read_recipe("fp32", SMALL), [], run._TrainingRun.train
    monkeypatch.setattr(run._TrainingRun, "train", lambda self: seen.append(torch.get_num_threads()) or train(self))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run.run(recipe, tmp_path / "run", quiet=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run.run(recipe, tmp_path / "run", quiet=True, resume=True)
    run.run(recipe.model_copy(update={"threads": 2}), tmp_path / "run", quiet=True, resume=True)
    assert seen == [3, 3, 2]


# Ranks from Python.

PROGRAM = """
import os, signal, sys
from pathlib import Path
from lowp.training.reading import read_recipe
from lowp.training.run import run
before = dict(os.environ), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
end = run(read_recipe("fp32", sys.argv[2:]), Path(sys.argv[1]), quiet=True)
assert (dict(os.environ), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]) == before
print(end["kind"], end["ranks"], os.listdir(sys.argv[1]))
"""


def test_run_starts_the_recipes_ranks(tmp_path):
    """From a script, which lies beside its model, and is run from somewhere else."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "program.py").write_text(PROGRAM)
    model = (
        "from torch import nn\n\ndef model(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(196, classes))\n"
    )
    (tmp_path / "script" / "beside.py").write_text(model)
    command = [
        sys.executable,
        str(tmp_path / "script" / "program.py"),
        str(tmp_path / "run"),
        "ranks=2",
        "model.name=beside:model",
    ]
    command += [change for change in SMALL if not change.startswith("model")]
    environment = training._environment() | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("end 2 "), done.stdout
    assert tomllib.loads((tmp_path / "run/recipe.toml").read_text())["ranks"] == 2


def test_what_ranks_came_to(tmp_path, monkeypatch):
    recipe = read_recipe("fp32", [*SMALL, "ranks=2"])
    RunDirectory.create(tmp_path / "old", "", {}, resume=False).close()
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(RunError, match="holds a run already"):
        run.run(recipe, tmp_path / "old")

    def ends(code, **status):
        def ended(*_, **__):
            with RunDirectory.create(tmp_path / f"run-{code}", "", {}, resume=True) as directory:
                directory.set_status(**status)
            return code

        monkeypatch.setattr(launch, "launch", ended)
        return run.run(recipe, tmp_path / f"run-{code}")

    assert ends(143, state="stopped", step=7) == {"kind": "stopped", "step": 7, "signal": "SIGTERM"}
    with pytest.raises(Diverged, match="in step 3"):
        ends(3, state="diverged", message="diverged in step 3")
    with pytest.raises(RanksFailed, match="exit code 2: ValueError: no"):
        ends(2, state="failed", message="ValueError: no")
