"""A character model: an embedding, LSTM layers, and a linear layer that says which character is next."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowp.training.models.shapes import text_length


def lstm(shape: tuple[int, ...], classes: int, *, width: int = 256, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """`classes` is the size of the vocabulary; `dropout` is between the layers, and before the last one."""
    text_length(shape, "lstm")
    return Lstm(classes, width, layers, dropout)


class Lstm(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        between = dropout if layers > 1 else 0.0  # torch warns of dropout between the layers of one
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the character after each of `tokens` (batch, time)."""
        embedded = self.embedding(tokens)
        with _without_hidden_fp32(embedded):
            states, _ = self.lstm(embedded)
        return self.head(self.dropout(states))


@contextmanager
def _without_hidden_fp32(x: Tensor) -> Iterator[None]:
    """On a CPU, oneDNN's LSTM for bfloat16 computes its gradients as FP32 tensors; torch's own does not."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)
