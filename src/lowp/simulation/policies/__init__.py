"""Which format every tensor has, and how that changes while a model trains. A policy decides; the training loop asks it.

- `Uniform`: one format for each role. `PerLayer`: formats of some layers.
- `Schedule`: formats by epoch or by step. Warm up in fp32, then go narrow.
- `OnOverflow`: a layer whose numbers keep leaving the range moves to a wider format.
- `GradientDiversity`: everything moves up a ladder of formats when gradients stop telling different things (MuPPET).
- `MemoryBudget`: the largest tensors are demoted until the model fits; those that overflow are promoted (arXiv 2301.13464).
- `Together`: several of them.

policy.py says what a policy is asked, and when.
"""

from lowp.simulation.policies.diversity import GradientDiversity as GradientDiversity
from lowp.simulation.policies.fixed import PerLayer as PerLayer
from lowp.simulation.policies.fixed import Uniform as Uniform
from lowp.simulation.policies.memory import MemoryBudget as MemoryBudget
from lowp.simulation.policies.overflow import OnOverflow as OnOverflow
from lowp.simulation.policies.policy import Policy as Policy
from lowp.simulation.policies.policy import Together as Together
from lowp.simulation.policies.schedule import Schedule as Schedule
