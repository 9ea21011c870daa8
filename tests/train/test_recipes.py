"""Recipes as text: there and back, changes on top, and one clear line for everything that can be wrong."""

import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from lowp.training import recipe as schema
from lowp.training.check import check, check_model
from lowp.training.keys import all_keys, written
from lowp.training.mistakes import RecipeError, explain
from lowp.training.numerics import wire_settings
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import DataSettings, LayerRoles, ModelSettings, Phase, Precision, Promote, Recipe, Switch, Wire
from lowp.training.recipes import RECIPES
from lowp.training.toml import to_toml

# There and back.

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-30, 1)
below_1 = st.floats(0, 1, exclude_max=True)
words = st.text(max_size=8)
anything = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
options = st.dictionaries(words, anything, max_size=2)
format_name = words.filter(lambda text: text != "none")  # which says that a key is absent
roles = {role: st.none() | format_name for role in ("weights", "activations", "errors", "gradients")}
recipes = st.builds(
    Recipe,
    name=st.text("aZ09_.-é", min_size=1, max_size=8),
    description=words,
    seed=st.integers(0, 2**63 - 1),
    model=st.builds(ModelSettings, name=words, options=options, compile=st.booleans()),
    data=st.builds(DataSettings, augment=st.lists(st.sampled_from(["crop", "flip"]), max_size=2), options=options),
    optimizer=st.builds(
        schema.OptimizerSettings, lr=positive, betas=st.tuples(below_1, below_1), eps=positive, options=options
    ),
    learning_rate=st.builds(schema.LearningRate, points=st.lists(below_1, max_size=3), factors=st.lists(below_1, max_size=3)),
    precision=st.builds(
        Precision,
        weights=words,
        state=words | st.dictionaries(words, words, max_size=2),
        loss_scale=words | finite,
        rounding=words | st.dictionaries(words, words, max_size=2),
        scale=words | st.dictionaries(words, words, max_size=2),
        arithmetic=st.builds(schema.ArithmeticSettings, multiply=words, chunk=st.integers(1, 64), quire=st.booleans()),
        layers=st.dictionaries(
            words, st.builds(LayerRoles, scale=words, accumulate=st.none() | format_name, **roles), max_size=2
        ),
        schedule=st.lists(st.builds(Phase, epoch=st.integers(0, 99), wire=st.none() | format_name, **roles), max_size=2),
        promote=st.none() | st.builds(Promote, to=words, after=st.integers(1, 99)),
        switch=st.none() | st.builds(Switch, ladder=st.lists(words, min_size=2, max_size=3), threshold=st.floats(1, 1e6)),
    ),
    wire=st.builds(Wire, skip=st.lists(words, max_size=2), layers=st.dictionaries(words, words, max_size=2)),
)


def through_a_file(recipe: Recipe, folder, comments: bool = True) -> Recipe:
    file = folder / "written.toml"
    file.write_text(to_toml(recipe, comments), encoding="utf-8", newline="\n")
    return read_recipe(str(file))


@settings(max_examples=50)
@given(recipe=recipes, comments=st.booleans())
def test_every_recipe_survives_a_file(recipe, comments, tmp_path_factory):
    usual = with_changes(recipe)  # a drawn text may be another library's name of a format
    assert through_a_file(recipe, tmp_path_factory.getbasetemp(), comments) == usual


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_survive_a_file_and_can_be_run(name, tmp_path):
    recipe = read_recipe(name)
    assert recipe == RECIPES[name]()
    assert through_a_file(recipe, tmp_path) == recipe
    check(recipe)


def test_a_file_has_every_key_and_its_meaning():
    text = to_toml(Recipe())
    document = tomllib.loads(text)
    for path in all_keys():
        if path[:2] in (("precision", "layers"), ("precision", "schedule"), ("precision", "promote"), ("precision", "switch")):
            continue  # examples, below
        if path != ("wire", "layers"):
            found = document
            for key in path:
                assert key in found, written(path)
                found = found[key]
    for section in (Recipe, *(field.annotation for field in Recipe.model_fields.values())):
        for field in getattr(section, "model_fields", {}).values():
            if field.description:
                assert field.description in re.sub(r"\n# ", " ", text)
    assert all(len(line) <= 116 for line in text.splitlines())


