"""The tensors of a .npy or .safetensors file, one at a time: a large file is mapped, not read into memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = (".npy", ".safetensors")
NUMPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor] | None  # None: not floating point


@contextmanager
def open_tensors(path: Path) -> Iterator[list[StoredTensor]]:
    """What the file holds. A missing, broken or unknown file raises OSError or ValueError with the file's name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: files are {' or '.join(SUFFIXES)}, not {path.suffix or 'without a suffix'}")
    with path.open("rb") as file:  # the system's own message where it cannot be opened
        start = file.read(len(NUMPY_MAGIC))
    if path.suffix.lower() == ".npy":
        if start != NUMPY_MAGIC:  # numpy would take it for a pickle, and say so
            raise ValueError(f"{path} is not a .npy file")
        yield [_numpy_tensor(path)]
    else:
        with _safetensors(path) as stored:
            yield stored


def _numpy_tensor(path: Path) -> StoredTensor:
    import numpy as np

    try:
        # Copy on write: torch refuses arrays that it may not write to, and nobody writes.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    native = array.dtype.newbyteorder("=")
    known = native.kind == "f" and native.itemsize <= 8
    load = (lambda: torch.from_numpy(np.asarray(array, dtype=native))) if known else None
    return StoredTensor(path.stem, str(array.dtype), array.shape, load)


@contextmanager
def _safetensors(path: Path) -> Iterator[list[StoredTensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is broken: {error}") from None
    with file:
        stored = []
        for name in file.keys():  # noqa: SIM118  (not a dict)
            view = file.get_slice(name)
            dtype = view.get_dtype()
            load = (lambda name=name: file.get_tensor(name)) if dtype.startswith(("F", "BF")) else None
            stored.append(StoredTensor(name, dtype, tuple(view.get_shape()), load))
        yield stored
