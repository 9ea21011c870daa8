"""What a step of compressed gradients can raise, beside a collective that fails (faults.py)."""

from lowp.tensor.errors import NonFiniteGradient as NonFiniteGradient


class ReplicasDiffer(RuntimeError):
    """Parameters or gradients that should be the same on all ranks are not."""
