"""Runs are safe: killed, stopped, damaged, out of space or diverged, a run loses nothing, and ends as if nothing had been.

"As if nothing had been" is meant bit for bit: the last checkpoint and metrics.jsonl, but for times and for what is said about
the interruptions, are those of an uninterrupted run.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowp.training import checkpoint
from train import training
from train.training import OF_THE_RANKS, arguments, assert_same, ranks_of, status

OFTEN = {"checkpoints__every": 1, "log__every": 1}
LONG = OFTEN | {"epochs": 300, "test_every": 0, "learning_rate__kind": "constant"}  # until it is stopped


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with training.server(tmp_path_factory.mktemp("processes")) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_goes_on(server):
    yield
    server.clear()


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """A run on one rank that nothing happened to, with all of its checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    server.run(arguments("aps8", run, **OFTEN, checkpoints__keep=100))
    return run


@pytest.fixture(scope="module")
def whole_of_three(server, tmp_path_factory):
    """The same on three real ranks, with error feedback: they have states of their own."""
    run = tmp_path_factory.mktemp("whole") / "run"
    server.run_ranks(three(run), 3)
    return run


def three(run: Path, *more: str) -> list[str]:
    feedback = {"wire__scale": "local", "wire__error_feedback": "true"}
    return arguments("aps8", run, "--ranks", "3", *more, **OFTEN, **feedback, epochs=4)  # long enough to be killed in


