"""Checkpoints: a state on the disk that is whole or not there, whatever kills the process or fills the disk.

    checkpoints/step-00000120/tensors.safetensors     every tensor, under the path to it
                              state.json              the structure around them (stored_state.py)
                              manifest.json           step, fingerprint of the run, versions, size and SHA-256 of the others

`save`, where each step leaves a state from which `latest` finds a whole checkpoint:

1. Remove what processes that are dead now left behind. (Names that begin with a dot are never read.)
2. Write the files into `.step-00000120.partial-<pid>`, the manifest last, each forced to the disk.
3. Rename that directory to `step-00000120`. One of this step that is there already is first renamed to `step-00000120.old`,
   which still counts: there is no moment without either.
4. Remove the oldest of this run's checkpoints beyond the last `keep`: renamed to a dotted name first, so that one killed
   half-way through leaves no half checkpoint under a valid name. What is damaged or foreign is not ours to remove.

`load` trusts nothing: the manifest must be byte for byte what `save` would write for its content, its own checksum included,
and the other files what it says they are, before a single tensor is made. The bytes that were checked are the bytes decoded.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowp.training.durable import explained, make_directory, sync_directory, write_file
from lowp.training.stored_state import State as State
from lowp.training.stored_state import from_bytes, to_bytes
from lowp.training.stored_state import pack as pack
from lowp.training.stored_state import unpack as unpack
from lowp.version import __version__

LAYOUT = 1  # of the files below; a reader refuses a higher one
TENSORS, STRUCTURE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"

_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_LEFTOVER = re.compile(r"\.step-.*\.(?:partial|removed)-(\d+)")


class CheckpointError(OSError):
    """A checkpoint that cannot be written or must not be read; the message names the file and says why."""


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, and every one of them is refused. `refused` has one line for each."""

    def __init__(self, directory: Path, refused: list[str]) -> None:
        self.refused = refused
        super().__init__(f"no checkpoint in {directory} can be used: " + "; ".join(refused))


@dataclass(frozen=True)
class Found:
    path: Path
    step: int
    state: State
    refused: list[str] = field(default_factory=list)  # of each newer one, which it is and why


def save(directory: Path, step: int, state: State, *, fingerprint: str, keep: int) -> Path:
    """Write the checkpoint of `step`, then drop all but the newest `keep`. Where it fails, those before are as they were."""
    if step < 0 or keep < 1:
        raise ValueError(f"a step is at least 0 and one checkpoint is kept, not step={step} and keep={keep}")
    path = directory / f"step-{step:08d}"
    structure, tensors = to_bytes(state)
    files = {TENSORS: tensors, STRUCTURE: structure}
    manifest = _manifest(
        {
            "layout": LAYOUT,
            "step": step,
            "fingerprint": fingerprint,
            "lowp": __version__,
            "torch": str(torch.__version__),
            "files": {name: {"bytes": len(content), "sha256": _sha256(content)} for name, content in files.items()},
        }
    )
    with explained(CheckpointError, f"write checkpoint {path}"):
        make_directory(directory)
        _sweep(directory)
        _put_in_place(path, files | {MANIFEST: manifest})
    with explained(CheckpointError, f"remove old checkpoints, with {path} saved,"):
        _keep_newest(directory, path, step, fingerprint, keep)
    return path


def load(path: Path, *, fingerprint: str | None) -> tuple[int, State]:
    """The step and the state; CheckpointError if anything about it is wrong. `fingerprint=None` takes any run's."""
    manifest = _read_manifest(path, fingerprint)
    contents = {name: _checked(path / name, expected) for name, expected in manifest["files"].items()}
    try:
        return manifest["step"], from_bytes(contents[STRUCTURE], contents[TENSORS])
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be decoded: {error}") from error


def latest(directory: Path, *, fingerprint: str) -> Found | None:
    """The newest checkpoint that is whole and this run's; None if there is none at all.

    If there are some and all are refused, NoUsableCheckpoint: to begin again from nothing must be somebody's decision.
    """
    refused: list[str] = []
    for path in reversed(_checkpoints(directory)):
        try:
            step, state = load(path, fingerprint=fingerprint)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return Found(path, step, state, refused)
    if refused:
        raise NoUsableCheckpoint(directory, refused)
    return None


