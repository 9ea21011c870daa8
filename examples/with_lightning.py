"""Lightning: compressed gradients are a callback.

python examples/with_lightning.py            # Lightning starts the second process itself
"""

import tempfile

import lightning
import torch
from lowp.integrations.lightning import GradientCompression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 10)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    compression = GradientCompression("e5m2", scale="aps", error_feedback=True)  # checkpoints have the state of every process
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="auto",
            devices=2 if not torch.cuda.is_available() else "auto",
            strategy="ddp",
            max_epochs=3,
            callbacks=[compression],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), loader)

    if trainer.is_global_zero:
        print(f"loss of the last batch: {trainer.callback_metrics['loss']:.4f}")
        if compression.handle is not None:  # None in a single process
            print(compression.handle.total())


if __name__ == "__main__":
    main()
