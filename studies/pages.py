"""The pages of docs/studies, and README's table of evidence: text made of page.toml files and records, and of nothing else."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from studies.collection import FOLDER, Claim, Judgement, Page, Part

from lowp.lab.results import StudyResults

ROOT = FOLDER.parent
DOCS = ROOT / "docs" / "studies"
README = ROOT / "README.md"
BEGIN, END = "<!-- evidence:begin -->", "<!-- evidence:end -->"
Row = Sequence[str]


def table(heads: Row, rows: Sequence[Row]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (heads, ["---"] * len(heads), *rows)]


def page_text(page: Page) -> str:
    return "\n".join(_page_lines(page)) + "\n"


def _page_lines(page: Page) -> Iterator[str]:
    yield from (
        f"# {page.title}",
        "",
        f"Paper: {page.paper}. Made by `make studies` of the records in `studies/{page.name}`.",
        "",
    )
    yield from (page.about.strip(), "")
    if page.claims:
        yield from ("## Claims and verdicts", "")
        heads = ["claim", "rule", "what came out", "n", "verdict"]
        yield from table(heads, [_claim_row(claim) for claim in page.claims])
        yield from (
            "",
            "What came out: the advantage over the row that it is compared with, paired by seed, ± half of a 95 % interval; "
            "more is better. Accuracies are in points. Rules and verdicts: studies/collection.py.",
            "",
        )
    for part in page.parts:
        yield from _part_lines(part)
    yield from _errors_lines(page)
    for text in page.also:
        yield from (text.strip(), "")
    if page.differs:
        yield from ("## Where this differs from the paper, and what to know", "")
        yield from (f"- {text}" for text in page.differs)


def _claim_row(claim: Claim) -> Row:
    percent = claim.part.study.metric != "loss"
    scale, digits = (100, 2) if percent else (1, 4)
    margin = f"{scale * claim.margin:g}" + (" points" if percent else "")
    less = f" ({margin} count)" if claim.margin else ""
    rule = {"no_worse": f"loses less than {margin}", "worse": f"is worse{less}", "better": f"is better{less}"}[claim.kind]
    rule += f" than {claim.than}" * bool(claim.than)
    found = claim.judged
    return [claim.says, f"`{claim.setting}` {rule}", _advantage(found, scale, digits), str(found.n or ""), _verdict(found)]


def _advantage(found: Judgement, scale: float, digits: int) -> str:
    lost = f"{found.diverged} diverged" if found.diverged else ""
    if math.isnan(found.advantage):
        return lost
    text = f"{scale * found.advantage:+.{digits}f}"
    text += "" if math.isnan(found.half) else f" ± {scale * found.half:.{digits}f}"
    return f"{text}, {lost}" if lost else text


def _verdict(found: Judgement) -> str:
    if found.verdict == "open":
        return f"open: about {found.seeds} seeds would decide" if found.seeds else "open"
    return f"**{found.verdict}**" if found.verdict != "not run" else "not run"


def _part_lines(part: Part) -> Iterator[str]:
    yield from (f"## {part.study.description}", "", f"`{part.command}`", "")
    record = part.record
    if record is None:
        yield from (f"**Not run: needs {need(part)}.** {_planned(part)} There is no verdict.", "")
        return
    results = record.results
    where = "; ".join(dict.fromkeys(_machine(each) for each in record.environments))
    yield from (f"{runs_text(results)}, recorded {record.recorded}: {where}. Baseline: {results.baseline}.", "")
    yield from table(*_settings_table(results))
    yield ""
    yield (
        f"± is half of a 95 % interval; differences are paired by seed; verdicts are corrected for their number (Holm), margin "
        f"{_margin(results)}."
    )
    for line in _reasons(results):
        yield f"- {line}"
    yield ""


def runs_text(results: StudyResults) -> str:
    """How many runs were made, and what became of them."""
    states = [run.state for each in results.settings for run in each.runs.values()]
    states += ["failed" for each in results.settings for _ in each.failures]
    planned = sum(each.planned for each in results.settings)
    others = [f"{states.count(state)} {state}" for state in ("diverged", "failed") if state in states]
    text = f"{states.count('finished')} of {planned} runs finished"
    return ", ".join([text, *others])


def _planned(part: Part) -> str:
    study = part.study
    count = len(study.changes) + len(list(study.combinations()))
    return f"{count} settings x {len(study.seeds)} seeds."


def need(part: Part) -> str:
    """What a part takes."""
    gpu = f"{part.gpu_minutes:g} GPU minutes" if part.gpu_minutes else "no GPU"
    return f"{gpu}, {part.data}" if part.data else gpu


def _machine(told: dict[str, Any]) -> str:
    gpu = told.get("gpu") or []
    names = ", ".join(each if isinstance(each, str) else str(each.get("name", each)) for each in gpu)
    return f"{names or told.get('cpu')}, torch {told.get('torch')}, lowp {told.get('lowp')}"


def _margin(results: StudyResults) -> str:
    if results.margin is None:
        return "one deviation of the baseline between seeds"
    return f"{100 * results.margin:g} points" if results.metric != "loss" else f"{results.margin:g}"


def _settings_table(results: StudyResults) -> tuple[Row, list[Row]]:
    percent = results.metric != "loss"
    scale, digits = (100, 2) if percent else (1, 4)
    heads = [
        "setting",
        "n",
        f"test {results.metric}" + (", %" if percent else ""),
        "difference",
        "verdict",
        "of fp32's bytes",
        "B/parameter",
    ]
    rows = []
    for row, setting in zip(results.records(), results.settings, strict=True):
        n = f"{row['n']}" + "".join(f", {row[key]} {key}" for key in ("diverged", "failed") if row[key])
        mean = _with_half(row["mean"], row["low"], scale, digits, "")
        difference = _with_half(row["difference"], row["difference_low"], scale, digits, "+")
        verdict = row["verdict"] + (f" ({row['seeds_needed']} in all)" if row["seeds_needed"] else "")
        share = f"{row['share_of_fp32']:.3f}" if row["share_of_fp32"] is not None else ""
        memory = setting.mean("bytes_per_parameter")
        rows.append([setting.name, n, mean, difference, verdict, share, "" if memory is None else f"{memory:.1f}"])
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _with_half(mean: float | None, low: float | None, scale: float, digits: int, sign: str) -> str:
    if mean is None:
        return ""
    return f"{scale * mean:{sign}.{digits}f}" + ("" if low is None else f" ± {scale * (mean - low):.{digits}f}")


def _reasons(results: StudyResults) -> Iterator[str]:
    """Why runs diverged or failed, each reason once."""
    for setting in results.settings:
        told = {seed: run.message for seed, run in setting.runs.items() if run.state == "diverged"} | dict(setting.failures)
        for reason in dict.fromkeys(told.values()):
            seeds = ", ".join(str(seed) for seed, text in sorted(told.items()) if text == reason)
            yield f"{setting.name}, seed {seeds}: {reason}"


def _errors_lines(page: Page) -> Iterator[str]:
    """The table of errors, where a study has one."""
    path = FOLDER / page.name / "errors.jsonl"
    if not path.exists():
        return
    told = [json.loads(line) for line in path.read_text().splitlines()]
    yield from ("## Errors of the four types", "", "`python -m studies errors` (no GPU)", "")
    heads = [
        "data",
        "type",
        "rounded",
        "mean squared error",
        'paper\'s "mean absolute"',
        "mean relative, %",
        "paper",
        "paper / ours",
    ]
    rows = []
    for row in told:
        squared, relative = (sum(row[key]) / len(row[key]) for key in ("squared", "relative"))
        cells = [row["data"], row["type"], "as published" if row["rounding"] == "published" else "to nearest", f"{squared:.2g}"]
        rows.append(
            [
                *cells,
                f"{row['paper_error']:g}",
                f"{relative:.2f}",
                f"{row['paper_relative']:g}",
                f"{row['paper_relative'] / relative:.2f}",
            ]
        )
    yield from table(heads, rows)
    yield from ("", f"n = {len(told[0]['squared'])} draws of ten million numbers each.", "")


def evidence(pages: Sequence[Page]) -> list[str]:
    """README's table: the claims that count most, their verdicts, n, and the pages; of those not run, how many there are."""
    rows, planned = [], 0
    for page in pages:
        for claim in (each for each in page.claims if each.readme):
            found = claim.judged
            if found.verdict == "not run":
                planned += 1
                continue
            scale, digits = (100, 2) if claim.part.study.metric != "loss" else (1, 4)
            out = _advantage(found, scale, digits)
            rows.append([claim.says, out, str(found.n or ""), _verdict(found), f"[{page.name}](docs/studies/{page.name}.md)"])
    lines = table(["claim", "advantage, points or loss", "n", "verdict", "study"], rows)
    if planned:
        lines += ["", f"{planned} further claims and their margins are written down, and not run yet: the pages have them."]
    return lines


