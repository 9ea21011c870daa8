"""What a policy is asked, when, and with what. A loop of one's own drives one like this:

    simulation = simulate(model, count_overflow=policy.count_overflow)
    policy.start(simulation, model)
    for epoch in range(epochs):
        for batch in batches:
            policy.before_step(simulation, step, epoch)      # formats of this step
            ...                                              # forward, backward, reduce gradients
            policy.after_step(simulation, gradients, agree)  # reduced gradients by name, the same on all ranks
            step += 1
        policy.after_epoch(simulation, agree)

If a step comes to nothing because a gradient is infinite or NaN, `after_failure` may promote what overflowed; where it did, the
step can be taken again. Every answer is a list of sentences for the log: what changed, empty if nothing did.

Ranks must decide alike. They see the same gradients and the same steps; overflows they count each for itself, so `agree` is
given their counts as one tensor and returns the sum over ranks (None: there is one rank).

Decisions are a function of what a policy has seen, which is in `state_dict`: plain data and tensors. To resume, make the policy
as before, `start` it, and load its state and the simulation's.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lowp.simulation.layers import ROLES, checked_roles
from lowp.simulation.simulation import Simulation

Agree = Callable[[Tensor], Tensor]

_BESIDE_FORMATS = frozenset(inspect.signature(Simulation.set).parameters) - {"self", *ROLES}  # layers, scale, ...


class Policy:
    """A policy that decides nothing: each of the others overrides what it has an opinion on."""

    count_overflow = False  # what `simulate` has to be told for this policy

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        """Set the first formats of a model that was just simulated. What does not fit it raises here, not epochs later."""

    def before_step(self, simulation: Simulation, step: int, epoch: int) -> list[str]:
        """Both count from 0, and never back."""
        return []

    def after_step(self, simulation: Simulation, gradients: Mapping[str, Tensor], agree: Agree | None = None) -> list[str]:
        return []

    def after_epoch(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return []

    def after_failure(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        """A step had gradients that are not finite; empty if nothing can be done about it."""
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {', '.join(map(str, state))}")


class Together(Policy):
    """Several policies, asked in the order given: where two set the same thing, the last one to be asked has its way."""

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise ValueError("Together needs a policy, or several")
        if sum(policy.count_overflow for policy in policies) > 1:
            raise ValueError("of policies that go by overflows there can be one: whoever asks first resets the counts")
        self.policies = policies
        self.count_overflow = any(policy.count_overflow for policy in policies)

    def start(self, simulation: Simulation, model: nn.Module) -> None:
        for policy in self.policies:
            policy.start(simulation, model)

    def before_step(self, simulation: Simulation, step: int, epoch: int) -> list[str]:
        return [said for policy in self.policies for said in policy.before_step(simulation, step, epoch)]

    def after_step(self, simulation: Simulation, gradients: Mapping[str, Tensor], agree: Agree | None = None) -> list[str]:
        return [said for policy in self.policies for said in policy.after_step(simulation, gradients, agree)]

    def after_epoch(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return [said for policy in self.policies for said in policy.after_epoch(simulation, agree)]

    def after_failure(self, simulation: Simulation, agree: Agree | None = None) -> list[str]:
        return [said for policy in self.policies for said in policy.after_failure(simulation, agree)]

    def state_dict(self) -> dict[str, Any]:
        return {"policies": [policy.state_dict() for policy in self.policies]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["policies"]) != len(self.policies):
            raise ValueError(f"the saved state is of {len(state['policies'])} policies, and here are {len(self.policies)}")
        for policy, theirs in zip(self.policies, state["policies"], strict=True):
            policy.load_state_dict(theirs)


def require_counts(simulation: Simulation, policy: Policy) -> None:
    if not simulation.count_overflow:
        raise ValueError(
            f"{type(policy).__name__} goes by overflows, and nobody counts them: simulate(..., count_overflow=True)"
        )


def checked_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments for `Simulation.set`, as far as they can be looked at without a model: formats and names of roles."""
    formats = {role: name for role, name in settings.items() if role not in _BESIDE_FORMATS}
    return {**settings, **checked_roles(formats, where)}


def listed(formats: Mapping[str, Any]) -> str:
    """Formats by role, and other settings, in words."""
    roles = [f"{role} in {fmt or 'fp32'}" for role, fmt in formats.items() if role in ROLES]
    return ", ".join([*roles, *(f"other {name}" for name in formats if name in _BESIDE_FORMATS)])
