"""What a sampled step left behind: figures by layer and role, which travel to the host together and become records there."""

import json
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp import compat
from lowp.formats import AnyFormat
from lowp.health.columns import aligned
from lowp.health.measures import CHANGES, change_summary, local_part, measure, merge, own_format, sample, summary


@dataclass
class Entry:
    """What is known of one layer in one role: how many elements there were, and the figures of those looked at."""

    elements: int
    vector: Tensor
    change: Tensor | None = None


class Sample:
    """The figures of one step."""

    def __init__(self, step: int, most: int) -> None:
        self._step, self._most = step, most
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self._failures: dict[tuple[str, str, str | None], str] = {}
        self.rounded: set[tuple[str, str]] = set()  # layers and roles that `see_rounded` has added
        self._arrivals: list[tuple[list[tuple[str, str, str]], Tensor, Any]] = []

    @property
    def started(self) -> bool:
        return bool(self._entries or self._failures)

    def see(
        self,
        layer: str,
        role: str,
        fmt: AnyFormat | None,
        tensor: Tensor,
        elements: int | None = None,
        change: Tensor | None = None,
    ) -> None:
        """Add a tensor, or a sample of one with so many `elements`, to the figures of its layer and role."""
        key = layer, role, "fp64" if fmt is None else str(fmt)
        if compat.is_functorch_wrapped_tensor(tensor):
            raise TypeError("its numbers are not there to be seen inside torch.func transforms")
        elements = local_part(tensor).numel() if elements is None else elements
        # In its own format a number is what it is: there is nothing to round.
        rounds_to = None if fmt == own_format(tensor.dtype.to_real()) else fmt
        vector = measure(sample(tensor, self._most, fmt), rounds_to)
        if (known := self._entries.get(key)) is not None:
            elements, vector = elements + known.elements, merge(vector, known.vector)
        self._entries[key] = Entry(elements, vector, change)

    def see_rounded(self, layer: str, role: str, label: str, numbers: Tensor, rounded: Tensor, limit: float | None) -> None:
        """Add numbers that somebody else has rounded, and what they became. `label` says to what."""
        key, elements = (layer, role, label), local_part(numbers).numel()
        vector = measure(sample(numbers, self._most), None, sample(rounded, self._most), limit)
        if (known := self._entries.get(key)) is not None:
            elements, vector = elements + known.elements, merge(vector, known.vector)
        self._entries[key] = Entry(elements, vector)
        self.rounded.add((layer, role))

    @contextmanager
    def attempt(self, layer: str, role: str, fmt: AnyFormat | None = None) -> Iterator[None]:
        """Whatever goes wrong inside becomes a record with its reason. Nobody's training ends because its health was taken."""
        try:
            yield
        except Exception as error:
            self.fail(layer, role, fmt, f"{type(error).__name__}: {error}")

    def fail(self, layer: str, role: str, fmt: AnyFormat | None, reason: str) -> None:
        self._failures[layer, role, None if fmt is None else str(fmt)] = reason

    def send(self) -> None:
        """Start the figures on their way to the host: one copy for each device, into pinned memory, without waiting."""
        for device in {entry.vector.device for entry in self._entries.values()}:
            keys = [key for key, entry in self._entries.items() if entry.vector.device == device]
            none = torch.zeros(CHANGES, dtype=torch.float64, device=device)
            rows = [self._entries[key] for key in keys]
            figures = torch.stack([torch.cat([none if row.change is None else row.change, row.vector]) for row in rows])
            arrived = torch.cuda.Event() if device.type == "cuda" else None
            self._arrivals.append((keys, figures.to("cpu", non_blocking=True), arrived))
            if arrived is not None:
                arrived.record(torch.cuda.current_stream(device))

    def records(self) -> list[dict[str, Any]]:
        """The figures, once they have arrived, in the order in which the step made them."""
        found = {}
        for keys, figures, arrived in self._arrivals:
            if arrived is not None:
                arrived.synchronize()
            found |= dict(zip(keys, figures.tolist(), strict=True))
        records = []
        for key, entry in self._entries.items():
            change, vector = found[key][:CHANGES], found[key][CHANGES:]
            changes = {} if entry.change is None else change_summary(change)
            records.append(self._head(key) | {"elements": entry.elements} | summary(vector) | changes)
        for key, reason in self._failures.items():
            changes = {"lost_updates": None, "unchanged": None} if key[1] == "updates" else {}
            records.append(self._head(key) | changes | {"reason": reason})
        return records

    def _head(self, key: tuple[str, str, str | None]) -> dict[str, Any]:
        return {"step": self._step} | dict(zip(("layer", "role", "format"), key, strict=True))


class HealthLog:
    """Samples that wait for their figures to reach the host, then records: the newest in memory, all in the file."""

    def __init__(self, path: Path | None, keep: int) -> None:
        self.path = path
        self.samples: deque[list[dict[str, Any]]] = deque(maxlen=keep)
        self.waiting: list[Sample] = []
        if path is not None:
            path.touch()  # a folder that does not exist is said now, not after a hundred steps

    def write(self) -> None:
        """Turn waiting samples into records; on CUDA this waits until their figures have arrived."""
        waiting, self.waiting = self.waiting, []
        for arrived in waiting:
            records = arrived.records()
            self.samples.append(records)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)


COLUMNS = ("layer", "role", "format", "underflow", "overflow", "nonfinite", "sqnr_db", "lost_updates", "unchanged", "largest")


def table(records: list[dict[str, Any]], rows: int) -> str:
    """Records as text, the worst first: non-finite numbers, then whatever loses the largest share, then the lowest SQNR."""
    if not records:
        return "no step has been sampled yet"

    def goodness(record: dict[str, Any]) -> tuple[bool, float, float]:
        shares = [record.get(name) or 0.0 for name in ("underflow", "overflow", "lost_updates")]
        decibels = record.get("sqnr_db")
        return not record.get("nonfinite"), -max(shares), math.inf if decibels is None else decibels

    worst = sorted(records, key=goodness)[:rows]
    lines = aligned([COLUMNS, *([_cell(name, record.get(name)) for name in COLUMNS] for record in worst)])
    reasons = dict.fromkeys(f"{record['role']}: {record['reason']}" for record in worst if "reason" in record)
    hidden = len(records) - len(worst)
    return "\n".join([f"step {records[0]['step']}", *lines, *([f"and {hidden} more"] if hidden else []), *reasons])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("underflow", "overflow", "lost_updates", "unchanged"):
        return f"{value:.2%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
