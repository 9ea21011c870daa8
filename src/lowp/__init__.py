"""lowp: training neural networks in low precision across many machines.

The public API, and nothing else. Formats are here at once: they are pure Python. Everything else needs torch, whose import
takes a second or more, and is imported when it is first asked for: `lowp --help` does not wait for it.
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
from lowp.version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers and editors see of _LATER
    from lowp import fsdp as fsdp
    from lowp import health as health
    from lowp import optim as optim
    from lowp.health.audit import ForbiddenTensor as ForbiddenTensor
    from lowp.health.audit import audit as audit
    from lowp.lab.recommend import Recommendation as Recommendation
    from lowp.lab.recommend import recommend as recommend
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
    from lowp.tensor.block import BlockCodes as BlockCodes
    from lowp.tensor.errors import NonFiniteGradient as NonFiniteGradient
    from lowp.tensor.interchange import from_128x4 as from_128x4
    from lowp.tensor.interchange import to_128x4 as to_128x4
    from lowp.tensor.kernels import kernel_info as kernel_info
    from lowp.tensor.kernels import set_kernel_policy as set_kernel_policy
    from lowp.tensor.matmul import Arithmetic as Arithmetic
    from lowp.tensor.matmul import conv2d as conv2d
    from lowp.tensor.matmul import linear as linear
    from lowp.tensor.matmul import matmul as matmul
    from lowp.tensor.noise import Noise as Noise
    from lowp.tensor.ops import decode as decode
    from lowp.tensor.ops import encode as encode
    from lowp.tensor.ops import fake_quantize as fake_quantize
    from lowp.tensor.ops import quantize as quantize
    from lowp.tensor.packing import pack as pack
    from lowp.tensor.packing import unpack as unpack
    from lowp.train_function import TrainingResult as TrainingResult
    from lowp.train_function import train as train
    from lowp.training.divergence import Diverged as Diverged
    from lowp.training.recipe import Recipe as Recipe
    from lowp.wire.collectives import all_reduce as all_reduce
    from lowp.wire.compressor import Compressor as Compressor
    from lowp.wire.ddp import compress_gradients as compress_gradients
    from lowp.wire.faults import CollectiveError as CollectiveError
    from lowp.wire.replicas import ReplicasDiffer as ReplicasDiffer
    from lowp.wire.replicas import check_replicas as check_replicas
    from lowp.wire.virtual import VirtualWorld as VirtualWorld


_MODULES = {  # where a name is to be found; without names: the module itself
    "lowp.fsdp": (),
    "lowp.health": (),
    "lowp.health.audit": ("ForbiddenTensor", "audit"),
    "lowp.lab.recommend": ("Recommendation", "recommend"),
    "lowp.optim": (),
    "lowp.optim.loss_scale": ("LossScale", "LossScaleExhausted"),
    "lowp.predict": (),
    "lowp.predict.calibration": ("calibrate_cluster",),
    "lowp.predict.planning": ("plan",),
    "lowp.simulation": (
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
    "lowp.tensor.block": ("BlockCodes",),
    "lowp.tensor.errors": ("NonFiniteGradient",),
    "lowp.tensor.interchange": ("from_128x4", "to_128x4"),
    "lowp.tensor.kernels": ("kernel_info", "set_kernel_policy"),
    "lowp.tensor.matmul": ("Arithmetic", "conv2d", "linear", "matmul"),
    "lowp.tensor.noise": ("Noise",),
    "lowp.tensor.ops": ("decode", "encode", "fake_quantize", "quantize"),
    "lowp.tensor.packing": ("pack", "unpack"),
    "lowp.train_function": ("TrainingResult", "train"),
    "lowp.training.divergence": ("Diverged",),
    "lowp.training.recipe": ("Recipe",),
    "lowp.wire.collectives": ("all_reduce",),
    "lowp.wire.compressor": ("Compressor",),
    "lowp.wire.ddp": ("compress_gradients",),
    "lowp.wire.faults": ("CollectiveError",),
    "lowp.wire.replicas": ("ReplicasDiffer", "check_replicas"),
    "lowp.wire.virtual": ("VirtualWorld",),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names or (module.rpartition(".")[2],)}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'lowp' has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if module.__name__ == f"lowp.{name}" else getattr(module, name)
    globals()[name] = found  # it is not asked for here again
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
