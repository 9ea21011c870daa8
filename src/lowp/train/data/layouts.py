"""Images in their sets' official file layouts. A file is read whole and checked before any of it is used.

IDX (MNIST and its likes), plain or compressed by gzip: a magic number, the sizes as big-endian 32-bit integers, then the bytes.
CIFAR-10's binary version: 10,000 records a file, each a label and the red, green and blue planes of 32 x 32 pixels.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CLASSES = 10  # of all the sets here

_IDX_IMAGES = 0x803  # unsigned bytes, 3 dimensions
_IDX_LABELS = 0x801  # unsigned bytes, 1 dimension
_SIDE = 28

_CIFAR_RECORDS = 10_000
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


class Labelled(NamedTuple):
    images: Tensor  # uint8 (n, channels, height, width)
    labels: Tensor  # uint8 (n,)


def read_idx(images_path: Path, labels_path: Path) -> Labelled:
    images = _read_idx_file(images_path, _IDX_IMAGES, dimensions=3)
    labels = _read_idx_file(labels_path, _IDX_LABELS, dimensions=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise ValueError(f"{images_path} holds images of {images.shape[1]} x {images.shape[2]} pixels, not {_SIDE} x {_SIDE}")
    if len(images) != len(labels):
        raise ValueError(f"{labels_path} holds {len(labels)} labels for the {len(images)} images of {images_path}")
    return Labelled(images[:, None], _checked_labels(labels, labels_path))


def read_cifar(paths: list[Path]) -> Labelled:
    parts = [_read_cifar_file(path) for path in paths]
    return Labelled(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _read_idx_file(path: Path, magic: int, dimensions: int) -> Tensor:
    content = _content(path)
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise _damaged(path, f"{len(content)} bytes are too few for an IDX header")
    found, *sizes = struct.unpack_from(f">{1 + dimensions}I", content)
    if found != magic:
        raise _damaged(path, f"it begins with {found:#010x}, not {magic:#010x}")
    count, follow = math.prod(sizes), len(content) - start
    if follow != count or not count:
        shape = " x ".join(map(str, sizes))
        raise _damaged(path, f"its header promises {shape} bytes, and {follow} follow")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(sizes)


def _read_cifar_file(path: Path) -> Labelled:
    content = _content(path)
    if len(content) != _CIFAR_RECORDS * _CIFAR_RECORD_BYTES:
        raise _damaged(path, f"it has {len(content)} bytes, not {_CIFAR_RECORDS} records of {_CIFAR_RECORD_BYTES}")
    records = torch.frombuffer(content, dtype=torch.uint8).view(_CIFAR_RECORDS, _CIFAR_RECORD_BYTES)
    return Labelled(records[:, 1:].reshape(-1, *_CIFAR_SHAPE), _checked_labels(records[:, 0], path))


def _checked_labels(labels: Tensor, path: Path) -> Tensor:
    highest = int(labels.max())
    if highest >= CLASSES:
        raise _damaged(path, f"it has a label {highest}, and there are {CLASSES} classes")
    return labels


def _content(path: Path) -> bytearray:
    """All bytes, unpacked. In a buffer of its own, since a tensor on it must be able to write."""
    try:
        content = path.read_bytes()
        return bytearray(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, f"{error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged or of another kind: {why}; remove it to have it downloaded again")
