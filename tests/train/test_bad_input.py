"""Whatever a user gives to `lowp train`: one line that says what is wrong, soon, and without filling the memory."""

import gzip
import os
import re
import socket
import struct
import tracemalloc
import types
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowp.cli import app
from lowp.training.check import check
from lowp.training.data import open_data
from lowp.training.data.base import Request
from lowp.training.data.layouts import read_idx
from lowp.training.keys import all_keys, kind_at, written
from lowp.training.mistakes import RecipeError
from lowp.training.models import MODELS
from lowp.training.plugins import PluginError, load_plugin
from lowp.training.reading import read_recipe
from lowp.training.recipes import RECIPES
from lowp.training.toml import to_toml
from lowp.training.trainer import Trainer
from lowp.training.world import World

USER = "train.plugins_of_a_user"
CPU = torch.device("cpu")
SMALL = ("epochs=1", "batch=32", "data.limit=64", "model.options.hidden=[4]")


def refusal(function, *arguments, **options) -> str:
    """The one line of the ValueError that a call ends with."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        function(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def train(*changes: str) -> None:
    """The start of a run, its first step and its test, in this process."""
    recipe = read_recipe("fp32", [*SMALL, *changes])
    check(recipe)
    trainer = Trainer(recipe, World(0, 1, CPU))
    trainer.train_step()
    trainer.test()


# Recipes.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "[" * 2000 + "]" * 2000, "tables and lists are nested more than 16 deep"),
        ("[" + ".".join("a" * 3000) + "]\nb = 1", "a.a: tables and lists are nested more than 16 deep"),
        (
            ".".join("a" * 50_000) + " = 1",
            "tables and lists are nested more than 16 deep",
        ),  # Python's parser takes half a minute
        ("[model.options]\nx = " + "[" * 40 + "]" * 40, "model.options: tables and lists are nested more than 16 deep"),
        ("seed = " + "1" * 5000, "Exceeds the limit"),
        ("seed = 0x" + "f" * 200, "seed: whole numbers have at most 128 bits, not 800"),
        ("name = '" + "n" * 300 + "'", "name: "),
        ('base = "plug\\u0000.toml"', "is not a path"),
    ],
)
def test_recipe_files_that_ask_too_much(tmp_path, text, said):
    (tmp_path / "deep.toml").write_text(text)
    assert said in refusal(read_recipe, str(tmp_path / "deep.toml"))


def test_deep_nesting_in_a_change():
    value = "[" * 3000 + "]" * 3000
    assert "model.options.x: tables and lists are nested" in refusal(read_recipe, "fp32", [f"model.options.x={value}"])
    assert "nested more than 16 deep" in refusal(read_recipe, "fp32", [".".join("a" * 60) + "=1"])
    assert "a key has at most 64 parts, not 3000" in refusal(read_recipe, "fp32", [".".join("a" * 3000) + "=1"])


def test_a_base_that_leads_to_itself(tmp_path):
    for name, base in (("a", "b.toml"), ("b", "./../x/c.toml"), ("c", "a.toml"), ("d", f"{USER}:recipe_of_itself")):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{name}.toml").write_text(f'base = "{base}"\n')
    assert refusal(read_recipe, str(tmp_path / "x" / "a.toml")).endswith("a.toml: its base leads back to itself")
    assert "recipe_of_itself: its base leads back to itself" in refusal(read_recipe, str(tmp_path / "x" / "d.toml"))
    assert read_recipe("fp32") == RECIPES["fp32"]()  # nothing is left over


def test_a_long_chain_of_bases(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    assert "more than 32 recipes" in refusal(read_recipe, str(tmp_path / "0.toml"))
    (tmp_path / "35.toml").write_text("epochs = 3\n")
    assert read_recipe(str(tmp_path / "5.toml")).epochs == 3


NUMBERS = [
    path
    for path in all_keys()
    if re.search(r"\b(int|float)\b", str(kind_at(path))) and path != ("precision", "loss_scale")  # check() knows its range
]


@pytest.mark.parametrize("path", NUMBERS, ids=written)
@pytest.mark.parametrize("sign", ["-", ""])
def test_every_number_of_the_schema_has_bounds(path, sign):
    """A number that no run can have is refused with its key. Keys that are added later are tested too."""
    kind = str(kind_at(path))
    number = f"{sign}1e300" if "float" in kind else f"{sign}1{30 * '0'}"
    value = f"[{number}, {number}]" if "tuple" in kind else number
    with pytest.raises(RecipeError, match=re.escape(f"{written(path)}") + r"(\[0\])?: .* must be (at|above|below)"):
        read_recipe("fp32", [f"{written(path)}={value}"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.betas=[2, 2]", "optimizer.betas[0]: 2 must be below 1 (and 1 more)"),
        ("optimizer.lr=1e308", "optimizer.lr: 1e+308 must be at most 1e+38"),
        ("optimizer.lr=1e-320", "optimizer.lr: 1e-320 must be at least 1e-30"),
        ("optimizer.lr=inf", "optimizer.lr: inf is not a finite number"),
        ("optimizer.eps=1e308", "optimizer.eps: 1e+308 must be at most 1"),
        ("optimizer.momentum=1", "optimizer.momentum: 1 must be below 1"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay: -1 must be at least 0"),
        ("batch=99999999999999999999", "batch: 99999999999999999999 must be at most 16,777,216"),
        ("epochs=99999999999999999999", "epochs: 99999999999999999999 must be at most 1,000,000"),
        ("seed=9223372036854775808", "seed: 9223372036854775808 must be below 9,223,372,036,854,775,808"),
        ("threads=100000", "threads: 100000 must be at most 1,024"),
        ("learning_rate.factors=[0, -1]", "learning_rate.factors[1]: -1 must be at least 0"),
    ],
)
def test_numbers_out_of_range(change, said):
    assert refusal(read_recipe, "fp32", [change]) == f"recipe fp32: {said}"


def test_learning_rates_that_float32_cannot_hold():
    points = ["learning_rate.warmup=0", "learning_rate.points=0,1,2"]
    linear = ["learning_rate.kind=linear", *points, "learning_rate.factors=0,1e6,0", "optimizer.lr=1e37"]
    assert refusal(check, read_recipe("fp32", linear)) == "learning_rate: the rate reaches 1e43, and may be at most 1e+38"
    steps = ["learning_rate.kind=steps", *points, "learning_rate.factor=1e6", "optimizer.lr=1e30"]
    assert refusal(check, read_recipe("fp32", steps)) == "learning_rate: the rate reaches 1e48, and may be at most 1e+38"
    check(read_recipe("fp32", ["optimizer.lr=1e38"]))


# Plugins.


def test_plugins_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (
        ("needs_more", "import json\nimport no_such_module_at_all\n"),
        ("divides", "def f(): pass\n\n1 / 0\n"),
        ("leaves", "import sys\nsys.exit(0)\n"),
        ("not_python", "def f(:\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    missing = "ModuleNotFoundError: No module named 'no_such_module_at_all' (needs_more.py:2)"
    assert refusal(load_plugin, "needs_more:f", "model") == f"model 'needs_more:f': {missing}"
    assert refusal(read_recipe, "needs_more:f") == f"recipe 'needs_more:f': {missing}"
    assert refusal(check, read_recipe("fp32", ["data.filter=needs_more:f"])) == f"data.filter: filter 'needs_more:f': {missing}"
    assert refusal(load_plugin, "divides:f", "model").endswith("ZeroDivisionError: division by zero (divides.py:3)")
    assert refusal(load_plugin, "leaves:f", "model").endswith("SystemExit: 0 (leaves.py:2)")
    assert refusal(load_plugin, "not_python:f", "model").endswith("SyntaxError: invalid syntax (not_python.py, line 1)")
    assert "model '..:f': TypeError" in refusal(load_plugin, "..:f", "model")
    assert "model 'builtins:dict': ValueError: no signature" in refusal(load_plugin, "builtins:dict", "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.name={}:model", "model '{}:model': RuntimeError: cannot be built ("),
        ("model.name={}:wrong_inside", "model '{}:wrong_inside': RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (
            "model.name={}:a_dictionary",
            "model '{}:a_dictionary' returns dict, not a tensor; wanted are logits of shape (32, 10)",
        ),
        ("model.name={}:a_pair", "model '{}:a_pair' returns tuple, not a tensor"),
        ("model.name={}:too_few_classes", "model '{}:too_few_classes' returns float32 of shape (32, 3); wanted are logits of"),
        ("model.name={}:one_number", "model '{}:one_number' returns float32 of shape ()"),
        ("model.name={}:raises_in_forward", "model '{}:raises_in_forward': IndexError: index 99 is out of bounds"),
        ("model.name={}:nothing_to_train", "model '{}:nothing_to_train' has no parameter that is trained"),
        ("data.name={}:data", "data set '{}:data': RuntimeError: no data today ("),
        ("data.name={}:sick_sample", "data set '{}:sick_sample': OSError: the disk is gone ("),
        ("data.name={}:sick_first_sample", "data set '{}:sick_first_sample': OSError: the disk is gone ("),
        (
            "data.name={}:target_beyond_the_classes",
            "targets of the data set '{}:target_beyond_the_classes': IndexError: Target 7",
        ),
        ("data.name={}:no_number_of_classes", "the number of classes must be a whole number from 1 on, not 'three'"),
        ("data.transform={}:transform", "data.transform '{}:transform': IndexError: index 99 is out of bounds"),
        ("data.filter={}:choose", "data.filter '{}:choose': ZeroDivisionError: by nothing ("),
        ("data.filter={}:choose_nonsense", "data.filter '{}:choose_nonsense' returned str, which cannot choose samples: "),
        (
            "data.filter={}:choose_nothing",
            "data.filter '{}:choose_nothing' returned NoneType, which cannot choose samples; wanted",
        ),
    ],
)
def test_plugins_that_raise_are_named(change, said):
    changes = ["model.options={}"] if change.startswith("model") else ["data.workers=0"] if "data.name" in change else []
    line = refusal(train, *changes, change.format(USER))
    assert said.format(USER) in line
    assert not said.endswith("(") or re.search(r"\(.*plugins_of_a_user\.py:\d+\)$", line)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_is_one_line_with_its_traceback_beside(workers):
    settings = read_recipe("fp32", [f"data.name={USER}:sick_sample", f"data.workers={workers}"]).data
    data = open_data(settings, device=CPU, dtype=torch.float32, directory=None)
    batches = data.train.stream([Request(torch.tensor(indices), (0, 0, indices[0])) for indices in ([1, 2], [3, 4])])
    assert len(next(batches)[1]) == 2
    with pytest.raises(PluginError) as raised:
        next(batches)
    assert re.fullmatch(r"data set .*: OSError: the disk is gone \(.*:\d+\)", str(raised.value))
    assert 'raise OSError("the disk is gone")' in "".join(raised.value.__notes__)


def test_the_rest_of_a_plugins_error_is_there_for_a_traceback():
    result = CliRunner().invoke(app, ["recipes", f"{USER}:recipe"])
    assert result.exit_code == 2
    assert re.fullmatch(r"lowp: recipe '.*:recipe': KeyError: 'no such thing' \(.*:\d+\)\n", result.stderr)
    result = CliRunner().invoke(app, ["--traceback", "recipes", f"{USER}:recipe"], env={"LOWP_TRACEBACK": None})
    assert isinstance(result.exception, PluginError)
    assert isinstance(result.exception.__cause__, KeyError)
    result = CliRunner().invoke(app, ["recipes", f"{USER}:recipe"], env={"LOWP_TRACEBACK": "1"})  # as ranks are told
    assert isinstance(result.exception, PluginError)


def test_torch_optimizers_that_refuse_what_they_are_given():
    for changes, said in (
        (["optimizer.name=torch:Rprop"], "optimizer: optimizer 'torch:Rprop': TypeError: Rprop.__init__() got an unexpected"),
        (
            ["optimizer.name=torch:Adam", "optimizer.options.capturable=true"],
            "optimizer.options: optimizer 'torch:Adam': Assert",
        ),
        (
            ["optimizer.name=torch:Adam", "optimizer.options.betas=[2, 2]"],
            "optimizer.options: optimizer 'torch:Adam': ValueError",
        ),
    ):
        assert refusal(check, read_recipe("fp32", ["device=cpu", *changes])).startswith(said)
    check(read_recipe("fp32", ["optimizer.name=torch:Rprop", "optimizer.weight_decay=0"]))
    assert refusal(train, "optimizer.name=torch:Muon").startswith("optimizer 'torch:Muon': ValueError: Muon only supports 2D")


# Models.


@pytest.mark.parametrize(
    ("model", "option", "said"),
    [
        ("mlp", "hidden=[-5]", "hidden must be from 1 to 1,048,576, not -5"),
        ("mlp", "hidden=[0]", "hidden must be from 1 to"),
        ("mlp", "hidden=-5", "hidden must be a list, not -5"),
        ("mlp", "hidden=[1e30]", "hidden must be a whole number, not 1e+30"),
        ("mlp", "hidden=[true]", "hidden must be a whole number, not True"),
        ("mlp", "hidden=[999999999999]", "hidden must be from 1 to"),
        ("mlp", "dropout=7", "dropout must be at least 0 and below 1, not 7"),
        ("mlp", "dropout=[0.1, nan, 0.1]", "dropout must be at least 0 and below 1, not nan"),
        ("cnn", "channels=['a', 'b']", "channels must be a whole number, not 'a'"),
        ("alexnet", "batch_norm=1", "batch_norm must be true or false, not 1"),
        ("resnet18", "stem=3", "stem must be text, not 3"),
        ("davidnet", "width=0", "width must be from 1 to"),
        ("gpt", "heads=0", "heads must be from 1 to"),
        ("gpt", "layers=100000000", "layers must be from 1 to 1,024"),
        ("lstm", "layers=-1", "layers must be from 1 to"),
    ],
)
def test_impossible_options_of_models(model, option, said):
    data = ["data.name=shakespeare"] if model in ("gpt", "lstm") else []
    line = refusal(check, read_recipe("fp32", [*data, f"model.name={model}", f"model.options.{option}"]))
    assert line.startswith(f"model: model {model!r}: the option {said}")


def test_defaults_of_models_are_possible():
    for name in MODELS:
        text = name in ("gpt", "lstm")
        check(
            read_recipe("fp32", [f"model.name={name}", f"data.name={'shakespeare' if text else 'cifar10'}", "model.options={}"])
        )


def test_a_torchvision_that_cannot_be_imported(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore lines")

    broken = types.SimpleNamespace(import_module=fail)
    monkeypatch.setattr("lowp.training.models.importlib", broken)
    recipe = read_recipe("fp32", ["model.name=torchvision:fcn_resnet50"])
    said = r"torchvision cannot be imported \(RuntimeError: operator torchvision::nms does not exist\); install the version"
    assert re.match(f"model: model 'torchvision:fcn_resnet50': {said}", refusal(check, recipe))
    text = read_recipe("lstm", ["model.name=torchvision:resnet18"])
    assert refusal(check, text) == "model.name: torchvision:resnet18 takes images, and shakespeare is text"


# Files.


@pytest.fixture
def no_regular_files(tmp_path):
    """A pipe, a socket and a directory; and what an error calls each."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        yield {tmp_path / "pipe": "a pipe", tmp_path / "folder": "a directory", tmp_path / "socket": "a socket"}