def test_examples_in_a_file_are_right_when_uncommented(tmp_path):
    text = re.sub(r"(?m)^# (\[|\w+ = )", r"\1", to_toml(Recipe()))
    (tmp_path / "examples.toml").write_text(text)
    precision = read_recipe(str(tmp_path / "examples.toml")).precision
    assert precision.layers["last"].weights == "fp16"
    assert [phase.epoch for phase in precision.schedule] == [1]
    assert (precision.promote, precision.switch) == (Promote(), Switch())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "model.options.x: a recipe cannot say None"),
        (nn.ReLU, "model.options.x: a recipe holds text, numbers, true and false, lists and tables, not type"),
        ({1: 2}, "model.options.x: keys are strings, not 1"),
    ],
)
def test_what_toml_cannot_say_is_refused(value, said):
    recipe = Recipe(model=ModelSettings(options={"x": value}))
    with pytest.raises(RecipeError, match=re.escape(said)):
        to_toml(recipe)
    with pytest.raises(RecipeError, match=re.escape(said)):
        check(recipe)


# Where recipes come from.


def write(folder, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_file_is_named_after_itself_and_may_have_a_base(tmp_path):
    write(tmp_path, "first.toml", 'base = "aps8"\nepochs = 3\n[wire]\nskip = ["1d"]\n')
    second = write(tmp_path, "my second.toml", 'base = "first.toml"\n[optimizer]\nlr = 1\n')
    expected = with_changes(RECIPES["aps8"](), name="my-second", epochs=3, wire={"skip": ["1d"]}, optimizer={"lr": 1.0})
    assert read_recipe(second) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"model.options.width": 8, "model.name": "cnn"},
        {"model.options.width": 8, "model": {"name": "cnn"}},
        {"model.options.width": 8, "model": ModelSettings(name="cnn")},
    ],
)
def test_a_name_comes_before_the_options_that_are_given_with_it(changes):
    """However the name is written, and in any order."""
    model = with_changes(read_recipe("fp32"), **changes).model
    assert (model.name, model.options) == ("cnn", {"width": 8})


def test_another_name_drops_the_options_beside_it(tmp_path):
    file = write(tmp_path, "mine.toml", 'base = "fp32"\n[model]\nname = "cnn"\noptions = { hidden = 64 }\n')
    assert read_recipe("fp32").model.options == {"hidden": [256, 128]}
    assert read_recipe(file).model.options == {"hidden": 64}
    assert read_recipe("fp32", ["model.options.hidden=32", "model.name=cnn"]).model.options == {"hidden": 32}
    assert read_recipe("fp32", ["model.name=mlp"]).model.options == {"hidden": [256, 128]}


def test_absent_in_a_file(tmp_path):
    base = write(tmp_path, "base.toml", '[precision]\npromote = { to = "fp16" }\nschedule = [{ epoch = 1, wire = "none" }]\n')
    assert read_recipe(base).precision.schedule == (Phase(epoch=1),)
    mine = write(tmp_path, "mine.toml", 'base = "base.toml"\n[precision]\npromote = "none"\n')
    assert read_recipe(base).precision.promote is not None
    assert read_recipe(mine).precision.promote is None


