"""`lowp recipes`: the list, one in full, models and data sets, and the mistakes one can make."""

import tomllib

import pytest

from lowp.cli.recipes import DATA_SETS
from lowp.training.data import SET_NAMES
from lowp.training.models import MODELS, model_options
from lowp.training.recipes import RECIPES
from lowp.training.toml import plain


def fits(text: str, columns: int) -> bool:
    return "\x1b" not in text and "…" not in text and all(len(line) <= columns for line in text.splitlines())


@pytest.mark.parametrize("columns", [80, 120])
def test_list_has_every_recipe_and_fits(stdout, columns):
    text = stdout("recipes", columns=columns)
    first_words = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2:3].strip()]
    assert sorted(first_words) == sorted(RECIPES)
    assert text.index("fashion14") < text.index("aps8") < text.index("cifar10") < text.index("davidnet-aps8")
    assert fits(text, columns)


def test_list_as_json(from_json):
    listed = {entry["name"]: entry for entry in from_json("recipes")}
    assert list(listed) == list(RECIPES)
    assert listed["davidnet"]["data"] == "cifar10"
    assert listed["aps8"]["summary"] == RECIPES["aps8"].__doc__.splitlines()[0]


@pytest.mark.parametrize("name", RECIPES)
def test_one_in_full(stdout, name):
    text = stdout("recipes", name)
    summary = RECIPES[name].__doc__.split("\n\n")[0]
    assert " ".join(f"{name}  {summary}".split()) in " ".join(text.split())
    assert fits(text, 80)


def test_one_shows_what_differs_from_the_defaults(stdout, from_json):
    rows = [line.split() for line in stdout("recipes", "aps8").splitlines()]
    assert ["wire.format", '"e5m2"'] in rows
    assert ["wire.scale", '"aps"'] in rows
    assert ["seed", "0"] not in rows
    assert "last = " in stdout("recipes", "hybrid")
    document = from_json("recipes", "hybrid")
    assert document["changes"]["wire.layers"] == {"last": "fp16"}
    assert document["recipe"] == plain(RECIPES["hybrid"]())


def test_toml_is_complete_and_can_be_read_again(stdout, tmp_path):
    text = stdout("recipes", "davidnet", "--toml")
    assert tomllib.loads(text)["learning_rate"]["points"] == [0, 5, 24]
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert stdout("recipes", file, "--toml") == text


def test_models_with_their_options(stdout, from_json):
    text = stdout("recipes", "--models")
    assert "hidden = [256, 256], dropout = 0.0" in text
    assert fits(text, 80)
    listed = {entry["name"]: entry["options"] for entry in from_json("recipes", "--models")}
    assert list(listed) == list(MODELS)
    assert listed["gpt"] == model_options("gpt")


def test_data_sets_are_those_that_can_be_opened(stdout, from_json):
    assert list(DATA_SETS) == [*SET_NAMES, "text:FILE", "module:function"]
    assert [entry["name"] for entry in from_json("recipes", "--data")] == list(DATA_SETS)
    assert fits(stdout("recipes", "--data"), 80)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("asp8",), "unknown recipe 'asp8'; did you mean 'aps8'"),
        (("missing.toml",), "missing.toml: No such file or directory"),
        (("--toml",), "--toml prints one recipe"),
        (("aps8", "--toml", "--json"), "--toml prints one recipe, and no JSON"),
        (("aps8", "--models"), "NAME, --models and --data"),
        (("--data", "--models"), "NAME, --models and --data"),
    ],
)
def test_mistakes(mistake, arguments, said):
    assert said in mistake("recipes", *arguments)
