"""Checkpoints: exact, whole or not there, and refused when anything about them is wrong."""

import errno
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowp
from lowp.training import checkpoint
from lowp.training.checkpoint import CheckpointError, NoUsableCheckpoint, latest, load, pack, save, unpack
from lowp.training.stored_state import STORABLE
from lowp.wire.exchange import State
from lowp.wire.layer_tensors import Bounds, Residuals


def small(step):
    return {"weights": torch.full((3,), float(step)), "optimizer": {"state": {0: (step, 0.5)}}}


def same(one, other):
    """Equal in types, order of keys and bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy())
            == bytes(other.contiguous().reshape(-1).view(torch.uint8).numpy())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one, other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()  # nan is nan, and -0.0 is not 0.0
    return one == other


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# What comes back.


@pytest.mark.parametrize("dtype", sorted(STORABLE, key=str), ids=str)
def test_tensors_of_every_kind_come_back_bit_for_bit(dtype, tmp_path):
    bits = torch.randint(0, 256, (4, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    many = bits.bool() if dtype == torch.bool else bits.view(dtype)  # with the NaNs and subnormals among them
    state = {
        "whole": many,
        "across": many.transpose(0, 1),
        "every other": many[::2],
        "scalar": many[1, 1, 0],
        "empty": many[:0],
        "a view of the same memory": many[1:],
        "the same": many,
    }
    assert same(unpack(pack(state)), state)
    assert same(load(save(tmp_path, 1, state, fingerprint="f", keep=1), fingerprint="f"), (1, state))


def test_structure_comes_back_exactly(tmp_path):
    state = {
        "tuples": ((0.9, 0.999), (), ((),)),
        "lists": [[], [None, True, False, "text \u00e9 \U0001f600 \ud800 \n"]],
        "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1.0, 1e22],
        "integers": [0, -1, 2**63, -(2**63), 2**64, -(10**5000)],
        "keys": {0: "a", 1: {2: torch.ones(2)}, "1": torch.zeros(2), -3: 1, None: 2, 0.5: 3},
        "true": {True: 1},
        "marks": [{"$tensor": "x"}, {"$tuple": [1], "b": 2}, {"$": 1}, {"$dict": {"$int": 1}}],
        "slashes": {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a/b#2": torch.tensor(3)},
        "": {},
    }
    assert same(unpack(pack(state)), state)
    assert same(load(save(tmp_path, 2**40, state, fingerprint="f", keep=1), fingerprint=None), (2**40, state))
    for alone in (torch.ones(2), {"__metadata__": torch.ones(2)}, None, [], 3.5):
        assert same(unpack(pack(alone)), alone)


def test_what_comes_back_has_its_own_memory():
    shared = torch.zeros(4)
    back = unpack(pack([shared, shared[:2], nn.Parameter(shared)]))
    back[0].fill_(1)
    assert back[1].tolist() == [0, 0]
    assert back[2].tolist() == [0, 0, 0, 0]
    assert type(back[2]) is torch.Tensor
    assert same(unpack(pack(torch.tensor([1 + 2j], dtype=torch.complex64).conj())), torch.tensor([1 - 2j]))
    assert type(unpack(pack(OrderedDict(a=1)))) is dict


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.float64(1), r"a state cannot hold a numpy.float64: state\['a'\]\[1\]"),
        ({1, 2}, "a state cannot hold a builtins.set"),
        (torch.float32, "a state cannot hold a torch.dtype"),
        ({(1, 2): 3}, r"keys of a state are strings or numbers: state\['a'\]\[1\] has \(1, 2\)"),
        (torch.zeros(2, dtype=torch.complex128), r"safetensors cannot hold torch.complex128: state\['a'\]\[1\]"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu), "safetensors cannot hold torch.float8_e8m0fnu"),
        (torch.zeros(2, device="meta"), "only dense, whole tensors"),
        (torch.ones(2, 2).to_sparse(), "only dense, whole tensors"),
    ],
    ids=str,
)
def test_what_cannot_come_back_is_refused_by_its_path(value, reason, tmp_path):
    with pytest.raises(TypeError, match=reason):
        save(tmp_path / "checkpoints", 1, {"a": [0, value]}, fingerprint="f", keep=1)
    assert not (tmp_path / "checkpoints").exists()


def test_broken_packed_states_are_refused():
    packed = pack(small(1))
    for end in range(len(packed)):
        with pytest.raises(ValueError, match=r"too few|truncated|cannot be read"):
            unpack(packed[:end])
    without = pack({"a": 1}).replace(b'{"a": 1}', b'{"$x":1}')
    with pytest.raises(ValueError, match=r"\$x is unknown"):
        unpack(without)
    with pytest.raises(ValueError, match="the tensor 'a' is missing"):
        unpack(pack({"$": "a"}).replace(b'{"$dict": [["$", "a"]]}', b'{"$tensor":        "a"}'))


# Optimizers and their like, interrupted after every step.

OPTIMIZERS = {
    "torch SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "torch Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "torch AdamW": lambda parameters: torch.optim.AdamW([{"params": parameters, "lr": torch.tensor(0.1)}], foreach=False),
    "lowp SGD": lambda parameters: lowp.optim.SGD(parameters, lr=0.1, momentum=0.9, update="stochastic", seed=3),
    "lowp AdamW": lambda parameters: lowp.optim.AdamW(parameters, lr=0.1, update="kahan", state="dynamic8"),
    "lowp LARS": lambda parameters: lowp.optim.LARS(parameters, lr=0.1, momentum=0.9),
    "lowp LAMB": lambda parameters: lowp.optim.LAMB(parameters, lr=0.1),
}


def trained(kind, steps, interruption):
    """The weights and the state after `steps`, with everything made anew from `interruption(state)` after each step."""

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
            lowp.LossScale("per_layer", model=model, interval=2),
        )

    dtype = torch.bfloat16 if kind.startswith("lowp") else torch.float32
    parts = fresh()
    states = []
    for step in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        model, optimizer, schedule, scale = parts
        scale.scale(model(inputs).square().mean()).backward()
        scale.step(optimizer)
        optimizer.zero_grad()
        schedule.step()
        states.append({"parts": [part.state_dict() for part in parts]})
        if interruption is not None:
            parts[-1].remove()
            parts = fresh()
            for part, state in zip(parts, interruption(step, states[-1])["parts"], strict=True):
                part.load_state_dict(state)
    return unpack(pack(states[-1]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(kind, tmp_path):
    def interruption(step, state):
        save(tmp_path, step, state, fingerprint="f", keep=2)
        found = latest(tmp_path, fingerprint="f")
        assert found.step == step
        assert same(found.state["parts"][1:], state["parts"][1:])
        return found.state

    assert same(trained(kind, 5, interruption), trained(kind, 5, None))


def test_the_memory_of_a_gradient_compression_comes_back():
    residuals = {"fc.weight": torch.randn(3, generator=torch.Generator().manual_seed(0))}
    bounds = {"fc.weight": torch.tensor([100, 7], dtype=torch.uint8)}
    state = State(Residuals(residuals), Bounds(bounds), step=4)
    loaded = State()
    loaded.load_state_dict(unpack(pack(state.state_dict())))
    assert same(loaded.state_dict(), state.state_dict())


# The directory.


def test_files_are_readable_by_others(tmp_path):
    from safetensors.torch import load_file

    path = save(tmp_path / "deep" / "checkpoints", 120, small(120), fingerprint="abc", keep=1)
    assert path == tmp_path / "deep" / "checkpoints" / "step-00000120"
    assert names(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    assert load_file(path / "tensors.safetensors")["weights"].tolist() == [120.0] * 3
    manifest = json.loads((path / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("layout", "step", "fingerprint", "lowp", "torch")} == {
        "layout": 1,
        "step": 120,
        "fingerprint": "abc",
        "lowp": lowp.__version__,
        "torch": torch.__version__,
    }
    assert json.loads((path / "state.json").read_text())["weights"] == {"$tensor": "weights"}


def test_the_last_ones_are_kept(tmp_path):
    for step in (1, 5, 9, 10, 200_000_000, 3_000_000_000):
        save(tmp_path, step, small(step), fingerprint="f", keep=3)
    assert names(tmp_path) == ["step-00000010", "step-200000000", "step-3000000000"]
    save(tmp_path, 3_000_000_001, small(0), fingerprint="f", keep=1)
    assert names(tmp_path) == ["step-3000000001"]
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 5, small(5), fingerprint="f", keep=0)


def test_a_damaged_one_counts_for_nothing_and_a_foreign_one_is_not_removed(tmp_path):
    save(tmp_path, 1, small(1), fingerprint="theirs", keep=1)
    for step in (10, 20):
        save(tmp_path, step, small(step), fingerprint="f", keep=2)
    (tmp_path / "step-00000020" / "state.json").write_bytes(b"")
    save(tmp_path, 30, small(30), fingerprint="f", keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000010", "step-00000020", "step-00000030"]
    save(tmp_path, 40, small(40), fingerprint="f", keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000020", "step-00000030", "step-00000040"]


def test_a_step_is_saved_again(tmp_path):
    save(tmp_path, 1, small(1), fingerprint="f", keep=2)
    save(tmp_path, 2, small(2), fingerprint="f", keep=2)
    save(tmp_path, 2, small(7), fingerprint="f", keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert same(latest(tmp_path, fingerprint="f").state, small(7))


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getpid(), 1):
        (tmp_path / f".step-00000001.partial-{pid}").mkdir()
        (tmp_path / f".step-00000001.removed-{pid}" / "inside").mkdir(parents=True)
    (tmp_path / "notes.old").write_text("mine")
    save(tmp_path, 2, small(2), fingerprint="f", keep=1)
    assert names(tmp_path) == [".step-00000001.partial-1", ".step-00000001.removed-1", "notes.old", "step-00000002"]


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path / "nothing", fingerprint="f") is None
    (tmp_path / ".step-00000001.partial-1").mkdir()
    (tmp_path / "step-1").mkdir()
    assert latest(tmp_path, fingerprint="f") is None


# Damage.


def damaged(content):
    """Every way to damage a small file, and what to call it."""
    yield "missing", None
    for end in range(0, len(content), 7):
        yield f"cut at {end}", content[:end]
    yield "longer", content + b" "
    for at in range(len(content)):
        yield f"byte {at}", content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
def test_any_damage_is_refused_by_the_name_of_the_file(name, tmp_path):
    save(tmp_path, 1, small(1), fingerprint="f", keep=2)
    file = save(tmp_path, 2, small(2), fingerprint="f", keep=2) / name
    content = file.read_bytes()
    for what, bad in damaged(content):
        if bad is None:
            file.unlink()
        else:
            file.write_bytes(bad)
        found = latest(tmp_path, fingerprint="f")
        assert (found.step, len(found.refused)) == (1, 1), what
        assert "step-00000002" in found.refused[0], what
        if "layout" not in found.refused[0] and "another run" not in found.refused[0]:
            assert str(file) in found.refused[0], what
        assert same(found.state, small(1)), what
    file.write_bytes(content)
    assert latest(tmp_path, fingerprint="f").step == 2


def rewrite_manifest(path, **changes):
    """As `save` would have written it, with a right checksum."""
    content = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_bytes(checkpoint._manifest(content))


def test_foreign_unknown_and_renamed_ones_are_refused(tmp_path):
    path = save(tmp_path, 1, small(1), fingerprint="theirs", keep=9)
    with pytest.raises(CheckpointError, match="step-00000001 is another run's: its fingerprint is theirs, this run's is ours"):
        load(path, fingerprint="ours")
    assert load(path, fingerprint=None)[0] == 1
    save(tmp_path, 2, small(2), fingerprint="ours", keep=9)
    rewrite_manifest(save(tmp_path, 3, small(3), fingerprint="ours", keep=9), layout=2)
    save(tmp_path, 4, small(4), fingerprint="ours", keep=9).rename(tmp_path / "step-00000005")
    (tmp_path / "step-00000006").write_text("a file")
    (tmp_path / "step-00000007").mkdir()
    found = latest(tmp_path, fingerprint="ours")
    assert (found.step, found.path.name) == (2, "step-00000002")
    reasons = [
        "manifest.json is missing",
        "manifest.json cannot be read",
        "was renamed: its manifest says step 4",
        "has layout 2",
    ]
    for line, reason in zip(found.refused, reasons, strict=True):
        assert reason in line
    with pytest.raises(NoUsableCheckpoint, match=r"no checkpoint in .* can be used: .*step-00000007") as error:
        latest(tmp_path, fingerprint="nobody's")
    assert len(error.value.refused) == 6


def test_a_state_that_cannot_be_decoded_is_refused(tmp_path):
    path = save(tmp_path, 1, small(1), fingerprint="f", keep=1)
    (path / "state.json").write_bytes(b'{"$new": 1}')
    described = {"bytes": 11, "sha256": checkpoint._sha256(b'{"$new": 1}')}
    rewrite_manifest(path, files=json.loads((path / "manifest.json").read_text())["files"] | {"state.json": described})
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be decoded: \$new is unknown"):
        load(path, fingerprint="f")


# Killed, or out of disk.


class Killed(BaseException):
    pass


class Killer:
    """Lets n operations on the file system happen and refuses all that follow: what is left is what a kill would leave."""

    EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"})

    def __init__(self):
        self.left = None
        sys.addaudithook(self._hook)  # for good: it does nothing unless armed

    def _hook(self, event, arguments):
        if self.left is not None and event in self.EVENTS:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def dies(self, operations, function):
        self.left = operations
        try:
            function()
        except Killed:
            return True
        finally:
            self.left = None
        return False


@pytest.fixture(scope="module")
def killer():
    return Killer()


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there"])
def test_killed_at_any_moment_the_old_or_the_new_one_is_whole(again, tmp_path, killer):
    new = 2 if again else 3
    for operations in range(100):
        directory = tmp_path / str(operations)
        save(directory, 2, small(2), fingerprint="f", keep=1)
        died = killer.dies(operations, lambda d=directory: save(d, new, small(7), fingerprint="f", keep=1))
        found = latest(directory, fingerprint="f")
        assert found.refused == []
        assert same(found.state, small(7) if found.step == 3 or (again and found.state["weights"][0] == 7) else small(2))
        save(directory, 4, small(4), fingerprint="f", keep=1)  # cleans up, and goes on
        assert names(directory) == ["step-00000004"]
        if not died:
            assert operations > 15  # the moments were there
            return
    pytest.fail("never ended")


def save_for_ever(directory):
    step = 0
    while True:
        step += 1
        save(directory, step, {"weights": torch.full((200_000,), float(step))}, fingerprint="f", keep=2)


def test_sigkill(tmp_path):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=save_for_ever, args=(tmp_path,), daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # into the middle of something
    process.kill()
    process.join()
    found = latest(tmp_path, fingerprint="f")
    reached = found.step
    assert found.refused == []
    assert found.state["weights"].unique().tolist() == [reached]
    save(tmp_path, reached + 1, small(1), fingerprint="f", keep=2)
    assert names(tmp_path) == [f"step-{reached:08d}", f"step-{reached + 1:08d}"]


@pytest.mark.parametrize("call", range(5))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_where_the_disk_fails_the_earlier_ones_are_intact(call, number, tmp_path, monkeypatch):
    save(tmp_path, 1, small(1), fingerprint="f", keep=1)
    real, calls = os.fsync, iter(range(100))

    def fsync(descriptor):
        if next(calls) == call:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=rf"cannot write checkpoint .*step-00000002: {os.strerror(number)}"):
        save(tmp_path, 2, small(2), fingerprint="f", keep=1)
    # The fifth forces the parent: by then both are whole.
    assert names(tmp_path) == ["step-00000001"] + ["step-00000002"] * (call == 4)
    assert latest(tmp_path, fingerprint="f").refused == []
    save(tmp_path, 3, small(3), fingerprint="f", keep=1)
    assert names(tmp_path) == ["step-00000003"]


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True)
    except OSError:
        pytest.skip("no mount")
    if made.returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(tiny_disk):
    fits, large = {"weights": torch.ones(10_000)}, {"weights": torch.ones(60_000)}
    save(tiny_disk, 1, fits, fingerprint="f", keep=1)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000002.*: No space left on device"):
        save(tiny_disk, 2, large, fingerprint="f", keep=1)
    assert names(tiny_disk) == ["step-00000001"]
    assert same(latest(tiny_disk, fingerprint="f").state, fits)
    save(tiny_disk, 2, fits, fingerprint="f", keep=1)
    assert names(tiny_disk) == ["step-00000002"]


def test_places_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*file/checkpoints/step-00000001.*: Not a directory"):
        save(tmp_path / "file" / "checkpoints", 1, small(1), fingerprint="f", keep=1)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*file/step-00000001.*file.*: Not a directory"):
        save(tmp_path / "file", 1, small(1), fingerprint="f", keep=1)
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint /proc/nothing/step-00000001.*: No such file or directory"
    ):
        save(Path("/proc/nothing"), 1, small(1), fingerprint="f", keep=1)
    with pytest.raises(CheckpointError, match=r"cannot read .*file: Not a directory"):
        latest(tmp_path / "file", fingerprint="f")