def until(happened, seconds: float = training.DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


def saved(run: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*[0-9]"))


def up_to(whole: Path, step: int, copy: Path) -> Path:
    """The run as it was when it was killed after the checkpoint of `step`."""
    shutil.copytree(whole, copy)
    for number in saved(copy):
        if number > step:
            shutil.rmtree(copy / f"checkpoints/step-{number:08d}")
    return copy


# SIGKILL.


def test_killed_at_random_moments_on_one_rank(server, whole, tmp_path):
    run, chance = tmp_path / "run", random.Random(5)
    words = arguments("aps8", run, "--resume", **OFTEN, checkpoints__keep=100)
    for _ in range(4):
        process = server.start(words)
        time.sleep(chance.uniform(0.05, 0.6))
        process.kill()
    server.run(words)
    assert_same(run, whole)


def test_killed_while_a_checkpoint_is_written(server, whole, tmp_path):
    """As soon as an unfinished one is there. Nothing of it is left in the end."""
    run = tmp_path / "run"
    words = arguments("aps8", run, "--resume", **OFTEN, checkpoints__keep=100)
    for _ in range(3):
        process = server.start(words)
        while process.poll() is None and not list(run.glob("checkpoints/.step-*.partial-*")):
            pass
        process.kill()
    server.run(words)
    assert_same(run, whole)
    assert not list(run.glob("checkpoints/.*"))


def test_three_ranks_killed_all_and_one(server, whole_of_three, tmp_path):
    """Where one is killed, the others end by themselves; a launcher would not even wait for that."""
    run = tmp_path / "run"
    ranks = server.start_ranks(three(run), 3)
    until(lambda: 2 in saved(run))
    for rank in ranks:
        rank.kill()
    before = max(saved(run))  # which may be more than 2 by now; only what comes after it says that these ranks have met
    ranks = server.start_ranks(three(run, "--resume"), 3)
    until(lambda: max(saved(run)) > before)
    ranks[1].kill()
    assert [rank.wait(30) for rank in ranks] == [1, -signal.SIGKILL, 1], [rank.said for rank in ranks]
    survivors = ranks[0].said + ranks[2].said
    server.run_ranks(three(run, "--resume"), 3)
    assert_same(run, whole_of_three)
    assert "Traceback" not in survivors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_killed_many_times(seed, ranks, server, whole, whole_of_three, tmp_path):
    """Some of the ranks first, and the others, as a launcher does, a moment later."""
    run, chance = tmp_path / "run", random.Random(seed)
    alone = arguments("aps8", run, "--resume", **OFTEN, checkpoints__keep=100)
    words = alone if ranks == 1 else three(run, "--resume")
    for _ in range(chance.randrange(3, 8)):
        started = [server.start(words)] if ranks == 1 else server.start_ranks(words, ranks)
        time.sleep(chance.uniform(0, 1.5))
        for process in chance.sample(started, ranks):
            process.kill()
            time.sleep(chance.uniform(0, 0.2))
    server.run(words) if ranks == 1 else server.run_ranks(words, ranks)
    assert_same(run, whole if ranks == 1 else whole_of_three)


# Asked to stop.


def resume_command(said: str) -> list[str]:
    """What is to be typed, as it was printed; without the name of the program."""
    found = re.search(r"go on with: lowp (train .* --resume)$", said, re.MULTILINE)
    assert found, said
    return found[1].split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_after_its_step(number, server, tmp_path, whole):
    """Twice in a row; and the printed command finishes the run."""
    run = tmp_path / "run"
    words = arguments("aps8", run, **OFTEN, checkpoints__keep=100)
    for stop in (2, 5):
        process = server.start(words)
        until(lambda stop=stop: stop in saved(run))
        process.send(number)
        assert process.wait() == 128 + number, process.said
        step = status(run)["step"]
        assert status(run)["state"] == "stopped"
        assert f"stopped by {number.name} after step {step} of 12" in process.said
        assert max(saved(run)) == step
        words = resume_command(process.said)
    server.run(words)
    assert_same(run, whole)


def test_asked_twice_a_run_ends_at_once(server, tmp_path, whole):
    run = tmp_path / "run"
    process = server.start(arguments("aps8", run, **OFTEN, checkpoints__keep=100))
    until(lambda: 2 in saved(run))
    for _ in range(2):
        process.send(signal.SIGINT)
        time.sleep(0.001)
    assert process.wait() == 130, process.said
    assert "Traceback" not in process.said
    server.run(arguments("aps8", run, "--resume", **OFTEN, checkpoints__keep=100))
    assert_same(run, whole)


def test_one_of_three_ranks_is_asked(server, tmp_path, whole_of_three):
    """All of them stop, after the same step."""
    run = tmp_path / "run"
    ranks = server.start_ranks(three(run), 3)
    until(lambda: 2 in saved(run))
    ranks[2].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGTERM] * 3, [rank.said for rank in ranks]
    assert status(run)["state"] == "stopped"
    assert resume_command(ranks[0].said)[1] == str(run)
    server.run_ranks(three(run, "--resume"), 3)
    assert_same(run, whole_of_three)


# `--ranks`: the launcher. In fp32, so that ranks, which are new interpreters each time, need not build kernels.


@pytest.mark.timeout(240)
def test_a_rank_that_dies_is_started_again(server, tmp_path):
    """With --max-restarts 1 the run completes, and is the uninterrupted one (of virtual ranks: that is cheaper)."""
    changes = OFTEN | {"epochs": 10, "test_every": 0, "checkpoints__keep": 100}
    server.run(arguments("fp32", tmp_path / "whole", "--virtual-ranks", "2", **changes))
    process = server.interpreter(arguments("fp32", tmp_path / "run", "--ranks", "2", "--max-restarts", "1", **changes))
    until(lambda: 3 in saved(tmp_path / "run"))
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    assert process.wait() == 0, process.said
    assert "resumed at step" in process.said
    assert_same(tmp_path / "run", tmp_path / "whole", but=OF_THE_RANKS)


@pytest.mark.timeout(240)
def test_a_rank_that_dies_ends_the_run(server, tmp_path):
    """Without restarts. One line says which rank, and how to go on; nobody is left behind."""
    run = tmp_path / "run"
    process = server.interpreter(arguments("fp32", run, "--ranks", "2", **LONG))
    until(lambda: 3 in saved(run))
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait() not in (0, 3), process.said
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert "rank 1 was killed (SIGKILL)" in process.said
    assert "Traceback" not in process.said
    assert f"lowp train {run} --resume" in process.said
    reached = max(saved(run))
    server.start_ranks(arguments("fp32", run, "--resume", "--ranks", "2", **LONG), 2)
    until(lambda: max(saved(run)) > reached)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_launcher_is_asked_to_stop(number, server, tmp_path):
    """The exit code is the one that `lowp train --help` tells; SIGINT goes to all, as from a terminal."""
    run = tmp_path / "run"
    process = server.interpreter(arguments("fp32", run, "--ranks", "2", **LONG))
    until(lambda: 3 in saved(run))
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send(number)
    assert process.wait() == 128 + number, process.said
    assert status(run)["state"] == "stopped"
    assert resume_command(process.said)[1] == str(run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_launcher_alone_is_killed(server, tmp_path):
    """Its ranks must not train on, unseen, and keep the directory."""
    run = tmp_path / "run"
    process = server.interpreter(arguments("fp32", run, "--ranks", "2", **LONG))
    until(lambda: 3 in saved(run))
    ranks = ranks_of(process)
    os.kill(process.pid, signal.SIGKILL)
    try:
        until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=20)
    finally:
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)


# Checkpoints that must not be used.


def truncated(path: Path) -> None:
    file = path / checkpoint.TENSORS
    file.write_bytes(file.read_bytes()[:-100])


