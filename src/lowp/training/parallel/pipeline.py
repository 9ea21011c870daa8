"""Two stages on two ranks: activations travel forward in a codec, their gradients travel back in it.

One step, of which each rank does its part and a virtual team both:

1. Rank 0 runs the first stage on the inputs, encodes what comes out and sends it.
2. Rank 1 decodes it, runs the second stage and the loss, and goes back to the gradient of what it received.
3. That gradient travels back, encoded. Rank 0 decodes it and goes back through the first stage.
4. Rank 1 sends the loss, so that both know it.

While one rank works the other waits: two stages halve the memory of a model, not its time.

Random numbers (dropout): both ranks come with torch's generator in the same state, and take one number from it. Each stage
draws from a generator of its own, seeded by that number and the stage. So a stage's masks do not depend on what the other one
draws, and the process that stands for both ranks draws what two processes do.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowp.formats import FormatLike
from lowp.training.parallel.messages import TensorCodec
from lowp.training.parallel.placement import LossFunction, Placement, ScaleLoss, evaluating, unscaled
from lowp.training.parallel.team import Team
from lowp.training.randomness import seed_of
from lowp.wire.scaling import Scale

FIRST, SECOND = 0, 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEADER = 8  # numbers of 8 bytes: the place in DTYPES, how many dimensions, and each of up to six
PLAIN = TensorCodec.of("fp32")


@dataclass(frozen=True)
class Kind:
    """What the other rank must know to receive a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Kind":
        if tensor.dtype not in DTYPES or tensor.dim() > HEADER - 2:
            raise ValueError(
                f"between the stages of a pipeline travels a floating-point tensor of up to {HEADER - 2} dimensions, "
                f"not one of {tensor.dtype} and {tensor.dim()}"
            )
        return cls(tensor.shape, tensor.dtype)

    def header(self, device: torch.device) -> Tensor:
        numbers = [DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=device).view(torch.uint8)

    @classmethod
    def read(cls, header: Tensor) -> "Kind":
        dtype, dimensions, *sizes = header.view(torch.int64).tolist()
        return cls(torch.Size(sizes[:dimensions]), DTYPES[dtype])


SCALAR = Kind(torch.Size(), torch.float32)


def pipeline_model(
    model: nn.Module,
    team: Team,
    format: FormatLike = "e5m2",
    scale: "str | Scale | None" = None,
    *,
    cut: int | None = None,
) -> "Pipeline":
    """Cut a sequential model into two stages.

    Args:
        model: an `nn.Sequential`, with the same weights on both ranks.
        team: of two ranks. A real one keeps its own stage alone.
        format, scale: as for `split_model`.
        cut: how many of the model's children are the first stage; by default, as many as balance the parameters best.
    """
    if team.world != 2:
        raise ValueError(f"a pipeline has two stages and takes two ranks, not {team.world}")
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"a pipeline takes an nn.Sequential, whose children follow each other, not {type(model).__name__}")
    codec = TensorCodec.of(format, scale)
    children = list(model._modules.items())  # named_children() leaves out a module that comes a second time
    cut = _balanced_cut(model) if cut is None else cut
    if not 0 < cut < len(children):
        raise ValueError(f"a pipeline is cut after 1 to {len(children) - 1} of the model's {len(children)} children, not {cut}")
    first, second = (nn.Sequential(OrderedDict(part)) for part in (children[:cut], children[cut:]))
    shared = set(first.parameters()) & set(second.parameters())
    if shared:
        names = [name for name, parameter in model.named_parameters() if parameter in shared]
        raise ValueError(f"both stages of the pipeline would need {', '.join(names)}: a shared parameter cannot be cut")
    team.agree(f"codec={codec} cut={cut} children={len(children)}", "how to cut the model")
    return Pipeline(model, (first, second), team, codec)


