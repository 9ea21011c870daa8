"""What the numbers are doing: the audit, memory by role, and statistics of every layer."""

from lowp.health.audit import audit as audit
from lowp.health.memory import Memory as Memory
from lowp.health.memory import memory as memory
from lowp.health.watch import Watch as Watch
from lowp.health.watch import watch as watch