def flipped(path: Path) -> None:
    file = path / checkpoint.TENSORS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def without_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()


def foreign(path: Path) -> None:
    """One of another run, put in its place."""
    step, state = checkpoint.load(path, fingerprint=None)
    shutil.rmtree(path)
    checkpoint.save(path.parent, step, state, fingerprint="0" * 16, keep=100)


@pytest.mark.parametrize("damage", [truncated, flipped, without_manifest, foreign])
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(damage, server, whole, tmp_path):
    run = up_to(whole, 8, tmp_path / "run")
    damage(run / "checkpoints/step-00000008")
    said = server.run(arguments("aps8", run, "--resume", **OFTEN, checkpoints__keep=100))
    assert f"{run}/checkpoints/step-00000008" in said
    assert "resumed at step 7 of 12" in said
    assert_same(run, whole)


def content(run: Path) -> dict[str, bytes]:
    kept = ("checkpoints", "metrics.jsonl", "recipe.toml")
    return {
        str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file() and f.relative_to(run).parts[0] in kept
    }


def one_line(said: str) -> str:
    """What a user's mistake, or bad luck, is answered with."""
    (line,) = said.splitlines()
    assert line.startswith("lowp: ")
    return line


@pytest.mark.parametrize("how", ["damaged", "another recipe"])
def test_no_checkpoint_that_can_be_used(how, server, whole, tmp_path):
    run = up_to(whole, 3, tmp_path / "run")
    if how == "damaged":
        for step in saved(run):
            flipped(run / f"checkpoints/step-{step:08d}")
    before = content(run)
    seed = 1 if how == "another recipe" else 0
    line = one_line(server.run(arguments("aps8", run, "--resume", "--quiet", **OFTEN, seed=seed), code=2))
    assert "step-00000003" in line
    assert ("SHA-256" if how == "damaged" else "another run's") in line
    assert content(run) == before


# Places that cannot be written to.


