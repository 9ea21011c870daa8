"""Rates of a study, by the rule that was written down before: of each optimizer, the one with the best run of another seed.

    python -m studies.rates RUNS STUDY.toml        RUNS: what `lowp ablate` made of the rates; STUDY.toml gets the best ones

A setting's optimizer is the first word of its name; its `optimizer.lr=` is replaced in all settings.
"""

import re
import sys
from pathlib import Path

from lowp.lab.results import study_results


def best_rates(runs: Path) -> dict[str, str]:
    """By optimizer: the rate of its best run, as it is written in the setting's change."""
    results = study_results(runs)
    found: dict[str, tuple[float, str]] = {}
    for setting in results.settings:
        figures = setting.figures(results.metric).values()
        rate = next(change.partition("=")[2] for change in setting.changes if change.startswith("optimizer.lr="))
        for figure in figures:
            word = setting.name.partition(",")[0]
            found[word] = max(found.get(word, (figure, rate)), (figure, rate))
    return {word: rate for word, (_, rate) in found.items()}


def with_rates(text: str, rates: dict[str, str]) -> str:
    """A study's TOML with these rates in its settings."""
    for word, rate in rates.items():
        text = re.sub(rf'(?m)^("{word}\b.*optimizer\.lr=)[\d.]+', rf"\g<1>{rate}", text)
    return text


def main(runs: str, study: str) -> None:
    rates, path = best_rates(Path(runs)), Path(study)
    print(f"{path}: {rates}", flush=True)
    path.write_text(with_rates(path.read_text(), rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
