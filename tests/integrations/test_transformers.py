"""lowp.integrations.transformers, in the real Trainer, on two ranks and on one."""

import shutil
from pathlib import Path

import pytest
import torch
from recording import SINGLE, Recorder, as_a_launcher_would, names_of_torchvision, same_state, single_process

import lowp
from wire import ranks

pytestmark = pytest.mark.trainers

OPTIONS = {"scale": "aps", "error_feedback": True}
STEPS = 4


def model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def texts() -> list[dict]:
    tokens = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


def trainer_of(folder, net, callbacks, **others):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(net, arguments, train_dataset=texts(), callbacks=callbacks, **others)


def on_ranks(rank: int, folder: str) -> dict:
    as_a_launcher_would(rank)
    names = names_of_torchvision()
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

    from lowp.integrations.transformers import GradientCompression

    class States(TrainerCallback):
        """The state of the compression that another callback before this one holds, when training begins and at each save."""

        def __init__(self, compression):
            self.compression, self.at = compression, {}

        def on_train_begin(self, args, state, control, **others):
            self.at["begin"] = self.compression.handle.state_dict()

        def on_save(self, args, state, control, **others):
            self.at[state.global_step] = self.compression.handle.state_dict()

    found = {}
    # 1. Four steps, a checkpoint after two of them.
    compression = GradientCompression("e5m2", **OPTIONS)
    states, net = States(compression), model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    recorder = Recorder(net, optimizer)
    trainer = trainer_of(folder, net, [compression, states], optimizers=(optimizer, None))
    trainer.train()
    total = compression.handle.total()
    found["equal"] = recorder.equals_virtual(compression.handle, "e5m2", **OPTIONS)
    found["steps"], found["ratio"], found["bytes"] = total.steps, total.ratio, total.bytes_sent
    found["log"] = [entry["wire_ratio"] for entry in trainer.state.log_history if "loss" in entry]

    # 2. train() a second time: a new training of the same model, of which nothing is left over.
    first = compression.handle
    trainer.train()
    found["second"] = compression.handle is not first and compression.handle.total().steps == STEPS
    found["second starts anew"] = not any(r.any() for own in states.at["begin"]["residuals"].values() for r in own.values())

    # 3. Another program goes on from the checkpoint.
    saved = torch.load(Path(folder) / "checkpoint-2" / f"lowp_wire_{rank}.pt", weights_only=True)
    again = GradientCompression("e5m2", **OPTIONS)
    later, net = States(again), model()
    trainer = trainer_of(folder, net, [again, later], optimizers=(torch.optim.AdamW(net.parameters(), lr=1e-2), None))
    # The second train() wrote checkpoint-2 once more; both trainings were saved after their second step.
    found["saved"] = same_state(saved["wire"], states.at[2])
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    found["restored"] = same_state(saved["wire"], later.at["begin"])
    found["resumed steps"] = again.handle.total().steps
    found["final"] = same_state(states.at[4], later.at[4])

    # 4. A checkpoint that was moved is asked for; nothing is taken from another one of the same step.
    torch.distributed.barrier()
    moved = Path(folder).parent / "moved"
    if rank == 0:
        shutil.move(Path(folder) / "checkpoint-2", moved)
    torch.distributed.barrier()
    net = model()
    optimizers = (torch.optim.AdamW(net.parameters(), lr=1e-2), None)
    trainer = trainer_of(folder, net, [GradientCompression("e5m2", **OPTIONS)], optimizers=optimizers)
    with pytest.raises(ValueError, match=r"rank 0 cannot go on.*lowp_wire_0.pt of this checkpoint is not in.*resume_from="):
        trainer.train(resume_from_checkpoint=str(moved))
    told = GradientCompression("e5m2", resume_from=moved, **OPTIONS)
    later = States(told)
    trainer_of(folder, net, [told, later], optimizers=optimizers).train(resume_from_checkpoint=str(moved))
    found["told"] = same_state(saved["wire"], later.at["begin"])

    # 5. lowp.optim, passed in and by its class.
    for name, others in {
        "optimizers": lambda net: {"optimizers": (lowp.optim.AdamW(net.named_parameters(), lr=1e-2), None)},
        "class": lambda net: {"optimizer_cls_and_kwargs": (lowp.optim.AdamW, {"lr": 1e-2, "update": "kahan"})},
    }.items():
        net, before = model().half(), model().half()
        compression = GradientCompression("e4m3fn")
        trainer = trainer_of(Path(folder).parent / name, net, [compression], **others(net))
        trainer.train()
        moved_all = all(not torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
        found[name] = type(trainer.optimizer.optimizer) is lowp.optim.AdamW and moved_all and compression.handle.step == STEPS
        lowp.check_replicas(net)

    with single_process() as found["said"]:
        AcceleratorState._reset_state(reset_partial_state=True)
        compression = GradientCompression("e5m2", scale="aps")
        trainer = trainer_of(Path(folder).parent / f"single-{rank}", model(), [compression])
        trainer.train()
        trainer.train()
    found["nothing is done"] = compression.handle is None
    del names
    return found


def test_two_ranks(tmp_path):
    for found in ranks.run(on_ranks, 2, str(tmp_path / "out")):
        assert found["equal"]
        assert found["steps"] == STEPS
        assert found["bytes"] > 0
        assert 3.5 < found["ratio"] < 4.1
        assert len(found["log"]) == STEPS
        assert all(3.5 < ratio < 4.1 for ratio in found["log"])
        assert found["second"]
        assert found["second starts anew"]
        assert found["saved"]
        assert found["restored"]
        assert found["resumed steps"] == STEPS - 2
        assert found["final"]
        assert found["told"]
        assert found["optimizers"]
        assert found["class"]
        assert found["said"] == [SINGLE]
        assert found["nothing is done"]
