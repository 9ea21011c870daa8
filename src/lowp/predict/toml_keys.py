"""A table of a TOML file that is being read: every key is taken once, with its type and its bounds, and `end` refuses the rest.

A mistake is one line: the file, the key, what was given and what is wanted.
"""

import sys
from collections.abc import Mapping
from typing import Any

from lowp.names import did_you_mean
from lowp.predict.quantities import SECONDS, Unit, quantity

_MANY = 10  # keys, which are too many to list
_LONGEST = 80  # characters of a value that are repeated
_MISSING: Any = object()


class ClusterError(ValueError):
    """A cluster that cannot be read, in one line with the file and the key."""


def is_number(value: Any) -> bool:
    """Finite, and no larger than a float can be: Python reads whole numbers of any length."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def _short(value: Any) -> str:
    """As it is written, or its beginning where that is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class TomlKeys:
    def __init__(self, table: Mapping[str, Any], source: str, path: str = "") -> None:
        self._table, self._source, self._path = table, source, path
        self._known: dict[str, None] = {}

    def wrong(self, key: str, what: str) -> ClusterError:
        return ClusterError(f"{self._source}: {self._written(key)}: {what}")

    def _written(self, key: str) -> str:
        return f"{self._path}{'.' if self._path and key else ''}{key}"

    def take(self, key: str, default: Any = _MISSING) -> Any:
        self._known[key] = None
        if key not in self._table and default is _MISSING:
            raise self.wrong(key, "is missing")
        return self._table.get(key, default)

    def names(self) -> list[str]:
        return list(self._table)

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self.take(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"{value!r} is not a string")
        return value

    def number(self, key: str, default: Any = _MISSING, **bounds: float) -> float:
        value = self.take(key, default)
        if not is_number(value):
            raise self.wrong(key, f"{_short(value)} is not a number")
        self._check(key, value, **bounds)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, f"{value!r} is neither true nor false")
        return value

    def whole(self, key: str, default: Any = _MISSING, least: int = 0) -> Any:
        """A whole number, or the default None."""
        value = self.take(key, default)
        if value is None:
            return None
        if not is_whole(value):
            raise self.wrong(key, f"{_short(value)} is not a whole number")
        self._check(key, value, least=least)
        return value

    def quantity(self, key: str, unit: Unit, default: Any = _MISSING) -> Any:
        """A number with a unit, or the default as it is."""
        value = self.take(key, default)
        return value if key not in self._table else self.number_of(key, value, unit)

    def number_of(self, key: str, value: Any, unit: Unit) -> float:
        try:
            number = quantity(value, unit)
        except ValueError as error:
            raise self.wrong(key, str(error)) from None
        if number < 0 or (number == 0 and unit is not SECONDS):
            raise self.wrong(key, f"{value!r} must be {'at least' if unit is SECONDS else 'above'} 0")
        return number

    def _check(
        self, key: str, value: float, least: float | None = None, above: float | None = None, most: float | None = None
    ) -> None:
        if least is not None and value < least:
            raise self.wrong(key, f"{value:g} must be at least {least:g}")
        if above is not None and value <= above:
            raise self.wrong(key, f"{value:g} must be above {above:g}")
        if most is not None and value > most:
            raise self.wrong(key, f"{value:g} must be at most {most:g}")

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A table whose keys are the user's own."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"{value!r} is not a table")
        return value

    def inside(self, key: str, name: str) -> "TomlKeys":
        """The table `name` in the table at `key`; with no key, in this one."""
        holder = self._table if not key else self._table[key]
        return self._of(holder[name], f"{key}.{name}" if key else name)

    def _of(self, value: Any, key: str) -> "TomlKeys":
        if not isinstance(value, dict):
            raise self.wrong(key, f"{value!r} is not a table")
        return TomlKeys(value, self._source, self._written(key))

    def table(self, key: str, default: Any = _MISSING) -> "TomlKeys":
        return self._of(self.take(key, default), key)

    def tables(self, key: str, default: Any = _MISSING) -> "list[TomlKeys]":
        value = self.take(key, default)
        if not isinstance(value, list):
            raise self.wrong(key, f"{value!r} is not a list of tables; write [[{key}]]")
        return [self._of(entry, f"{key}[{number}]") for number, entry in enumerate(value)]

    def end(self) -> None:
        """Refuse the keys that nobody took."""
        for key in self._table:
            if key not in self._known:
                there = f"there are {', '.join(self._known)}" if len(self._known) <= _MANY else ""
                hint = did_you_mean(key, self._known, there)
                raise self.wrong(key, f"no such key{'; ' if hint else ''}{hint}")
