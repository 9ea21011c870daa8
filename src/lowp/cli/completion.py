"""What the shell completes: names of recipes, models, formats, runs. It waits for every key: nothing here imports torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from lowp.formats import FORMATS
from lowp.training.runs import runs_under

_RECIPES = Path(__file__).parents[1] / "training" / "recipes"


def recipe_names() -> list[str]:
    """As they stand in the sources: to import them takes seconds."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(_RECIPES.glob("*.py")))
    return [name.replace("_", "-") for text in texts for name in re.findall(r"^@named\ndef (\w+)\(", text, re.MULTILINE)]


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    files = (str(path) for path in Path().glob("*.toml"))
    return _begin([*recipe_names(), *files], incomplete)


def formats(incomplete: str) -> list[str]:
    return _begin(map(str, FORMATS), incomplete)


def runs(incomplete: str) -> list[str]:
    root = Path("runs")
    return _begin((str(path.relative_to(root)) for path in runs_under(root)), incomplete)
