"""`lowp train --set wire=plan`: the recipe gets a wire, is recorded with it, and goes on with it."""

import pytest

from lowp.predict.recipe_plan import planned_recipe
from lowp.training.check import check
from lowp.training.mistakes import RecipeError
from lowp.training.reading import read_recipe
from lowp.training.run import run

TINY = ["epochs=1", "batch=32", "model.options.hidden=[16]", "wire=plan", "threads=1"]


@pytest.fixture
def slow(tmp_path):
    file = tmp_path / "slow.toml"
    file.write_text(
        'name = "slow"\n[device]\nkind = "cpu"\nbandwidth = "10 GB/s"\nflops = "10 GFLOP/s"\n'
        '[[levels]]\nbandwidth = "1 Mbit/s"\nlatency = "10 us"\n'
    )
    return file


def test_a_word_is_the_whole_section(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "aps8"\nwire = "plan"\n')
    assert read_recipe(str(file)).wire.format == "plan"
    assert read_recipe("aps8", ["wire=plan", "wire.max_error=0.02"]).wire.max_error == 0.02
    with pytest.raises(RecipeError, match="wire"):
        read_recipe("aps8", ["wire=plam"])


def test_a_plan_is_recorded_and_repeated(tmp_path, slow):
    recipe = read_recipe("fp32", [*TINY, "virtual_ranks=2", f"wire.cluster={slow}"])
    said = []
    planned = planned_recipe(recipe, say=said.append)
    assert planned.wire.format != "plan"
    assert planned == planned_recipe(recipe, say=lambda text: None)
    assert any(line.startswith("plan: ") for line in said)
    assert any("not " in line for line in said)
    assert planned.wire.reduction == "one_shot"
    check(planned)
    run(planned, tmp_path / "run", quiet=True)
    assert planned_recipe(recipe, tmp_path / "run", say=said.append).wire == planned.wire
    assert "as planned before" in said[-1]


def test_a_budget_of_nothing_is_float32(slow):
    recipe = read_recipe("fp32", [*TINY, "virtual_ranks=2", f"wire.cluster={slow}", "wire.max_error=0"])
    assert planned_recipe(recipe, say=lambda text: None).wire.format == "fp32"


def test_one_process_has_no_link_to_measure():
    with pytest.raises(RecipeError, match=r"wire.format: plan needs links to measure"):
        planned_recipe(read_recipe("fp32", TINY))
    with pytest.raises(RecipeError, match=r"wire.format: plan is no format of its own"):
        check(read_recipe("fp32", TINY))


def test_other_recipes_stay_as_they_are():
    recipe = read_recipe("aps8")
    assert planned_recipe(recipe) is recipe


def test_only_gradients_are_planned_for(slow):
    recipe = read_recipe("fp32", [*TINY, "virtual_ranks=2", "parallel.kind=split", f"wire.cluster={slow}"])
    with pytest.raises(RecipeError, match=r"wire.format: plan is for gradients, and in split none travel"):
        planned_recipe(recipe)
