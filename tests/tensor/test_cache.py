"""The kernel cache: what lies there is run, so nobody else may have written it, and what is damaged is made again."""

import ctypes
import os
import re
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

import lowp
from lowp.tensor import kernels
from lowp.tensor.lists import cache, compiling, cpp
from lowp.tensor.lists.cache import UnsafeCache, load_library
from lowp.tensor.lists.function import ListFunction, Lists
from lowp.tensor.lists.tracing import Element

NOBODY = 65534


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A library as small as they get: `answer` gives 42."""
    return library(tmp_path_factory.mktemp("library"), 'extern "C" int answer() { return 42; }')


def library(folder, text):
    (folder / "made.cpp").write_text(text)
    subprocess.run([cpp.compiler(), "-shared", "-fPIC", "made.cpp", "-o", "made.so"], cwd=folder, check=True, timeout=60)
    return (folder / "made.so").read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "_compiled_before", False)  # as in a new process
    return tmp_path / "cache"


@pytest.fixture
def name(request):
    """A loader gives a library of the same name again without looking."""
    return f"{request.node.name}.so"


def given_to_nobody(path):
    if os.geteuid() != 0:
        pytest.skip("to give a file away takes root")
    os.chown(path, NOBODY, NOBODY)


def never():
    raise AssertionError("compiled")


def test_a_library_is_made_once_for_this_user_alone(folder, name, compiled):
    before = os.umask(0)
    try:
        assert load_library(name, lambda: compiled).answer() == 42
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [name]
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert load_library(name, never).answer() == 42


def test_two_libraries_are_two(folder, name, compiled, tmp_path):
    """(A loader that is given the path of a descriptor takes the next library for the last one.)"""
    other = library(tmp_path, 'extern "C" int answer() { return 43; }')
    assert load_library(f"one-{name}", lambda: compiled).answer() == 42
    assert load_library(f"two-{name}", lambda: other).answer() == 43


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(mode, folder, name):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UnsafeCache, match=rf"{folder} can be written by others \(mode {mode:o}\).*LOWP_CACHE"):
        load_library(name, never)


def test_somebody_elses_folder_is_refused(folder, name):
    folder.mkdir()
    given_to_nobody(folder)
    with pytest.raises(UnsafeCache, match=f"{folder} belongs to user {NOBODY}"):
        load_library(name, never)


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_a_library_that_others_can_write_to_is_refused(mode, folder, name, compiled):
    folder.mkdir(0o700)
    (folder / name).write_bytes(compiled)
    (folder / name).chmod(mode)
    with pytest.raises(UnsafeCache, match=re.escape(f"{name} can be written by others (mode {mode:o})")):
        load_library(name, never)


def test_eager_calls_refuse_it_too(folder, monkeypatch):
    """Of two ways to build a kernel (with OpenMP and without) the second must not hide what is wrong with the first's file."""
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))
    lowp.quantize(torch.ones(10), "e3m4b9")
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))  # as in a new process
    kernels.ready.clear()
    for library in folder.glob("*.so"):
        library.chmod(0o666)
    with pytest.raises(UnsafeCache, match="can be written by others"):
        lowp.quantize(torch.ones(10), "e3m4b9")


def test_somebody_elses_library_is_refused(folder, name, compiled):
    folder.mkdir(0o700)
    (folder / name).write_bytes(compiled)
    given_to_nobody(folder / name)
    with pytest.raises(UnsafeCache, match=f"{name} belongs to user {NOBODY}"):
        load_library(name, never)


def test_links(folder, name, compiled, tmp_path, monkeypatch):
    """LOWP_CACHE may be one; what it leads to counts. A library, and the folder that we choose ourselves, may not."""
    (tmp_path / "real").mkdir(0o700)
    folder.symlink_to(tmp_path / "real")
    assert load_library(name, lambda: compiled).answer() == 42
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(UnsafeCache, match="real can be written by others"):
        load_library(name, never)
    (tmp_path / "real").chmod(0o700)
    (tmp_path / "real" / f"link-{name}").symlink_to(tmp_path / "real" / name)
    with pytest.raises(UnsafeCache, match="remove it"):
        load_library(f"link-{name}", never)
    monkeypatch.delenv("LOWP_CACHE")
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"lowp-kernels-{os.getuid()}").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeCache, match="is a link or a file"):
        load_library(name, never)


