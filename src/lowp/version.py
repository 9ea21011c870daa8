"""lowp's version, for whoever needs it without the rest: ranks compare theirs before they exchange anything."""

__version__ = "0.1.0"
