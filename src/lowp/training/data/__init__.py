"""The input side of training: `open_data` finds a set by name and gives its splits.

    fashion14                       inside the package
    mnist, fashion_mnist, cifar10   from their official files, downloaded where there is a network
    shakespeare, text:FILE          characters
    module:function                 any map-style datasets, of the user's own

Sets that fit live on the device whole (images.py, text.py); others are read by worker processes (mapped.py).
"""

from dataclasses import replace
from pathlib import Path

import torch

from lowp.names import did_you_mean
from lowp.training.data.augment import Augment, check_names
from lowp.training.data.base import Data, DataChoice
from lowp.training.data.download import Download
from lowp.training.data.files import Files, data_directory, locate
from lowp.training.data.mapped import open_mapped
from lowp.training.data.sets import IMAGE_SETS
from lowp.training.data.text import open_text
from lowp.training.data.wrappers import Augmented, Limited, Transformed
from lowp.training.plugins import is_plugin, load_plugin
from lowp.training.regular_file import user_path

_TEXT = "text:"
_SHAKESPEARE = Files(
    "shakespeare",
    names=(("tinyshakespeare.txt", "input.txt"),),
    downloads=(
        Download(
            ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
            "6fb458f1232090904fb40fe944165e91",
            gives=("tinyshakespeare.txt",),
        ),
    ),
)
SET_NAMES = (*(image_set.name for image_set in IMAGE_SETS), _SHAKESPEARE.set_name)


def open_data(settings: DataChoice, *, device: torch.device, dtype: torch.dtype, directory: Path | None) -> Data:
    """The set that `settings` name, from `directory` (--data) where it has files. Limit and transform are for training."""
    check_names(settings.augment)
    if settings.workers < 0:
        raise ValueError(f"data.workers must not be negative: {settings.workers}")
    data = _open(settings, device, dtype, directory)
    train = data.train
    if settings.limit:
        if not 0 < settings.limit <= len(train):
            raise ValueError(f"data.limit = {settings.limit}, but {data.name!r} has {len(train)} training samples")
        train = Limited(train, settings.limit)
    if settings.transform:
        train = Transformed(train, load_plugin(settings.transform, "data.transform"), settings.transform)
    return replace(data, train=train)


def _open(settings: DataChoice, device: torch.device, dtype: torch.dtype, directory: Path | None) -> Data:
    name = settings.name
    for image_set in IMAGE_SETS:
        if name == image_set.name:
            return image_set.open(settings.augment, device, dtype, directory)
    if name == _SHAKESPEARE.set_name or name.startswith(_TEXT):
        if settings.augment:
            raise ValueError(f"data.augment = {', '.join(settings.augment)} is for images, and {name!r} is text")
        return open_text(name, _text_path(name, directory), settings.context, device)
    if not is_plugin(name):
        raise ValueError(f"unknown data set {name!r}; {_meant(name)}")
    data = open_mapped(name, settings.options, settings.workers, device, dtype)
    if not settings.augment:
        return data
    if data.kind != "image":
        raise ValueError(f"data.augment = {', '.join(settings.augment)} is for images, and {name!r} is text")
    augment = Augment(settings.augment, data.shape, device)
    return replace(data, train=Augmented(data.train, augment, device))


def _text_path(name: str, directory: Path | None) -> Path:
    if name == _SHAKESPEARE.set_name:
        return locate(_SHAKESPEARE, directory)[0]
    path = user_path(name.removeprefix(_TEXT))
    if path.exists() or path.is_absolute():
        return path
    below = data_directory(directory) / path
    return below if below.exists() else path


def _meant(name: str) -> str:
    return did_you_mean(name, SET_NAMES, f"known are {', '.join(SET_NAMES)}, text:FILE and module:function")
