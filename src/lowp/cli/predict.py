"""`lowp predict`: what a cluster would do with a model, for several wires side by side."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.output import JSON_HELP, console, examples, print_json

if TYPE_CHECKING:
    from lowp.predict.prediction import Prediction

EXAMPLES = examples(
    ("lowp predict --cluster ethernet-25g", "ResNet-50 on 1 to 64 machines"),
    ("lowp predict --model vgg16 --cluster p100-25gbe --ranks 1:512", "another model, more ranks"),
    ("lowp predict --cluster my.toml --wire fp32 --wire adaptive:4.4", "your cluster, two wires"),
    ("lowp predict --cluster dgx-h100 --wire e5m2/aps@hierarchical", "another reduction"),
    ("lowp predict --cluster aws-g5 --ranks 1:1024 --plot speed.png", "as a picture"),
    ("lowp predict --clusters", "known machines, with their sources"),
)
DEFAULT_WIRES = ("fp32", "fp16", "e5m2/aps")
CLUSTERS_LEGEND = (
    "--cluster takes one of these names or a TOML file. The files are in the package, to start from: "
    "src/lowp/predict/clusters. Each says what is a datasheet's figure and what is assumed."
)


def predict_steps(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A model of --models, or module:function of your own.")
    ] = "resnet50",
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="A cluster of --clusters, or a TOML file.")] = "",
    wires: Annotated[
        list[str] | None,
        typer.Option("--wire", metavar="WIRE", help="FORMAT/SCALE@REDUCTION; FORMAT is enough. May be given several times."),
    ] = None,
    ranks: Annotated[str, typer.Option(metavar="N", help="1:4096 doubles; 8,64,512 are three numbers.")] = "1:64",
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of one rank in a step.")] = None,
    bucket_mb: Annotated[float, typer.Option(help="Of gradients that travel together: DDP's bucket_cap_mb.")] = 25.0,
    weights: Annotated[str, typer.Option(metavar="FORMAT", help="Of weights and all that has no format of its own.")] = "fp32",
    state: Annotated[str, typer.Option(metavar="FORMAT", help="Of the optimizer's state.")] = "",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd, lars, adamw or lamb: for the memory.")] = "sgd",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write all figures as a table.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    clusters: Annotated[bool, typer.Option("--clusters", help="List the known clusters.")] = False,
    models: Annotated[bool, typer.Option("--models", help="List the known models.")] = False,
) -> None:
    """Predict throughput, speed-up and efficiency on a cluster, and where the time of a step goes.

    A wire is how gradients travel. fp32, fp16 and bf16: torch's own all-reduce.
    All else is lowp's: e5m2/aps, nvfp4, e2m1fn/block:32, adaptive:4.4, topk:0.01.
    After @ comes a reduction: two_shot, one_shot, ring, tree, sequential,
    by_size, hierarchical, hierarchical(8, leaders), halving_doubling, torus or
    parameter_server.
    """
    if clusters and models:
        raise ValueError("--clusters and --models each list something else: give one of them")
    if clusters:
        _show_clusters(json)
        return
    if models:
        _show_models(json)
        return
    if not cluster:
        raise ValueError("--cluster is missing: a name that `lowp predict --clusters` lists, or a TOML file")
    from lowp.cli.format_plot import check_suffix
    from lowp.predict.memory_needs import TrainingFormats
    from lowp.predict.prediction import predict

    if plot is not None:
        check_suffix(plot)
    formats = TrainingFormats(weights, state=state, optimizer=optimizer)
    found = predict(model, cluster, wires or DEFAULT_WIRES, ranks, batch=batch, bucket_mb=bucket_mb, formats=formats)
    if csv_file is not None:
        _write_csv(found, csv_file)
    if plot is not None:
        from lowp.cli.predict_plot import plot_prediction

        plot_prediction(found, plot)
    if json:
        print_json({"model": found.workload.name, "cluster": found.cluster.name, "steps": found.records()})
        return
    from lowp.cli.predict_table import print_prediction

    print_prediction(found)


def _write_csv(found: "Prediction", path: Path) -> None:
    records = found.records()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def _show_clusters(json: bool) -> None:
    from lowp.cli.output import table
    from lowp.predict.cluster_file import cluster_of, known_clusters
    from lowp.predict.quantities import rate_text

    known = [cluster_of(name) for name in known_clusters()]
    if json:
        keys = ({"name": each.name, "device": each.device.name, "source": each.source} for each in known)
        levels = (
            [
                {"name": level.name, "ranks": level.ranks, "bandwidth": level.bandwidth, "shared": level.shared}
                for level in each.levels
            ]
            for each in known
        )
        print_json([own | {"levels": links} for own, links in zip(keys, levels, strict=True)])
        return
    result = table()
    result.add_column("cluster", no_wrap=True)
    result.add_column("device, links (as reached), source")
    for each in known:
        links = ", ".join(
            f"{level.name} {rate_text(level.bandwidth)}" + (f" for {level.shared}" if level.shared > 1 else "")
            for level in each.levels
        )
        node = each.levels[0].ranks
        count = f"{node} x " if node is not None and len(each.levels) > 1 else ""
        result.add_row(each.name, f"{count}{each.device.name}; {links}\n[dim]{each.source}[/]")
    out = console()
    out.print(result)
    out.print(f"[dim]{CLUSTERS_LEGEND}[/]")


def _show_models(json: bool) -> None:
    from lowp.cli.output import table
    from lowp.predict.architectures import ARCHITECTURES

    if json:
        print_json([{"name": name, "summary": each.what, "batch": each.batch} for name, each in ARCHITECTURES.items()])
        return
    result = table()
    result.add_column("model", no_wrap=True)
    result.add_column("what it is")
    result.add_column("batch of a rank", justify="right")
    for name, each in ARCHITECTURES.items():
        result.add_row(name, each.what, str(each.batch))
    out = console()
    out.print(result)
    out.print("[dim]Your own is module:function: a function that returns (model, example batch).[/]")
