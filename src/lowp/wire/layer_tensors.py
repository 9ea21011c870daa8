"""What is remembered of each parameter between steps: by name for those who save it, one tensor a bucket for those who use it.

A bucket's tensor holds its layers one after the other. When a parameter comes in another bucket than before (DDP cuts buckets
anew after the first step), that bucket's tensor is put together from the parameters' own, and the old one is taken apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from lowp.wire.plan import Bucket


class LayerTensors(ABC):
    """Tensors by parameter (`named`), and by bucket (`of`)."""

    def __init__(self, named: Mapping[str, Tensor] | None = None) -> None:
        self._alone = dict(named or {})
        self._of_buckets: dict[Bucket, Tensor] = {}
        self._buckets: dict[str, Bucket] = {}  # of the parameters that lie in one

    @abstractmethod
    def _joined(self, bucket: Bucket, named: dict[str, Tensor], device: torch.device) -> Tensor:
        """A bucket's tensor."""

    @abstractmethod
    def _entries(self, bucket: Bucket, whole: Tensor) -> dict[str, Tensor]:
        """The layers' own in a bucket's tensor, as views."""

    def named(self) -> dict[str, Tensor]:
        found = dict(self._alone)
        for bucket, whole in self._of_buckets.items():
            found |= self._entries(bucket, whole)
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self.named()[name]

    def of(self, bucket: Bucket, device: torch.device) -> Tensor:
        """A bucket's tensor, to be read and written."""
        found = self._of_buckets.get(bucket)
        if found is None:
            with torch.inference_mode(False):  # what is made within it cannot be written to outside of it
                found = self._joined(bucket, self.named(), device)
            names = [layer.name for layer in bucket.layers]
            for before in {self._buckets[name] for name in names if name in self._buckets}:
                self._take_apart(before)
            for name in names:
                self._alone.pop(name, None)
                self._buckets[name] = bucket
            self._of_buckets[bucket] = found
        return found

    def _take_apart(self, bucket: Bucket) -> None:
        self._alone |= self._entries(bucket, self._of_buckets.pop(bucket))
        for layer in bucket.layers:
            del self._buckets[layer.name]

    def copy(self) -> Self:
        """The same in memory of its own."""
        new = type(self)({name: tensor.clone() for name, tensor in self._alone.items()})
        new._of_buckets = {bucket: whole.clone() for bucket, whole in self._of_buckets.items()}
        new._buckets = dict(self._buckets)
        return new


class Residuals(LayerTensors):
    """Float32, flat; zeros where nothing is known. A bucket's tensor is as long as the bucket."""

    def give_back(self, means: Mapping[str, Tensor]) -> None:
        """What was sent of these parameters, nobody has taken. (Each rank takes the mean: together they have the sum.)"""
        residuals = self.named()
        for name, mean in means.items():
            residuals[name].add_(mean.reshape(-1).to(torch.float32).nan_to_num(0, 0, 0))

    def _joined(self, bucket: Bucket, named: dict[str, Tensor], device: torch.device) -> Tensor:
        whole = torch.zeros(bucket.size, dtype=torch.float32, device=device)
        for layer, begin in zip(bucket.layers, bucket.begins, strict=False):
            if layer.name in named:
                whole[begin : begin + layer.size] = named[layer.name]
        return whole

    def _entries(self, bucket: Bucket, whole: Tensor) -> dict[str, Tensor]:
        return {x.name: whole[begin : begin + x.size] for x, begin in zip(bucket.layers, bucket.begins, strict=False)}


class Bounds(LayerTensors):
    """The last bounds of `aps_delayed`, a byte a layer; 0 where nothing is known, and for layers with other scales.

    On a CPU there is no entry for a layer of which nothing is known. (On CUDA, to know that would be to wait for the device.)
    """

    def unknown(self, bucket: Bucket) -> list[int]:
        """The layers with delayed scales that must agree on their scale when they are next sent."""
        delayed = bucket.scale_kinds.get("aps_delayed", [])
        whole = self._of_buckets.get(bucket)
        if whole is None:
            named = self.named() if delayed else {}
            return [i for i in delayed if bucket.layers[i].name not in named]
        if whole.device.type != "cpu":
            return []
        known = whole.tolist()
        return [i for i in delayed if not known[i]]

    def _joined(self, bucket: Bucket, named: dict[str, Tensor], device: torch.device) -> Tensor:
        whole = torch.zeros(len(bucket.layers), dtype=torch.uint8, device=device)
        for i in bucket.scale_kinds.get("aps_delayed", []):
            if bucket.layers[i].name in named:
                whole[i] = named[bucket.layers[i].name]
        return whole

    def _entries(self, bucket: Bucket, whole: Tensor) -> dict[str, Tensor]:
        known = whole.tolist() if whole.device.type == "cpu" else None
        delayed = bucket.scale_kinds.get("aps_delayed", [])
        return {bucket.layers[i].name: whole[i] for i in delayed if known is None or known[i]}
