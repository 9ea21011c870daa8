"""`lowp plan`: the wire with which a step is predicted to be the fastest, within a budget of error."""

from typing import TYPE_CHECKING, Annotated

import typer

from lowp.cli.output import JSON_HELP, console, examples, literal, print_json, table

if TYPE_CHECKING:
    from lowp.predict.planning import WirePlan

EXAMPLES = examples(
    ("lowp calibrate --ranks 2 --model cnn", "measure first: writes cluster.toml"),
    ("lowp plan --model cnn --cluster cluster.toml --ranks 2", "then plan for it"),
    ("lowp plan --model resnet50 --cluster dgx-a100 --ranks 256", "a known machine"),
    ("lowp plan --model my:make --cluster ethernet-10g --ranks 8 --max-error 0.02", "your model, a smaller error"),
    ("lowp train aps8 --ranks 2 --set wire=plan", "measure, plan and train"),
)

WIDE = 100  # columns, from which on a table shows where the time goes


def plan_wire(
    model: Annotated[str, typer.Option(metavar="NAME", help="A model of `lowp predict --models`, or module:function.")],
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="A file of `lowp calibrate`, or a known cluster.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one for each device.")],
    max_error: Annotated[
        float, typer.Option(help="The largest relative error of a step's gradients: |sent - exact| / |exact|.")
    ] = 0.1,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of one rank in a step.")] = None,
    wires: Annotated[
        list[str] | None, typer.Option("--wire", metavar="WIRE", help="Choose among these: FORMAT/SCALE[@REDUCTION].")
    ] = None,
    torchs: Annotated[
        bool, typer.Option("--torch/--no-torch", help="May torch's own fp16 and bf16 be chosen? (fp32 always may.)")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Choose wire format, scale, reduction and size of buckets: the fastest step within an error budget.

    How long a step takes is predicted. How large the error is is found on the model's own gradients, as virtual ranks add them
    up. What is printed at the end applies the choice, in a program and in a recipe.
    """
    from rich.console import Console

    from lowp.predict.planning import plan
    from lowp.predict.wires import PLAIN

    waiting = "predicting steps and trying wires on gradients; a minute or two for large models"
    with Console(stderr=True).status(waiting):  # seen in terminals only
        chosen = plan(
            model, cluster, ranks, max_error=max_error, batch=batch, wires=wires, torchs=PLAIN if torchs else ("fp32",)
        )
    if json:
        print_json(
            {
                "wire": chosen.chosen.wire,
                "bucket_mb": chosen.chosen.bucket_mb,
                "arguments": chosen.arguments,
                "recipe": chosen.recipe,
                "code": chosen.code,
                "gradients": chosen.gradients,
                "options": chosen.records(),
            }
        )
        return
    print_plan(chosen)


def print_plan(found: "WirePlan") -> None:
    out, chosen = console(), found.chosen
    step = chosen.step
    many = "s" if step.ranks > 1 else ""
    out.print(
        f"{literal(step.model)} on {step.ranks:,} rank{many} of {literal(step.cluster)}, {step.batch:,} samples each; "
        f"error at most {found.max_error:g}"
    )
    out.print(f"[dim]errors are of {literal(found.gradients)}[/]\n")
    wide = out.width >= WIDE
    result = table()
    result.add_column("wire", no_wrap=True)
    for head in ("MB", "step", *(("exposed", "coding") if wide else ()), "error"):
        result.add_column(head, justify="right", no_wrap=True)
    result.add_column("")
    for option in (chosen, *found.runners_up):
        times = option.step.times
        cells = [literal(option.wire), f"{option.bucket_mb:g}", f"{1e3 * times.step:.3g} ms"]
        cells += [f"{1e3 * times.exposed:.3g}", f"{1e3 * (times.encode + times.decode):.3g}"] if wide else []
        cells += [f"{option.error:.2g}", "chosen" if option is chosen else found.why_not(option)]
        result.add_row(*cells, style="bold" if option is chosen else None)
    out.print(result)
    out.print("[dim]MB: of a bucket, as DDP's bucket_cap_mb (2^20 bytes); recipes have 10^6[/]")
    rest = len(found.options) - 1 - len(found.runners_up)
    if rest:
        out.print(f"[dim]{rest} more are slower; --json has them[/]")
    out.print("\n[bold]In a program[/]")
    out.print(found.code, markup=False, soft_wrap=True)
    out.print("\n[bold]In a recipe[/]")
    out.print(found.recipe_toml, markup=False, soft_wrap=True)
