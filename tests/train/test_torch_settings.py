"""A run takes nothing from what its caller has told torch, and leaves nothing of its own behind."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.backends import mkldnn

import lowp
from lowp.lab.execution import Job, execute
from lowp.training.reading import read_recipe
from lowp.training.torch_settings import torch_unchanged
from train.training import final_state

SMALL = ["data.limit=48", "batch=16", "epochs=1", "model.options.hidden=[16]", "threads=1", "device=cpu"]
MIXED = [*SMALL, "precision.activations=bf16", "optimizer.lr=0.1"]


@contextmanager
def told(setter, value):
    with torch_unchanged():
        setter(value)
        yield


CALLERS = {
    "float64": lambda: told(torch.set_default_dtype, torch.float64),
    "bfloat16": lambda: told(torch.set_default_dtype, torch.bfloat16),
    "medium": lambda: told(torch.set_float32_matmul_precision, "medium"),
    "bf16 products": lambda: told(lambda value: setattr(mkldnn.matmul, "fp32_precision", value), "bf16"),
    "deterministic": lambda: told(torch.set_deterministic_debug_mode, "warn"),
    "default device": lambda: told(torch.set_default_device, "meta"),
    "device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "two autocasts": lambda: two(torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)),
}


@contextmanager
def two(outer, inner):
    with outer, inner:
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def all_settings():
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        mkldnn.matmul.fp32_precision,
        torch.get_deterministic_debug_mode(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_num_threads(),
    )


def trained(name, changes):
    lowp.train("fp32", changes, out=name, quiet=True)
    return final_state(Path(name))


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("changes", [SMALL, MIXED], ids=["fp32", "mixed"])
def test_a_run_is_a_function_of_its_recipe(changes, caller, capsys):
    plain = trained("plain", changes)
    with CALLERS[caller]():
        before = all_settings()
        assert trained("inside", changes) == plain
        assert all_settings() == before


def test_the_generator_is_the_callers(capsys):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    lowp.train("fp32", SMALL, out="a", quiet=True)
    assert torch.equal(torch.rand(4), expected)


IMPORTED = """
import torch
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.set_num_threads(3)
torch.manual_seed(1)
def net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))
"""
CALLED = """
import torch
def net(shape, classes):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cpu")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))
"""


@pytest.mark.parametrize("code", [IMPORTED, CALLED], ids=["imported", "called"])
def test_a_plugin_changes_nothing_for_other_runs(code, tmp_path, monkeypatch, capsys):
    """Of one worker's: neither for those of other recipes nor for the second one of its own, which imports nothing."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "net_of_a_user.py").write_text(code)
    before = all_settings()
    settings = [text for text in SMALL if not text.startswith("model")]
    try:
        for name, changes in (
            ("plain", []),
            ("first", ["model.name=net_of_a_user:net"]),
            ("second", ["model.name=net_of_a_user:net"]),
            ("after", []),
        ):
            outcome = execute(Job(name, read_recipe("fp32", [*settings, *changes]), tmp_path / name))
            assert (outcome.state, outcome.reason) == ("finished", "")
            assert all_settings() == (*before[:-1], 1)
    finally:
        sys.modules.pop("net_of_a_user", None)
        torch.set_num_threads(before[-1])
    assert final_state(tmp_path / "first") == final_state(tmp_path / "second")
    assert final_state(tmp_path / "plain") == final_state(tmp_path / "after")
