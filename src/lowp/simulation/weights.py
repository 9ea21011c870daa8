"""Rounded weights are for reading: what is written to them would be lost.

While a model is simulated `module.weight` is a rounded copy, made anew whenever it is read. Code that writes to it
(`nn.init.normal_(module.weight)`, `module.weight.data.copy_(w)`) would have no effect and would not know. So user code gets the
copy as a `RoundedWeight`: a tensor that is like any other but refuses, by name, what would change it, and whose views and
`.data` do the same. The rest is as fast as ever: torch's own modules, which only read, get the bare copy in their forward
passes, and so does compiled code.

Comparing version counters at the next read was the other way. It finds the mistake late, and not at all behind `.data`.
"""

from typing import Any

from torch import Tensor

from lowp import compat

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
_WRITE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}


class RoundedWeight(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _changes_first(name) and _holds_rounded(args[0] if args else next(iter(kwargs.values()), None)):
            _refuse(name)
        if _holds_rounded(kwargs.get("out")):
            _refuse(f"{name}(out=...)")
        with compat.without_torch_function():
            result = func(*args, **kwargs)
        return _guarded_views(result, args)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


def guarded(weight: Tensor) -> Tensor:
    """The same numbers, which refuse to be written to. Tensors with ways of their own (fake, functional) stay what they are."""
    if type(weight) is not Tensor or compat.is_functorch_wrapped_tensor(weight):
        return weight
    return weight.as_subclass(RoundedWeight)


def _guarded_views(result: Any, args: tuple) -> Any:
    """What shares memory with a rounded weight is guarded as well."""
    if isinstance(result, (tuple, list)):
        found = [_guarded_views(each, args) for each in result]
        return type(result)(found) if type(result) in (tuple, list) else result
    if type(result) is Tensor and args and isinstance(args[0], RoundedWeight) and _share_memory(result, args[0]):
        return guarded(result)
    return result


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _changes_first(name: str) -> bool:
    """Does the function write to its first argument? Torch says so in its names."""
    return name in _WRITE or (name.endswith("_") and not name.endswith("__"))


def _holds_rounded(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(isinstance(each, RoundedWeight) for each in argument)
    return isinstance(argument, RoundedWeight)


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"{name}: a simulated module's weight is a rounded copy, and what is written to it is lost. The parameter itself is in "
        "named_parameters(); or lowp.restore(model) first"
    )
