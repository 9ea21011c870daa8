"""Ctrl-C while the `lowp` command is starting: one line and exit code 130, no traceback; and while it ends: nothing.

To import torch takes a second or more, and somebody who has mistyped the command does not wait for it. An exception would
travel through modules that are imported in part; nothing has begun yet, so the process simply ends. This is imported before
torch, and does nothing where `lowp` is a library in somebody else's program.
"""

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT  # the exit code, as shells have it


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"lowp: interrupted\n")
    os._exit(INTERRUPTED)


def _is_the_command() -> bool:
    program = sys.argv[0] if getattr(sys, "argv", None) else ""  # "-m" while `python -m lowp` looks for what to run
    return program == "-m" or os.path.basename(program) == "lowp"


def has_started() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again: what has begun is ended in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def has_ended() -> None:
    """What is left is the end of the interpreter: who presses Ctrl-C twice must not see its tracebacks."""
    if _listens and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


_listens = (
    _is_the_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _listens:
    signal.signal(signal.SIGINT, _end)