def test_functions(tmp_path, monkeypatch):
    write(
        tmp_path,
        "recipes_of_a_user.py",
        "from lowp.training.recipe import Precision, Recipe\n"
        "def made(): return Recipe(name='made', model={'options': {'hidden': (4, 4)}})\n"
        "def table(): return {'name': 'table', 'epochs': 2}\n"
        "def wrong(): return Recipe(epoch=2)\n"
        "def deep(): return Recipe(precision=Precision(weigths='fp16'))\n"
        "def number(): return 3\n"
        "def asks(x): return {}\n",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert read_recipe("recipes_of_a_user:made").model.options == {"hidden": [4, 4]}
    assert read_recipe("recipes_of_a_user:table", ["epochs=4"]).epochs == 4
    for function, said in (
        ("wrong", "recipes_of_a_user:wrong: epoch: no such key; did you mean epochs?"),
        ("deep", "recipes_of_a_user:deep: precision.weigths: no such key; did you mean precision.weights?"),
        ("number", "recipes_of_a_user:number: returned int, not a Recipe or a dictionary"),
        ("asks", "without arguments: missing a required argument: 'x'"),
        ("nothing", "has no function 'nothing'; it has Precision, Recipe, asks, deep"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_recipe(f"recipes_of_a_user:{function}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aps9", "unknown recipe 'aps9'; did you mean 'aps8'? `lowp recipes` lists them"),
        ("zzzz", "unknown recipe 'zzzz'; `lowp recipes` lists them"),
        ("some/file", "unknown recipe 'some/file'; the name of a recipe's file ends in .toml"),
        ("missing.toml", "missing.toml: No such file or directory"),
        ("nosuchmodule:f", "recipe 'nosuchmodule:f': there is no module 'nosuchmodule'"),
    ],
)
def test_unknown_recipes(text, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        read_recipe(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"epochs = 3\nbatch = \n", "line 2, column 9: invalid value"),
        (b"epochs = 3\nepochs = 4\n", "line 2, column 11: cannot overwrite a value"),
        (b'name = "\xff"', "this is not text in UTF-8"),
        (b"base = 3", "base: 3 is not the name of a recipe"),
        (b'base = "fp33"', "unknown recipe 'fp33'; did you mean 'fp32'?"),
        (b'base = "wrong.toml"', "its base leads back to itself"),
        (b"epochs = 2020-01-01", "epochs: a recipe holds text, numbers"),
        (b'epochs = "5"', "epochs: '5' is not a whole number"),
        (b"epoch = 3\nbtach = 4\n[wire]\nfromat = 3", "wire.fromat: no such key; did you mean wire.format? (and 2 more)"),
    ],
)
def test_mistakes_in_files(tmp_path, content, said):
    (tmp_path / "wrong.toml").write_bytes(content)
    with pytest.raises(RecipeError, match=re.escape(said)) as raised:
        read_recipe(str(tmp_path / "wrong.toml"))
    assert "\n" not in str(raised.value)


# Changes.


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("optimizer.lr=0.5", "optimizer.lr", 0.5),
        ("optimizer.lr=.5", "optimizer.lr", 0.5),
        ("optimizer.lr = 1e-3", "optimizer.lr", 1e-3),
        ("wire.format=e5m2", "wire.format", "e5m2"),
        ('wire.format="e5m2"', "wire.format", "e5m2"),
        ("wire.sum_format=", "wire.sum_format", ""),
        ("wire.kahan=True", "wire.kahan", True),
        ("wire.skip=1d,last", "wire.skip", ("1d", "last")),
        ("wire.skip=", "wire.skip", ()),
        ("wire.layers.stem.conv=fp16", "wire.layers", {"stem.conv": "fp16"}),
        ("wire.layers.'*.bias'=fp16", "wire.layers", {"*.bias": "fp16"}),
        ("name=2024", "name", "2024"),
        ("description=a = b", "description", "a = b"),
        ("learning_rate.points=0,5,24", "learning_rate.points", (0.0, 5.0, 24.0)),
        ("model.options.hidden=[64, 64]", "model.options", {"hidden": [64, 64]}),
        ("model.options.stem=cifar", "model.options", {"hidden": [256, 128], "stem": "cifar"}),
        ("model.options={}", "model.options", {}),
        ("model.options=", "model.options", {}),
        ("precision.loss_scale=1024", "precision.loss_scale", 1024.0),
        ("precision.loss_scale=none", "precision.loss_scale", "none"),
        ("precision.state=", "precision.state", ""),
        ("precision.state.exp_avg=fp16", "precision.state", {"exp_avg": "fp16"}),
        ("precision.promote.to=fp16", "precision.promote", Promote(to="fp16")),
        ("precision.promote=none", "precision.promote", None),
        ("precision.scale=delayed:4", "precision.scale", "delayed:4"),
        ("precision.scale.weights=channel", "precision.scale", {"weights": "channel"}),
        ("precision.arithmetic.quire=true", "precision.arithmetic", schema.ArithmeticSettings(quire=True)),
        ("precision.layers.last.accumulate=fp32", "precision.layers", {"last": LayerRoles(accumulate="fp32")}),
        ("precision.layers.last.weights=fp16", "precision.layers", {"last": LayerRoles(weights="fp16")}),
        ("precision.layers.stem.conv.weights=", "precision.layers", {"stem.conv": LayerRoles()}),
        ("precision.layers.last={ errors = 'fp16' }", "precision.layers", {"last": LayerRoles(errors="fp16")}),
    ],
)
def test_overrides(change, path, value):
    found = read_recipe("fp32", [change])
    assert found != RECIPES["fp32"]() or value in ("", (), "none", None)
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win_and_keep_what_they_do_not_name():
    recipe = read_recipe("hybrid", ["wire.layers.first=bf16", "epochs=3", "epochs=4", "wire.layers.last=e5m2"])
    assert recipe.epochs == 4
    assert recipe.wire.layers == {"last": "e5m2", "first": "bf16"}
    assert recipe.wire.skip == ("1d",)


