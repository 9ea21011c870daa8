"""Compressed gradients in other people's trainers. Each module needs the library that it is named after; nothing imports it.

    lowp.integrations.accelerate      GradientCompression, for `Accelerator(kwargs_handlers=[...])`
    lowp.integrations.transformers    GradientCompression, for `Trainer(callbacks=[...])`
    lowp.integrations.lightning       GradientCompression, for `Trainer(callbacks=[...])`; a hook and a state for `DDPStrategy`
    lowp.integrations.ray             prepare_model, save and load, for the loop of a `TorchTrainer`

All of them call `lowp.compress_gradients`; they differ in where the wrapped model is found and in how its state is saved.
docs/INTEGRATIONS.md explains each.
"""
