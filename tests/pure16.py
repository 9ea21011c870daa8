"""Models that are trained in 16 bits alone, on a CPU (narrow) and on a GPU: ResNet-18, an LSTM, a small GPT."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width // stride, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(width // stride, width, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


def resnet18(width):
    blocks = [Block(width * 2**stage, 2 if stage and first == 0 else 1) for stage in range(4) for first in range(2)]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Lstm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0]).flatten(0, 1)


class GptBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.qkv(self.one(x)).split(c, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.two(x))


class Gpt(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, width), nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks, self.head = nn.Sequential(GptBlock(width), GptBlock(width)), nn.Linear(width, 50)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.place[: x.shape[1]])).flatten(0, 1)


MODELS = {"resnet18": resnet18, "lstm": Lstm, "gpt": Gpt}


def batch(name, size, length, device="cpu"):
    """Inputs and targets: images of `length` squared, or texts of `length`."""
    generator = torch.Generator().manual_seed(0)
    if name == "resnet18":
        x, y = torch.randn(size, 3, length, length, generator=generator).half(), torch.randint(10, (size,), generator=generator)
    else:
        x = torch.randint(50, (size, length), generator=generator)
        y = torch.randint(50, (size * length,), generator=generator)
    return x.to(device), y.to(device)


def train(net, optimizer, scale, x, y, steps):
    """Losses of a few steps, all in 16 bits."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        scale.scale(loss).backward()
        scale.step(optimizer)
        losses.append(loss.detach())
    return losses