# The names.


def _checkpoints(directory: Path) -> list[Path]:
    """Oldest first, by step. Of two of one step, the one that was about to replace the other counts as newer."""
    with explained(CheckpointError, f"read {directory}"):
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.exists() else []
    return sorted(found, key=lambda path: (_step(path), not path.name.endswith(".old")))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


# Writing.


def _put_in_place(path: Path, files: dict[str, bytes]) -> None:
    """Steps 2 and 3."""
    partial, old = _hidden(path, "partial"), path.with_name(path.name + ".old")
    try:
        partial.mkdir()
        for name, content in files.items():
            write_file(partial / name, content)
        sync_directory(partial)
        if path.exists():
            path.rename(old)
        partial.rename(path)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(path.parent)
    if old.exists():
        _remove(old)


def _keep_newest(directory: Path, new: Path, step: int, fingerprint: str, keep: int) -> None:
    """Step 4. One that looks damaged does not count: with two kept, there are two to fall back on."""
    older = [path for path in _checkpoints(directory) if path != new and _step(path) <= step]
    ours = [path for path in older if _looks_whole(path, fingerprint)]
    for path in ours[: len(ours) - (keep - 1)] if len(ours) >= keep else []:
        _remove(path)


def _looks_whole(path: Path, fingerprint: str) -> bool:
    """Without the checksums: reading every byte of every checkpoint at each save would cost more than the save."""
    try:
        manifest = _read_manifest(path, fingerprint)
        return all((path / name).stat().st_size == expected["bytes"] for name, expected in manifest["files"].items())
    except OSError:
        return False


def _remove(path: Path) -> None:
    doomed = _hidden(path, "removed")
    path.rename(doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)  # what resists is tried again at the next save


def _sweep(directory: Path) -> None:
    """Step 1."""
    for path in directory.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and not _alive_elsewhere(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
        elif _NAME.fullmatch(path.name) and path.suffix and path.with_suffix("").exists():
            _remove(path)  # killed with its successor in place


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}-{os.getpid()}")


def _alive_elsewhere(process: int) -> bool:
    if process == os.getpid():
        return False  # this process has one save at a time: it is from one that failed, or the number is used again
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, and is another user's
    return True


# Checking.


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _manifest(content: dict[str, Any]) -> bytes:
    """As it stands in the file: with its own checksum, which is that of the same without it."""
    own = {key: value for key, value in content.items() if key != "sha256"}
    checksum = _sha256(json.dumps(own).encode())
    return json.dumps(own | {"sha256": checksum}, indent=1).encode() + b"\n"


def _read_manifest(path: Path, fingerprint: str | None) -> dict[str, Any]:
    file = path / MANIFEST
    raw = _read(file)
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is damaged: it is {'empty' if not raw else 'not JSON'}") from None
    if not isinstance(manifest, dict) or type(manifest.get("layout")) is not int:
        raise CheckpointError(f"{file} is damaged: it is no manifest of a checkpoint")
    if manifest["layout"] != LAYOUT:
        raise CheckpointError(f"{file} has layout {manifest['layout']}, and lowp {__version__} reads {LAYOUT} only")
    if raw != _manifest(manifest) or not {TENSORS, STRUCTURE} <= manifest.get("files", {}).keys():
        raise CheckpointError(f"{file} is damaged: its checksum is not that of its content")
    if fingerprint is not None and manifest["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} is another run's: its fingerprint is {manifest['fingerprint']}, this run's is {fingerprint}"
        )
    if _NAME.fullmatch(path.name) and _step(path) != manifest["step"]:
        raise CheckpointError(f"{path} was renamed: its manifest says step {manifest['step']}")
    return manifest


def _checked(file: Path, expected: dict[str, Any]) -> bytes:
    content = _read(file)
    if len(content) != expected["bytes"]:
        raise CheckpointError(f"{file} is damaged: it has {len(content)} bytes, and had {expected['bytes']} when written")
    if _sha256(content) != expected["sha256"]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}")
    return content


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
