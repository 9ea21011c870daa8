"""Images in their sets' official file layouts. A file is read whole and checked before any of it is used.

IDX (MNIST and its likes), plain or compressed by gzip: a magic number, the sizes as big-endian 32-bit integers, then the bytes.
Some kilobytes of gzip can unpack to gigabytes. So the header is checked first, and no more is unpacked than it promises.
CIFAR-10's binary version: 10,000 records a file, each a label and the red, green and blue planes of 32 x 32 pixels.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from lowp.training.regular_file import open_regular

CLASSES = 10  # of all the sets here

_IDX_IMAGES = 0x803  # unsigned bytes, 3 dimensions
_IDX_LABELS = 0x801  # unsigned bytes, 1 dimension
_SIDE = 28
_MOST_IMAGES = 2_000_000  # 1.6 GB; MNIST has 60,000, the largest of its kind some 800,000
_LARGEST = 1 << 31  # bytes of a file

_CIFAR_RECORDS = 10_000
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


class Labelled(NamedTuple):
    images: Tensor  # uint8 (n, channels, height, width)
    labels: Tensor  # uint8 (n,)


def read_idx(images_path: Path, labels_path: Path) -> Labelled:
    images = _read_idx_file(images_path, _IDX_IMAGES, dimensions=3)
    labels = _read_idx_file(labels_path, _IDX_LABELS, dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{labels_path} holds {len(labels)} labels for the {len(images)} images of {images_path}")
    return Labelled(images[:, None], _checked_labels(labels, labels_path))


def read_cifar(paths: list[Path]) -> Labelled:
    parts = [_read_cifar_file(path) for path in paths]
    return Labelled(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _read_idx_file(path: Path, magic: int, dimensions: int) -> Tensor:
    """1. Read the header. 2. Refuse what no set of ours has. 3. Read what it promises, and look whether more follows."""
    start = 4 + 4 * dimensions
    with _opened(path) as file:
        header = file.read(start)
        if len(header) < start:
            raise _damaged(path, f"{len(header)} bytes are too few for an IDX header")
        found, *sizes = struct.unpack(f">{1 + dimensions}I", header)
        if found != magic:
            raise _damaged(path, f"it begins with {found:#010x}, not {magic:#010x}")
        if sizes[1:] and sizes[1:] != [_SIDE, _SIDE]:
            raise ValueError(f"{path} holds images of {sizes[1]} x {sizes[2]} pixels, not {_SIDE} x {_SIDE}")
        if sizes[0] > _MOST_IMAGES:
            raise _damaged(path, f"its header promises {sizes[0]:,} entries, and at most {_MOST_IMAGES:,} are read")
        content = bytearray(file.read(math.prod(sizes)))  # of its own, since a tensor on it must be able to write
        more = bool(file.read(1))
    if len(content) != math.prod(sizes) or more or not content:
        shape = " x ".join(map(str, sizes))
        raise _damaged(path, f"its header promises {shape} bytes, and {'more' if more else len(content)} follow")
    return torch.frombuffer(content, dtype=torch.uint8).view(sizes)


def _read_cifar_file(path: Path) -> Labelled:
    expected = _CIFAR_RECORDS * _CIFAR_RECORD_BYTES
    with _opened(path) as file:
        content = bytearray(file.read(expected + 1))
    if len(content) != expected:
        size = "more" if len(content) > expected else len(content)
        raise _damaged(path, f"it has {size} bytes, not {_CIFAR_RECORDS} records of {_CIFAR_RECORD_BYTES}")
    records = torch.frombuffer(content, dtype=torch.uint8).view(_CIFAR_RECORDS, _CIFAR_RECORD_BYTES)
    return Labelled(records[:, 1:].reshape(-1, *_CIFAR_SHAPE), _checked_labels(records[:, 0], path))


def _checked_labels(labels: Tensor, path: Path) -> Tensor:
    highest = int(labels.max())
    if highest >= CLASSES:
        raise _damaged(path, f"it has a label {highest}, and there are {CLASSES} classes")
    return labels


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The file, unpacked as it is read. What goes wrong in reading it is said with its name."""
    try:
        opened = open_regular(path, _LARGEST)
    except ValueError as error:
        raise ValueError(f"cannot read {error}") from None
    try:
        with opened as file:
            if path.suffix == ".gz":
                with gzip.open(file) as unpacked:
                    yield unpacked
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, f"{error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged or of another kind: {why}; remove it to have it downloaded again")
