"""From a study to its runs: a recipe for every setting and seed, all of them checked before anything starts.

A setting is the base recipe, the study's changes for all runs, and the setting's own. The baseline is the setting that the
study names; where it names none, the base recipe (with the changes for all): the setting that has the same recipe, or one that
is added, called `base`.

Every recipe gets a name that can be a directory's: letters, digits and a few signs of the setting's name. Two settings with the
same recipe are a mistake, and so is one that cannot be run; all of these are named before any run starts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowp.lab.study import MOST_RUNS, AxisChoice, Study, StudyError
from lowp.names import did_you_mean
from lowp.training.reading import read_recipe, with_changes, with_overrides
from lowp.training.recipe import Recipe
from lowp.training.toml import plain

BASE = "base"
_LONGEST_SLUG = 80  # characters; a seed comes behind it, and a recipe's name has at most 100
_NAMED = 3  # settings that an error names
_BARE = re.compile(r"[-+\d.e_]+|true|false|\[.*\]|\{.*\}|\"\"|", re.DOTALL)  # labels that say nothing without their key


@dataclass(frozen=True)
class StudySetting:
    """One setting. `recipe` is that of every seed, but for the seed."""

    name: str
    slug: str  # begins the names of its runs' directories
    changes: tuple[str, ...]
    labels: Mapping[str, str]  # by axis; empty for single changes
    recipe: Recipe


@dataclass(frozen=True)
class StudyRun:
    """One run: a directory under the study's `runs`."""

    setting: StudySetting
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.setting.slug}-s{self.seed}"


@dataclass(frozen=True)
class StudyPlan:
    """All settings and runs of a study, in the order in which they are made: seed by seed, so that a study that is stopped has
    whole seeds of everything."""

    study: Study
    settings: tuple[StudySetting, ...]
    baseline: str

    @cached_property
    def runs(self) -> tuple[StudyRun, ...]:
        return tuple(StudyRun(each, seed, self._recipe(each, seed)) for seed in self.study.seeds for each in self.settings)

    def _recipe(self, setting: StudySetting, seed: int) -> Recipe:
        """Numeric health is sampled in the runs of the first seed alone: the files are large, and seeds are alike."""
        recipe = with_changes(setting.recipe, name=f"{setting.slug}-s{seed}", seed=seed)
        wanted = self.study.health if seed == self.study.seeds[0] else 0
        return with_changes(recipe, log={"health": wanted}) if wanted else recipe


def plan_of_study(study: Study) -> StudyPlan:
    """The settings of a study; StudyError if one of them cannot be run."""
    base = _recipe(study, (), "base")
    settings = _settings(study, base)
    baseline = _baseline(study, settings, base)
    if not baseline:
        baseline = BASE
        settings = [StudySetting(BASE, _slug(BASE), (), {}, base), *settings]
    _check_all(study, settings)
    return StudyPlan(study, tuple(settings), baseline)


def _recipe(study: Study, changes: Iterable[str], what: str) -> Recipe:
    try:
        return _with_table(read_recipe(study.base, []), study.set, changes)
    except ValueError as error:
        raise StudyError(f"{study.source}: {what}: {error}") from None


def _with_table(recipe: Recipe, table: Mapping[str, Any], changes: Iterable[str]) -> Recipe:
    """The study's changes for all runs, then the setting's own, as `lowp train --set` takes them."""
    recipe = with_changes(recipe, **table) if table else recipe
    return with_overrides(recipe, list(changes))


def _settings(study: Study, base: Recipe) -> list[StudySetting]:
    short = _short_names([axis.name for axis in study.axes])
    found: list[StudySetting] = []
    slugs: set[str] = set()
    for name, labels, changes in (*_crossed(study, short), *_single(study.changes)):
        if any(each.name == name for each in found):
            raise StudyError(f"{study.source}: two settings are called {name!r}")
        slug = _free_slug(name, slugs)
        recipe = _recipe(study, changes, f"setting {name!r}")
        found.append(StudySetting(name, slug, changes, labels, recipe))
    if not found:
        raise StudyError(f"{study.source}: skip: no combination of the axes is left")
    return found


