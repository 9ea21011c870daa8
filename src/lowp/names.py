"""Names that users write: patterns for layers and parameters, and what was meant by a name that nothing has.

**The grammar of patterns.** It is the same in `lowp.simulate(layers=)` and policies, in `skip=` and `layers=` of the wire, in
`exclude=` of optimizers, in `allow=["module:..."]` of an audit, and for the keys of recipes. A pattern is

- a name as torch has it, of a parameter ("fc.weight") or of a module ("fc", "blocks.0"). A module stands for everything inside;
- a shell pattern for such names: "*.bias", "blocks.[0-3]". `*` matches any text, dots included. Upper and lower case differ;
- "first" or "last": the first or last layer, in order of registration, that has a matrix of weights (wire and `simulate`);
- "1d": parameters of one dimension or none, which are biases and norms (wire and optimizers);
- the name of a class ("BatchNorm2d"), the class itself, or a predicate `(name, module) -> bool` (`simulate`).

Where a model has something that is called "first" or "last", the word means that. Among several patterns the first that
matches counts. A pattern that matches nothing is a mistake, and an error names what was probably meant.
"""

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

LIKELY = 0.6  # from 0 to 1: how alike two names must be for one to be suggested
SMALL = "1d"
WORDS = ("first", "last", SMALL)


def covers(pattern: str, name: str) -> bool:
    """Does the pattern match the name of a parameter or module, or of a module that it is inside of?"""
    return any(fnmatchcase(part, pattern) for part in _with_owners(name))


def _with_owners(name: str) -> Iterator[str]:
    """ "a.b.weight", "a.b", "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that cover none of the names; "first", "last" and "1d" are not looked at."""
    names = list(names)
    return [pattern for pattern in patterns if pattern not in WORDS and not any(covers(pattern, name) for name in names)]


def written(pattern: Any) -> str:
    """As it stands in an error: `'fc'`, `Linear`."""
    return repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__qualname__", repr(pattern))


def matches_nothing(pattern: Any, names: Iterable[str]) -> str:
    """The end of an error: `'fd' matches nothing; did you mean 'fc'?`"""
    names = list(names)
    known = dict.fromkeys(part for name in names for part in (name, *_with_owners(name)))
    some = ", ".join(names if len(names) <= 3 else [*names[:3], "..."])
    word = pattern if isinstance(pattern, str) else ""
    return f"{written(pattern)} matches nothing; {did_you_mean(word, known, f'there are {some}', likely=0.5)}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", likely: float = LIKELY) -> str:
    """`did you mean 'poly' or 'polar'?`, with the names that are most like a wrong one; `otherwise` where none is."""
    by_lower_case = {name.lower(): name for name in reversed(list(known))}
    near = difflib.get_close_matches(word.lower(), by_lower_case, n=3, cutoff=likely)
    return question(repr(by_lower_case[each]) for each in near) if near else otherwise


def question(near: Iterable[str]) -> str:
    return f"did you mean {' or '.join(near)}?"
