"""A model that really runs: its weights, a batch, and a loss to go back from.

For measuring how long its layers take (probes/model.py) and for its own gradients (gradients.py). A named model gets its usual
weights and a batch that is drawn: normal pixels, even tokens, random classes. A user's own comes with a batch, and may come
with a loss:

    def mine():                                   # --model module:mine
        return model, inputs                      # what the model returns is the loss, or logits
        return model, inputs, targets, loss       # loss(outputs, targets) is a number; a part of the samples has one too
        return model, inputs, loss                # loss(outputs) is a number; of the whole batch alone

Where outputs are no number and there is no loss, it is the cross-entropy of the last dimension with classes drawn at random.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowp.compat import tree_leaves, tree_map
from lowp.predict.architectures import ARCHITECTURES, from_function, unknown_model
from lowp.training.plugins import blamed, is_plugin, load_plugin

SEED = 0


@dataclass
class Subject:
    """`drawn` says what of it was drawn at random; empty: nothing. `whole`: the loss is of the whole batch alone."""

    name: str
    module: nn.Module
    inputs: Any
    loss: Callable[..., Tensor]
    drawn: str
    targets: Any = None
    whole: bool = False

    @property
    def batch(self) -> int:
        """Samples: the length of the first tensor."""
        return next((leaf.shape[0] for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor) and leaf.dim()), 0)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def forward(self, module: nn.Module | None = None, inputs: Any = None, targets: Any = None) -> Tensor:
        """The loss of a batch, by the model or by what stands around it."""
        module, inputs = module or self.module, self.inputs if inputs is None else inputs
        targets = self.targets if targets is None else targets
        with blamed(f"model {self.name!r}"):
            outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            return self.loss(outputs) if targets is None else self.loss(outputs, targets)

    def part(self, number: int, parts: int) -> tuple[Any, Any]:
        """Inputs and targets of equal parts of the batch."""
        size = self.batch // parts
        return self.samples(slice(number * size, (number + 1) * size))

    def samples(self, which: "slice | Tensor") -> tuple[Any, Any]:
        """Inputs and targets of some samples: all tensors whose first dimension counts samples are cut."""
        batch = self.batch

        def cut(leaf: Any) -> Any:
            return leaf[which] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch else leaf

        return tree_map(cut, self.inputs), tree_map(cut, self.targets)


def subject_of(
    model: "str | nn.Module",
    inputs: Any = None,
    loss: "Callable[[Any], Tensor] | None" = None,
    *,
    batch: int | None = None,
    device: "torch.device | str" = "cpu",
) -> Subject:
    """A named model (with a batch of `batch` samples), `module:function`, or an nn.Module with its inputs."""
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ValueError("inputs: is missing; a model of your own needs an example batch")
        made: tuple[Any, ...] = (model, inputs, None, loss)
        name, drawn = type(model).__name__, ""
    elif is_plugin(model):
        made, name, drawn = from_function(model), model, ""
    else:
        made, name, drawn = (*_drawn(model, batch), None, None), model, "weights, inputs and classes"
    module, given, targets, own_loss = made

    def there(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    if own_loss is None:
        drawn = drawn or "classes"
    whole = own_loss is not None and targets is None
    given, targets = tree_map(there, given), tree_map(there, targets)
    subject = Subject(name, module.to(device).train(), given, own_loss or usual_loss, drawn, targets, whole)
    if not subject.batch:
        raise ValueError(f"model {name}: the example batch has no tensor whose first dimension counts samples")
    if not subject.parameters:
        raise ValueError(f"model {name}: it has no parameter that takes a gradient")
    return subject


def check_models(names: Iterable[str]) -> None:
    """Are these names of models, or functions that can be found?"""
    for name in names:
        if is_plugin(name):
            load_plugin(name, "model")
        elif name not in ARCHITECTURES:
            raise unknown_model(name)


def _drawn(name: str, batch: int | None) -> tuple[nn.Module, Tensor]:
    if name not in ARCHITECTURES:
        raise unknown_model(name)
    found = ARCHITECTURES[name]
    count = found.batch if batch is None else batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = found.build()
        if len(found.shape) > 1:
            return module, torch.randn(count, *found.shape)
        return module, torch.randint(0, found.classes, (count, *found.shape))


def usual_loss(outputs: Any) -> Tensor:
    """Numbers are losses; of logits, the cross-entropy with classes drawn at random; of anything else, the mean square."""
    found = []
    for leaf in tree_leaves(outputs):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
            continue
        if leaf.dim() == 0 or leaf.numel() == 1:
            found.append(leaf.reshape(()))
        elif leaf.dim() == 1:
            found.append(leaf.square().mean())
        else:
            logits = leaf.reshape(-1, leaf.shape[-1]).float()
            generator = torch.Generator().manual_seed(SEED)
            classes = torch.randint(0, logits.shape[-1], (len(logits),), generator=generator)
            found.append(F.cross_entropy(logits, classes.to(logits.device)))
    if not found:
        raise ValueError("what the model returns has no gradient to go back from")
    return torch.stack([each.float() for each in found]).sum()
