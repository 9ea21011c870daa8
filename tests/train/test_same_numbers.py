"""The same recipe gives the same numbers, bit for bit: run after run, real ranks or virtual ones, with or without a pause."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lowp.training.reading import read_recipe
from lowp.training.run import run
from lowp.training.trainer import Trainer
from lowp.training.world import World
from train import training
from train.training import OF_THE_RANKS, TINY, arguments, assert_same

NORMED = {"model__name": "train.training:normed", "model__options": "{width = 12}"}
PURE16 = {"precision__audit": "false"}  # it has tests of its own
BF16 = PURE16 | {"precision__weights": "bf16", "wire__format": "bf16", "precision__loss_scale": "none"}
FEEDBACK = {"wire__format": "e4m3fn", "wire__scale": "local", "wire__error_feedback": "true", "wire__rounding": "stochastic"}

# One line for each thing that has a state of its own, or draws numbers of its own.
CASES = {
    "fp32": ("fp32", {}),
    "aps": ("aps8", {}),
    "aps-delayed": ("aps8", {"wire__scale": "aps_delayed"}),
    "ring": ("aps8", {"wire__reduction": "ring"}),
    "error-feedback": ("fp32", FEEDBACK),
    "top-k": ("fp32", {"wire__format": "topk:0.1", "wire__error_feedback": "true"}),
    "hybrid": ("hybrid", {}),
    "batch-norm-micro-batches": ("aps8", NORMED | FEEDBACK | {"micro_batches": 2}),
    "many-buckets": ("aps8", {"wire__bucket_mb": 0.001, "model__options__hidden": [16, 16]}),
    "adamw-8-bit": ("fp32", {"optimizer__name": "adamw", "optimizer__lr": 0.01, "precision__state": "dynamic8"}),
    "lars": ("aps8", {"optimizer__name": "lars", "label_smoothing": 0.1}),
    "torch-rmsprop": ("aps8", {"optimizer__name": "torch:RMSprop", "optimizer__lr": 0.001}),
    "pure-bf16": ("pure16", BF16),
    "pure-fp16": ("pure16", PURE16),
    "per-layer-scale": ("pure16", PURE16 | {"precision__loss_scale": "per_layer"}),
    "mixed": ("mixed", {}),
    "posit8": ("posit8", {}),
    "posit8-stochastic": ("posit8", {"precision__rounding": "stochastic"}),
    "fp8": ("fp8", {}),
    "delayed": ("posit8", {"precision__scale": "delayed:3", "precision__rounding": "stochastic", "micro_batches": 2}),
    "scales-by-role": ("fp8", {"precision__scale": "{ weights = 'channel', activations = 'aps', errors = 'block:4' }"}),
    "narrow-sums": ("fp32", {"precision__accumulate": "e5m2", "precision__arithmetic": "{ rounding = 'stochastic' }"}),
    "fp8-all": ("fp8-all", {}),
    "fixed16": ("fixed16", {}),
    "master-of-torch": ("fp32", {"precision__master": "posit8", "optimizer__name": "torch:AdamW", "optimizer__lr": 0.01}),
    "posit-warmup": ("posit-warmup", {}),
    "muppet": ("muppet", {"epochs": 3, "precision__switch__patience": 1, "precision__switch__window": 2}),
    "promote": ("promote", {"optimizer__lr": 0.5}),
    "augment": ("aps8", {"data__augment": ["crop", "flip"]}),
}
# Those without a state beyond weights and momentum:
NO_STATE = {"fp32", "aps", "ring", "hybrid", "many-buckets", "lars", "mixed", "posit8", "fp8", "scales-by-role"}
SLOW = NO_STATE | {"narrow-sums", "fp8-all", "master-of-torch"}
REAL = ("aps", "batch-norm-micro-batches", "delayed")  # of these, with real ranks, in every run of the tests


def of_case(name: str, *more: str, out: Path | str, **changes) -> list[str]:
    recipe, own = CASES[name]
    return arguments(recipe, out, *more, **own | changes)


@pytest.fixture(scope="module")
def lowp_server(tmp_path_factory):
    with training.server(tmp_path_factory.mktemp("processes")) as found:
        yield found


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_here(words: list[str], *, resume: bool = False) -> None:
    """The command, in this process."""
    changes = [word for flag, word in pairwise(words) if flag == "--set"]
    run(read_recipe(words[1], changes), Path(words[words.index("--out") + 1]), resume=resume, quiet=True)


def stopped_at(run: Path, step: int, copy: Path) -> Path:
    """The run as it was when it was killed after the checkpoint of `step`."""
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return copy


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path, capsys):
    """From a checkpoint in the middle of an epoch."""
    setting = {"virtual_ranks": 2, "checkpoints__every": 1, "checkpoints__keep": 100, "log__every": 1}
    train_here(of_case(name, out=tmp_path / "whole", **setting))
    copy = stopped_at(tmp_path / "whole", 4, tmp_path / "resumed")
    train_here(of_case(name, out=copy, **setting), resume=True)
    assert_same(copy, tmp_path / "whole")


def test_resumed_in_the_middle_of_a_stretch_of_the_log(tmp_path, capsys):
    """A line of metrics.jsonl is about all steps since the line before, whoever took them."""
    setting = {"virtual_ranks": 2, "checkpoints__every": 1, "checkpoints__keep": 100, "log__every": 3}
    train_here(of_case("aps", out=tmp_path / "whole", **setting))
    copy = stopped_at(tmp_path / "whole", 4, tmp_path / "resumed")
    train_here(of_case("aps", out=copy, **setting), resume=True)
    assert_same(copy, tmp_path / "whole")


@pytest.mark.parametrize("step", [0, 6, 11, 12])
def test_resumed_at_the_edges(step, tmp_path, capsys):
    """At the first step, between two epochs where the formats change, before the last step, and after it."""
    setting = {"checkpoints__every": 1, "checkpoints__keep": 100, "log__every": 1}
    train_here(of_case("posit-warmup", out=tmp_path / "whole", **setting))
    copy = stopped_at(tmp_path / "whole", step, tmp_path / "resumed")
    train_here(of_case("posit-warmup", out=copy, **setting), resume=True)
    assert_same(copy, tmp_path / "whole")


@pytest.mark.parametrize("name", ["aps", "fp8"])
@pytest.mark.parametrize("step", [5, 6])
def test_health_is_the_same_after_a_resume(step, name, tmp_path, capsys):
    """Step 6 ends an epoch: the whole run has been tested while its next sample was open, the resumed one not."""
    setting = {"checkpoints__every": 1, "checkpoints__keep": 100, "log__health": 2}
    train_here(of_case(name, out=tmp_path / "whole", **setting))
    copy = stopped_at(tmp_path / "whole", step, tmp_path / "resumed")
    train_here(of_case(name, out=copy, **setting), resume=True)
    assert (copy / "health.jsonl").read_text() == (tmp_path / "whole" / "health.jsonl").read_text()


def test_how_often_a_run_is_tested_changes_nothing(tmp_path, capsys):
    """The test set has numbers above 7.9, which the samples of training that are used here do not have so early."""
    setting = {"data__limit": 32, "batch": 8, "epochs": 3, "checkpoints__every": 1, "checkpoints__keep": 100, "log__health": 1}
    setting |= {"precision__activations": "fixed3.4", "precision__promote__to": "fp32", "optimizer__lr": 0.02}
    for often in (0, 1):
        train_here(arguments("fp32", tmp_path / f"{often}", learning_rate__kind="constant", test_every=often, **setting))
    never, always = tmp_path / "0", tmp_path / "1"
    assert (never / "health.jsonl").read_text() == (always / "health.jsonl").read_text()
    last = [training.final_state(stopped_at(run, 12, tmp_path / f"{run.name}-copy")) for run in (never, always)]
    assert last[0][1] == last[1][1], "weights and counts of overflows"
    events = [[line for line in training.records(run) if line["kind"] == "event"] for run in (never, always)]
    assert events[0] == events[1]


@pytest.mark.other_cpu
def test_run_after_run(tmp_path, capsys):
    """And another seed gives other numbers, so that equality says something."""
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        train_here(of_case("batch-norm-micro-batches", out=tmp_path / name, virtual_ranks=2, seed=seed))
    assert_same(tmp_path / "one", tmp_path / "two")
    assert training.final_state(tmp_path / "one") != training.final_state(tmp_path / "other")


@pytest.mark.parametrize("augment", [[], ["crop", "flip"]])
def test_a_micro_batch_is_a_tensor_of_its_own(augment):
    """A product may have other bits where an operand's address is less round: a view into all ranks' samples would not do."""
    recipe = read_recipe("aps8", ["batch=30", "data.limit=60", "micro_batches=2", "virtual_ranks=3", f"data.augment={augment}"])
    trainer = Trainer(recipe, World(0, 1, torch.device("cpu")))
    for rank in range(3):
        for inputs, _ in trainer.micro_batches(rank):
            assert len(inputs) == 5
            assert inputs.storage_offset() == inputs.data_ptr() % 64 == 0


def real_and_virtual(server, name: str, ranks: int, folder: Path, **changes) -> None:
    server.run_ranks(of_case(name, "--ranks", str(ranks), out=folder / "real", **changes), ranks)
    server.run(of_case(name, "--virtual-ranks", str(ranks), out=folder / "virtual", **changes))
    assert_same(folder / "real", folder / "virtual", but=OF_THE_RANKS)


@pytest.mark.other_cpu
@pytest.mark.parametrize(("name", "ranks"), [(REAL[0], 3), (REAL[1], 2), (REAL[2], 2)])
def test_real_ranks_are_virtual_ranks(name, ranks, lowp_server, tmp_path):
    real_and_virtual(lowp_server, name, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_real_ranks_are_virtual_ranks_in_every_case(name, ranks, lowp_server, tmp_path):
    real_and_virtual(lowp_server, name, ranks, tmp_path)


@pytest.mark.other_cpu
@pytest.mark.parametrize("case", [REAL[1], "promote"])
def test_virtual_ranks_go_on_where_real_ones_stopped(case, lowp_server, tmp_path):
    """And the other way round: a checkpoint is of ranks, whoever stands for them."""
    setting = {"checkpoints__every": 1, "checkpoints__keep": 100}
    lowp_server.run(of_case(case, "--virtual-ranks", "2", out=tmp_path / "whole", **setting))
    copy = stopped_at(tmp_path / "whole", 4, tmp_path / "copy")
    lowp_server.run_ranks(of_case(case, "--ranks", "2", "--resume", out=copy, **setting), 2)
    assert_same(copy, tmp_path / "whole", but=OF_THE_RANKS)
    back = stopped_at(copy, 9, tmp_path / "back")
    lowp_server.run(of_case(case, "--virtual-ranks", "2", "--resume", out=back, **setting))
    assert_same(back, tmp_path / "whole", but=OF_THE_RANKS)


def test_the_settings_of_these_tests_exercise_something():
    """12 steps, and dropout: or equality would be cheap."""
    assert TINY["data.limit"] // TINY["batch"] * TINY["epochs"] == 12
    assert TINY["model.options.dropout"]
