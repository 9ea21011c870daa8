"""A model with an operation that no compiler can differentiate: Dynamo leaves it out of the graph, simulated or not.

transformers' mixtures of experts (Mixtral) have one: the backward pass of their grouped product asks how long each group is.
"""

import pytest
import torch
from torch import nn

from lowp.simulation import simulate

# torch's compiler warns about itself while it is imported, and when it breaks a graph
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")
FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
ENDS = [2, 5, 8]


@torch.library.custom_op("lowp_tests::grouped", mutates_args=())
def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    pieces = x.tensor_split(ends[:-1].tolist())
    return torch.cat([piece @ own for piece, own in zip(pieces, weight, strict=True)])


@grouped.register_fake
def _(x, weight, ends):
    return x.new_empty(x.shape[0], weight.shape[2])


def _gradients(ctx, gradient):
    x, weight, ends = ctx.saved_tensors
    cuts = ends[:-1].tolist()  # unknown to a compiler
    both = list(zip(gradient.tensor_split(cuts), x.tensor_split(cuts), weight, strict=True))
    return torch.cat([g @ w.t() for g, _, w in both]), torch.stack([p.t() @ g for g, p, _ in both]), None


grouped.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        return grouped(x, self.weight, torch.tensor(ENDS))


def gradients_of(run, model):
    model.zero_grad()
    run(torch.linspace(-1, 1, 64).view(8, 8)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_grouped_product_is_left_out_of_the_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 4))
    simulate(model, **FORMATS)
    eager = gradients_of(model, model)
    compiled = gradients_of(torch.compile(model, backend="aot_eager"), model)
    torch._dynamo.reset()
    for name, gradient in eager.items():
        torch.testing.assert_close(compiled[name], gradient)


@pytest.mark.slow
def test_mixtral():
    names = torch.library.Library("torchvision", "FRAGMENT")  # see test_real_models.py
    if not torch.backends.cuda.is_built():
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    text = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = text.MixtralForCausalLM(
        text.MixtralConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=16,
        )
    )
    tokens = torch.tensor([[1, 4, 2, 36, 0, 9, 30], [3, 3, 5, 11, 2, 17, 8]])
    simulate(model, **FORMATS)
    losses = [run(input_ids=tokens, labels=tokens).loss for run in (model, torch.compile(model))]
    losses[1].backward()
    torch._dynamo.reset()
    torch.testing.assert_close(losses[0], losses[1])
    assert all(p.grad is not None for p in model.parameters())
