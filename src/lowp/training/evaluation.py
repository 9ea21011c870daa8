"""Loss and accuracy on the test split."""

import torch

from lowp.training.data.base import Data, Request
from lowp.training.passes import Passes
from lowp.training.world import World

SAMPLES = 1000  # in a batch of images; fixed, so that a test's numbers do not depend on the ranks
CHARACTERS = 16384  # in one of text


@torch.no_grad()
def evaluate(passes: Passes, data: Data, world: World, *, step: int, dealt: bool, flip: bool) -> dict[str, float]:
    """`dealt`: batches are dealt out to the ranks, and added up in their order. `flip`: also each image's mirror image."""
    size = len(data.test)
    length = SAMPLES if data.kind == "image" else max(1, CHARACTERS // data.shape[0])
    starts = range(0, size, length)
    mine = [i for i in range(len(starts)) if not dealt or i % world.ranks == world.rank]
    asked = (Request(torch.arange(starts[i], min(size, starts[i] + length)), ("test", i)) for i in mine)
    table = torch.zeros(len(starts), 3, dtype=torch.float64)
    for i, (inputs, targets) in zip(mine, data.test.stream(asked), strict=True):
        passes.numerics.begin(step, i)  # noise of a test batch is its own, whoever computes it
        logits = passes.predict(passes.laid_out(inputs))
        if flip:
            logits = (logits + passes.predict(passes.laid_out(inputs.flip(-1)))) / 2
        loss, correct = passes.cross_entropy(logits, targets, 0.0), (logits.argmax(-1) == targets).sum()
        table[i] = torch.tensor([float(loss) * targets.numel(), int(correct), targets.numel()], dtype=torch.float64)
    total = world.sum(table) if dealt else table
    losses, correct, predictions = (sum(column.tolist()) for column in total.unbind(1))
    return {"loss": losses / predictions, "accuracy": correct / predictions}
