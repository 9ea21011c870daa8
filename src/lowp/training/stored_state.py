"""A nested state as JSON and named tensors, and back, exactly. Nothing is pickled: what is read can run no code.

A state is what `state_dict()`s are made of: dicts, lists, tuples, tensors, strings, numbers, True, False and None. JSON knows
fewer things than Python, so what it lacks is written as an object with a single key that begins with `$`:

    a tensor                      {"$tensor": "model/fc.weight"}    its name in the safetensors file: the path to it
    a tuple                       {"$tuple": [0.9, 0.999]}
    inf, -inf, nan                {"$float": "inf"}                 other floats are written by repr, which is exact
    an integer beyond 64 bits     {"$int": "0x1000..."}             decimal digits would take quadratic time, and have a limit
    a dict with other keys        {"$dict": [[0, {...}], ...]}      than strings (an optimizer's), or with one like `$tensor`

Tensors come back on the CPU with the same bits, each with memory of its own: two that shared it are stored twice.
"""

import json
import math
import struct
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Any  # nested dict, list, tuple of Tensor, str, int, float, bool, None: Python cannot check it recursively

# What safetensors both writes and reads. (It writes float8_e8m0fnu, and cannot read it.)
STORABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    }
)

_LENGTH = struct.Struct("<Q")
_RESERVED = "__metadata__"  # safetensors keeps this name to itself


def to_bytes(state: State) -> tuple[bytes, bytes]:
    """The structure as JSON (ASCII), and the tensors as a safetensors file."""
    from safetensors.torch import save

    writer = _StateWriter()
    text = json.dumps(writer.encoded(state, ()), allow_nan=False)
    return text.encode("ascii"), save(writer.tensors)


def from_bytes(text: bytes, tensors: bytes) -> State:
    """What `to_bytes` was given. ValueError if the two are no such thing, or do not belong together."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        stored = load(tensors)
    except SafetensorError as error:
        raise ValueError(f"the tensors cannot be read: {error}") from None
    try:
        return json.loads(text, object_hook=lambda found: _decoded(found, stored))
    except RecursionError:
        raise ValueError("the structure is nested too deeply") from None


def pack(state: State) -> bytes:
    """The same in memory, for sending: the length of the JSON text in 8 bytes, the text, the tensors."""
    text, tensors = to_bytes(state)
    return b"".join((_LENGTH.pack(len(text)), text, tensors))


def unpack(packed: bytes) -> State:
    if len(packed) < _LENGTH.size:
        raise ValueError(f"this is no packed state: {len(packed)} bytes are too few")
    (length,) = _LENGTH.unpack_from(packed)
    end = _LENGTH.size + length
    if end > len(packed):
        raise ValueError(f"the packed state is truncated: it has {len(packed)} bytes, its JSON alone needs {end}")
    return from_bytes(packed[_LENGTH.size : end], packed[end:])


class _StateWriter:
    """Turns a state into what JSON can hold, and collects the tensors that it meets on the way."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def encoded(self, value: State, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._collect(value, path)}
        if isinstance(value, dict):  # an OrderedDict, too, comes back as a dict
            return self._encoded_dict(value, path)
        # A subclass (numpy.float64, an IntEnum, a named tuple) would come back as something else: better to refuse it.
        kind = type(value)
        if kind in (list, tuple):
            items = [self.encoded(item, (*path, i)) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (str, bool, type(None)):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        raise TypeError(f"a state cannot hold a {kind.__module__}.{kind.__qualname__}: {_named(path)} is {value!r}")

    def _encoded_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int, float, bool, type(None)):
                raise TypeError(f"keys of a state are strings or numbers: {_named(path)} has {key!r}")
        items = [(key, self.encoded(item, (*path, key))) for key, item in value.items()]
        plain = all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
        return dict(items) if plain else {"$dict": [[self.encoded(key, path), item] for key, item in items]}

    def _collect(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Take the tensor in under the name of the path to it; the name it got."""
        _check_tensor(tensor, path)
        own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if own.untyped_storage().data_ptr() in self._storages:
            own = own.clone()  # safetensors refuses tensors that share memory
        self._storages.add(own.untyped_storage().data_ptr())
        name = wanted = "/".join(map(str, path)) or "state"
        copies = 1
        while name in self.tensors or name == _RESERVED:  # the keys 1 and "1", or a key with a slash
            copies += 1
            name = f"{wanted}#{copies}"
        self.tensors[name] = own
        return name


def _check_tensor(tensor: Tensor, path: tuple[Any, ...]) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
        raise TypeError(f"only dense, whole tensors can be stored: {_named(path)} is {type(tensor).__name__}, {tensor.layout}")
    if tensor.dtype not in STORABLE:
        raise TypeError(f"safetensors cannot hold {tensor.dtype}: {_named(path)}; store its bytes, .view(torch.uint8)")


def _named(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _decoded(found: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """One JSON object; what it holds is decoded already."""
    mark = next(iter(found), "") if len(found) == 1 else ""
    if not mark.startswith("$"):
        return found
    value = found[mark]
    try:
        match mark:
            case "$tensor":
                return tensors[value]
            case "$tuple":
                return tuple(value)
            case "$float":
                return float(value)
            case "$int":
                return int(value, 16)
            case "$dict":
                return dict(value)
    except KeyError:
        raise ValueError(f"the tensor {value!r} is missing") from None
    except TypeError:
        raise ValueError(f"{mark} with {value!r}") from None
    raise ValueError(f"{mark} is unknown: written by a newer version?")
