"""All benchmarks have a name, and say what they are for, without one being run."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.__main__")


def programs() -> set[str]:
    """Modules with a command line of their own (not what writes README's table), and packages with a `__main__`."""
    modules = {
        path.stem for path in FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text() or "import main" in path.read_text()
    }
    return modules - {"__main__", "step_table"} | {path.parent.name for path in FOLDER.glob("*/__main__.py")}


def test_the_list_is_complete_and_needs_no_torch():
    script = "import sys; from benchmarks.__main__ import main; main([]); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    listed = {line.split()[0] for line in shown.stdout.splitlines() if line and line.split()[0] in programs()}
    assert listed == programs()
    assert len(listed) >= 11


def test_every_benchmark_tells_its_options(harness, capsys, monkeypatch):
    assert set(harness.NAMES) == programs()
    for name in harness.NAMES:
        monkeypatch.setattr(sys, "argv", ["benchmarks"])
        with pytest.raises(SystemExit) as ended:
            harness.main([name, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code in (0, None), name
        assert "--out" in shown, name
        assert "--quick" in shown, name


def test_an_unknown_name_is_answered_with_a_known_one(harness):
    with pytest.raises(SystemExit, match=r"no benchmark 'link'; did you mean 'links'\?$"):
        harness.main(["link"])


def test_no_module_is_called_like_one_of_pythons_own():
    """A script beside it would import it instead: `numbers.py` broke `import decimal`."""
    ours = {path.stem for path in FOLDER.rglob("*.py")}
    assert len(ours) > 30
    assert ours & sys.stdlib_module_names == set()