def test_changes_from_python():
    recipe = with_changes(RECIPES["hybrid"](), epochs=3, **{"optimizer.lr": 1, "wire.layers.stem.conv": "fp16"})
    assert (recipe.epochs, recipe.optimizer.lr) == (3, 1.0)
    assert recipe.wire.layers == {"last": "fp16", "stem.conv": "fp16"}
    assert with_changes(recipe, wire=Wire(format="e5m2")).wire == Wire(format="e5m2")  # a section replaces all
    assert with_changes(recipe, precision={"promote": Promote()}).precision.promote == Promote()
    assert with_changes(recipe) == recipe
    with pytest.raises(RecipeError, match=r"^recipe hybrid: optimizer\.lr: 'fast' is not a number$"):
        with_changes(recipe, optimizer={"lr": "fast"})


# Mistakes in one key.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.lr=fast", "optimizer.lr: 'fast' is not a number"),
        ("optimizer.lr=nan", "optimizer.lr: nan is not a finite number"),
        ("optimizer.lr=0", "optimizer.lr: 0 must be at least 1e-30"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate: no such key; did you mean optimizer.lr?"),
        ("optimizer.betas=0.5", "optimizer.betas[1]: is missing"),
        ("optimizer.betas=1,2,3", "optimizer.betas: has 3 entries, and at most 2 are wanted"),
        ("lr=1", "lr: no such key; did you mean optimizer.lr?"),
        ("wd=1", "wd: no such key; did you mean optimizer.weight_decay?"),
        ("batch_size=1", "batch_size: no such key; did you mean batch?"),
        ("zzz=1", "zzz: no such key"),
        ("checkpoints.zzz=1", "checkpoints.zzz: no such key; there are every, keep"),
        ("precision.weigths=fp16", "precision.weigths: no such key; did you mean precision.weights?"),
        ("precision.format=e5m2", "precision.format: no such key; did you mean wire.format or parallel.format?"),
        ("precison.weights=fp16", "precison: no such key; did you mean precision?"),
        (
            "precision.layers.last.weight=fp16",
            "precision.layers.last.weight: no such key; did you mean precision.layers.last.weights?",
        ),
        ("model=cnn", "model: 'cnn' is not a table; did you mean model.name?"),
        ("epochs=2.5", "epochs: 2.5 is not a whole number"),
        ("epochs=true", "epochs: true is not a whole number"),
        ("epochs=0", "epochs: 0 must be at least 1"),
        ("wire.kahan=1", "wire.kahan: 1 is not true or false"),
        ("name=a b", "name: 'a b' must consist of letters, digits, '_', '.' and '-'"),
        (
            "learning_rate.kind=polly",
            "learning_rate.kind: 'polly' is not one of constant, poly, cosine, linear, steps; did you mean 'poly'?",
        ),
        ("data.augment=crop,flp", "data.augment[1]: 'flp' is not one of crop, flip, cutout; did you mean 'flip'?"),
        ("device=gpu", "device: 'gpu' is not one of auto, cpu, cuda"),
        ("precision.loss_scale=true", "precision.loss_scale: true is not a string or a number"),
        ("precision.state={ a = 1 }", "precision.state.a: 1 is not a string"),
        ("precision.schedule=[{ wire = 'e5m2' }]", "precision.schedule[0].epoch: is missing"),
        ("precision.switch.ladder=fp16", "precision.switch.ladder: has 1 entries, and at least 2 are wanted"),
        (
            "precision.switch.roles=error",
            "precision.switch.roles[0]: 'error' is not one of weights, activations, errors, gradients; did you mean 'errors'?",
        ),
    ],
)
def test_mistakes_in_keys(change, said):
    with pytest.raises(RecipeError) as raised:
        read_recipe("aps8", [change])
    assert str(raised.value) == f"recipe aps8: {said}"


