"""Headers that the compiler has read once: kernels are the same with them and without them, and nothing depends on them."""

import os
import shutil
import subprocess

import pytest

from lowp.tensor.lists import compiling, cpp
from lowp.tensor.lists.cache import UnsafeCache
from lowp.tensor.lists.preamble import preamble

VERSION = ["g++", "--version"]
pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or "Free Software" not in subprocess.run(VERSION, capture_output=True, text=True).stdout,
    reason="only GCC's headers are kept",
)
TEXT = preamble() + 'extern "C" void run(float* x) { store(x, square_root(load<f32>(x, LANES) * %d.0f), LANES); }'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache of a new process on a new machine."""
    monkeypatch.setenv("LOWP_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    new_process()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Headers that the second of two kernels made, and all that was asked of the compiler meanwhile."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWP_CACHE", str(folder))
        asked = recorded(patch)
        new_process()
        build(1)
        build(2)
        build(3)
    (headers,) = folder.glob("*.gch")
    return headers, asked


@pytest.fixture
def headers(folder, made):
    """Those, in the cache of a new process."""
    folder.mkdir(0o700)
    shutil.copy(made[0], folder)  # with its mode
    new_process()
    return folder / made[0].name


@pytest.fixture
def commands(monkeypatch):
    return recorded(monkeypatch)


def recorded(patch):
    """What the compiler is asked to do, one after the other."""
    asked, run = [], compiling._run

    def recording(command, text, written, *inherited):
        asked.append("headers" if "c++-header" in command else "with headers" if "-include" in command else "alone")
        return run(command, text, written, *inherited)

    patch.setattr(compiling, "_run", recording)
    return asked


def new_process():
    compiling._compiled_before = False
    compiling._headers.cache_clear()


def build(number):
    return cpp.build(TEXT % number, [cpp.ctypes.c_void_p])


def libraries(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.so")}


def test_the_second_kernel_makes_headers(made):
    assert made[1] == ["alone", "headers", "with headers", "with headers"]


def test_a_kernel_is_the_same_with_headers_and_without(headers, commands, folder):
    build(1)
    build(2)
    found = libraries(folder)
    for path in folder.iterdir():
        path.unlink()
    for number in (1, 2):
        new_process()
        build(number)
    assert commands == ["with headers", "with headers", "alone", "alone"]
    assert libraries(folder) == found
    assert len(found) == 2


def test_gcc_takes_them_and_not_the_text_beside_them(headers, monkeypatch):
    monkeypatch.setattr(compiling, "HEADERS", "#error these were read\n")
    command, file = [cpp.compiler(), *cpp._FLAGS, cpp._processor()], os.open(headers, os.O_RDONLY)
    assert compiling._library(command, TEXT % 3, file)
    with pytest.raises(RuntimeError, match="these were read"):  # headers for another command
        compiling._library([*command, "-fopenmp"], TEXT % 3, file)
    os.close(file)


def test_damaged_headers_are_made_again(headers, commands):
    compiling._compiled_before = True
    whole = headers.read_bytes()
    headers.write_bytes(whole[: len(whole) // 2])
    build(3)
    assert commands == ["headers", "with headers"]
    assert len(headers.read_bytes()) > len(whole) // 2


def test_headers_that_others_can_write_to_are_refused(headers):
    headers.chmod(0o666)
    with pytest.raises(UnsafeCache, match="can be written by others"):
        build(3)


def test_a_compiler_that_fails_with_headers_compiles_without(headers, commands, tmp_path, monkeypatch):
    (tmp_path / "half").write_bytes(headers.read_bytes()[: headers.stat().st_size // 2])
    with open(tmp_path / "half", "rb") as half, monkeypatch.context() as patch:
        patch.setattr(compiling, "_headers", lambda *_: half.fileno())
        build(1)
    assert commands == ["with headers", "alone"]


def test_another_compilers_headers_are_not_used(folder, commands, monkeypatch):
    """It is asked once."""
    new_process()
    run = compiling._run

    def other(command, *more):
        return run(command, *more) if "c++-header" not in command else commands.append("headers") or b"CPCH"

    monkeypatch.setattr(compiling, "_run", other)
    for number in (1, 2, 3):
        build(number)
    new_process()
    build(4)
    assert commands == ["alone", "headers", "alone", "alone", "alone"]


def test_a_small_disk_has_no_room_for_headers(folder, commands, monkeypatch):
    new_process()
    monkeypatch.setattr(compiling, "_ROOM", 1 << 60)
    build(1)
    build(2)
    assert commands == ["alone", "alone"]
    assert not list(folder.glob("*.gch"))


def test_a_mistake_in_a_text_is_told(headers):
    with pytest.raises(RuntimeError, match=r"could not compile a kernel.*nonsense"):
        cpp.build(preamble() + "nonsense")
