"""Hugging Face's Trainer: compressed gradients are a callback. The model is made from a configuration: nothing is downloaded.

torchrun --nproc-per-node 2 examples/with_transformers.py
"""

import tempfile

import torch
from lowp.integrations.transformers import GradientCompression
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, **special))
    # Sequences that count: each token is the one before plus a step, which differs from sequence to sequence.
    starts, steps = torch.randint(0, 64, (512, 1)), torch.randint(1, 4, (512, 1))
    tokens = (starts + steps * torch.arange(32)) % 64
    data = [{"input_ids": each, "labels": each} for each in tokens]

    compression = GradientCompression("e5m2", scale="aps", error_feedback=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=40,
            learning_rate=3e-3,
            logging_steps=10,  # the log has wire_bytes_sent, wire_ratio, wire_saturated and wire_underflowed
            save_steps=20,  # the checkpoint has the state of every process
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
            report_to=[],
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[compression])
        trainer.train()  # trainer.train(resume_from_checkpoint=True) goes on, with that state

        if trainer.is_world_process_zero():
            print(f"mean loss of 40 steps: {trainer.state.log_history[-1]['train_loss']:.3f}")
            if compression.handle is not None:  # None in a single process
                print(compression.handle.total())
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
