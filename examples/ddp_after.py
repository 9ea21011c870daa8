"""A small network, trained by several processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_before.py
torchrun --nproc-per-node 2 examples/ddp_after.py        # the same with gradients in 8 bits
diff examples/ddp_before.py examples/ddp_after.py        # two lines
"""

import lowp
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def samples() -> TensorDataset:
    """Points in 32 dimensions, with the labels that a random linear function gives them. Every process makes the same ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=generator)
    return TensorDataset(x, (x @ torch.randn(32, 10, generator=generator)).argmax(1))


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" with a GPU for each process
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10))
    ddp = DistributedDataParallel(model)
    lowp.compress_gradients(ddp, "e5m2", scale="aps")  # what it returns knows the bytes that were sent: .total()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    data = samples()
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))

    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            x, y = data.tensors
            print(f"loss of all samples after training: {nn.functional.cross_entropy(model(x), y):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