def test_what_is_no_regular_file_is_refused_at_once(no_regular_files, tmp_path):
    for path, kind in (no_regular_files | {Path("/dev/zero"): "a device"}).items():
        recipe = read_recipe("lstm", [f"data.name=text:{path}"])
        said = f"{path}: is {kind}, not a regular file"
        assert refusal(check, recipe) == f"data.name: {said}"
        assert (
            refusal(open_data, recipe.data, device=CPU, dtype=torch.float32, directory=None) == f"cannot read the text {said}"
        )
        as_recipe = tmp_path / f"{path.name}.toml"
        as_recipe.symlink_to(path)
        assert refusal(read_recipe, str(as_recipe)) == f"{as_recipe}: is {kind}, not a regular file"
    (tmp_path / "mnist").mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        os.mkfifo(tmp_path / "mnist" / name)
    mnist = read_recipe("mnist-data-parallel").data
    line = refusal(open_data, mnist, device=CPU, dtype=torch.float32, directory=tmp_path)
    assert line.endswith("train-images-idx3-ubyte: is a pipe, not a regular file")


def test_files_that_are_too_large(tmp_path):
    for name, size, of in (("huge.txt", 3 << 30, "text:"), ("huge.toml", 2 << 20, "")):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)  # a hole: it takes no room on the disk
        path = f"{of}{tmp_path / name}"
        line = (
            refusal(open_data, read_recipe("lstm", [f"data.name={path}"]).data, device=CPU, dtype=torch.float32, directory=None)
            if of
            else refusal(read_recipe, path)
        )
        assert re.search(r"has [\d.]+ [MG]B, and at most [\d.]+ [MG]B are read$", line)


