"""The models whose steps are timed on a GPU, with a batch for each: forward and backward under autocast in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Model:
    """`make` builds the module, `batch` its inputs and targets; `loss` is of the module, the inputs and the targets."""

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], tuple[Tensor, Tensor]]  # of so many samples
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    samples: int  # on one rank alone
    shared: int  # where several ranks share the GPU
    layers: Callable[[nn.Module], list[nn.Module]]  # that FSDP2 shards one by one


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50().to(memory_format=torch.channels_last)


def _gpt2_medium() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))


def _images(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(samples, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(0, 1000, (samples,), device=device)


def _tokens(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 50257, (samples, 512), device=device)
    return tokens, tokens


def _vectors(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 64, device=device), torch.randint(0, 64, (samples,), device=device)


def _cross_entropy(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(module(inputs), targets)


def _language(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return module(input_ids=inputs, labels=targets).loss


MODELS = {
    "resnet50": Model(
        "ResNet-50, 224 x 224",
        _resnet50,
        _images,
        _cross_entropy,
        128,
        32,
        lambda net: [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage],
    ),
    "gpt2-medium": Model(
        "GPT-2 medium, 512 tokens", _gpt2_medium, _tokens, _language, 8, 2, lambda net: list(net.transformer.h)
    ),
    "gpt2": Model("GPT-2, 512 tokens", _gpt2, _tokens, _language, 8, 2, lambda net: list(net.transformer.h)),
    "mlp": Model("a small MLP (does it run?)", _mlp, _vectors, _cross_entropy, 8, 8, lambda net: list(net)[::2]),
}


def on_device(name: str, device: torch.device) -> nn.Module:
    """The same weights on all ranks and for all contenders."""
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name].make().train()


def step_of(name: str, module: nn.Module, samples: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward. The optimizer is left out: it is the same for all contenders, and sends nothing."""
    model = MODELS[name]
    inputs, targets = model.batch(samples, device)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(module, inputs, targets)
        loss.backward()

    return step
