"""Names that have changed are understood for one version, and a warning says the new one: in Python and in recipes."""

import inspect
import os
import re
import subprocess
import sys

import pytest
import torch

import lowp
from lowp.former_names import OLD_NAME, with_current_names
from lowp.integrations.request import CompressionRequest
from lowp.training.reading import read_recipe, with_changes
from lowp.training.recipe import Recipe, Wire
from lowp.training.runs import Run
from lowp.training.saving import fingerprint
from lowp.wire.reductions import reduction_of
from lowp.wire.settings import Settings
from train.training import SOURCE


def renamed(old: str, new: str):
    return pytest.warns(FutureWarning, match=f"{re.escape(old)} is called {re.escape(repr(new))} now; {OLD_NAME}")


def test_the_argument_of_the_wire():
    with renamed("the argument 'accumulate'", "sum_format"):
        settings = Settings.of("e5m2", accumulate="fp16")
    assert settings == Settings.of("e5m2", sum_format="fp16")
    assert str(settings.sum_format) == "fp16"
    rows = [torch.randn(100) for _ in range(2)]
    with renamed("the argument 'accumulate'", "sum_format") as found:
        old = lowp.VirtualWorld(2).all_reduce(rows, "e5m2", reduction="ring", accumulate="fp16")
    assert [warning.filename for warning in found] == [__file__]  # where the user says it
    assert torch.equal(old, lowp.VirtualWorld(2).all_reduce(rows, "e5m2", reduction="ring", sum_format="fp16"))
    with pytest.raises(ValueError, match="the argument 'accumulate' is the old name of 'sum_format': give one of them"):
        Settings.of("e5m2", accumulate="fp16", sum_format="fp16")
    with pytest.raises(TypeError, match="accumulated"):
        Settings.of("e5m2", accumulated="fp16")


def test_what_calls_compress_gradients_later():
    with renamed("the argument 'accumulate'", "sum_format"):
        CompressionRequest("e5m2", {"accumulate": "fp16"})
    assert "accumulate" not in inspect.signature(lowp.compress_gradients).parameters
    with pytest.raises(TypeError, match="DistributedDataParallel"), renamed("the argument 'accumulate'", "sum_format"):
        lowp.compress_gradients(torch.nn.Linear(2, 2), "e5m2", accumulate="fp16")


def test_the_reduction():
    with renamed("the reduction 'hybrid'", "by_size"):
        assert reduction_of("hybrid") == reduction_of("by_size")
    assert str(reduction_of("by_size")) == "by_size(tree, two_shot, 65536)"
    with renamed("the reduction 'hybrid'", "by_size"):
        assert Wire(reduction="hybrid").reduction == "by_size"


def test_the_recipe(tmp_path):
    with renamed("the recipe 'simulate'", "posit8"):
        assert read_recipe("simulate") == read_recipe("posit8")
    file = tmp_path / "mine.toml"
    file.write_text('base = "simulate"\nepochs = 1\n')
    with renamed("the recipe 'simulate'", "posit8"):
        assert read_recipe(str(file)).precision.weights == "posit8"


OLD = {"accumulate": 4, "wire": {"accumulate": "fp16", "reduction": "hybrid", "format": "e5m2"}}
CHANGES = ["accumulate=4", "wire.accumulate=fp16", "wire.reduction=hybrid", "wire.format=e5m2"]


def as_file(tmp_path):
    file = tmp_path / "custom.toml"
    file.write_text('accumulate = 4\n[wire]\naccumulate = "fp16"\nreduction = "hybrid"\nformat = "e5m2"\n')
    return read_recipe(str(file))


def as_file_on_a_base(tmp_path):
    """A base has a value under the new name, which the old name must replace."""
    file = tmp_path / "custom.toml"
    file.write_text('base = "fp32"\naccumulate = 4\nwire = { accumulate = "fp16", reduction = "hybrid", format = "e5m2" }\n')
    return read_recipe(str(file))


