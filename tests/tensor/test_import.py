"""What `import lowp` costs and brings along, seen from fresh interpreters."""

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowp

PACKAGE = Path(lowp.__file__).parent


def run(code: str, folder: Path = PACKAGE.parent) -> dict:
    """Run a program that prints one JSON object, warnings as errors, with the lowp that lies in a folder."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT = """
import json, sys, threading, time
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
torch_alone = set(sys.modules)
threads = threading.active_count(), len(__import__("os").listdir("/proc/self/task"))
start = time.perf_counter()
import lowp
seconds = time.perf_counter() - start
at_once, listed = sorted(set(sys.modules) - torch_alone), dir(lowp)
from lowp import optim
print(json.dumps({
    "seconds": seconds,
    "torch_seconds": torch_seconds,
    "at_once": at_once,
    "listed": listed,
    "later": {name: getattr(lowp, name).__name__ for name in lowp._LATER},
    "same": [lowp.optim is optim is sys.modules["lowp.optim"], lowp.health is sys.modules["lowp.health"]],
    "brought": sorted(set(sys.modules) - torch_alone),
    "modules": sorted(sys.modules),
    "threads": [threading.active_count() - threads[0], len(__import__("os").listdir("/proc/self/task")) - threads[1]],
    "built": lowp.kernel_info()["built"],
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """lowp as pip leaves it, in bytecode: reading the sources takes twice as long as all the rest of its import."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, folder / "lowp", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture(scope="module")
def imported(installed) -> dict:
    return run(IMPORT, installed)


@pytest.mark.parametrize("name", ["torch._dynamo", "torch._inductor", "triton", "rich", "typer", "matplotlib", "safetensors"])
def test_import_leaves_alone_what_it_does_not_need(imported, name):
    assert "lowp.tensor.ops" in imported["brought"], "the list is empty: nothing was looked at"
    brought = [module for module in imported["brought"] if module == name or module.startswith(f"{name}.")]
    assert not brought


@pytest.mark.parametrize("name", ["torch._inductor", "rich", "typer", "matplotlib"])
def test_nor_does_torch_itself(imported, name):
    assert name not in imported["modules"]


def test_import_starts_no_thread_and_builds_no_kernel(imported):
    assert imported["threads"] == [0, 0]
    assert imported["built"] == 0


def test_import_is_quick(imported, installed):
    """A small part of what torch's own import takes; the best of three, as others may be using the machine."""
    shares = [imported["seconds"] / imported["torch_seconds"]]
    while shares[-1] >= 0.08 and len(shares) < 3:
        again = run(IMPORT, installed)
        shares.append(again["seconds"] / again["torch_seconds"])
    assert min(shares) < 0.08


def test_what_is_imported_later_is_found_as_if_it_were_there(imported):
    assert not {"lowp.health", "lowp.optim", "lowp.tensor.lists.cpp"} & set(imported["at_once"])
    assert set(lowp._LATER) <= set(imported["listed"])
    assert {name: found.rpartition(".")[2] for name, found in imported["later"].items()} == {name: name for name in lowp._LATER}
    assert imported["same"] == [True, True]


def test_import_lowp_brings_no_torch(installed):
    """And what needs it is there as soon as it is asked for, in a compiled function too."""
    found = run(
        """
import json, sys
import lowp
early = [name for name in ("torch", "numpy") if name in sys.modules]
assert lowp.format("e4m3fn").max == 448
import torch
f = torch.compile(lambda x: lowp.quantize(x, "e4m3fn"), fullgraph=True, backend="eager")
print(json.dumps([early, f(torch.tensor([3.3])).tolist(), lowp.Noise.__module__]))
""",
        installed,
    )
    assert found == [[], [3.25], "lowp.tensor.noise"]


def test_what_lowp_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'lowp' has no attribute 'optimm'$"):
        _ = lowp.optimm


WITHOUT_TORCH = """
import importlib, json, sys, types
sys.modules["torch"] = None  # import torch: ModuleNotFoundError
sys.modules["numpy"] = None
package = {package!r}
stub = types.ModuleType("lowp")
stub.__path__ = [package]  # so that lowp/__init__.py does not run
sys.modules["lowp"] = stub
formats = importlib.import_module("lowp.formats")
from lowp.formats import reference
blocked = []
for name in ("torch", "numpy"):
    try:
        __import__(name)
    except ImportError:
        blocked.append(name)
print(json.dumps({{
    "blocked": blocked,
    "file": formats.__file__,
    "names": [str(formats.format(str(f))) for f in formats.FORMATS],
    "equal": all(formats.format(str(f)) == f for f in formats.FORMATS),
    "rounded": reference.round(3.3, formats.format("e4m3fn")),
    "custom": [str(formats.format(text)) for text in ("e3m7", "int5", "posit9_1", "block(int8, 64, fp32)")],
}}))
"""


def test_formats_need_no_torch():
    found = run(WITHOUT_TORCH.format(package=str(PACKAGE)))
    assert found["blocked"] == ["torch", "numpy"]
    assert Path(found["file"]) == PACKAGE / "formats" / "__init__.py"
    assert found["names"] == [str(fmt) for fmt in lowp.FORMATS]
    assert found["equal"]
    assert found["rounded"] == 3.25
    assert found["custom"] == ["e3m7", "int5", "posit9_1", "block(int8, 64, fp32)"]


def test_operations_on_small_tensors_need_no_compiler_stack():
    """Plain operations run without Dynamo or inductor ever being imported."""
    found = run("""
import json, sys
import torch, lowp
x = torch.randn(100)
for name in ("e4m3fn", "posit8", "nf4"):
    lowp.decode(lowp.encode(x, name), name)
    lowp.fake_quantize(x.requires_grad_(), name, name).sum().backward()
print(json.dumps([m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules]))
""")
    assert found == []
