"""Compressed FSDP2: `from lowp.fsdp import compress`. The code is in `lowp.wire.fsdp`."""

from lowp.wire.fsdp import FsdpHandle as FsdpHandle
from lowp.wire.fsdp import compress as compress
