"""Who does a job: a kernel, made for its arithmetic and for lanes that its numbers allow, or plain operations."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.tensor import kernels, ops
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.matmul import cpp, plain, triton
from lowp.tensor.matmul.arithmetic import Arithmetic
from lowp.tensor.matmul.job import MatmulJob
from lowp.tensor.matmul.lanes import Operands, choices, cuts, steps_of
from lowp.tensor.matmul.quire import MOST_BINS
from lowp.tensor.matmul.steps import GENERAL, Lanes, Steps


def contract(job: MatmulJob, dtype: torch.dtype) -> Tensor:
    """[*batch, M, N], rounded to nearest where `dtype` cannot hold the numbers of `accumulate`."""
    if job.elements == 0:
        return torch.empty(job.shape, dtype=dtype, device=job.device)
    compiling = kernels.kernel_info()["policy"] != "never"
    result = _launched(job) if compiling and job.device.type == "cuda" else None
    if result is None:
        result = _called(job, compiling and job.device.type == "cpu")
    if result.dtype == dtype:
        return result
    return ops.quantize(result, FORMAT_OF_DTYPE[dtype], out=torch.empty_like(result, dtype=dtype))


def _called(job: MatmulJob, compiling: bool) -> Tensor:
    """The host looks at the numbers, and calls one kernel, or none."""
    several = len(choices(job.arithmetic)) > 1
    operands = job.operands() if several and (compiling or job.arithmetic.quire) else None
    lanes = _first_right(job.arithmetic, operands)
    kernel = kernels.get_or_build(_What(job.arithmetic, lanes), job.device, job.work, _build) if compiling else None
    steps = steps_of(job.arithmetic, lanes if kernel is not None or job.arithmetic.quire else GENERAL)
    uniforms = _uniforms(job.arithmetic, operands, steps, job.device)
    if kernel is not None:
        return kernel(job, uniforms)
    return plain.run(job, steps, uniforms, tables_on(steps, job.device))


def _first_right(arithmetic: Arithmetic, operands: Operands | None) -> Lanes:
    """The fastest lanes that are right for these operands; of unknown ones, for all."""
    return next(c.lanes for c in choices(arithmetic) if c.condition is None or (operands is not None and c.condition(operands)))


def _launched(job: MatmulJob) -> Tensor | None:
    """All kernels are launched that may be right; the device finds out which is. None where they cannot be built."""
    found = [c for c in choices(job.arithmetic) if c.lanes.bins in _LAUNCHED_BINS]
    built = [kernels.get_or_build(_What(job.arithmetic, c.lanes), job.device, kernels.SMALL, _build) for c in found]
    if None in built:
        return None
    operands = job.operands() if len(found) > 1 else None
    chosen = torch.full((1,), len(found) - 1, dtype=torch.int32, device=job.device)
    for i, choice in reversed([*enumerate(found)]):
        if choice.condition is not None and operands is not None:
            right, own = choice.condition(operands), torch.full_like(chosen, i)
            if isinstance(right, Tensor):
                chosen = torch.where(right, own, chosen)
            elif right:  # whatever the data
                chosen = own
    result = torch.empty(job.shape, dtype=steps_of(job.arithmetic, GENERAL).result_dtype, device=job.device)
    for i, (choice, kernel) in enumerate(zip(found, built, strict=True)):
        steps = steps_of(job.arithmetic, choice.lanes)
        kernel.launch(job, result, _uniforms(job.arithmetic, operands, steps, job.device), chosen, i)
    return result


_LAUNCHED_BINS = (1, 4, MOST_BINS)  # of a quire: each is a kernel to build and to launch


def _uniforms(arithmetic: Arithmetic, operands: Operands | None, steps: Steps, device: torch.device) -> Tensor:
    if operands is None or not steps.uniforms:
        return torch.empty(0, dtype=torch.float64, device=device)
    return cuts(arithmetic, operands, steps.lanes.bins, device)


@lru_cache(maxsize=256)
def tables_on(steps: Steps, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(table.tensor(device) for table in steps.tables)


@dataclass(frozen=True)
class _What:
    """What a kernel is for."""

    arithmetic: Arithmetic
    lanes: Lanes


def _build(what: _What, device: torch.device) -> Any:
    steps = steps_of(what.arithmetic, what.lanes)
    return (triton.TritonMatmul if device.type == "cuda" else cpp.CppMatmul)(steps, tables_on(steps, device), device)
