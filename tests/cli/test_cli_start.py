"""How the command line starts: without torch where nothing is computed, and knowing how it was called."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowp
from lowp import invocation
from lowp.cli import completion

SOURCE = str(Path(lowp.__file__).parents[1])
BLOCKED = ("torch", "numpy", "matplotlib")

HELP = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"{{name}} was asked for")

sys.meta_path.insert(0, Blocked())
from typer.testing import CliRunner
from lowp.cli import app
commands = [[], *([command.name] for command in app.registered_commands)]
calls = [*([*command, "--help"] for command in commands), ["runs", "--root", "."], ["formats"]]
print(json.dumps({{" ".join(call): CliRunner().invoke(app, call).exit_code for call in calls}}))
"""


def test_help_and_lists_need_no_torch(tmp_path):
    environment = os.environ | {"PYTHONPATH": SOURCE}
    script = HELP.format(blocked=BLOCKED)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert set(codes.values()) == {0}, codes
    assert {"--help", "train --help", "ablate --help"} <= set(codes)


def test_names_are_completed(monkeypatch, tmp_path):
    from lowp.training.recipes import RECIPES

    assert set(completion.recipe_names()) == set(RECIPES)
    assert "aps8" in completion.recipes("ap")
    assert completion.formats("e4m3fn") == ["e4m3fn", "e4m3fnuz"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo-001" / "aps8").mkdir(parents=True)
    (tmp_path / "runs" / "demo-001" / "aps8" / "recipe.toml").touch()
    assert completion.runs("de") == ["demo-001/aps8"]


def test_the_shell_is_answered():
    environment = os.environ | {
        "PYTHONPATH": SOURCE, "_LOWP_COMPLETE": "complete_bash", "COMP_WORDS": "lowp train aps", "COMP_CWORD": "2",
    }  # fmt: skip
    code = "import sys; sys.argv = ['lowp']; from lowp.cli import app; app(prog_name='lowp')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert {"aps8", "aps8-paper"} <= set(done.stdout.split())


def test_flags_are_shown_as_flags(stdout):
    text = stdout("train", "--help") + stdout("--help")
    assert "<bool>" not in text
    assert "--install-completion" in text


@pytest.fixture
def called(monkeypatch, tmp_path):
    """What `program` says after `argv[0]` was called with these directories on the PATH."""

    def program(argv0: str, *path: Path) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(invocation.VARIABLE, raising=False)
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
        monkeypatch.setattr(sys, "argv", [argv0])
        invocation.program.cache_clear()
        return invocation.program()

    yield program
    invocation.program.cache_clear()


def script(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_command_is_printed_as_it_works_in_that_shell(called, monkeypatch, tmp_path):
    here, elsewhere = script(tmp_path / ".venv" / "bin" / "lowp"), script(tmp_path / "other" / "lowp")
    monkeypatch.setattr(sys, "executable", str(script(here.parent / "python")))
    assert called(str(here), here.parent) == "lowp"
    assert called(".venv/bin/lowp", elsewhere.parent) == ".venv/bin/lowp"  # another lowp is first on the PATH
    assert called(".venv/bin/lowp") == ".venv/bin/lowp"
    main = str(tmp_path / "lowp" / "__main__.py")
    assert called(main) == ".venv/bin/python -m lowp"
    assert called(main, here.parent) == "python -m lowp"
    assert called("train_mine.py", here.parent) == "lowp"
    assert called("train_mine.py") == ".venv/bin/python -m lowp"
    monkeypatch.setenv(invocation.VARIABLE, "from the launcher")  # ranks are told
    invocation.program.cache_clear()
    assert invocation.command("train", "a b") == "from the launcher train 'a b'"
