"""Errors that more than one layer raises."""


class NonFiniteGradient(ArithmeticError):
    """A gradient was infinite or NaN. Ranks that work together raise it in the same step. `parameter`: whose, if known."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
