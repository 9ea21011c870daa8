"""Model parallelism with activations in a few bits (arXiv 1511.04561): linear layers split over ranks, and a pipeline.

`Whole(model)`, `split_model(model, team)` and `pipeline_model(model, team)` have one interface, `Placement`: the training loop
calls `forward_backward` and `evaluate`, and does not care where the layers are. A team is `RealTeam(group)`, one of several
processes, or `VirtualTeam(2)`, one process for all ranks, which computes the same bits.
"""

from lowp.training.parallel.messages import TensorCodec as TensorCodec
from lowp.training.parallel.pipeline import Pipeline as Pipeline
from lowp.training.parallel.pipeline import pipeline_model as pipeline_model
from lowp.training.parallel.placement import Placement as Placement
from lowp.training.parallel.placement import Whole as Whole
from lowp.training.parallel.split import SplitLinear as SplitLinear
from lowp.training.parallel.split import SplitModel as SplitModel
from lowp.training.parallel.split import split_model as split_model
from lowp.training.parallel.team import RealTeam as RealTeam
from lowp.training.parallel.team import Team as Team
from lowp.training.parallel.team import VirtualTeam as VirtualTeam
