"""For scripts that tests start: torchvision can be imported where its wheel is not built for this torch.

The wheels of torchvision on PyPI are built for CUDA. Beside a torch without it, the names of two C++ operators are missing, and
transformers and Lightning import torchvision. The names are given when it is first imported.
"""

import sys

_kept = []


class _BeforeTorchvision:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision" and not _kept:
            import torch

            _kept.append(torch.library.Library("torchvision", "FRAGMENT"))
            if not torch.backends.cuda.is_built():
                for operator in ("nms", "qnms"):
                    _kept[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision)
