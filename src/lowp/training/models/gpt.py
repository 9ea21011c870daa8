"""A small GPT: pre-norm transformer blocks over learned positions, as in GPT-2.

    x = tokens + positions
    x = x + attention(norm(x));  x = x + mlp(norm(x))      for each block
    logits = head(norm(x))

Attention is causal and torch's own fused one. Weights begin as N(0, 0.02); the last layer of each branch begins smaller by
sqrt(2 * layers), so that the sum of all branches begins with the variance of one. The head may share its weight with the
embedding of tokens (`tied`).
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowp.training.models.shapes import text_length

INITIAL_DEVIATION = 0.02


def gpt(
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Sequential:
    """`shape` is (the longest text,), `classes` the size of the vocabulary."""
    length = text_length(shape, "gpt")
    if width % heads:
        raise ValueError(f"gpt: a width of {width} cannot be shared by {heads} heads; make it a multiple of them")
    embedding = Embedding(classes, length, width, dropout)
    blocks = [GptBlock(width, heads, dropout) for _ in range(layers)]
    head = nn.Linear(width, classes, bias=False)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=embedding, blocks=nn.Sequential(*blocks), norm=nn.LayerNorm(width), head=head
    )
    model = nn.Sequential(parts)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for block in blocks:
        for last in (block.attention.out, block.narrow):
            nn.init.normal_(last.weight, std=INITIAL_DEVIATION / math.sqrt(2 * layers))
    if tied:
        head.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """Tokens and where they stand."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * INITIAL_DEVIATION)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        time, longest = tokens.shape[1], self.positions.shape[0]
        if time > longest:
            raise ValueError(f"gpt has positions for {longest} tokens, and the text has {time}")
        return self.dropout(self.tokens(tokens) + self.positions[:time])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.narrow(self.gelu(self.widen(self.norm2(x)))))