@pytest.mark.parametrize(
    "made",
    [
        lambda _: Recipe(**OLD),
        lambda _: Recipe(accumulate=4, wire=Wire(**OLD["wire"])),
        lambda _: with_changes(Recipe(), **OLD),
        lambda _: with_changes(Recipe(micro_batches=2), **{"accumulate": 4, "wire.accumulate": "fp16"}, wire=OLD["wire"]),
        lambda _: read_recipe("fp32", CHANGES),
        as_file,
        as_file_on_a_base,
    ],
    ids=["python", "sections", "changes", "dots", "set", "file", "base"],
)
def test_keys_of_a_recipe(made, tmp_path):
    with (
        renamed("the key 'accumulate'", "micro_batches"),
        pytest.warns(FutureWarning, match=r"the key 'accumulate'( of \[wire\])? is called 'sum_format' now"),
        renamed("the reduction 'hybrid'", "by_size"),
    ):
        recipe = made(tmp_path)
    assert (recipe.micro_batches, recipe.wire.sum_format, recipe.wire.reduction) == (4, "fp16", "by_size")


def test_the_new_name_given_later_counts(tmp_path):
    file = tmp_path / "custom.toml"
    file.write_text("accumulate = 4\n")
    with renamed("the key 'accumulate'", "micro_batches"):
        assert read_recipe(str(file), ["micro_batches=2"]).micro_batches == 2


def test_other_keys_of_that_name_stay():
    recipe = read_recipe("fp32", ["precision.accumulate=fp16", "precision.layers.last.accumulate=fp32"])
    assert recipe.precision.accumulate == "fp16"
    assert recipe.precision.layers["last"].accumulate == "fp32"


def test_both_names():
    with pytest.raises(ValueError, match=r"'accumulate' of \[wire\] is the old name of 'sum_format': give one of them"):
        Recipe(wire={"accumulate": "fp16", "sum_format": "fp16"})
    assert with_current_names({"a": 1, "b": 2}, {"c": "d"}, "key") == {"a": 1, "b": 2}


def test_checkpoints_of_before():
    """Fingerprints as commit a8375ee computed them, where the keys had their old names."""
    assert fingerprint(read_recipe("aps8")) == "2a4006775b7b1e1f"
    assert fingerprint(read_recipe("posit8")) == "77379b1899f214af"
    changes = ["micro_batches=4", "wire.sum_format=fp16", "wire.reduction=by_size", "optimizer.lr=1e-7"]
    assert fingerprint(read_recipe("aps8", changes)) == "4cae88d4046a4303"


def lowp_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowp", *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )


def test_a_run_of_before_goes_on(tmp_path):
    """Its recipe.toml says the old names; two epochs and then a third one are three epochs."""
    small = ["--quiet", "--set", "data.limit=128", "--set", "learning_rate.kind=constant", "--set", "threads=1"]
    old = ["--set", "accumulate=2", "--set", "wire.accumulate=fp16", "--set", "wire.reduction=hybrid", "--virtual-ranks", "2"]
    first = lowp_command("train", "aps8", "--out", str(tmp_path / "old"), *small, *old, "--set", "epochs=2")
    assert [line.partition("'")[0] for line in first.stderr.splitlines()] == [
        "lowp: the key ",
        "lowp: the key ",
        "lowp: the reduction ",
    ]
    recipe = tmp_path / "old" / "recipe.toml"
    text = recipe.read_text()
    for new, before in (("micro_batches = 2", "accumulate = 2"), ('sum_format = "fp16"', 'accumulate = "fp16"')):
        assert new in text
        text = text.replace(new, before)
    recipe.write_text(text.replace('"by_size"', '"hybrid"'))
    assert Run.read(tmp_path / "old").recipe["wire"]["sum_format"] == "fp16"  # no warning: nobody has written it
    resumed = lowp_command("train", str(tmp_path / "old"), "--resume", "--quiet", "--set", "epochs=3")
    assert "'accumulate' of [wire] is called 'sum_format' now" in resumed.stderr
    today = ["--set", "micro_batches=2", "--set", "wire.sum_format=fp16", "--set", "wire.reduction=by_size"]
    whole = lowp_command(
        "train", "aps8", "--out", str(tmp_path / "new"), *small, *today, "--virtual-ranks", "2", "--set", "epochs=3"
    )
    assert not whole.stderr
    old_run, new_run = Run.read(tmp_path / "old"), Run.read(tmp_path / "new")
    assert (old_run.loss, old_run.train_loss, old_run.step) == (new_run.loss, new_run.train_loss, new_run.step)
