"""Hugging Face accelerate: compressed gradients are one more setting of the Accelerator.

torchrun --nproc-per-node 2 examples/with_accelerate.py          # or: accelerate launch --num_processes 2 ...
"""

import tempfile

import torch
from accelerate import Accelerator
from lowp.integrations.accelerate import GradientCompression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    # Arguments of lowp.compress_gradients, and those of accelerate's DistributedDataParallelKwargs.
    compression = GradientCompression("e5m2", scale="aps", error_feedback=True, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[compression])

    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # here compression begins
    accelerator.register_for_checkpointing(compression)  # error feedback remembers: every process has a state of its own

    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()

    # Every process saves to the same folder and loads from it.
    folder = accelerator.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # one process writes for all
    accelerator.load_state(folder)
    accelerator.print(f"loss of the last batch: {loss.item():.4f}")
    if compression.handles:  # none in a single process
        accelerator.print(compression.handle.total())
    accelerator.end_training()


if __name__ == "__main__":
    main()
