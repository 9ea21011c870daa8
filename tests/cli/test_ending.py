"""Ctrl-C while the command ends."""

import subprocess
import sys

PROGRAM = """
import sys
sys.argv = ["lowp", "formats", "e5m2"]
import atexit, os, signal
import lowp.cli
def press():
    os.kill(os.getpid(), signal.SIGINT)
    print("still there")
atexit.register(press)
lowp.cli.app()
"""


def test_ctrl_c_at_the_end_says_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "e5m2" in done.stdout
    assert done.stdout.endswith("still there\n")
