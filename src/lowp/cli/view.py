"""`lowp view`: the report of a study that is still running."""

from pathlib import Path
from typing import Annotated

import typer

from lowp.cli.output import examples

EXAMPLES = examples(
    ("lowp view runs/wires", "a study while it runs, at http://127.0.0.1:8765/"),
    ("lowp view runs --port 0", "all runs and studies under runs, on any free port"),
)


def view(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study, a run, or a folder of them.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
) -> None:
    """Serve the report on this machine, and refresh it as runs proceed. Ctrl-C ends it.

    Only programs on this machine can reach it. From elsewhere: ssh -L 8765:127.0.0.1:8765 HOST.
    """
    from lowp.lab.report.page import check_report_packages

    check_report_packages()
    from lowp.lab.live import LiveServer

    with LiveServer(folder, port) as server:
        typer.echo(f"serving {folder} at {server.address} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