@pytest.mark.parametrize("change", ["epochs", "=3", "", ".x=3", "a..b=3"])
def test_what_is_no_change(change):
    with pytest.raises(RecipeError, match="a change is written key=value"):
        read_recipe("fp32", [change])


def test_several_mistakes_are_counted():
    with pytest.raises(ValidationError) as raised:
        Recipe.model_validate({"epochs": "many", "batch": 0, "precision": {"state": {"a": 1}, "loss_scale": []}})
    assert str(explain(raised.value, "x.toml")) == "x.toml: epochs: 'many' is not a whole number (and 3 more)"


# Mistakes in keys together.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["ranks=2", "virtual_ranks=4"], "virtual_ranks: 4 virtual ranks are one process"),
        (
            ["virtual_ranks=3"],
            "batch: a batch of 128 cannot be shared evenly by 3 ranks with 1 micro-batches each; the nearest that can: 126",
        ),
        (
            ["batch=5", "ranks=4", "micro_batches=2"],
            "batch: a batch of 5 cannot be shared evenly by 4 ranks with 2 micro-batches each; the nearest that can: 8",
        ),
        (["data.name=mnits"], "data.name: unknown data set 'mnits'; did you mean 'mnist'?"),
        (["data.name=zzz"], "data.name: unknown data set 'zzz'; there are fashion14, mnist"),
        (["data.name=nosuchmodule:f"], "data.name: data set 'nosuchmodule:f': there is no module"),
        (["data.options.x=1"], "data.options: fashion14 has none"),
        (["data.transform=nosuchmodule:f"], "data.transform: transform 'nosuchmodule:f'"),
        (["data.name=shakespeare", "model.name=gpt", "data.augment=crop"], "data.augment: is for images"),
        (["data.name=shakespeare"], "model.name: mlp takes images, and shakespeare is text"),
        (["model.name=gpt"], "model.name: gpt takes text, and fashion14 is images"),
        (["model.name=resnt18"], "model.name: unknown model 'resnt18'; did you mean 'resnet18'"),
        (["model.options.hiden=3"], "model: model 'mlp' has no option 'hiden'; it has hidden, dropout"),
        (["precision.weights=e4m3fm"], "precision.weights: unknown format 'e4m3fm'; did you mean 'e4m3fn'"),
        (["precision.weights=FP16"], "precision.weights: write 'fp16', not 'FP16'"),
        (["precision.errors=e8m0fnu"], "precision.errors: e8m0fnu has no room for errors"),
        (["precision.layers.last.weights=foo"], "precision.layers.last.weights: unknown format 'foo'"),
        (["precision.schedule=[{ epoch = 1, errors = 'foo' }]"], "precision.schedule[0].errors: unknown format 'foo'"),
        (["precision.switch.ladder=foo,fp16"], "precision.switch.ladder[0]: unknown format 'foo'"),
        (["precision.rounding=neerest"], "precision.rounding: unknown rounding 'neerest'; did you mean 'nearest'"),
        (
            ["precision.weights=fp16", "precision.activations=bf16"],
            "precision.activations: fp16 weights compute in fp16, not in bf16",
        ),
        (
            ["precision.weights=fp16", "precision.layers.last.weights=fp32"],
            "precision.layers.last.weights: all weights are stored in fp16",
        ),
        (["precision.audit=true"], "precision.audit: looks for FP32 tensors, and 'fp32' weights are some"),
        (["precision.loss_scale=1000"], "precision.loss_scale: a static scale must be a power of two"),
        (
            ["precision.loss_scale=dynamc"],
            "precision.loss_scale: 'dynamc' is not one of none, dynamic, per_layer or a power of two; did you mean 'dynamic'?",
        ),
        (
            ["precision.schedule=[{ epoch = 1, wire = 'e5m2' }, { epoch = 1, wire = 'fp16' }]"],
            "precision.schedule: phases begin one after the other, not at 1, then 1",
        ),
        (
            ["precision.schedule=[{ epoch = 6, wire = 'e5m2' }]"],
            "precision.schedule[0].epoch: the run has 6 epochs, counted from 0, and none is 6",
        ),
        (["precision.schedule=[{ epoch = 1 }]"], "precision.schedule[0]: names no format"),
        (["precision.schedule=[{ epoch = 1, wire = 'foo' }]"], "precision.schedule[0].wire: unknown format 'foo'"),
        (
            ["precision.weights=bf16", "precision.schedule=[{ epoch = 1, errors = 'e5m2' }]"],
            "precision.schedule[0].errors: formats that change are simulated in a float32 model",
        ),
        (
            ["precision.switch={}", "precision.schedule=[{ epoch = 1, errors = 'e5m2' }]"],
            "precision.schedule[0].errors: precision.switch decides about errors",
        ),
        (["precision.switch={}", "precision.weights=fp16"], "precision.switch: needs weights in float32"),
        (
            ["precision.switch={}", "precision.weights=e5m2"],
            "precision.weights: 'e5m2', but precision.switch begins with 'e4m3fn'",
        ),
        (["precision.switch.ladder=fp16,e4m3fn"], "precision.switch.ladder: the narrowest format comes first"),
        (["precision.promote={}"], "precision.promote: no role is simulated"),
        (["precision.promote={}", "precision.weights=bf16"], "precision.promote: needs weights in float32"),
        (
            ["precision.promote={}", "precision.weights=e4m3fn", "precision.scale=tensor"],
            "precision.promote: nothing overflows",
        ),
        (
            ["precision.promote.to=fp16", "precision.weights=e8m2"],
            "precision.promote.to: 'fp16' has less room than e8m2 (precision.weights)",
        ),
        (["precision.promote.to=fp16", "precision.switch={}"], "precision.promote.to: 'fp16' is narrower than 'fp32'"),
        (["optimizer.name=adam"], "optimizer.name: unknown optimizer 'adam'; did you mean 'adamw'?"),
        (["optimizer.options.x=1"], "optimizer.options: are for a torch:CLASS"),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov: needs a momentum"),
        (
            ["optimizer.name=torch:adamw"],
            "optimizer.name: torch.optim has no optimizer 'adamw' that can be used here; did you mean 'torch:AdamW'",
        ),
        (["optimizer.name=torch:LBFGS"], "optimizer.name: torch.optim has no optimizer 'LBFGS' that can be used here"),
        (
            ["optimizer.name=torch:Adam", "optimizer.options.foo=1"],
            "optimizer.options: optimizer 'torch:Adam': TypeError: Adam.__init__() got an unexpected keyword argument 'foo'",
        ),
        (["optimizer.name=torch:Adam", "precision.state=fp16"], "precision.state: torch's own optimizers round nothing"),
        (
            ["optimizer.name=torch:Adam", "precision.weights=bf16"],
            "optimizer.name: torch's own optimizers lose small updates of bf16 weights",
        ),
        (["precision.update=kahan"], "precision.update: 'kahan' is for weights that are stored in 16 bits"),
        (
            ["precision.weights=e4m3fn", "precision.update=stochastic"],
            "precision.update: 'stochastic' is for weights that are stored in 16 bits (fp16, bf16), and 'e4m3fn' is kept",
        ),
        (["precision.scale=tensr"], "precision.scale: unknown scale 'tensr'; did you mean 'tensor'?"),
        (["precision.scale.weight=tensor"], "precision.scale: unknown role 'weight'; did you mean 'weights'?"),
        (["precision.scale.weights=tensr"], "precision.scale.weights: unknown scale 'tensr'"),
        (["precision.rounding.weights=neerest"], "precision.rounding.weights: unknown rounding 'neerest'; did you mean"),
        (["precision.rounding.foo=nearest"], "precision.rounding: unknown role 'foo'; there are weights, activations"),
        (["precision.scale=block:0"], "precision.scale: scale 'block:0': block:<n> takes n from 1"),
        (["precision.scale=calibrated"], "precision.scale: 'calibrated' wants a pass over data before the run"),
        (["precision.layers.last.scale=clibrated"], "precision.layers.last.scale: unknown scale 'clibrated'"),
        (
            ["precision.promote={}", "precision.weights=e4m3fn", "precision.scale=aps"],
            "precision.promote: nothing overflows with precision.scale = 'aps'",
        ),
        (["precision.accumulate=e5m3x"], "precision.accumulate: unknown format 'e5m3x'"),
        (["precision.accumulate=mxfp4"], "precision.accumulate: accumulate=mxfp4 is a block format"),
        (["precision.arithmetic.multiply=foo"], "precision.arithmetic.multiply: unknown format 'foo'"),
        (["precision.arithmetic.rounding=neerest"], "precision.arithmetic: unknown rounding 'neerest'"),
        (
            ["precision.arithmetic={quire=true, kahan=true}"],
            "precision.arithmetic: a quire holds exact sums: there is nothing for kahan to compensate",
        ),
        (["precision.layers.last.accumulate=foo"], "precision.layers.last.accumulate: unknown format 'foo'"),
        (
            ["precision.activations=fp16", "precision.accumulate=fp16"],
            "precision.accumulate: under autocast torch computes in fp16",
        ),
        (["parallel.kind=split", "ranks=2", "precision.accumulate=fp16"], "precision.accumulate: sums cannot be simulated in"),
        (
            ["parallel.kind=split", "ranks=2", "precision.arithmetic.approximate=integer_add"],
            "precision.arithmetic: sums cannot be simulated in split",
        ),
        (["precision.master=fixed1.41"], "precision.master: impossible fixed1.41"),
        (["precision.master=mxfp8_e4m3"], "precision.master: mxfp8_e4m3 has no room for master weights: a block's scale"),
        (["precision.master=e8m0fnu"], "precision.master: e8m0fnu has no room for master weights"),
        (
            ["precision.weights=fp16", "precision.master=bf16"],
            "precision.master: fp16 weights are what the optimizer keeps; master weights are for a float32 model",
        ),
        (["precision.master=fp16", "precision.update=kahan"], "precision.update: 'kahan' is for weights that are stored"),
        (["precision.master=fp32", "precision.update=stochastic"], "precision.update: 'stochastic' is for weights that are"),
        (["parallel.kind=split", "ranks=2", "precision.master=fp16"], "precision.master: formats cannot be simulated in split"),
        (["precision.state=e2m1fn"], "precision.state: state format e2m1fn is too narrow"),
        (
            ["optimizer.name=adamw", "precision.state.momentum=fp16"],
            "precision.state: state= names momentum; this optimizer has exp_avg, exp_avg_sq",
        ),
        (["learning_rate.kind=linear"], "learning_rate.points: linear needs at least one"),
        (
            ["learning_rate.kind=steps", "learning_rate.points=5,3"],
            "learning_rate.points: epochs begin with 0 and ascend, not 5, 3",
        ),
        (
            ["learning_rate.kind=linear", "learning_rate.points=0,5", "learning_rate.factors=1"],
            "learning_rate.factors: one for each point is wanted: 2, not 1",
        ),
        (["learning_rate.warmup=6"], "learning_rate.warmup: 6 epochs, and the run has 6"),
        (["wire.format=e5m2x"], "wire.format: unknown format 'e5m2x'"),
        (["wire.format=tf32"], "wire.format: formats on the wire have up to 16 bits"),
        (["wire.scale=apps"], "wire.scale: unknown scale 'apps'"),
        (["wire.reduction=tow_shot"], "wire.reduction: unknown reduction 'tow_shot'"),
        (["wire.reduction=auto"], "wire.reduction: 'auto' chooses by a measurement"),
        (["wire.rounding=near"], "wire.rounding: unknown rounding 'near'"),
        (["wire.sum_format=tf32"], "wire.sum_format: formats on the wire"),
        (["wire.layers.fc.weight=foo"], 'wire.layers."fc.weight": unknown format'),
        (["parallel.format=e5m2"], "parallel.format: is for split and pipeline"),
        (["parallel.format=foo"], "parallel.format: unknown format 'foo'"),
        (["parallel.kind=split"], "parallel.kind: split takes 2 or more ranks, real or virtual, not 1"),
        (["parallel.kind=pipeline", "virtual_ranks=3"], "parallel.kind: pipeline takes exactly 2 ranks"),
        (["parallel.kind=split", "ranks=2", "parallel.scale=aps"], "parallel.scale: scale 'aps' is for sums over ranks"),
        (["parallel.kind=split", "ranks=2", "wire.scale=local"], "wire.scale: no gradients of weights travel in split"),
        (["parallel.kind=split", "ranks=2", "wire.format=e5m2"], "wire.format: no gradients of weights travel in split"),
        (["parallel.kind=split", "ranks=2", "precision.errors=e5m2"], "precision.errors: formats cannot be simulated in split"),
        (["parallel.kind=split", "ranks=2", "precision.switch={}"], "precision.switch: formats cannot be simulated in split"),
    ],
)
def test_impossible_combinations(changes, said):
    with pytest.raises(RecipeError) as raised:
        check(read_recipe("fp32", changes))
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        ["precision.weights=fp16", "precision.activations=e4m3fn", "precision.errors=e5m2"],  # simulated over 16 bits
        ["precision.weights=bf16", "precision.schedule=[{ epoch = 1, wire = 'e5m2' }]"],
        ["precision.weights=bf16", "precision.update=kahan", "precision.state=e4m3fn", "precision.audit=true"],
        ["precision.weights=e5m2", "precision.master=fp16", "precision.state=fp16"],
        ["precision.weights=e5m2", "precision.scale.weights=channel", "precision.promote={}"],
        ["precision.weights=e5m2", "precision.rounding.gradients=stochastic"],
        ["precision.weights=e5m2", "precision.scale=delayed:4", "precision.layers.last.scale=none"],
        ["precision.accumulate=posit16", "precision.arithmetic.quire=true", "precision.layers.last.accumulate=fp32"],
        ["precision.weights=bf16", "precision.accumulate=fp16", "precision.arithmetic.chunk=64"],
        ["optimizer.name=torch:RMSprop", "precision.master=posit16", "precision.update=stochastic"],
        ["precision.promote={}", "precision.switch={}"],
        ["precision.weights=e5m2", "precision.promote.to=fp16"],
        ["optimizer.name=torch:RMSprop", "precision.loss_scale=65536", "optimizer.options.alpha=0.9"],
        ["wire.reduction=hierarchical(2)", "wire.format=topk:0.01:e4m3fn", "wire.error_feedback=true"],
        ["parallel.kind=pipeline", "virtual_ranks=2", "parallel.format=dynamic8", "batch=3"],
        ["parallel.kind=pipeline", "virtual_ranks=2", "parallel.format=int4", "parallel.scale=block:16"],
        ["parallel.kind=split", "virtual_ranks=2", "parallel.scale=local", "wire.scale=none"],  # as runs were saved before
        ["learning_rate.kind=linear", "learning_rate.points=0,24", "learning_rate.factors=1,0", "learning_rate.warmup=8"],
    ],
)
def test_possible_combinations(changes):
    check(read_recipe("fp32", changes))


