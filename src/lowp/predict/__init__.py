"""What would 1,024 GPUs do? Links, clusters, topologies, the timeline of a step, and published cases to check it against.

`lowp.predict` is this package and a function at once: `lowp.predict("resnet50", "dgx-h100", wire="e5m2/aps", ranks="1:4096")`
calls `prediction.predict`. A function of that name would hide the package, or the package would take the function's place as
soon as it is imported.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from lowp.predict.prediction import predict

        return predict(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
