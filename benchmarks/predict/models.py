"""Three models whose steps take 50 to 1000 ms here, each as a user would bring it: `--model benchmarks.predict.models:mlp`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowp.training.models import build_model

NAMES = ("mlp", "resnet18", "gpt")
ON_GPUS = ("resnet50", "vgg16", "gpt2")  # the predictor's own
BATCH = 32  # of those
Made = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


def named(name: str) -> str:
    """As `--model` takes it."""
    return f"{__name__}:{name}" if name in NAMES else name


def mlp() -> Made:
    """784 - 1024 - 1024 - 10, 256 samples: 1.9 million parameters in few large layers."""
    torch.manual_seed(0)
    model = build_model("mlp", shape=(1, 28, 28), classes=10, options={"hidden": [1024, 1024]})
    return model, torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,)), _loss


def resnet18() -> Made:
    """ResNet-18 with a quarter of the channels, 16 images of 32 x 32: .7 million parameters in 62 tensors."""
    torch.manual_seed(0)
    model = build_model("resnet18", shape=(3, 32, 32), classes=10, options={"width": 16})
    return model, torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)), _loss


def gpt() -> Made:
    """The recipes' small GPT, 4 texts of 128 characters: .8 million parameters."""
    torch.manual_seed(0)
    model = build_model("gpt", shape=(128,), classes=65, options={})
    tokens = torch.randint(0, 65, (4, 129))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), _loss


def _loss(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
