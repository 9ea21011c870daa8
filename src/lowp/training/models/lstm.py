"""A character model: an embedding, LSTM layers, and a linear layer that says which character is next."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowp.training.models.shapes import text_length


def lstm(shape: tuple[int, ...], classes: int, *, width: int = 256, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """`classes` is the size of the vocabulary; `dropout` follows each LSTM layer."""
    text_length(shape, "lstm")
    return Lstm(classes, width, layers, dropout)


class Lstm(nn.Module):
    """Layers are modules of their own: dropout between those of one `nn.LSTM` is drawn by cuDNN, which no seed of a step
    reaches, and which cannot be recorded in a CUDA graph."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the character after each of `tokens` (batch, time)."""
        states = self.embedding(tokens)
        with _without_hidden_fp32(states):
            for layer in self.lstm:
                states = self.dropout(layer(states)[0])
        return self.head(states)


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
