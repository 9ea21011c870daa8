"""Commands are run in the test's own process, at a chosen width; a few tests elsewhere start a real one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lowp.cli import app

PLAIN = {
    "FORCE_COLOR": None,
    "NO_COLOR": None,
    "TERM": "dumb",
    "GITHUB_ACTIONS": None,
    "LOWP_KERNELS": None,
    "LOWP_TRACEBACK": None,
}


@pytest.fixture
def run() -> Callable[..., Result]:
    """`run("formats", "e5m2", columns=80)`: the finished command."""

    def run_command(*arguments: object, columns: int = 80) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], env=PLAIN | {"COLUMNS": str(columns)})

    return run_command


@pytest.fixture
def stdout(run) -> Callable[..., str]:
    """The output of a command that succeeds."""

    def run_well(*arguments: object, columns: int = 80) -> str:
        result = run(*arguments, columns=columns)
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        return result.stdout

    return run_well


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def from_json(stdout) -> Callable[..., Any]:
    """The document that a command prints with --json. NaN and Infinity, which Python would read, are not JSON."""
    return lambda *arguments: json.loads(stdout(*arguments, "--json"), parse_constant=_refuse)


@pytest.fixture
def mistake(run) -> Callable[..., str]:
    """The one line that a command with a mistake in it prints, on stderr and with exit code 2."""

    def run_badly(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("lowp: ")
        assert result.stderr.count("\n") == 1
        return result.stderr.removeprefix("lowp: ").strip()

    return run_badly
