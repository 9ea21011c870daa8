"""Training in FP16 with no FP32 tensor anywhere, and the proof of it, with an ordinary DataLoader.

python examples/pure_fp16.py
"""

import lowp
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    # Data become FP16 before the audit begins: what is read in FP32 and converted inside would be found.
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x.half(), y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    # Updates are smaller than what FP16 resolves near a weight. Stochastic rounding keeps them on average.
    optimizer = lowp.optim.AdamW(model.named_parameters(), lr=1e-2, update="stochastic")
    # Gradients are smaller than what FP16 holds. The loss is multiplied by a power of two, and the optimizer divides by it.
    scale = lowp.LossScale("dynamic", model=model)

    losses = []
    # Without kernels, plain operations would compute in FP32 for a moment, and the audit would say so.
    lowp.set_kernel_policy("always")
    with lowp.audit(forbid=(torch.float32, torch.float64)) as report:  # raises at the first such tensor, with the line
        for _ in range(4):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                scale.scale(loss).backward()
                scale.step(optimizer)
                losses.append(loss.detach())
    assert report.clean  # nothing was found, and nothing was hidden from the audit

    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(report)
    print(lowp.health.memory(model, optimizer))


if __name__ == "__main__":
    main()
