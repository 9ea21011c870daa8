"""`lowp report`: runs and studies as one HTML file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lowp.cli.output import examples

EXAMPLES = examples(
    ("lowp report runs/wires", "a study, into report.html"),
    ("lowp report runs/fp32-001 runs/aps8-001 -o two.html", "runs that were made one by one: the first is the baseline"),
    ("lowp report runs/wires --cluster ethernet-25g", "steps beside those predicted for a cluster"),
)


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_OR_STUDY...", help="Directories of runs, of studies, or both.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes.")] = Path("report.html"),
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Predict steps for this cluster (`lowp predict --clusters`).")
    ] = "",
) -> None:
    """Write one HTML file that opens without a network: results with intervals, curves, numeric health, formats."""
    from lowp.lab.report.document import report_document
    from lowp.lab.report.page import check_report_packages, page_of
    from lowp.lab.results import readable_results

    check_report_packages()
    results, unreadable = readable_results(paths)
    told = shlex.join(["lowp", "report", *map(str, paths), *(["--cluster", cluster] if cluster else [])])
    text = page_of(report_document(results, told, cluster))
    output.write_text(text, encoding="utf-8")
    for line in [*unreadable, *(line for each in results for line in each.damage)]:
        typer.echo(f"lowp: {line}", err=True)
    typer.echo(f"wrote {output} ({len(text.encode()) / 1e6:.1f} MB)")
