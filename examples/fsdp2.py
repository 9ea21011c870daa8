"""FSDP2: gradients travel to their owners in 8 bits, and parameters to everybody in 8 bits.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import lowp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" with a GPU for each process
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)), nn.Linear(256, 10))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # After the last fully_shard, and before the first step. e4m3fn is the more exact of the two: it has a bit more of mantissa,
    # and parameters have a smaller range than gradients.
    handle = lowp.fsdp.compress(model, reduce="e5m2", gather="e4m3fn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    teacher = torch.randn(256, 10, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1 + dist.get_rank())  # every process has samples of its own
    losses = []
    for _ in range(60):
        x = torch.randn(64, 256, generator=own)
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(handle.total())
    handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