def with_evidence(text: str, pages: Sequence[Page]) -> str:
    """README with its table made again; as it is, where it has no markers."""
    if BEGIN not in text or END not in text:
        return text
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *evidence(pages), END]) + after


def index_text(pages: Sequence[Page]) -> str:
    lines = [
        "# Studies",
        "",
        "What papers claim, run again with `lowp ablate`. Made by `make studies` of the records in the folder `studies`.",
        "",
    ]
    rows = []
    for page in pages:
        run = sum(part.record is not None for part in page.parts)
        verdicts = [claim.judged.verdict for claim in page.claims]
        said = ", ".join(
            f"{verdicts.count(each)} {each}" for each in ("holds", "does not hold", "open", "not run") if each in verdicts
        )
        rows.append([f"[{page.title}]({page.name}.md)", page.paper, f"{run} of {len(page.parts)}", said])
    return "\n".join([*lines, *table(["study", "paper", "parts run", "claims"], rows)]) + "\n"


def texts(pages: Sequence[Page]) -> dict[Path, str]:
    """Every file that is made of the records."""
    found = {DOCS / f"{page.name}.md": page_text(page) for page in pages}
    found[DOCS / "README.md"] = index_text(pages)
    if README.exists():
        found[README] = with_evidence(README.read_text(), pages)
    return found
