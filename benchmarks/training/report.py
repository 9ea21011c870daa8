"""What the training benchmarks write: a Markdown file for people and a JSON file with every round, named after the machine."""

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.speed.report import Report

import lowp

RESULTS = Path(__file__).parents[1] / "results"


def facts_of(device: str) -> dict[str, Any]:
    """The machine, the versions and the command line."""
    report = Report(device, torch.get_num_threads())
    command = shlex.join(["python", *sys.argv])
    return report.facts() | {"lowp": lowp.__version__, "command": command}


def heading(title: str, facts: dict[str, Any]) -> list[str]:
    lines = [f"# {facts['machine']}: {title}", ""]
    return lines + [f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in facts.items()]


def table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def write(folder: Path, name: str, facts: dict[str, Any], content: dict[str, Any], lines: list[str]) -> list[Path]:
    """`<machine>-<name>.json` and `.md`."""
    machine = re.sub(r"[^a-z0-9]+", "-", facts["machine"].lower().replace("(r)", "")).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{machine}-{name}.json", folder / f"{machine}-{name}.md"]
    paths[0].write_text(json.dumps({"facts": facts} | content, indent=1) + "\n")
    paths[1].write_text("\n".join(lines) + "\n")
    return paths
