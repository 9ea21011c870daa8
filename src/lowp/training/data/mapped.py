"""Any map-style dataset: what does not fit on the device, or is made as it is read.

Each request is one item of a DataLoader, so a worker makes a whole micro-batch and it comes out in the order asked. Before it
does, Python's, NumPy's and torch's generators are seeded from the request's key: a dataset that makes random crops makes the
same ones whichever worker it falls to, with any number of workers, and after a resume. Copies to a GPU go through pinned memory
on a stream of their own, two batches ahead.
"""

import gc
import inspect
import random
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lowp.training.data.base import Data, Request, Split
from lowp.training.plugins import PluginError, blamed, load_plugin
from lowp.training.randomness import seed_of

_AHEAD = 2  # batches on their way to the device


class _Batches(Dataset):
    """The dataset as the DataLoader sees it: an item is a micro-batch, its index the request.

    An error of the dataset is an item too. Raised in a worker, it would arrive as a page of text, the worker's traceback.
    """

    def __init__(self, name: str, samples: Any, dtype: torch.dtype) -> None:
        self._name = name
        self._samples = samples
        self._dtype = dtype

    def __getitem__(self, index: Request) -> tuple[Tensor, Tensor] | PluginError:
        try:
            with blamed(f"data set {self._name!r}"):
                return self._batch(index)
        except PluginError as error:
            error.add_note(traceback.format_exc())  # a cause does not travel between processes
            return error

    def _batch(self, index: Request) -> tuple[Tensor, Tensor]:
        with _seeded(seed_of(*index.key, "dataset")):
            inputs, targets = default_collate([self._samples[place] for place in index.indices.tolist()])
        # Already here, in the worker: a 16-bit batch is half as much to copy.
        return (inputs.to(self._dtype) if inputs.is_floating_point() else inputs), targets


class Mapped:
    def __init__(self, name: str, samples: Any, workers: int, device: torch.device, dtype: torch.dtype) -> None:
        self._name = name
        self._size = len(samples)
        self._batches = _Batches(name, samples, dtype)
        self._workers = workers
        self._device = device

    def __len__(self) -> int:
        return self._size

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(
            self._batches,
            batch_size=None,  # an item is a batch already
            sampler=requests,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator().manual_seed(seed_of("workers")),  # else it draws from the global one
        )
        batches = self._arriving(loader)
        return _to_cuda_ahead(batches, self._device) if self._device.type == "cuda" else batches

    def _arriving(self, loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's items but for errors, which are raised. A worker that is killed is an error of the loader's own.

        Garbage is collected before workers are forked: events and groups of a GPU that are destroyed in a fork abort it.
        """
        if self._workers:
            gc.collect()
        with blamed(f"data set {self._name!r}"):
            for item in loader:
                if isinstance(item, PluginError):
                    raise item
                yield item


def open_mapped(name: str, options: Mapping[str, Any], workers: int, device: torch.device, dtype: torch.dtype) -> Data:
    """The sets that `module:function` returns: (train, test) or (train, test, classes)."""
    function = load_plugin(name, "data set")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"data set {name!r} and data.options do not fit together: {error}") from None
    made = function(**options)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"data set {name!r} must return (train, test) or (train, test, classes), not {type(made).__name__}")
    train, test = made[:2]
    for split, samples in (("training", train), ("test", test)):
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            raise ValueError(f"data set {name!r}: its {split} set ({type(samples).__name__}) is not map-style: no len() or []")
        with blamed(f"data set {name!r}"):
            size = len(samples)
        if size == 0:
            raise ValueError(f"data set {name!r}: its {split} set is empty")
    shape, kind = _describe(name, train)
    classes = made[2] if len(made) == 3 else _count_classes(name, train)
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
        raise ValueError(f"data set {name!r}: the number of classes must be a whole number from 1 on, not {classes!r}")
    splits: list[Split] = [Mapped(name, samples, workers, device, dtype) for samples in (train, test)]
    return Data(name, splits[0], splits[1], shape, classes, kind)


def _describe(name: str, samples: Any) -> tuple[tuple[int, ...], str]:
    """Shape and kind, as the first sample shows them: floats are images, integers are text."""
    with blamed(f"data set {name!r}"), _seeded(seed_of("describe")):
        sample = samples[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ValueError(f"data set {name!r}: a sample must be a pair (inputs, target), not {type(sample).__name__}")
    inputs = torch.as_tensor(sample[0]) if isinstance(sample[0], np.ndarray) else sample[0]
    if not isinstance(inputs, Tensor) or not (inputs.is_floating_point() or inputs.dtype == torch.int64):
        found = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"data set {name!r}: inputs must be tensors of floats (images) or int64 (text), not {found}")
    return tuple(inputs.shape), "image" if inputs.is_floating_point() else "text"


def _count_classes(name: str, samples: Any) -> int:
    """As torchvision's sets tell it."""
    known = getattr(samples, "classes", None)
    if known is None:
        raise ValueError(f"data set {name!r} does not say how many classes it has; return (train, test, classes)")
    return known if isinstance(known, int) else len(known)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The three global generators that a dataset may draw from, put back afterwards."""
    saved = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.default_generator.set_state(saved[2])


def _to_cuda_ahead(batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    copies = torch.cuda.Stream(device)
    on_their_way: deque[tuple[tuple[Tensor, Tensor], torch.cuda.Event]] = deque()

    def arrived() -> tuple[Tensor, Tensor]:
        pair, copied = on_their_way.popleft()
        now = torch.cuda.current_stream(device)
        now.wait_event(copied)
        for tensor in pair:
            tensor.record_stream(now)  # its memory belongs to the copying stream, which must not reuse it too early
        return pair

    for inputs, targets in batches:
        with torch.cuda.stream(copies):
            pair = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(copies)
            on_their_way.append((pair, copied))
        if len(on_their_way) > _AHEAD:
            yield arrived()
    while on_their_way:
        yield arrived()