def _crossed(study: Study, short: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str], tuple[str, ...]]]:
    """Every combination of the axes, called by its values: `e5m2 aps ring`. A value that does not say what it is (a number, or
    one that two axes have) stands with its key: `batch=64`."""
    times = Counter(choice.label for axis in study.axes for choice in axis.choices)
    for chosen in study.combinations():
        pairs = list(zip(study.axes, chosen, strict=True))
        words = [
            choice.label
            if times[choice.label] == 1 and not _BARE.fullmatch(choice.label)
            else f"{short[axis.name]}={choice.label}"
            for axis, choice in pairs
        ]
        labels = {axis.name: choice.label for axis, choice in pairs}
        yield " ".join(words), labels, tuple(change for choice in chosen for change in choice.changes)


def _single(changes: Iterable[AxisChoice]) -> Iterator[tuple[str, dict[str, str], tuple[str, ...]]]:
    yield from ((choice.label, {}, choice.changes) for choice in changes)


def _short_names(names: list[str]) -> dict[str, str]:
    """The last part of a key, where that is the only one of its kind: `format` for `wire.format`."""
    last = Counter(name.rpartition(".")[2] for name in names)
    return {name: name.rpartition(".")[2] if last[name.rpartition(".")[2]] == 1 else name for name in names}


def _slug(name: str) -> str:
    """Text as part of a directory's name: `e5m2 aps batch=64` becomes `e5m2_aps_batch-64`."""
    text = re.sub(r"[^A-Za-z0-9_.]+", "-", re.sub(r"\s+", "_", name.strip())).strip("-._")
    return text[:_LONGEST_SLUG].rstrip("-._") or "setting"


def _free_slug(name: str, taken: set[str]) -> str:
    """Names that differ in signs alone, or in capitals (some disks do not tell those apart), get numbers."""
    slug = first = _slug(name)
    number = 2
    while slug.lower() in taken:
        slug, number = f"{first}-{number}", number + 1
    taken.add(slug.lower())
    return slug


def _same(one: Recipe, other: Recipe) -> bool:
    """Do they compute the same? Names and descriptions decide nothing."""
    ignored = {"name": "x", "description": ""}
    return plain(one.model_copy(update=ignored)) == plain(other.model_copy(update=ignored))


def _baseline(study: Study, settings: list[StudySetting], base: Recipe) -> str:
    names = [setting.name for setting in settings]
    if study.baseline:
        if study.baseline not in names:
            hint = did_you_mean(study.baseline, names, f"the settings are {', '.join(names[:5])}{', ...' * (len(names) > 5)}")
            raise StudyError(f"{study.source}: baseline: there is no setting {study.baseline!r}; {hint}")
        return study.baseline
    return next((setting.name for setting in settings if _same(setting.recipe, base)), "")


def _check_all(study: Study, settings: list[StudySetting]) -> None:
    """Name every setting that cannot be run, or that is the same as another one."""
    from lowp.training.check import check

    if len(settings) * len(study.seeds) > MOST_RUNS:
        raise StudyError(
            f"{study.source}: {len(settings)} settings x {len(study.seeds)} seeds are more than {MOST_RUNS:,} runs"
        )
    wrong: dict[str, str] = {}
    known: dict[str, str] = {}
    for setting in settings:
        try:
            check(setting.recipe)
        except ValueError as error:
            wrong[setting.name] = str(error)
            continue
        content = repr(plain(setting.recipe.model_copy(update={"name": "x", "description": ""})))
        if content in known:
            raise StudyError(f"{study.source}: settings {known[content]!r} and {setting.name!r} are the same recipe")
        known[content] = setting.name
    if wrong:
        name, message = next(iter(wrong.items()))
        others = [repr(each) for each in wrong][1:]
        more = f" (and so {', '.join(others[:_NAMED])}{', ...' * (len(others) > _NAMED)})" if others else ""
        raise StudyError(f"{study.source}: setting {name!r} cannot be run: {message}{more}")
