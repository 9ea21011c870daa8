"""Worker processes of a study."""

import os
import signal
import time

from lowp.lab import pool


def test_workers_that_do_not_end_are_given_their_time_together(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "IDLE_GRACE", 2.0)
    workers = pool.LocalPool(jobs=3, threads=1, logs=tmp_path)
    pids = [workers._new_worker().pid for _ in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # it does not see that there is nothing more to do
    began = time.perf_counter()
    workers.close()
    assert 2.0 <= time.perf_counter() - began < 5.0
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        raise AssertionError(f"worker {pid} is still there")