class Pipeline(Placement):
    """The stages that live here. Children keep their names, so that parameters are called as in the whole model."""

    def __init__(
        self, model: nn.Sequential, stages: tuple[nn.Sequential, nn.Sequential], team: Team, codec: TensorCodec
    ) -> None:
        self._stages = {index: stages[index] for index in (FIRST, SECOND) if team.here(index)}
        super().__init__(model if len(self._stages) == 2 else stages[team.local.start], team)
        self._pair, self._codec = team, codec

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, loss_function: LossFunction, scale_loss: ScaleLoss = unscaled
    ) -> Tensor:
        seed, device = int(torch.randint(1 << 62, ())), inputs.device
        left = gradient = loss = None
        if FIRST in self._stages:
            with _generator_of_stage(FIRST, seed, device):
                left = self._stages[FIRST](inputs)
        arrived = self._send(left, FIRST, SECOND, self._codec, device)
        if arrived is not None:
            arrived.requires_grad_()
            with _generator_of_stage(SECOND, seed, device):
                outputs = self._stages[SECOND](arrived)
            loss = loss_function(outputs, targets)
            scale_loss(loss).backward()
            gradient, loss = arrived.grad, loss.detach()
        returned = self._carry(gradient, SECOND, FIRST, self._codec, None if left is None else Kind.of(left), device)
        if left is not None and left.requires_grad:
            left.backward(returned)
        return _either(loss, self._carry(loss, SECOND, FIRST, PLAIN, SCALAR, device))

    def evaluate(self, inputs: Tensor) -> Tensor:
        with evaluating(self.module):
            left = self._stages[FIRST](inputs) if FIRST in self._stages else None
            arrived = self._send(left, FIRST, SECOND, self._codec, inputs.device)
            outputs = None if arrived is None else self._stages[SECOND](arrived)
            return _either(outputs, self._send(outputs, SECOND, FIRST, PLAIN, inputs.device))

    def _send(self, tensor: Tensor | None, source: int, target: int, codec: TensorCodec, device: torch.device) -> Tensor | None:
        """A tensor that the target knows nothing about: a header goes before it."""
        kind = None if tensor is None else Kind.of(tensor)
        header = None if kind is None else kind.header(device)
        room = torch.empty(8 * HEADER, dtype=torch.uint8, device=device)
        header = self._pair.pass_on(header, source, target, room if self._pair.here(target) else None, count=0)
        return self._carry(tensor, source, target, codec, None if header is None else Kind.read(header), device)

    def _carry(
        self, tensor: Tensor | None, source: int, target: int, codec: TensorCodec, kind: Kind | None, device: torch.device
    ) -> Tensor | None:
        """The source's tensor where the target lives, and None elsewhere. The target knows what kind it is."""
        message = room = None
        if self._pair.here(source):
            assert tensor is not None
            message = codec.encode(tensor)
        if self._pair.here(target):
            assert kind is not None
            room = torch.empty(codec.length(kind.shape.numel()), dtype=torch.uint8, device=device)
        arrived = self._pair.pass_on(message, source, target, room, count=0 if tensor is None else tensor.numel())
        return None if arrived is None or kind is None else codec.decode(arrived, kind.shape, kind.dtype)


def _either(mine: Tensor | None, theirs: Tensor | None) -> Tensor:
    """What this process computed, or else what it was sent."""
    result = theirs if mine is None else mine
    assert result is not None
    return result


@contextmanager
def _generator_of_stage(stage: int, seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators seeded for a stage, and afterwards as they were."""
    number = seed_of(seed, "stage", stage)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        yield


def _balanced_cut(model: nn.Sequential) -> int:
    """After how many children: before one with parameters, where the stages' numbers of parameters differ least."""
    sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in model]
    cuts = [index for index, size in enumerate(sizes) if size and sum(sizes[:index])]
    if not cuts:
        raise ValueError("a pipeline needs a model with parameters in two of its children or more")
    return min(cuts, key=lambda cut: abs(sum(sizes[:cut]) - sum(sizes[cut:])))