def test_a_home_that_there_is_not():
    assert refusal(check, read_recipe("lstm", ["data.name=text:~no_such_user/x"])) == (
        "data.name: ~no_such_user/x: there is no such user"
    )


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    """64 MB of zeros in 64 kB, behind a header that promises 12 images; and behind one that promises all of it, and more."""
    honest = gzip.compress(struct.pack(">2I", 0x801, 12) + bytes(12))
    (tmp_path / "labels.gz").write_bytes(honest)
    for promised, said in ((12, "its header promises 12 x 28 x 28 bytes, and more follow"), (2**31, "2,147,483,648 entries")):
        bomb = tmp_path / "bomb.gz"
        bomb.write_bytes(gzip.compress(struct.pack(">4I", 0x803, promised, 28, 28) + bytes(64 << 20), compresslevel=1))
        tracemalloc.start()
        try:
            line = refusal(read_idx, bomb, tmp_path / "labels.gz")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert said in line
        assert peak < 4 << 20


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.\nMore lines"), 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2),
        (MemoryError(), 2),
        (RuntimeError("a bug of ours"), 1),
    ],
)
def test_too_little_memory_is_one_line_and_a_bug_is_a_traceback(monkeypatch, error, code):
    def fail(json):
        raise error

    monkeypatch.setattr("lowp.cli.recipes._show_list", fail)
    result = CliRunner().invoke(app, ["recipes"], env={"LOWP_TRACEBACK": None})
    assert result.exit_code == code
    assert result.stderr.count("\n") == (1 if code == 2 else 0)
    assert (result.exception is error) == (code == 1)


