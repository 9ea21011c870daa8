"""The loss, and what is said where a model or a data set gives something that has none."""

import torch.nn.functional as F
from torch import Tensor

from lowp.training.plugins import blamed


class CrossEntropy:
    """Cross-entropy for the outputs of one model and the targets of one data set, which both may be the user's own."""

    def __init__(self, model: str, data: str, classes: int) -> None:
        self._model, self._classes = model, classes
        self._blamed = blamed(f"targets of the data set {data!r}")

    def __call__(self, logits: object, targets: Tensor, smoothing: float) -> Tensor:
        """The mean over all predictions: of images one each, of text one for each character."""
        if not isinstance(logits, Tensor):
            raise ValueError(f"model {self._model!r} returns {type(logits).__name__}, not a tensor; {self._wanted(targets)}")
        *places, classes = logits.shape or (0,)
        if places != [*targets.shape] or classes < self._classes or not logits.is_floating_point():
            found = f"{str(logits.dtype).removeprefix('torch.')} of shape {tuple(logits.shape)}"
            raise ValueError(f"model {self._model!r} returns {found}; {self._wanted(targets)}")
        if len(places) != 1:
            logits, targets = logits.flatten(0, -2), targets.flatten()
        with self._blamed:  # beyond the classes, or no whole numbers
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def _wanted(self, targets: Tensor) -> str:
        return f"wanted are logits of shape {(*targets.shape, self._classes)}"
