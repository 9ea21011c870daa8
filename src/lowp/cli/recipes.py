"""`lowp recipes`: what can be trained by name, one recipe in full, and the models and data sets that recipes can name."""

import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowp import former_names
from lowp.cli.output import JSON_HELP, console, examples, literal, print_json, table
from lowp.invocation import command

if TYPE_CHECKING:
    from lowp.training.recipe import Recipe, Section

EXAMPLES = examples(
    ("lowp recipes", "all of them, by data set"),
    ("lowp recipes aps8", "one: what it is, and what it sets"),
    ("lowp recipes aps8 --toml > my.toml", "complete, to start from: lowp train my.toml"),
    ("lowp recipes --models", "the models, with their options"),
    ("lowp recipes --data", "the data sets"),
)
DATA_SETS = {
    "fashion14": "Fashion-MNIST at 14 x 14: 10,000 + 2,000 images, inside the package",
    "mnist": "handwritten digits, 28 x 28: 60,000 + 10,000 images",
    "fashion_mnist": "clothes, 28 x 28: 60,000 + 10,000 images",
    "cifar10": "colour photographs, 32 x 32: 50,000 + 10,000 images",
    "shakespeare": "1.1 million characters of his plays",
    "text:FILE": "the characters of a file",
    "module:function": "your own: a function that returns a map-style data set to train on and one to test on",
}
DATA_LEGEND = (
    "Files are looked for where --data or $LOWP_DATA says, or in ~/.cache/lowp/data, and downloaded where there is a network. "
    "data.augment (crop, flip, cutout) is for images; data.context is for text; data.options are your function's arguments."
)
MODEL_LEGEND = (
    "Options are set as model.options.NAME=VALUE. torchvision:NAME is any of torchvision's; module:function is your own, "
    "called with its options, and with shape= and classes= if it has them."
)


def show_recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A recipe to explain: a name, a TOML file or module:function.", show_default=False),
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the recipe complete, every key with what it means.")] = False,
    models: Annotated[bool, typer.Option("--models", help="List the models and their options.")] = False,
    data: Annotated[bool, typer.Option("--data", help="List the data sets.")] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """List the recipes that `lowp train` knows by name, or explain one."""
    if sum((name is not None, models, data)) > 1:
        raise ValueError("NAME, --models and --data each ask for something else: give one of them")
    if toml and (name is None or json):
        raise ValueError("--toml prints one recipe, and no JSON: lowp recipes aps8 --toml")
    if models:
        _show_models(json)
    elif data:
        _show_data(json)
    elif name is not None:
        _show_recipe(name, toml, json)
    else:
        _show_list(json)


def _show_list(json: bool) -> None:
    """All names, by the data that they need."""
    from lowp.training.recipes import RECIPES

    recipes = [function() for function in RECIPES.values()]
    if json:
        keys = [{"name": r.name, "summary": r.description, "model": r.model.name, "data": r.data.name} for r in recipes]
        print_json(keys)
        return
    result = table()
    result.add_column("recipe", no_wrap=True)
    result.add_column("model", no_wrap=True)
    result.add_column("what it is")
    for data in dict.fromkeys(recipe.data.name for recipe in recipes):
        result.add_row(f"[bold cyan]{data}[/]")
        for recipe in recipes:
            if recipe.data.name == data:
                result.add_row(f"  {recipe.name}", recipe.model.name, literal(recipe.description))
        result.add_section()
    out = console()
    out.print(result)
    out.print(f"[dim]{command('recipes')} NAME explains one.  {command('train')} NAME runs it.[/]")


def _show_recipe(name: str, toml: bool, json: bool) -> None:
    from lowp.training.keys import written
    from lowp.training.reading import read_recipe
    from lowp.training.recipes import RECIPES
    from lowp.training.toml import plain, to_toml, value_text

    recipe = read_recipe(name)
    name = former_names.RECIPES.get(name, name)
    explanation = _reflowed((RECIPES[name].__doc__ if name in RECIPES else None) or recipe.description)
    changes = {written(path): value for path, value in _changes(recipe)}
    if toml:
        typer.echo(to_toml(recipe), nl=False)
        return
    if json:
        print_json({"name": recipe.name, "explanation": explanation, "changes": plain(changes), "recipe": plain(recipe)})
        return
    out = console()
    out.print(f"[bold cyan]{recipe.name}[/]  {literal(explanation)}\n")
    result = table()
    result.add_column("what it sets", no_wrap=True)
    result.add_column("to")
    for path, value in changes.items():
        result.add_row(path, literal(value_text(value)))
    out.print(result)
    out.print(
        f"\n[dim]Other keys have their defaults: {command('recipes')} {literal(name)} --toml prints them all.\n"
        f"{command('train')} {literal(name)} --set KEY=VALUE ... runs it with some changed.[/]"
    )


def _reflowed(text: str) -> str:
    """Paragraphs without the line breaks of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _changes(recipe: "Recipe") -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys that differ from the defaults, but for the recipe's name and description."""
    from lowp.training.recipe import Recipe, Section

    def differing(
        section: "Section", default: "Section | None", path: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, value in section:
            usual = getattr(default, key, None)
            if isinstance(value, Section):
                yield from differing(value, usual, (*path, key))
            elif value != usual:
                yield (*path, key), value

    return (change for change in differing(recipe, Recipe(), ()) if change[0] not in (("name",), ("description",)))


def _show_models(json: bool) -> None:
    from lowp.training.models import MODELS, model_options
    from lowp.training.toml import plain, value_text

    found = {name: (_first_line(function), plain(model_options(name))) for name, function in MODELS.items()}
    if json:
        print_json([{"name": name, "summary": summary, "options": options} for name, (summary, options) in found.items()])
        return
    result = table()
    result.add_column("model", no_wrap=True)
    result.add_column("what it is, and its options with their defaults")
    for name, (summary, options) in found.items():
        shown = ", ".join(f"{key} = {'(none)' if value is None else value_text(value)}" for key, value in options.items())
        result.add_row(name, f"{literal(summary)}\n[dim]{literal(shown)}[/]")
    out = console()
    out.print(result)
    out.print(f"[dim]{MODEL_LEGEND}[/]")


def _first_line(function: Any) -> str:
    """A model is explained at the top of its file."""
    return (sys.modules[function.__module__].__doc__ or "").splitlines()[0]


def _show_data(json: bool) -> None:
    if json:
        print_json([{"name": name, "summary": summary} for name, summary in DATA_SETS.items()])
        return
    result = table()
    result.add_column("data set", no_wrap=True)
    result.add_column("what it is")
    for name, summary in DATA_SETS.items():
        result.add_row(name, summary)
    out = console()
    out.print(result)
    out.print(f"[dim]{DATA_LEGEND}[/]")
