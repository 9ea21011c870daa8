"""A process that makes runs one after the other, as it is told: `python -m lowp.lab.worker`.

To start Python and import torch takes seconds, and many runs of a study are not much longer; so a worker lives for the whole
study. It reads a job, one line of JSON, from stdin and answers with its outcome, one line of JSON, on what was its stdout. All
that runs print goes to stderr, which is a file. It ends when there is nothing more to read, and when its parent is killed.
"""

import ctypes
import json
import os
import signal
import sys

from lowp.training.launch import PR_SET_PDEATHSIG

PARENT = "LOWP_STUDY"  # the environment variable with the process id of who started it


def follow_parent() -> bool:
    """Where the parent is killed, a run is asked to stop: it saves, and the worker ends. False: it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    return os.getppid() == int(os.environ.get(PARENT, os.getppid()))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if not follow_parent():
        return
    from lowp.lab.execution import Job, execute

    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        outcome = execute(Job.read(line))
        try:
            answers.write(json.dumps(outcome.document()) + "\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
