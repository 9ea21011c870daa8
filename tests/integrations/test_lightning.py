"""lowp.integrations.lightning, in the real library, on two ranks and on one."""

from pathlib import Path

import pytest
import torch
from recording import SINGLE, Recorder, as_a_launcher_would, names_of_torchvision, same_state, single_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wire import ranks

pytestmark = pytest.mark.trainers

OPTIONS = {"scale": "aps", "error_feedback": True}
STEPS = 4


def module_of(lightning):
    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))

        def training_step(self, batch, index):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            self.sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            self.recorder = Recorder(self, self.sgd)
            return self.sgd

    return Net()


def data():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))  # two batches a rank, in the same order in each epoch
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)


def trainer_of(lightning, folder, callbacks, strategy="ddp", devices=2, **others):
    return lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=callbacks,
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **({"logger": False} | others),
    )


def on_ranks(rank: int, folder: str) -> dict:
    as_a_launcher_would(rank)
    names = names_of_torchvision()
    import lightning.pytorch as lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook  # what DDPStrategy calls on CUDA

    from lowp.integrations.lightning import CompressionState, GradientCompression, compression_hook

    class SaveAt(lightning.Callback):
        """A checkpoint after two steps, and the state of the compression at that moment."""

        def __init__(self, compression):
            self.compression = compression

        def on_train_start(self, trainer, module):
            self.begin = self.compression.handle.state_dict(all_ranks=True)

        def on_train_batch_end(self, trainer, module, *others):
            if trainer.global_step == 2:
                self.state = self.compression.handle.state_dict(all_ranks=True)
                trainer.save_checkpoint(f"{folder}/two.ckpt")

    found = {}
    # 1. Four steps, and a checkpoint after two of them.
    compression = GradientCompression("e5m2", **OPTIONS)
    save, net = SaveAt(compression), module_of(lightning)
    strategy = lightning.strategies.DDPStrategy(find_unused_parameters=True)  # DDP keeps its first buckets
    trainer = trainer_of(lightning, folder, [compression, save], strategy, logger=CSVLogger(folder, name="", version=""))
    trainer.fit(net, data())
    total = compression.handle.total()
    found["equal"] = net.recorder.equals_virtual(compression.handle, "e5m2", **OPTIONS)
    found["steps"], found["ratio"], found["bytes"] = total.steps, total.ratio, total.bytes_sent
    whole = {name: value.clone() for name, value in net.state_dict().items()}

    # 2. Another program goes on from the checkpoint.
    again = GradientCompression("e5m2", **OPTIONS)
    later, resumed = SaveAt(again), module_of(lightning)
    strategy = lightning.strategies.DDPStrategy(find_unused_parameters=True)
    trainer_of(lightning, folder, [again, later], strategy).fit(resumed, data(), ckpt_path=f"{folder}/two.ckpt")
    found["restored"] = same_state(save.state, later.begin)
    found["resumed steps"] = again.handle.total().steps
    found["final"] = all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.items())

    # 3. The same trainer and callback a second time.
    first = compression.handle
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit(net, data())
    found["second"] = compression.handle is not first and compression.handle.total().steps == STEPS

    # 4. The hook and the state of a strategy.
    state, plain = CompressionState("e4m3fn"), module_of(lightning)
    sgd = plain.configure_optimizers()
    ddp = DistributedDataParallel(plain.layers)
    recorder = Recorder(plain.layers, sgd)
    _register_ddp_comm_hook(model=ddp, ddp_comm_state=state, ddp_comm_hook=compression_hook)
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        sgd.zero_grad()
        ddp(x).square().mean().backward()
        recorder._step()
    found["hook equal"] = recorder.equals_virtual(state.handle, "e4m3fn")
    found["hook ratio"] = state.handle.total().ratio
    state.handle.remove()

    # 5. A strategy without DDP.
    bare = GradientCompression("e5m2")
    net = module_of(lightning)
    trainer = trainer_of(lightning, folder, [bare])
    trainer.strategy.configure_ddp = lambda: None  # as a strategy that wraps the model in something else
    with pytest.raises(TypeError, match=r"not Net; trainers keep the wrapped one in .*trainer.strategy.model \(Lightning\)"):
        trainer.fit(net, data())

    with single_process() as found["said"]:
        for _ in range(2):
            compression = GradientCompression("e5m2", scale="aps")
            trainer_of(lightning, folder, [compression], strategy="auto", devices=1).fit(module_of(lightning), data())
    found["nothing is done"] = compression.handle is None and compression.state_dict() == {}
    del names
    return found


def test_two_ranks(tmp_path):
    for found in ranks.run(on_ranks, 2, str(tmp_path)):
        assert found["equal"]
        assert found["steps"] == STEPS
        assert found["bytes"] > 0
        assert 3.5 < found["ratio"] < 4.1
        assert found["restored"]
        assert found["resumed steps"] == STEPS - 2
        assert found["final"]
        assert found["second"]
        assert found["hook equal"]
        assert 3.5 < found["hook ratio"] < 4.1
        assert found["said"] == [SINGLE]
        assert found["nothing is done"]
    lines = (Path(tmp_path) / "metrics.csv").read_text().splitlines()
    assert "wire_ratio" in lines[0].split(",")
    assert len(lines) >= STEPS
