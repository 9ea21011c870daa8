"""The inlined road: an operation as plain torch operations on a tensor of any shape."""

import torch
from torch import Tensor

from lowp.tensor.core import Operation
from lowp.tensor.noise import Noise, blocks, key_tensor


def apply_inline(operation: Operation, stored: Tensor, noise: Noise | None) -> Tensor:
    """Stored bits in, stored bits out. The operation's tables become constants of whatever is being traced."""
    tables = tuple(table.tensor(stored.device) for table in operation.tables)
    if noise is None:
        return operation(stored, tables)
    pieces = blocks(noise, stored.numel())
    if len(pieces) <= 1:
        return operation(stored, tables, key_tensor(noise, 0, stored.device))
    flat = stored.reshape(-1)
    results = [operation(flat[first:end], tables, key_tensor(noise, first, stored.device)) for first, end in pieces]
    return torch.cat(results).reshape(stored.shape)
