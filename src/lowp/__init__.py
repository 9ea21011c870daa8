"""lowp: training neural networks in low precision across many machines.

The public API, and nothing else. `fsdp`, `health`, `optim`, `predict`, `simulation`, `wire` and products of matrices are
imported when something of them is first asked for: who rounds a tensor, or waits for `lowp --help`, does not wait for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowp import processor as processor  # before torch's first product
from lowp import starting as starting  # before anything that takes time
from lowp.formats import FORMATS as FORMATS
from lowp.formats import BlockFormat as BlockFormat
from lowp.formats import CodebookFormat as CodebookFormat
from lowp.formats import FixedFormat as FixedFormat
from lowp.formats import FloatFormat as FloatFormat
from lowp.formats import Format as Format
from lowp.formats import PositFormat as PositFormat
from lowp.formats import Rounding as Rounding
from lowp.formats import Specials as Specials
from lowp.formats import format as format
from lowp.tensor.block import BlockCodes as BlockCodes
from lowp.tensor.errors import NonFiniteGradient as NonFiniteGradient
from lowp.tensor.interchange import from_128x4 as from_128x4
from lowp.tensor.interchange import to_128x4 as to_128x4
from lowp.tensor.kernels import kernel_info as kernel_info
from lowp.tensor.kernels import set_kernel_policy as set_kernel_policy
from lowp.tensor.noise import Noise as Noise
from lowp.tensor.ops import decode as decode
from lowp.tensor.ops import encode as encode
from lowp.tensor.ops import fake_quantize as fake_quantize
from lowp.tensor.ops import quantize as quantize
from lowp.tensor.packing import pack as pack
from lowp.tensor.packing import unpack as unpack
from lowp.version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers and editors see of _LATER
    from lowp import fsdp as fsdp
    from lowp import health as health
    from lowp import optim as optim
    from lowp.health.audit import ForbiddenTensor as ForbiddenTensor
    from lowp.health.audit import audit as audit
    from lowp.optim.loss_scale import LossScale as LossScale
    from lowp.optim.loss_scale import LossScaleExhausted as LossScaleExhausted
    from lowp.predict.calibration import calibrate_cluster as calibrate_cluster
    from lowp.predict.planning import plan as plan
    from lowp.predict.prediction import predict as predict
    from lowp.simulation import GradientDiversity as GradientDiversity
    from lowp.simulation import MasterWeights as MasterWeights
    from lowp.simulation import MemoryBudget as MemoryBudget
    from lowp.simulation import OnOverflow as OnOverflow
    from lowp.simulation import PerLayer as PerLayer
    from lowp.simulation import Policy as Policy
    from lowp.simulation import Products as Products
    from lowp.simulation import Schedule as Schedule
    from lowp.simulation import SearchResult as SearchResult
    from lowp.simulation import Simulation as Simulation
    from lowp.simulation import Together as Together
    from lowp.simulation import Uniform as Uniform
    from lowp.simulation import calibrate as calibrate
    from lowp.simulation import describe as describe
    from lowp.simulation import restore as restore
    from lowp.simulation import search as search
    from lowp.simulation import simulate as simulate
    from lowp.simulation import simulation_of as simulation_of
    from lowp.tensor.matmul import Arithmetic as Arithmetic
    from lowp.tensor.matmul import conv2d as conv2d
    from lowp.tensor.matmul import linear as linear
    from lowp.tensor.matmul import matmul as matmul
    from lowp.wire.collectives import all_reduce as all_reduce
    from lowp.wire.compressor import Compressor as Compressor
    from lowp.wire.ddp import compress_gradients as compress_gradients
    from lowp.wire.errors import ReplicasDiffer as ReplicasDiffer
    from lowp.wire.faults import CollectiveError as CollectiveError
    from lowp.wire.replicas import check_replicas as check_replicas
    from lowp.wire.virtual import VirtualWorld as VirtualWorld


_LATER = {
    "fsdp": "lowp.fsdp",
    "health": "lowp.health",
    "optim": "lowp.optim",
    "predict": "lowp.predict",
    "calibrate_cluster": "lowp.predict.calibration",
    "plan": "lowp.predict.planning",
    "ForbiddenTensor": "lowp.health.audit",
    "audit": "lowp.health.audit",
    "LossScale": "lowp.optim.loss_scale",
    "LossScaleExhausted": "lowp.optim.loss_scale",
    **dict.fromkeys(
        (
            "GradientDiversity",
            "MasterWeights",
            "MemoryBudget",
            "OnOverflow",
            "PerLayer",
            "Policy",
            "Products",
            "Schedule",
            "SearchResult",
            "Simulation",
            "Together",
            "Uniform",
            "calibrate",
            "describe",
            "restore",
            "search",
            "simulate",
            "simulation_of",
        ),
        "lowp.simulation",
    ),
    **dict.fromkeys(("Arithmetic", "conv2d", "linear", "matmul"), "lowp.tensor.matmul"),
    "all_reduce": "lowp.wire.collectives",
    "Compressor": "lowp.wire.compressor",
    "compress_gradients": "lowp.wire.ddp",
    "ReplicasDiffer": "lowp.wire.errors",
    "CollectiveError": "lowp.wire.faults",
    "check_replicas": "lowp.wire.replicas",
    "VirtualWorld": "lowp.wire.virtual",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'lowp' has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if module.__name__ == f"lowp.{name}" else getattr(module, name)
    globals()[name] = found  # it is not asked for here again
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