@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[: len(c) // 2], lambda c: c[:-1], lambda c: c[:99] + b"?" + c[100:]]
)
def test_a_damaged_library_is_made_again(damage, folder, name, compiled):
    folder.mkdir(0o700)
    cache._write(os.open(folder, os.O_RDONLY), name, compiled)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(damage(whole))
    assert load_library(name, lambda: compiled).answer() == 42
    assert (folder / name).read_bytes() == whole


def test_what_two_need_at_once_is_made_once(folder, name, compiled):
    """The other waits; afterwards only the library is there."""
    made, found, together = [], [], threading.Barrier(2)

    def make():
        made.append(name)
        time.sleep(0.3)
        return compiled

    def need():
        together.wait()
        found.append(load_library(name, make).answer())

    threads = [threading.Thread(target=need) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, found) == ([name], [42, 42])
    assert [path.name for path in folder.iterdir()] == [name]


def test_nobody_waits_for_ever(folder, name, compiled, monkeypatch):
    monkeypatch.setattr(cache, "LONGEST_WAIT", 0.05)
    folder.mkdir(0o700)
    with cache._alone(os.open(folder, os.O_RDONLY), f".{name}.lock"):
        assert load_library(name, lambda: compiled).answer() == 42


def test_a_planted_library_does_not_run(folder, tmp_path, monkeypatch):
    """In a folder that all may write to, somebody has put a library under the name that a kernel will have."""
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))
    what = ListFunction(lambda x, *_: [x * 54321], (Element(torch.int32),), (0,), 0, 0)
    names = []
    monkeypatch.setattr(cpp, "load_library", lambda name, make: names.append(name) or ctypes.CDLL(None))
    with pytest.warns(RuntimeWarning, match="could not compile"):  # libc has no `run`
        what(Lists([[torch.arange(20, dtype=torch.int32)]]), torch.zeros((0, 1), dtype=torch.int32), [])
    monkeypatch.undo()
    monkeypatch.setenv("LOWP_CACHE", str(folder))
    monkeypatch.setattr(kernels, "_state", kernels._KernelState(policy="always"))
    folder.mkdir()
    folder.chmod(0o777)
    marker = tmp_path / "marker"
    evil = f'#include <cstdio>\n__attribute__((constructor)) void begin() {{ std::fclose(std::fopen("{marker}", "w")); }}\n'
    (folder / names[0]).write_bytes(library(tmp_path, evil + 'extern "C" void run() {}'))
    with pytest.raises(UnsafeCache):
        what(Lists([[torch.arange(20, dtype=torch.int32)]]), torch.zeros((0, 1), dtype=torch.int32), [])
    assert not marker.exists()


def test_ctrl_c_ends_the_compiler_and_what_it_started(folder, tmp_path, monkeypatch):
    """A compiler is a driver and its helpers. The terminal's signal is not theirs: we may have a step to finish."""
    slow, helper = tmp_path / "slow", tmp_path / "helper"
    slow.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {helper}.part\nmv {helper}.part {helper}\nwait\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    groups = []

    def interrupt():
        while not helper.exists():
            time.sleep(0.01)
        groups.append(os.getpgid(int(helper.read_text())))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cpp.build("")
    thread.join()
    assert groups[0] != os.getpgid(0)
    deadline = time.monotonic() + 10
    while _runs(helper.read_text().strip()):
        assert time.monotonic() < deadline, "the compiler goes on"
        time.sleep(0.01)
    assert not list(folder.iterdir())


def _runs(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()  # Z: ended, and nobody has collected it yet
    except FileNotFoundError:
        return False
