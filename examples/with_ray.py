"""Ray Train: compressed gradients in the loop of a TorchTrainer, and a worker that dies.

    python examples/with_ray.py          # two workers on this machine

The first time, worker 1 ends in the middle of its third epoch. Ray starts both workers again, from the last checkpoint that it
knows of: model, optimizer, and what each worker's error feedback remembers.
"""

import os
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from lowp.integrations.ray import load, prepare_model, save
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn


def loop(config: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10))
    model, handle = prepare_model(model, "e5m2", scale="aps", error_feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, first = ray.train.get_context().get_world_rank(), 0

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt")
            load(handle, folder)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1

    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    for epoch in range(first, config["epochs"]):
        own = torch.Generator().manual_seed(1000 * epoch + rank)  # every worker has samples of its own
        for step in range(32):
            x = torch.randn(64, 32, generator=own)
            loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 1 and epoch == 2 and step == 16 and checkpoint is None:
                os._exit(1)  # as if the machine had gone

        with tempfile.TemporaryDirectory() as folder:
            save(handle, folder)  # every worker its own file: Ray puts the files of all workers together
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "model.pt")
            figures = {"loss": loss.item(), "ratio": handle.total().ratio, "first epoch": first}
            ray.train.report(figures, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            loop,
            train_loop_config={"epochs": 4},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            run_config=RunConfig(storage_path=folder, name="compressed", failure_config=FailureConfig(max_failures=1)),
        )
        found = trainer.fit().metrics
    print(f"loss of the last batch: {found['loss']:.4f}; {found['ratio']:.2f} x fewer bytes than fp32")
    print(f"the workers that finished began at epoch {found['first epoch']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
