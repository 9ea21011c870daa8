"""What a process is told about CUDA's products, for as long as a run lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowp.training.recipe import Recipe


@contextmanager
def cuda_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """TF32 or not, the same bits every time or the fastest algorithm; as it was before, afterwards."""
    if device.type != "cuda":
        yield
        return
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the process's first product
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    were_deterministic = torch.are_deterministic_algorithms_enabled()
    matmul.allow_tf32 = cudnn.allow_tf32 = recipe.precision.tf32
    cudnn.benchmark = not recipe.deterministic
    torch.use_deterministic_algorithms(recipe.deterministic)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
        torch.use_deterministic_algorithms(were_deterministic)
