"""`lowp calibrate`: this machine's links, codecs and models, measured and written down as a cluster."""

import time
from pathlib import Path
from typing import Annotated

import typer

from lowp.cli.output import examples

EXAMPLES = examples(
    ("lowp calibrate --ranks 2 --model cnn", "two processes on this machine"),
    ("lowp calibrate --model my_module:make", "one process, a model of your own; no links"),
    ("torchrun --nnodes 2 ... -m lowp calibrate --out cluster.toml", "the machines of a cluster, on each of them"),
    ("lowp plan --model cnn --cluster cluster.toml --ranks 2", "what follows from it"),
)


def calibrate(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME", help="A model of `lowp predict --models`, or module:function. May be repeated."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="What is written, at the end.")] = Path("cluster.toml"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine. (torchrun starts its own.)")] = 1,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of one rank, for named models.")] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", metavar="WIRE", help="FORMAT/SCALE. May be repeated. Default: what plan tries."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="What all of it may take.")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of each rank; 0: the cores divided by the ranks.")] = 0,
    name: Annotated[str, typer.Option(help="Of the cluster.")] = "this machine",
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not say what is found.")] = False,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="The model and the data of a recipe, as `lowp train` has it.")
    ] = "",
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the recipe's data lie.")] = None,
) -> None:
    """Measure this machine through the real process group: links, codecs, and models layer by layer.

    The result is a TOML file that `lowp predict`, `lowp plan` and `lowp train --set wire.cluster=FILE` take. The file is
    replaced at the end, in one moment: a calibration that is interrupted leaves everything as it was.
    """
    import torch

    from lowp.predict.calibration import check_limit, codecs_of
    from lowp.predict.candidates import CODECS
    from lowp.predict.subjects import check_models
    from lowp.training.launch import FAILED, RanksFailed, follow_launcher, is_rank, launch

    _check_out(out)
    check_limit(seconds)
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"--device is cpu, cuda or auto, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here; auto takes one where there is one")
    if recipe and models:
        raise ValueError("--model and --recipe: give one of them; a recipe has its own model")
    codecs_of(codecs or CODECS)
    check_models(models or [])
    if is_rank() or ranks == 1:
        follow_launcher()
        _measure(models or [], out.absolute(), batch, codecs or CODECS, seconds, device, threads, name, quiet, recipe, data)
        return
    command = ["calibrate", "--out", str(out.absolute()), "--seconds", str(seconds), "--device", device, "--name", name]
    command += [word for model in models or [] for word in ("--model", model)]
    command += [word for codec in codecs or [] for word in ("--codec", codec)]
    command += ["--threads", str(threads)] + (["--quiet"] if quiet else [])
    command += ["--batch", str(batch)] if batch is not None else []
    command += ["--recipe", recipe] if recipe else []
    command += ["--data", str(data)] if data is not None else []
    try:
        code = launch(command, ranks, threads, 0)
    except RanksFailed as error:
        typer.echo(f"lowp: {error}; nothing was written", err=True)
        code = FAILED
    raise typer.Exit(code)


def _check_out(out: Path) -> None:
    """Before two minutes of measuring."""
    if out.suffix != ".toml":
        raise ValueError(f"--out {out}: the name of a cluster's file ends in .toml")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: this is a folder, or its folder is not there")


def _measure(
    models: list[str],
    out: Path,
    batch: int | None,
    codecs: "list[str] | tuple[str, ...]",
    seconds: float,
    device: str,
    threads: int,
    name: str,
    quiet: bool,
    recipe: str,
    data: Path | None,
) -> None:
    from lowp.predict.calibration import calibrate_cluster
    from lowp.predict.cluster_file import cluster_toml
    from lowp.predict.recipe_plan import calibrate_recipe
    from lowp.predict.subjects import subject_of
    from lowp.training.durable import replace_file
    from lowp.training.reading import read_recipe
    from lowp.training.world import World

    began = time.perf_counter()

    def say(text: str) -> None:
        if not quiet:
            typer.echo(f"{time.perf_counter() - began:5.1f} s  {text}")

    world = World.join(device, threads)
    try:
        if recipe:
            found = calibrate_recipe(read_recipe(recipe, [f"ranks={world.ranks}"]), world, data=data, seconds=seconds, say=say)
        else:
            subjects = [subject_of(model, batch=batch, device=world.device) for model in models]
            found = calibrate_cluster(
                name=name, subjects=subjects, codecs=codecs, seconds=seconds, device=world.device, say=say
            )
        if world.first:
            replace_file(out, cluster_toml(found).encode())
            say(f"written  {out}")
    finally:
        world.leave()