@pytest.mark.parametrize(
    ("name", "changes", "codecs"),
    [
        ("hybrid", [], ["e2m1fn/block:32", "fp16/local"]),
        ("hybrid", ["wire.scale=local"], ["e2m1fn/local", "fp16/local"]),
        ("fp32", ["wire.format=nf4"], ["nf4/block:32"]),
        ("fp32", ["wire.format=e4m3fn"], ["e4m3fn/local"]),
        (
            "fp32",
            ["wire.format=e4m3fn", "precision.schedule=[{ epoch = 1, wire = 'int4' }]"],
            ["e4m3fn/local", "int4/block:32"],
        ),
        ("pure16", [], ["fp16/none"]),
        ("posit-warmup", [], ["fp32/none", "posit16/none"]),
    ],
)
def test_scales_on_the_wire(name, changes, codecs):
    assert [*map(str, wire_settings(read_recipe(name, changes), 10).codecs())] == codecs


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"^device: there is no CUDA device here"):
        check(Recipe(device="cuda"))
    check(Recipe(device="auto"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "wire.layers.fc*=fp16",
            "wire.layers.\"fc*\": 'fc*' matches nothing; there are 0.weight, 0.bias, 1.weight, ...",
        ),
        ("wire.skip=1d,0.wieght", "wire.skip: '0.wieght' matches nothing; did you mean '0.weight' or '1.weight'?"),
        ("precision.layers.fc.weights=fp16", "precision: layers: 'fc' matches nothing; there are 0, 1"),
    ],
)
def test_patterns_that_match_nothing(change, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(RecipeError) as raised:
        check_model(read_recipe("fp32", [change]), model)
    assert str(raised.value) == said


def test_patterns_that_match_leave_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    recipe = read_recipe(
        "fp32", ["wire.skip=1d,last,0.*", "precision.layers.last.weights=fp16", "precision.layers.Linear.errors=e5m2"]
    )
    check_model(recipe, model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
