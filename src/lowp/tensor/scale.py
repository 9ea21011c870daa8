"""How numbers are brought into a format's range, as users name it: one `Scale`, for the wire and for simulated models.

A scale multiplies by a power of two, which never rounds. Who takes a scale says which kinds (`wire/scaling.py` and
`simulation/scales.py` have them, and what each does):

| scale | one power for | wire | simulate |
|---|---|---|---|
| `none` | | yes | yes |
| `aps` | a layer, agreed by all ranks from its largest magnitude (arXiv 1911.08907) | yes | of one rank |
| `aps_delayed` | the same, from the last step's | yes | |
| `local` | a layer in one message, from its own largest magnitude | yes | |
| `tensor`, `channel` | a tensor, or each channel, from its own | | yes |
| `block:<n>` | n neighbours, from their own | yes | yes |
| `delayed:<n>` | a tensor, from the largest of the last n steps (16 if n is not given) | | yes |
| `calibrated` | a tensor, from the largest of a calibration | | yes |
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowp.formats.block import MAX_BLOCK_SIZE
from lowp.names import did_you_mean

_HISTORY = 16  # steps
_LARGEST = {"block": MAX_BLOCK_SIZE, "delayed": 1024}  # n of kinds that have one


@dataclass(frozen=True)
class Scale:
    """A kind, with the number of elements that share a scale (`block`) or of steps that are remembered (`delayed`)."""

    kind: str
    size: int = 0

    @property
    def block(self) -> int:
        """The number of elements that share a scale; 0 where that is not a fixed number."""
        return self.size if self.kind == "block" else 0

    @property
    def shared(self) -> bool:
        """On the wire: do all ranks use one scale, so that scaled numbers can be added?"""
        return self.kind in ("none", "aps", "aps_delayed")

    @property
    def agreed(self) -> bool:
        """On the wire: is there a message before the gradients?"""
        return self.kind == "aps"

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" if self.size else self.kind


def parse_scale(text: "str | Scale", kinds: Sequence[str]) -> Scale:
    """One of `kinds`, such as "aps" or "block:<n>"; ValueError for all others."""
    text = str(text)
    kind, colon, size = text.partition(":")
    if not colon and kind in kinds:
        return Scale(kind, _HISTORY if kind == "delayed" else 0)
    if f"{kind}:<n>" in kinds and colon:
        if size.isdecimal() and len(size) < 10 and 1 <= int(size) <= _LARGEST[kind]:
            return Scale(kind, int(size))
        raise ValueError(f"scale {text!r}: {kind}:<n> takes n from 1 to {_LARGEST[kind]}")
    known = f"it is one of {', '.join(kinds)}"
    raise ValueError(f"unknown scale {text!r}; {did_you_mean(text, kinds, known)}")
