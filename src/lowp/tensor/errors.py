"""Errors that more than one layer raises."""


class NonFiniteGradient(ArithmeticError):
    """A gradient was infinite or NaN. Ranks that work together raise it in the same step."""
