"""What was measured, for readers: tables in Markdown, the figure, and the table in docs/WIRE.md."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, table

from lowp.cli.format_plot import COLOURS, empty_figure, label, save

DOCS = Path(__file__).parents[2] / "docs/WIRE.md"
BEGIN, END = "<!-- errors:begin -->", "<!-- errors:end -->"
KINDS = {"resnet18": "CNN", "gpt": "GPT", "lstm": "LSTM"}  # what the tables call the models, in their order
WANTED = ((4.4, 0.001), (2.4, 0.008))  # (bits, vNMSE): what a wire that spends bits where they matter has to reach

Row = dict[str, Any]


def figure_text(value: float) -> str:
    """Two digits, without an exponent where that can be read: .00094, 3.2e-06."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2g}".replace("0.", ".", 1) if value >= 1e-4 or value == 0 else f"{value:.1e}"


def span(values: Iterable[float], digits: int = 1) -> str:
    """`4.5`, or `4.5 to 4.9` where models differ."""
    texts = [f"{value:.{digits}f}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def names_of(rows: Sequence[Row], key: str) -> list[Any]:
    """The values that occur, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def chosen(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def models_of(rows: Sequence[Row]) -> list[str]:
    models = names_of(rows, "model")
    return [*(model for model in KINDS if model in models), *(model for model in models if model not in KINDS)]


def by_moment(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each number of ranks: every codec at every moment of every model."""
    for ranks in names_of(rows, "ranks"):
        own = chosen(rows, ranks=ranks)
        places = [(model, step) for model in models_of(own) for step in sorted(names_of(chosen(own, model=model), "step"))]
        yield from ("", f"## vNMSE, {ranks} ranks", "")
        body = []
        for codec in names_of(own, "codec"):
            found = {(row["model"], row["step"]): row for row in chosen(own, codec=codec)}
            cells = [figure_text(found[place]["vnmse"]) if place in found else "" for place in places]
            body.append([codec, span((row["bits"] for row in found.values()), 2), *cells])
        yield from table(["codec", "bits", *(f"{model}, step {step}" for model, step in places)], body)


def for_docs(rows: Sequence[Row]) -> list[str]:
    """Codecs by their bits; of each model the largest error over its moments, by the number of ranks."""
    places = [(model, ranks) for model in models_of(rows) for ranks in names_of(chosen(rows, model=model), "ranks")]
    body = []
    for codec in names_of(rows, "codec"):
        own = chosen(rows, codec=codec)
        largest = [max((row["vnmse"] for row in chosen(own, model=m, ranks=r)), default=None) for m, r in places]
        cells = ["" if value is None else figure_text(value) for value in largest]
        body.append((min(row["bits"] for row in own), [f"`{codec}`", span(row["bits"] for row in own), *cells]))
    heads = ["codec", "bits", *(f"{KINDS.get(model, model)}, {ranks} ranks" for model, ranks in places)]
    return table(heads, [cells for _, cells in sorted(body, key=lambda pair: -pair[0])])


def block_for_docs(results: Path) -> str:
    """What stands between the marks in docs/WIRE.md, from a file of results."""
    content = json.loads(results.read_text())
    rows: list[Row] = content["rows"]
    steps = "; ".join(
        f"{KINDS.get(model, model)} after {_moments(chosen(rows, model=model))} steps" for model in models_of(rows)
    )
    said = f"Written by `python -m benchmarks errors` from [{results.name}](../benchmarks/results/{results.name}). {steps}."
    return "\n".join([BEGIN, "", said, "", *for_docs(rows), "", END])


def _moments(rows: Sequence[Row]) -> str:
    """`20, 200 (8 ranks), 200 (64 ranks)`; once where all numbers of ranks have the same."""
    by_ranks = {r: ", ".join(map(str, sorted(names_of(chosen(rows, ranks=r), "step")))) for r in names_of(rows, "ranks")}
    if len(set(by_ranks.values())) == 1:
        return next(iter(by_ranks.values()))
    return ", ".join(f"{steps} ({ranks} ranks)" for ranks, steps in by_ranks.items())


def cited_results(page: str) -> Path:
    """The file of results that the table in a page was made from."""
    found = re.search(rf"{BEGIN}.*?\]\(\.\./benchmarks/results/([\w.-]+)\).*?{END}", page, re.DOTALL)
    if not found:
        raise ValueError(f"there is no table of errors between {BEGIN} and {END}")
    return RESULTS / found[1]


def rewritten(page: str, results: Path) -> str:
    """The page with the table between the marks replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the table goes between one {BEGIN} and, after it, one {END}")
    return page[: page.index(BEGIN)] + block_for_docs(results) + page[page.index(END) + len(END) :]


def family_of(codec: str) -> str:
    format, *others = codec.split()
    if format.startswith(("topk", "adaptive")):
        return "top-k" if format.startswith("topk") else "adaptive"
    if format.startswith(("mx", "nv")):
        return "block formats"
    return "block scales" if any(word.startswith("block") for word in others) else "a scale a layer or message"


def draw(rows: Sequence[Row], path: Path) -> None:
    """vNMSE against bits, a panel a model: the largest error over the moments, with the most ranks."""
    models = models_of(rows)
    figure = empty_figure(width=5.4 * len(models), height=6.4)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    families = list(dict.fromkeys(family_of(row["codec"]) for row in rows))
    for axes, model in zip(panels, models, strict=True):
        ranks = max(names_of(chosen(rows, model=model), "ranks"))
        points = worst_of(chosen(rows, model=model, ranks=ranks))
        for family, colour in zip(families, COLOURS, strict=False):
            own = sorted((row["bits"], row["vnmse"]) for row in points if family_of(row["codec"]) == family)
            line = "-" if family == "adaptive" else ""
            axes.plot(*zip(*own, strict=True), "o", linestyle=line, color=colour, markersize=5, label=family) if own else None
        for row, height in label_heights(points):
            axes.annotate(
                row["codec"],
                (row["bits"], row["vnmse"]),
                (1.12 * row["bits"], height),
                va="center",
                fontsize=6.5,
                color="#444444",
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#999999", "shrinkA": 0, "shrinkB": 2},
            )
        for bits, error in WANTED:
            axes.plot([bits], [error], "+", color="#000000", markersize=11)
        label(axes, KINDS.get(model, model), f"{ranks} ranks, the worst moment; +: wanted", "bits an element", "vNMSE")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(right=40)  # room for the names of the widest
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = {name: h for axes in panels for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2 * len(models), frameon=False)
    save(figure, path)


def worst_of(rows: Sequence[Row]) -> list[Row]:
    """Of each codec the row with the largest error."""
    return [max(chosen(rows, codec=codec), key=lambda row: row["vnmse"]) for codec in names_of(rows, "codec")]


def label_heights(points: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Where the name of each point goes: at its own height, or as far above the name below it as can be read."""
    lowest: dict[int, float] = {}
    for row in sorted(points, key=lambda row: row["vnmse"]):
        column = round(2 * math.log2(row["bits"]))  # names of near bits are below each other
        height = max(row["vnmse"], lowest.get(column, 0.0))
        lowest[column] = height * 1.3
        yield row, height
