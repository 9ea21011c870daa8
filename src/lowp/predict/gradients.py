"""What a wire loses of a model's own gradients: |mean that travelled - exact mean| / |exact mean|.

1. Several ranks' gradients, each of samples of its own: parts of the example batch. At most 8 ranks stand for any number.
2. `VirtualExchange` reduces them as real ranks would. Where a reduction has nodes of k ranks, there are two nodes, and ranks
   repeat if need be.
3. The exact mean is taken in float64.

Of a large model the first numbers of each parameter are taken, in proportion, a million in all: scales belong to layers,
messages and blocks, so that an error changes little with the length of a layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowp.predict.subjects import Subject
from lowp.predict.topologies.counted import CountedReduction
from lowp.predict.wires import WireChoice
from lowp.wire.reductions import reduction_of
from lowp.wire.reductions.base import Reduction
from lowp.wire.reductions.hierarchical import Hierarchical
from lowp.wire.scaling import Scale
from lowp.wire.virtual import VirtualExchange

MOST_RANKS = 8
MOST_NUMBERS = 1 << 20  # of one rank


@dataclass(frozen=True)
class SampleGradients:
    """Gradients by parameter, rank by rank. `source` says in words where they come from."""

    ranks: tuple[Mapping[str, Tensor], ...]
    source: str

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("gradients: those of at least one rank are wanted")
        for number, own in enumerate(self.ranks):
            for name, gradient in own.items():
                if not bool(torch.isfinite(gradient).all()):
                    raise ValueError(f"gradients: that of {name!r} on rank {number} is not finite")

    def error(self, wire: WireChoice, ranks: int, node: int = 1) -> float:
        """Of the mean of `ranks` ranks, on nodes of `node`."""
        if wire.plain and wire.settings.format == "fp32":
            return 0.0
        reduction = _reduction(wire, node)
        world = _world(reduction, ranks, len(self.ranks))
        own = [self.ranks[rank % len(self.ranks)] for rank in range(world)]
        shapes = {name: gradient.shape for name, gradient in own[0].items()}
        settings = replace(wire.settings, reduction=reduction)
        if wire.plain:
            settings = replace(settings, scale=Scale("none"))  # as torch casts
        exchange = VirtualExchange(world, shapes, settings)
        means = exchange.reduce(own.__getitem__)
        lost = whole = 0.0
        for name, mean in means.items():
            exact = torch.stack([gradients[name].double() for gradients in own]).mean(0)
            lost += float((mean.double() - exact).square().sum())
            whole += float(exact.square().sum())
        if not math.isfinite(lost):
            return math.inf
        return math.sqrt(lost / whole) if whole else 0.0


def gradients_of(subject: Subject, ranks: int, most: int = MOST_NUMBERS) -> SampleGradients:
    """A model's own, of as many ranks as the batch has samples for (two for each rank, so that norms have statistics).

    Where the loss is of the whole batch alone, one rank's gradients stand for all.
    """
    parts = 1 if subject.whole else max(1, min(ranks, MOST_RANKS, subject.batch // 2))
    before = {name: buffer.clone() for name, buffer in subject.module.named_buffers()}
    found = []
    for number in range(parts):
        subject.module.zero_grad(set_to_none=True)
        inputs, targets = subject.part(number, parts)
        subject.forward(None, inputs, targets).backward()
        found.append({name: p.grad.detach().clone() for name, p in subject.parameters.items() if p.grad is not None})
    subject.module.zero_grad(set_to_none=True)
    _restore(subject.module, before)
    if not found[0]:
        raise ValueError(f"model {subject.name}: backward reached no gradient")
    drawn = f"; {subject.drawn} are drawn at random" if subject.drawn else ""
    samples = subject.batch // parts
    source = f"gradients of {parts} rank{'s' if parts > 1 else ''}, of {samples} sample{'s' if samples > 1 else ''} each{drawn}"
    return cut(SampleGradients(tuple(found), source), most)


@torch.no_grad()
def _restore(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Running statistics as they were: nobody has trained."""
    for name, buffer in module.named_buffers():
        if name in before:
            buffer.copy_(before[name])


def cut(gradients: SampleGradients, most: int = MOST_NUMBERS) -> SampleGradients:
    """The first numbers of every parameter, in proportion, so that a rank has at most about `most`."""
    share = share_of(sum(gradient.numel() for gradient in gradients.ranks[0].values()), most)
    if share == 1:
        return gradients
    own = tuple(
        {name: g.reshape(-1)[: max(1, math.ceil(share * g.numel()))].clone() for name, g in rank.items()}
        for rank in gradients.ranks
    )
    return SampleGradients(own, f"{gradients.source}; the first {100 * share:.0f} % of each parameter")


def share_of(numbers: int, most: int) -> float:
    """Of each parameter that is taken, so that there are about `most` numbers."""
    return min(1.0, most / max(1, numbers))


def _reduction(wire: WireChoice, node: int) -> Reduction:
    """As the virtual world has it. torch's own adds partial sums up in its dtype, as a ring does."""
    topology = wire.topology(node)
    return topology.reduction if isinstance(topology, CountedReduction) else reduction_of("ring")


def _world(reduction: Reduction, ranks: int, given: int) -> int:
    if isinstance(reduction, Hierarchical):
        return min(ranks, 2 * reduction.size)
    return min(ranks, max(given, 2))
