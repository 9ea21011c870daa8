"""What `import lowp` costs and brings along, seen from fresh interpreters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowp

PACKAGE = Path(lowp.__file__).parent


def run(code: str, **environment: str) -> dict:
    """Run a program that prints one JSON object, warnings as errors."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
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
print(json.dumps({
    "seconds": seconds,
    "torch_seconds": torch_seconds,
    "brought": sorted(set(sys.modules) - torch_alone),
    "modules": sorted(sys.modules),
    "threads": [threading.active_count() - threads[0], len(__import__("os").listdir("/proc/self/task")) - threads[1]],
    "built": lowp.kernel_info()["built"],
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict:
    return run(IMPORT)


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


def test_import_is_quick(imported):
    """A small part of what torch's own import takes; the best of three, as others may be using the machine."""
    shares = [imported["seconds"] / imported["torch_seconds"]]
    while shares[-1] >= 0.25 and len(shares) < 3:
        again = run(IMPORT)
        shares.append(again["seconds"] / again["torch_seconds"])
    assert min(shares) < 0.25


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
