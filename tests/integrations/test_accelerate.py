"""lowp.integrations.accelerate, in the real library, on two ranks and on one."""

import pytest
import torch
from recording import SINGLE, Recorder, as_a_launcher_would, same_state, single_process
from torch import nn

from wire import ranks

pytestmark = pytest.mark.trainers

STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def train(accelerator, model, optimizer, rank: int, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed + 2 * step + rank))
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()


def on_ranks(rank: int, folder: str) -> dict:
    as_a_launcher_would(rank)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    from lowp.integrations.accelerate import GradientCompression

    found = {}
    compression = GradientCompression("e5m2", scale="aps", error_feedback=True, bucket_cap_mb=1, static_graph=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[compression])
    bare = net()
    sgd = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(bare, sgd)
    model, optimizer = accelerator.prepare(bare, sgd)
    accelerator.register_for_checkpointing(compression)
    train(accelerator, model, optimizer, rank, STEPS)
    found["equal"] = recorder.equals_virtual(compression.handle, "e5m2", scale="aps", error_feedback=True)
    found["total"] = compression.handle.total()
    found["bucket_cap"] = model.bucket_bytes_cap  # the settings of DDP arrive

    saved = compression.handle.state_dict(all_ranks=True)
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, rank, 2, seed=100)
    accelerator.load_state(folder)
    found["restored"] = same_state(saved, compression.handle.state_dict(all_ranks=True))

    # Compiled, and in another format. Accelerators of one process share their settings until they are forgotten.
    AcceleratorState._reset_state()
    compiled = GradientCompression("e4m3fn")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[compiled], dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    bare = net()
    sgd = torch.optim.SGD(bare.parameters(), lr=0.1)
    recorder = Recorder(bare, sgd)
    model, optimizer = accelerator.prepare(bare, sgd)
    train(accelerator, model, optimizer, rank, STEPS)
    found["compiled"] = type(model).__name__
    found["compiled equal"] = recorder.equals_virtual(compiled.handle, "e4m3fn")
    second = accelerator.prepare_model(net())
    found["two models"] = second is not None and len(compiled.handles)
    with pytest.raises(RuntimeError, match="2 models are compressed"):
        _ = compiled.handle
    with pytest.raises(ValueError, match="the checkpoint has the compression of 1 models, here are 2"):
        compiled.load_state_dict({"models": [saved]})

    with single_process() as found["said"]:
        for _ in range(2):
            AcceleratorState._reset_state(reset_partial_state=True)
            compression = GradientCompression("e5m2", scale="aps")
            accelerator = Accelerator(cpu=True, kwargs_handlers=[compression])
            bare = net()
            model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
            train(accelerator, model, optimizer, 0, 1)
    found["nothing is done"] = model is bare and compression.handles == [] and compression.state_dict() == {"models": []}
    with pytest.raises(RuntimeError, match="no model is compressed"):
        _ = compression.handle
    return found


def test_two_ranks(tmp_path):
    for found in ranks.run(on_ranks, 2, str(tmp_path)):
        assert found["equal"]
        assert found["compiled equal"]
        assert found["restored"]
        assert found["compiled"] == "OptimizedModule"
        assert found["two models"] == 2
        assert found["bucket_cap"] == 2**20
        assert found["total"].steps == STEPS + 2
        assert found["total"].bytes_sent > 0
        assert 3.5 < found["total"].ratio < 4.1
        assert found["said"] == [SINGLE]
        assert found["nothing is done"]


def test_mistakes_are_found_before_there_is_a_model():
    from lowp.integrations.accelerate import GradientCompression

    with pytest.raises(ValueError, match="did you mean 'e5m2'"):
        GradientCompression("e5m3m2")
    with pytest.raises(TypeError, match="scal"):
        GradientCompression("e5m2", scal="aps")
    with pytest.raises(TypeError, match="comm_hook: a model has one communication hook"):
        GradientCompression("e5m2", comm_hook="fp16")