@contextmanager
def small_disk(folder: Path, size: str = "400k"):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode
    if mounted != 0:
        pytest.skip("mounting a file system takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_disk_is_full(ranks, server, tmp_path):
    """One line, nothing lost; with space made, the run goes on."""
    words = ["--virtual-ranks", "2"]
    server.run(arguments("aps8", tmp_path / "whole", *words, **OFTEN, checkpoints__keep=100))
    with small_disk(tmp_path / "disk") as disk:
        run, ballast = disk / "run", disk / "ballast"
        ballast.write_bytes(bytes(150_000))
        words = words if ranks == 1 else ["--ranks", "2"]
        command = arguments("aps8", run, "--quiet", *words, **OFTEN, checkpoints__keep=100)
        said = server.run(command, code=2) if ranks == 1 else server.run_ranks(command, ranks, code=2)
        assert "No space left on device" in one_line(said)
        assert str(run) in said
        assert 0 < max(saved(run)) < 12
        ballast.unlink()
        more = [*command, "--resume", "--set", "checkpoints.keep=1"]
        server.run(more) if ranks == 1 else server.run_ranks(more, ranks)
        assert_same(run, tmp_path / "whole", but=OF_THE_RANKS)


def test_a_read_only_place(server, whole, tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        up_to(whole, 3, disk / "run")
        before = content(disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert "Read-only file system" in one_line(server.run(arguments("aps8", disk / "new", "--quiet"), code=2))
        line = one_line(server.run(arguments("aps8", disk / "run", "--resume", "--quiet", **OFTEN), code=2))
        assert "Read-only file system" in line
        assert content(disk / "run") == before


def test_a_directory_that_is_in_use(server, tmp_path):
    run = tmp_path / "run"
    first = server.start(arguments("aps8", run, **LONG))
    until(lambda: saved(run))
    line = one_line(server.run(["train", str(run), "--resume", "--quiet"], code=2))
    assert f"{run} is in use by process {first.pid}" in line
    assert first.poll() is None
    assert status(run)["state"] == "running"


def test_a_directory_that_is_no_run_and_one_that_is(server, whole, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    assert "is not a run" in one_line(server.run(arguments("aps8", tmp_path, "--quiet"), code=2))
    assert "is not a run" in one_line(server.run(arguments("aps8", tmp_path, "--resume", "--quiet"), code=2))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    before = content(whole)
    assert "--resume" in one_line(server.run(arguments("aps8", whole, "--quiet"), code=2))
    assert content(whole) == before


# Divergence.


def diverged(said: str, run: Path) -> str:
    """What is said of it: the same on the screen and in status.json, which calls the run diverged."""
    found = status(run)
    assert found["state"] == "diverged"
    assert found["message"] in said
    assert max(saved(run)) == found["step"]
    return found["message"]


@pytest.mark.parametrize("changes", [{}, {"optimizer__name": "torch:RMSprop"}, {"wire__format": "fp32"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learning_rate_that_is_much_too_high(ranks, changes, server, tmp_path):
    changes = {"optimizer__lr": 1e30, **changes}
    words = arguments("aps8", tmp_path / "run", "--ranks", str(ranks), "--quiet", **OFTEN, **changes)
    said = server.run(words, code=3) if ranks == 1 else server.run_ranks(words, 2, code=3)
    assert re.match(
        r"diverged in step \d+: the first layer whose output is not finite is '\d", diverged(said, tmp_path / "run")
    )


def sick(run: Path, *more: str, **changes) -> list[str]:
    """Saved before step 3 and then when it diverges: what is saved there is not what every run saves."""
    spoiled = {"model__name": "train.training:spoiled", "model__options": "{}", "checkpoints__every": 3, "log__every": 1}
    return arguments("aps8", run, *more, **spoiled, **changes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_and_the_step_are_named_and_the_state_before_is_saved(ranks, server, tmp_path):
    """Which a resumed run shows: once its cause is gone, the run ends as if it had never diverged. (The bytes of the step that
    failed were sent, and count.)"""
    sent = frozenset({"bytes_sent", "bytes_of_fp32"})
    train = server.run if ranks == 1 else lambda words, **options: server.run_ranks(words, ranks, **options)
    number = ("--ranks", str(ranks))
    train(sick(tmp_path / "whole", *number))
    said = train(sick(tmp_path / "run", *number), code=3, LOWP_TEST_SICK="5")
    message = diverged(said, tmp_path / "run")
    assert message.startswith("diverged in step 5: the first layer whose output is not finite is 'sick'")
    train(sick(tmp_path / "run", "--resume", *number))
    whole, run = ([r for r in training.records(tmp_path / n, sent) if r["kind"] != "event"] for n in ("whole", "run"))
    assert run == whole
    assert training.final_state(tmp_path / "run", sent) == training.final_state(tmp_path / "whole", sent)


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_the_data_of_one_rank(rank, server, tmp_path):
    """All stop, and say where it came in (Flatten is the first layer), though the other rank saw nothing."""
    run = tmp_path / "run"
    words = arguments("aps8", run, "--ranks", "2", **OFTEN, data__transform="train.training:spoiled_data")
    message = diverged(server.run_ranks(words, 2, code=3, LOWP_TEST_SICK_RANK=str(rank)), run)
    assert re.match("diverged in step 0: (the first layer whose output is not finite is '0'|.*input)", message)


def test_a_dynamic_loss_scale_is_exhausted(server, tmp_path):
    run = tmp_path / "run"
    words = arguments("mixed", run, epochs=20, test_every=0, data__transform="train.training:spoiled_data")
    message = diverged(server.run(words, code=3, LOWP_TEST_SICK_RANK="0"), run)
    assert re.match(r"diverged in step \d+: (the first layer whose output is not finite is '0'|.*input)", message)


def test_divergence_in_the_last_step(server, tmp_path):
    """There is no next step whose gradients would show it; yet a run whose weights are infinite has not finished."""
    run = tmp_path / "run"
    words = arguments("fp32", run, **OFTEN | {"epochs": 1, "data__limit": 48, "learning_rate__kind": "constant"})
    words += ["--set", "learning_rate.warmup=0", "--set", "optimizer.lr=1e38", "--set", "optimizer.momentum=0"]
    server.run([*words, "--set", "model.options.hidden=[]"], code=3)
    assert status(run)["state"] == "diverged"


# What `lowp runs` says of them.


def test_the_list_of_runs(server, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "good")
    server.run(arguments("aps8", tmp_path / "wild", optimizer__lr=1e30, **OFTEN), code=3)
    going = {name: server.start(arguments("aps8", tmp_path / name, **LONG)) for name in ("asked", "shot")}
    for name in going:
        until(lambda name=name: saved(tmp_path / name))
    going["asked"].send(signal.SIGTERM)
    going["asked"].wait()
    running = json.loads(server.run(["runs", "--root", str(tmp_path), "--json"]))
    going["shot"].kill()
    ended = json.loads(server.run(["runs", "--root", str(tmp_path), "--json"]))
    states = [{run["name"]: run["state"] for run in runs} for runs in (running, ended)]
    expected = {"asked": "stopped", "good": "finished", "shot": "running", "wild": "diverged"}
    assert states == [expected, expected | {"shot": "killed"}]
    assert all(state in server.run(["runs", "--root", str(tmp_path)]) for state in states[1].values())
