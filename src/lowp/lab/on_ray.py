"""Runs on a cluster, by Ray: each run is a task, and Ray decides where and when it runs.

A task asks for as many processors as its run has ranks and threads, and for a share of a GPU where the run computes on one. Its
directory is the study's own, so all nodes must see that: a probe on every node finds out before any run begins. Ray keeps its
workers, so that torch is imported once in each of them. Tasks are not repeated by Ray when they die: a run that was killed is
recorded as failed, and `--resume` goes on from its last checkpoint.
"""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from lowp.lab.execution import Job, Outcome, execute
from lowp.machine import usable_cores

_GPU_SHARES = 1000  # Ray counts ten-thousandths; this is small enough for any number of runs on a GPU


def import_ray() -> Any:
    try:
        import ray  # pyrefly: ignore[missing-import]  # an extra
    except ModuleNotFoundError:
        raise ValueError("--on ray needs the package ray: pip install 'lowp[ray]'") from None
    return ray


def start_ray(ray: Any, cpus: int | None = None) -> bool:
    """Connect to the cluster that RAY_ADDRESS names, or to the one that this machine is part of, or start one here. Whether
    this process has now connected; it was before, where somebody else has called `ray.init`.

    Args:
        cpus: that a cluster which is started here counts, where it is more than this machine has: processes then share them.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    known = {} if address or cpus is None or cpus <= usable_cores() else {"num_cpus": cpus}
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=None if address else False, **known)
    return True


class RayExecutor:
    def __init__(self, shared: Path, threads: int, jobs: int | None = None, gpu_share: float = 0.0) -> None:
        """Connect to a cluster, or start one here (`start_ray`).

        Args:
            shared: the study's directory, which every node must see.
            threads: of each rank.
            jobs: the most runs that are under way at once; None: as many as there is room for.
            gpu_share: what a run takes of a GPU, from 0 to 1.
        """
        self._ray = ray = import_ray()
        self._threads, self._jobs, self._gpu_share = threads, jobs, round(gpu_share * _GPU_SHARES) / _GPU_SHARES
        self._own = start_ray(ray)
        self._refs: dict[Any, tuple[Job, float]] = {}
        self._stopping = False
        self._remote = ray.remote(_execute)
        check_shared(ray, shared.resolve())

    @property
    def nodes(self) -> int:
        return sum(node["Alive"] for node in self._ray.nodes())

    def has_room(self, job: Job) -> bool:
        return not self._stopping and (self._jobs is None or len(self._refs) < self._jobs)

    def start(self, job: Job) -> None:
        needs = {"num_cpus": job.ranks * (job.recipe.threads or self._threads), "num_gpus": self._gpu_share}
        environment = {"env_vars": {"OMP_NUM_THREADS": str(self._threads), "OMP_WAIT_POLICY": "passive"}}
        job = Job(job.name, job.recipe, job.out.resolve(), job.data and job.data.resolve())
        task = self._remote.options(name=job.name, runtime_env=environment, max_retries=0, **needs)
        self._refs[task.remote(job.text())] = job, time.perf_counter()

    def wait(self, seconds: float) -> list[Outcome]:
        if not self._refs:
            time.sleep(seconds)
            return []
        done, _ = self._ray.wait(list(self._refs), num_returns=1, timeout=seconds)
        return [self._outcome(ref) for ref in done]

    def _outcome(self, ref: Any) -> Outcome:
        job, began = self._refs.pop(ref)
        try:
            return Outcome(**self._ray.get(ref))
        except Exception as error:  # of Ray: a worker or a node that died, a task that was cancelled
            state = "stopped" if self._stopping else "failed"
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return Outcome(job.name, state, reason, time.perf_counter() - began)

    def stop(self) -> None:
        self._cancel(force=False)

    def kill(self) -> None:
        self._cancel(force=True)

    def _cancel(self, force: bool) -> None:
        """Without force Ray raises KeyboardInterrupt in the task: SIGINT, to which a run answers by saving."""
        self._stopping = True
        for ref in self._refs:
            self._ray.cancel(ref, force=force)

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()


def _execute(text: str) -> dict[str, Any]:
    """In a worker of Ray's. What a run prints is nobody's: the study's screen reads its directory."""
    null = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(null, 1)
    try:
        return execute(Job.read(text)).document()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def check_shared(ray: Any, directory: Path) -> None:
    """Does every node see the study's directory? A file with a name that cannot be there by chance tells."""
    token = directory / f".probe-{uuid.uuid4().hex}"
    token.write_text("")
    try:
        look = ray.remote(os.path.exists)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = [node for node in ray.nodes() if node["Alive"]]
        asked = [
            look.options(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False)).remote(str(token))
            for node in nodes
        ]
        blind = [node["NodeManagerHostname"] for node, seen in zip(nodes, ray.get(asked), strict=True) if not seen]
    finally:
        token.unlink()
    if blind:
        raise ValueError(
            f"node {blind[0]} does not see {directory}: with --on ray, --out must be on a disk that all nodes share"
        )
