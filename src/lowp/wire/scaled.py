"""Numbers of a bucket times a factor of their layer."""

import torch
from torch import Tensor

from lowp.tensor.lists.parts import PartTable
from lowp.wire.part_kernels import scale_function
from lowp.wire.plan import Stretch
from lowp.wire.scaling import divide_


def scaled(source: Tensor, stretch: Stretch, factors: Tensor | None, divisor: int = 1) -> Tensor:
    """Numbers of a chunk or a shard in float32, each layer times its factor, divided; without either, float32 as it is."""
    if (factors is None and divisor == 1) or not source.numel():
        return source.to(torch.float32)
    device = source.device
    ones = 1, 1 + stretch.runs[-1][0]
    of_layers = torch.ones(ones, dtype=torch.float32, device=device) if factors is None else factors.view(1, -1)
    if divisor != 1:
        of_layers = torch.cat([of_layers, torch.full_like(of_layers, divisor)])
    if device not in stretch.tables:
        stretch.tables[device] = PartTable([(last - first, layer, first) for layer, first, last in stretch.runs], device)
    table = stretch.tables[device]
    kernel = scale_function(source.dtype, divisor != 1).kernel(table)
    numbers = torch.empty(source.numel(), dtype=torch.float32, device=device)
    if kernel is not None:
        kernel(source, numbers, table, None, of_layers)
        return numbers
    for layer, first, last in stretch.runs:
        torch.mul(source[first:last].to(torch.float32), of_layers[0, layer], out=numbers[first:last])
    return divide_(numbers, divisor)
