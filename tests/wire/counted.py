"""Operations of torch that reach the dispatcher, by name. Each is a launch on CUDA, but for views, which are left out."""

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("view", "slice", "select", "as_strided", "unbind", "alias", "detach")


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))
