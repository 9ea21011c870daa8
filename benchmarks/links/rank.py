"""One rank: joins the others, runs every case of a plan, and, as rank 0, writes the measurements of all of them down.

python -m benchmarks.links.rank PLAN RESULT        started by processes.py with RANK, WORLD_SIZE, MASTER_ADDR ... set
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.links.bucket import buckets
from benchmarks.links.clock import Clock
from benchmarks.links.collective import collectives
from benchmarks.links.ddp_step import ddp_steps
from benchmarks.links.model_steps import fsdp_steps, model_steps
from benchmarks.predict.steps import calibrated, measured_steps

CALL_TIMEOUT = timedelta(minutes=5)
KINDS = {
    "collective": collectives,
    "ddp": ddp_steps,
    "model": model_steps,
    "fsdp": fsdp_steps,
    "bucket": buckets,
    "calibrated": calibrated,
    "steps": measured_steps,
}


def main(plan_path: str, result_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device(plan["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=CALL_TIMEOUT)
    clock = Clock(plan["interface"], device)
    failures: dict[str, str] = {}
    rows: list[dict] = []
    for case in plan["cases"]:
        print(case, flush=True)  # into the rank's log, which is shown when it fails
        rows += [{"kind": case["kind"]} | row for row in KINDS[case["kind"]](case, clock, failures)]
        if dist.get_rank() == 0:  # after each case: what is there already counts, should a later one fail
            Path(result_path).write_text(json.dumps({"rows": rows, "failures": failures}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