# Anything at all.

KEYS = [written(path) for path in all_keys()]
WORDS = st.sampled_from(
    ["", "none", "fp16", "e5m2", "e9m9", "aps", "local", "ring", "hierarchical(2)", "topk:0.01", "stochastic", "mlp", "gpt",
     "torch:Adam", "x:y", "text:/dev/zero", "text:/nowhere", "true", "nan", "inf", "-1", "0", "1", "2", "1e308", "1e-320",
     "9" * 30, "0x" + "f" * 40, "[]", "[1, 2]", "[-1]", "{}", "{ a = 1 }", "[[[]]]", "1,2", "'", '"', "2020-01-01", "\udcff",
     "\0"]
)  # fmt: skip
VALUES = WORDS | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)
TABLES = (
    "precision.layers.last.weights",
    "precision.layers.last",
    "wire.layers.last",
    "precision.scale.weights",
    "model.options.hidden",
)
CHANGES = st.builds("{}={}".format, st.sampled_from([*KEYS, *TABLES]) | st.text(max_size=12), VALUES) | st.text(max_size=20)


def one_line_or_fine(read, *arguments) -> None:
    try:
        check(read(*arguments))
    except ValueError as error:
        said = str(error)
    else:
        return
    assert said
    assert "\n" not in said


@settings(max_examples=150)
@example(["wire.skip=\udcff"])
@example(['"a\nb"=1', "wire.layers.'c\nd'=2"])
@example(["model.options.hidden=[-5]"])
@example(["model.options.hidden=" + "[" * 3000 + "]" * 3000])
@example(["precision.promote=1", "precision.schedule=[1]", "precision.schedule=[[]]"])
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_any_change_is_possible_or_gets_one_line(changes):
    one_line_or_fine(read_recipe, "aps8", changes)


@st.composite
def damaged(draw):
    """A recipe's file with a few places changed."""
    text = to_toml(RECIPES[draw(st.sampled_from(["fp32", "fp8-all", "gpt"]))](), comments=False)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(VALUES) + text[start + draw(st.integers(0, 12)) :]
    return text


@settings(max_examples=100)
@example(text="x = " + "[" * 2000 + "]" * 2000)
@given(text=damaged() | st.text(max_size=60))
def test_any_file_is_a_recipe_or_gets_one_line(text, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    one_line_or_fine(read_recipe, str(file))
