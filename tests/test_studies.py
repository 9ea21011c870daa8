"""The studies of this repository: each can be planned, pages and README agree with the records, verdicts follow the rules."""

import math
import sys
from pathlib import Path

import pytest

from lowp.lab.comparison import Summary
from lowp.lab.settings import plan_of_study

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """`studies` is a folder of the repository, not of the package."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def test_pages_and_readme_agree_with_the_records() -> None:
    from studies.collection import pages
    from studies.pages import texts

    stale = [str(path) for path, text in texts(pages()).items() if not path.exists() or path.read_text() != text]
    assert not stale, "make studies"


def test_every_study_of_the_folder_has_a_page_and_a_plan() -> None:
    from studies.collection import FOLDER, pages

    parts = {part.path: part for page in pages() for part in page.parts}
    files = {path for path in FOLDER.glob("*/*.toml") if path.name != "page.toml"}
    assert files == parts.keys()
    for part in parts.values():
        names = {setting.name for setting in plan_of_study(part.study).settings}
        for page in pages():
            for claim in page.claims:
                if claim.part.path == part.path:
                    assert {claim.setting, *filter(None, [claim.than])} <= names


def test_a_record_is_of_the_study_beside_it() -> None:
    """Changes of a setting are part of its record: a TOML that was edited since must be run again."""
    from studies.collection import pages

    for page in pages():
        for part in page.parts:
            if part.record is None:
                continue
            planned = {setting.name: setting.changes for setting in plan_of_study(part.study).settings}
            recorded = {setting.name: setting.changes for setting in part.record.results.settings}
            assert recorded == planned
            assert part.record.results.margin == part.study.margin
            assert part.record.results.metric == part.study.metric


@pytest.mark.parametrize(
    ("kind", "mean", "half", "lost", "verdict"),
    [
        ("no_worse", 0.0, 0.5, 0, "holds"),
        ("no_worse", -0.8, 0.5, 0, "open"),
        ("no_worse", -2.0, 0.5, 0, "does not hold"),
        ("no_worse", 0.0, 0.5, 1, "does not hold"),
        ("worse", -2.0, 0.5, 0, "holds"),
        ("worse", 0.0, 0.5, 0, "does not hold"),
        ("worse", -1.0, 1.5, 0, "open"),
        ("worse", 0.0, 0.5, 2, "holds"),
        ("better", 2.0, 0.5, 0, "holds"),
        ("better", 0.1, 0.5, 0, "does not hold"),
        ("better", 1.0, 1.5, 0, "open"),
        ("better", math.nan, math.nan, 0, "open"),
    ],
)
def test_verdicts(kind: str, mean: float, half: float, lost: int, verdict: str) -> None:
    from studies.collection import _judge

    found = _judge(kind, 1.0, Summary(5, mean, half, half), lost)
    assert found.verdict == verdict
    assert found.n == 5 + lost


@pytest.mark.parametrize(
    ("kind", "mean", "distance"),
    [("no_worse", -0.8, 0.2), ("no_worse", -1.2, 0.2), ("no_worse", 0.5, 1.5), ("worse", -0.8, 0.8), ("worse", -0.1, 0.9),
     ("better", 0.8, 0.8), ("better", 0.1, 0.9)],
)  # fmt: skip
def test_seeds_that_would_decide_go_by_the_distance_to_the_rules_limit(kind: str, mean: float, distance: float) -> None:
    """By the normal quantiles of 95 % and of a chance of 80 %."""
    from studies.collection import _judge

    found = _judge(kind, 1.0, Summary(5, mean, 1.6, 1.2), 0)
    assert found.seeds == pytest.approx((2.8 * 1.2 / distance) ** 2, rel=0.1, abs=4)  # 1.96 + .84, more with few seeds


def test_the_table_of_readme_stands_between_its_markers() -> None:
    from studies.collection import pages
    from studies.pages import BEGIN, END, with_evidence

    found = pages()
    text = with_evidence(f"before\n{BEGIN}\nformer\n{END}\nafter\n", found)
    assert text.startswith(f"before\n{BEGIN}\n| claim |")
    assert text.endswith(f"{END}\nafter\n")
    assert "former" not in text
    assert with_evidence(text, found) == text
    assert with_evidence("no markers", found) == "no markers"


def test_rates_go_to_the_settings_of_their_optimizer() -> None:
    from studies.rates import with_rates

    text = '"SGD" = ["optimizer.lr=3.2"]\n"LARS, pure FP16" = ["optimizer.name=lars", "optimizer.lr=1.6"]\n'
    rated = with_rates(text, {"SGD": "0.8", "LARS": "0.4"})
    assert rated == text.replace("3.2", "0.8").replace("1.6", "0.4")
