"""The image sets that are known by name: their files, layout, and the mean and deviation of their training pixels."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path

import numpy as np
import torch

from lowp.training.data.augment import Augment
from lowp.training.data.base import Data
from lowp.training.data.download import Download
from lowp.training.data.files import Files, locate
from lowp.training.data.images import ResidentImages, values_of
from lowp.training.data.layouts import CLASSES, Labelled, read_cifar, read_idx

TrainAndTest = tuple[Labelled, Labelled]


@dataclass(frozen=True)
class ImageSet:
    name: str
    read: Callable[[Path | None], TrainAndTest]  # given --data
    mean: tuple[float, ...]  # a channel each, of training pixels between 0 and 1
    deviation: tuple[float, ...]

    def open(self, augment: tuple[str, ...], device: torch.device, dtype: torch.dtype, directory: Path | None) -> Data:
        values = values_of(self.mean, self.deviation, dtype)
        train, test = self.read(directory)
        shape = tuple(train.images.shape[1:])
        trained = ResidentImages(*train, values, Augment(augment, shape, device), device)
        tested = ResidentImages(*test, values, Augment((), shape, device), device)
        return Data(self.name, trained, tested, shape, CLASSES, kind="image")


def _idx_files(set_name: str, mirrors: tuple[str, ...], md5: dict[str, str], folder: str) -> Files:
    return Files(
        set_name,
        names=tuple((name, f"{name}.gz") for name in md5),
        downloads=tuple(
            Download(tuple(f"{mirror}{name}.gz" for mirror in mirrors), digest, gives=(f"{name}.gz",))
            for name, digest in md5.items()
        ),
        folders=(folder,),
    )


MNIST_FILES = _idx_files(
    "mnist",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    folder="MNIST/raw",
)
FASHION_FILES = _idx_files(
    "fashion_mnist",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    folder="FashionMNIST/raw",
)
_CIFAR_NAMES = (*(f"data_batch_{part}.bin" for part in range(1, 6)), "test_batch.bin")
CIFAR_FILES = Files(
    "cifar10",
    names=tuple((name,) for name in _CIFAR_NAMES),
    downloads=(
        Download(
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "c32a1d4ab5d03f1284b67883e8d87530",
            gives=_CIFAR_NAMES,
            inside="cifar-10-batches-bin",
        ),
    ),
    folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
)


def _mnist(directory: Path | None) -> TrainAndTest:
    return _from_idx(MNIST_FILES, directory)


def fashion_mnist(directory: Path | None) -> TrainAndTest:
    return _from_idx(FASHION_FILES, directory)


def _from_idx(files: Files, directory: Path | None) -> TrainAndTest:
    train_images, train_labels, test_images, test_labels = locate(files, directory)
    return read_idx(train_images, train_labels), read_idx(test_images, test_labels)


def _cifar10(directory: Path | None) -> TrainAndTest:
    *train, test = locate(CIFAR_FILES, directory)
    return read_cifar(train), read_cifar([test])


def _fashion14(directory: Path | None) -> TrainAndTest:
    """From inside the package, wherever other data are. See make_fashion14.py."""
    del directory
    with resources("lowp.training.data").joinpath("fashion14.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"])[:, None] * 4  # 64 levels of grey, as bytes
        labels = torch.from_numpy(arrays["labels"])
        in_train = int(arrays["in_train"])
    return Labelled(images[:in_train], labels[:in_train]), Labelled(images[in_train:], labels[in_train:])


# Means and deviations of all training pixels; tests compute them again.
IMAGE_SETS = (
    ImageSet("fashion14", _fashion14, (0.28215,), (0.32837,)),
    ImageSet("mnist", _mnist, (0.13066,), (0.30811,)),
    ImageSet("fashion_mnist", fashion_mnist, (0.28604,), (0.35302,)),
    ImageSet("cifar10", _cifar10, (0.4914, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
)
