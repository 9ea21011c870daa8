"""Which DistributedDataParallel model is around a module?

A module does not know who wraps it, and trainers hand out the module. torch tells everybody who asks, by a public hook, when a
module becomes part of another one: `DistributedDataParallel(module)` is such a moment. So this module notes every DDP model
that is made after it was imported, and keeps none of them alive.

The rejected alternatives: a hook on forward calls makes torch.compile warn; looking through all objects of the garbage
collector finds wrappers that a trainer has already given up.
"""

import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from lowp import compat

_seen: "weakref.WeakKeyDictionary[DistributedDataParallel, None]" = weakref.WeakKeyDictionary()  # in the order of their making


def _note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _seen[parent] = None


register_module_module_registration_hook(_note)


def wrapper_of(model: Any) -> DistributedDataParallel | None:
    """The DDP model that was made last around this module."""
    bare = compat.uncompiled(model)
    found = [ddp for ddp in _seen if compat.uncompiled(ddp.module) is bare]
    return found[-1] if found else None


def wrapper_with(parameter: Tensor) -> DistributedDataParallel | None:
    """The DDP model that was made last and has this parameter."""
    found = [ddp for ddp in _seen if any(each is parameter for each in ddp.module.parameters())]
    return found[-1] if found else None
