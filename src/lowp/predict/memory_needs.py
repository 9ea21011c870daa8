"""Does it fit? Bytes on one rank by role, from what a model and a wire need.

Weights, gradients and optimizer state are counted by parameter and format. Activations are what forward saves for backward, as
autograd saved it when the model was traced in float32; half of that where activations have 16 bits. Not counted: buffers of
batch norm, workspaces of convolutions, memory that an allocator keeps, and a tenth of a gigabyte or more of the GPU's context.
"""

from dataclasses import dataclass

from lowp.formats import format as parse_format
from lowp.names import did_you_mean
from lowp.predict.workload import Workload

STATES = {"sgd": 1, "lars": 1, "adamw": 2, "lamb": 2}  # tensors of the size of a parameter; sgd and lars with momentum


@dataclass(frozen=True)
class TrainingFormats:
    """Formats of what stays on a rank. `master`: a copy of the weights that the optimizer keeps; "": none."""

    weights: str = "fp32"
    gradients: str = ""
    state: str = ""
    activations: str = ""
    master: str = ""
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            hint = did_you_mean(self.optimizer, STATES, f"it is one of {', '.join(STATES)}")
            raise ValueError(f"optimizer: unknown {self.optimizer!r}; {hint}")
        for role in ("weights", "gradients", "state", "activations", "master"):
            if getattr(self, role):
                parse_format(getattr(self, role))

    def bytes_of(self, role: str) -> float:
        """Of one number. Gradients, states and activations are as the weights unless they have a format of their own."""
        text = getattr(self, role) or ("" if role == "master" else self.weights)
        return parse_format(text).bits / 8 if text else 0.0


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes by role. `activations` is None where the workload does not say what forward saves."""

    weights: float
    gradients: float
    state: float
    wire: float
    activations: float | None

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + self.wire + (self.activations or 0.0)


def memory_needs(workload: Workload, batch: int, formats: TrainingFormats, wire_bytes: float) -> MemoryNeeds:
    """`wire_bytes`: buffers of messages that are under way at once."""
    count = workload.parameters
    return MemoryNeeds(
        count * formats.bytes_of("weights"),
        count * formats.bytes_of("gradients"),
        count * (STATES[formats.optimizer] * formats.bytes_of("state") + formats.bytes_of("master")),
        wire_bytes,
        None if workload.saved is None else batch * workload.saved * formats.bytes_of("activations") / 4,
    )
