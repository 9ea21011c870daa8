"""What a step of compressed gradients can raise, beside a collective that fails (faults.py)."""


class NonFiniteGradient(ArithmeticError):
    """A gradient was infinite or NaN on some rank. All ranks raise it in the same step."""


class ReplicasDiffer(RuntimeError):
    """Parameters or gradients that should be the same on all ranks are not."""
