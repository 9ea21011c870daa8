"""Compiled code made to run eagerly for a while, so that hooks are called."""

from typing import Any

import torch


class Eagerness:
    """Compiled code runs eagerly between `enter` and `leave`; then the stance that the user had comes back.

    Stances are a stack only as long as everybody leaves in order, and others (an audit, say) may enter during a sample and
    leave after it. Theirs is not taken away from under them; but when it ends it brings back ours, which by then has become a
    copy of the one before it.
    """

    def __init__(self) -> None:
        self._stance: Any = None

    def enter(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def leave(self) -> None:
        if self._stance is None:
            return
        ours, before = self._stance.stance, self._stance.prev
        if current_stance() is ours:
            self._stance.__exit__(None, None, None)
        vars(ours).update(vars(before))
        self._stance = None


def current_stance() -> Any:
    """The compiler's stance, which torch tells only to those who set another."""
    probe: Any = torch.compiler.set_stance("default")
    probe.__exit__(None, None, None)
    return probe.prev
