"""A growing file of records, one JSON object a line: `metrics.jsonl` and `health.jsonl` of a run.

A line goes to the system in one piece as soon as it is written, so a killed process loses none; at worst its last line is torn,
which is how an incomplete record shows: it has no newline. Numbers that are not finite stand as NaN and Infinity, which Python
and pandas read: a loss that diverged must be seen to have done so.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowp.training.durable import explained, replace_file


class LogError(OSError):
    """A record that cannot be written; the message names the file and says why."""


class JsonLines:
    """Append records to the file, which is made if it is not there. A torn last line goes when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(LogError, f"write {path}"):
            self._file = path.open("ab", buffering=0)
            whole = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(whole)

    def write(self, record: dict[str, Any]) -> None:
        """One line; all of it or, where it fails, nothing."""
        line = memoryview(json.dumps(record).encode() + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        with explained(LogError, f"write {self.path}"):
            try:
                while line:  # the system may take less at a time: when the disk is nearly full
                    line = line[self._file.write(line) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(end)
                raise

    def rewind(self, step: int) -> None:
        """Forget what came after `step`, whose records a resumed run will write again. At once, or not at all."""
        with explained(LogError, f"rewind {self.path}"):
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if not _comes_after(line, step)]
            if len(kept) == len(lines):
                return
            replace_file(self.path, b"".join(kept))
            self._file.close()  # it is the old file's
            self._file = self.path.open("ab", buffering=0)

    def holds(self, kind: str, step: int) -> bool:
        """Is there such a record? Of an earlier step, there may be: a run that ended can be prolonged."""
        records = (_record(line) or {} for line in self.path.read_bytes().splitlines())
        return any(record.get("kind") == kind and record.get("step") == step for record in records)

    def sync(self) -> None:
        """Force it to the disk: before a checkpoint, so that it has the records up to there even if the machine fails."""
        with explained(LogError, f"write {self.path}"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records. A torn last line is passed over; any other that is no record is a ValueError that names it."""
    lines = path.read_bytes().split(b"\n")[:-1]  # behind the last newline is nothing, or a torn line
    records = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            raise ValueError(f"{path}, line {number} is damaged: it is no JSON object")
        records.append(record)
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _comes_after(line: bytes, step: int) -> bool:
    """A line that is damaged, or has no step, cannot be told to: it stays."""
    found = (_record(line) or {}).get("step")
    return isinstance(found, int | float) and found > step
