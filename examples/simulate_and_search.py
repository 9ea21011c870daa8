"""Would this model survive FP8? A Hugging Face model in narrow formats, and a search for the fewest bits by layer.

    python examples/simulate_and_search.py

The model is made from a configuration: nothing is downloaded. Take `AutoModelForCausalLM.from_pretrained(...)` for a real one.
"""

import lowp
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def tokens(count: int) -> torch.Tensor:
    """Sequences that count: each token is the one before plus a step, which differs from sequence to sequence."""
    return (torch.randint(0, 32, (count, 1)) + torch.randint(1, 4, (count, 1)) * torch.arange(16)) % 32


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch, labels=batch).loss


def train(model: torch.nn.Module, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = loss_of(model, tokens(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    # 1. The same training twice: in FP32, and with every role in 8 bits. The model's code is not changed.
    plain = new_model()
    print(f"loss after 60 steps in fp32:            {train(plain, 60):.3f}")
    narrow = new_model()
    lowp.simulate(narrow, weights="e4m3fn", activations="e4m3fn", errors="e5m2", gradients="e5m2")
    print(f"loss after 60 steps in e4m3fn and e5m2: {train(narrow, 60):.3f}")
    lowp.restore(narrow)  # the exact model that it was, with the weights that it has now

    # 2. Formats by layer: the fewest bits that add at most .02 to the loss of the trained model. Nothing is trained here.
    plain.eval()
    # (One round of improvements, to be quick: more find better formats.)
    result = lowp.search(plain, [tokens(64)], evaluate=loss_of, tolerance=0.02, rounds=1)
    print(result.table())


if __name__ == "__main__":
    main()
