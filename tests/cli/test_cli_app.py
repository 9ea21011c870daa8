"""What all commands share: version, help, exit codes, errors in one line, pipes that close."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import lowp
from lowp.cli.errors import OneLineErrors, one_line
from lowp.cli.output import percent, short, survive_narrow_encodings, with_power

SOURCE = Path(lowp.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "80", "PYTHONUNBUFFERED": ""}  # unbuffered, errors are lost


def test_version_names_torch_too(stdout):
    text = stdout("--version")
    assert text.startswith("lowp ")
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize(
    ("command", "example"), [((), "lowp demo"), (("formats",), "--family posit"), (("quantize",), "--saturate")]
)
def test_help_has_examples(stdout, command, example):
    text = stdout(*command, "--help")
    assert "Examples" in text
    assert example in text


def test_no_command_shows_the_help(run):
    result = run()
    assert "Usage" in result.output
    assert result.exit_code == 2


def test_unknown_command_is_a_mistake(run):
    result = run("formtas")
    assert result.exit_code == 2
    assert "formtas" in result.stderr


def test_traceback_lets_the_error_through(run):
    result = run("--traceback", "formats", "nope")
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (TypeError(), "TypeError"),
        (FileNotFoundError(2, "No such file or directory", "x.npy"), "x.npy: No such file or directory"),
        (OSError("disk on fire"), "disk on fire"),
    ],
)
def test_errors_become_one_line(error, text):
    assert one_line(error) == text


def test_a_bug_is_not_taken_for_a_mistake():
    broken = typer.Typer(cls=OneLineErrors)
    broken.callback()(lambda: None)

    @broken.command("bug")
    def bug() -> None:
        raise KeyError("ours")

    assert isinstance(CliRunner().invoke(broken, ["bug"]).exception, KeyError)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_goes_away_is_no_error(options):
    command = [sys.executable, "-m", "lowp", "formats", "bf16", "--values", *options]  # far more than a pipe holds
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() in (b"{\n", b"bf16  float, 16 bits: sign, 8 exponent, 7 mantissa, bias 127\n")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_real_process_without_unicode_or_colour():
    command = [sys.executable, "-m", "lowp", "formats", "--family", "posit"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stderr == b""
    assert b"posit16_1" in done.stdout
    assert b"\x1b" not in done.stdout
    assert done.stdout.isascii()


def test_a_character_that_the_terminal_lacks_becomes_a_question_mark(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    survive_narrow_encodings()
    print("±", flush=True)
    assert stream.buffer.getvalue() == b"?\n"


def test_import_lowp_brings_no_command_line():
    script = "import lowp, sys; print([m for m in ('typer', 'rich', 'matplotlib', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=ENVIRONMENT, check=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (448.0, "448"),
        (127.99609375, "127.996"),
        (3.4028234663852886e38, "3.4e38"),
        (2.0**-24, "5.96e-8"),
        (1e10, "1e10"),
        (1e100, "1e100"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "NaN"),
        (None, "-"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_powers_and_percentages():
    assert with_power(2.0**-9) == "2^-9 = 0.001953125"
    assert with_power(1.0) == "1"
    assert with_power(448.0) == "448"
    assert [percent(share) for share in (None, 0.0, 1e-7, 0.0321, 1.0)] == ["-", "0", "1e-5 %", "3.21 %", "100 %"]
