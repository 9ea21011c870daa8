"""Linear layers split over ranks: each holds some of the outputs, and activations travel in a few bits.

Forward, on every rank, with the same inputs:

1. Multiply by the rows of the weight that live here: some of the outputs.
2. Encode them, gather everybody's bytes, decode. The owner decodes its own bytes, too: all ranks see the same activations.

Backward, with the same gradient of the outputs:

3. Cut out what belongs to the rows that live here. Their weight's gradient follows from it, and never travels.
4. The product with these rows is a part of the input's gradient. The sum of all parts travels in the codec.

Both ways are a pair of functions around an ordinary linear layer, as in Megatron-LM: `_Spread` is the identity whose gradient
is a sum over ranks, `_Gather` is the concatenation over ranks whose gradient is a slice. Rounding on the way counts as the
identity.

In `fp32` nothing is rounded on the way. Still the model is near the whole one, not equal to the last bit: torch may add up a
product of another shape in another order (docs/EQUALITY.md). Real and virtual ranks compute products of the same shapes: the
same bits.

Layers that are not split are the same everywhere, and stay so, as all ranks compute the same from the same bytes. What is
random in them (dropout) must be drawn alike: seed torch's generator with the same number on all ranks before a step. An
optimizer that rounds stochastically is told what each parameter is a part of (`Placement.whole_of`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lowp.formats import FormatLike
from lowp.training.parallel.messages import TensorCodec
from lowp.training.parallel.placement import Whole
from lowp.training.parallel.team import Team
from lowp.wire.scaling import Scale


class SplitLinear(nn.Module):
    """A linear layer of which every rank of a team holds some outputs.

    The parts that live here are `shards`, by rank: parameters have the same names in a real team and in a virtual one, and no
    two ranks use the same name.
    """

    def __init__(self, shards: dict[int, nn.Module], widths: tuple[int, ...], team: Team, codec: TensorCodec) -> None:
        super().__init__()
        self.shards = nn.ModuleDict({str(rank): shard for rank, shard in shards.items()})
        self.widths = widths
        self.team = team
        self.codec = codec

    @classmethod
    def of(cls, linear: nn.Linear, team: Team, codec: TensorCodec) -> "SplitLinear":
        """The same layer, split: the first ranks have one output more where it does not come out even."""
        each, more = divmod(linear.out_features, team.world)
        widths = tuple(each + (rank < more) for rank in range(team.world))
        return cls({rank: _rows(linear, widths, rank) for rank in team.local}, widths, team, codec)

    def forward(self, x: Tensor) -> Tensor:
        copies = _Spread.apply(x, self.team, self.codec)
        parts = [shard(copy) for shard, copy in zip(self.shards.values(), copies, strict=True)]
        return _Gather.apply(self.team, self.codec, self.widths, *parts)

    def extra_repr(self) -> str:
        return f"outputs={'+'.join(map(str, self.widths))}, codec={self.codec}"


def split_model(model: nn.Module, team: Team, format: FormatLike = "e5m2", scale: "str | Scale | None" = None) -> "SplitModel":
    """Split the model's linear layers over a team, in place; all but those with fewer outputs than there are ranks.

    Args:
        model: the whole model, with the same weights on all ranks.
        format: in which activations and their gradients travel: any of up to 16 bits, or "fp32".
        scale: "local", "block:<n>" or "none"; default: "block:32" for formats of fewer than 8 bits, else "local".
    """
    codec = TensorCodec.of(format, scale)
    tied = _shared_weights(model)
    chosen = {
        name: module
        for name, module in model.named_modules()
        # Not its subclasses: attention's output layer is one, and torch reads its weight without calling it.
        if type(module) is nn.Linear and module.out_features >= team.world and module.weight not in tied
    }
    if not chosen:
        raise ValueError(f"there is nothing to split: the model has no linear layer with {team.world} outputs or more")
    widths = ",".join(f"{name}:{linear.out_features}" for name, linear in chosen.items())
    team.agree(f"codec={codec} layers={widths}", "how to split the model")
    if isinstance(model, nn.Linear):
        return SplitModel(SplitLinear.of(model, team, codec), team)
    for name, linear in chosen.items():
        model.set_submodule(name, SplitLinear.of(linear, team, codec))
    return SplitModel(model, team)


class SplitModel(Whole):
    """A model with split layers. A step is that of a whole model: the layers themselves talk to the other ranks."""

    def whole_of(self, name: str) -> tuple[str, int]:
        layer, found, place = f".{name}".rpartition(".shards.")
        split = self.module.get_submodule(layer[1:])
        if not found or not isinstance(split, SplitLinear):
            return name, 0
        rank, _, kind = place.partition(".")
        row = self.module.get_parameter(name)[0].numel()
        return f"{layer}.{kind}"[1:], sum(split.widths[: int(rank)]) * row


class _Spread(torch.autograd.Function):
    """The input, once for every rank that lives here. Its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, codec: TensorCodec) -> tuple[Tensor, ...]:
        ctx.team, ctx.codec = team, codec
        return tuple(x.view_as(x) for _ in team.local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.team.add_up(gradients, ctx.codec), None, None


class _Gather(torch.autograd.Function):
    """All ranks' outputs side by side, from those of the ranks that live here."""

    @staticmethod
    def forward(ctx: Any, team: Team, codec: TensorCodec, widths: tuple[int, ...], *parts: Tensor) -> Tensor:
        ctx.team, ctx.widths = team, widths
        first = parts[0]
        shapes = [torch.Size([*first.shape[:-1], width]) for width in widths]
        counts = [shape.numel() for shape in shapes]
        messages = team.gather([codec.encode(part) for part in parts], [codec.length(count) for count in counts], counts)
        arrived = [codec.decode(message, shape, first.dtype) for message, shape in zip(messages, shapes, strict=True)]
        return torch.cat(arrived, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slices = gradients[0].split(ctx.widths, dim=-1)
        return None, None, None, *(slices[rank] for rank in ctx.team.local)


def _rows(linear: nn.Linear, widths: tuple[int, ...], rank: int) -> nn.Module:
    """One rank's outputs of a layer, as a layer."""
    weight = linear.weight
    part = nn.utils.skip_init(
        nn.Linear, linear.in_features, widths[rank], linear.bias is not None, device=weight.device, dtype=weight.dtype
    )
    for whole, mine in zip(linear.parameters(), part.parameters(), strict=True):
        mine.detach().copy_(whole.detach().split(widths)[rank])
        mine.requires_grad_(whole.requires_grad)
    return part.train(linear.training)


def _shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Parameters with two names, such as an embedding that is the head, too: half of them would go its own way if split."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if parameter in seen else seen).add(parameter)
    return shared
