"""A study's file: what it may say, the runs that it means, and every mistake in it named before a run starts."""

import pytest
from made_studies import plan_of, write_study

from lowp.lab.study import StudyError, read_study

AXES = """[axes]
"wire.format" = ["e5m2", "e4m3fn"]
"wire.scale" = ["none", "aps"]
[axes.ranks]
"2 real" = "ranks=2"
"4 v" = "virtual_ranks=4"
"""


def test_axes_are_crossed_and_the_base_recipe_is_the_baseline(tmp_path):
    plan = plan_of(write_study(tmp_path, AXES))
    assert [setting.name for setting in plan.settings][:3] == ["base", "e5m2 none 2 real", "e5m2 none 4 v"]
    assert len(plan.settings) == 1 + 2 * 2 * 2
    assert plan.baseline == "base"
    last = plan.settings[-1].recipe
    assert (last.wire.format, last.wire.scale, last.ranks, last.virtual_ranks, last.batch) == ("e4m3fn", "aps", 1, 4, 32)


def test_runs_are_ordered_seed_by_seed_and_have_names_of_their_own(tmp_path):
    plan = plan_of(write_study(tmp_path, AXES, head="seeds = [7, 3]"))
    assert [run.seed for run in plan.runs] == [7] * 9 + [3] * 9
    assert [run.recipe.seed for run in plan.runs] == [run.seed for run in plan.runs]
    assert len({run.name for run in plan.runs}) == 18


def test_combinations_can_be_left_out(tmp_path):
    skip = '[[skip]]\nranks = "2 real"\n"wire.scale" = ["none", "aps"]\n'
    names = [setting.name for setting in plan_of(write_study(tmp_path, f"{AXES}\n{skip}")).settings]
    assert len(names) == 1 + 4
    assert not any("real" in name for name in names)


def test_single_changes_and_a_named_baseline(tmp_path):
    body = '[changes]\n"eight" = ["wire.format=e5m2", "virtual_ranks=2"]\n"plain" = "virtual_ranks=2"'
    plan = plan_of(write_study(tmp_path, body, head='seeds = 1\nbaseline = "plain"'))
    assert ([setting.name for setting in plan.settings], plan.baseline) == (["eight", "plain"], "plain")


def test_a_setting_that_is_the_base_recipe_is_the_baseline(tmp_path):
    plan = plan_of(write_study(tmp_path, '[axes]\n"optimizer.lr" = [0.1, 0.05]', head="seeds = 1"))
    assert (len(plan.settings), plan.baseline) == (2, "lr=0.1")


def test_numbers_stand_with_their_key(tmp_path):
    plan = plan_of(write_study(tmp_path, '[axes]\nbatch = [16, 64]\n"wire.kahan" = [true, false]'))
    assert {"batch=16 kahan=true", "batch=64 kahan=false"} <= {setting.name for setting in plan.settings}


def test_health_is_sampled_in_the_first_seed_alone(tmp_path):
    plan = plan_of(write_study(tmp_path, AXES, head="seeds = 2\nhealth = 3"))
    assert {(run.seed, run.recipe.log.health) for run in plan.runs} == {(0, 3), (1, 0)}


def test_names_that_differ_in_signs_alone_get_directories_of_their_own(tmp_path):
    body = '[changes]\n"a/b" = "batch=16"\n"a:b" = "batch=64"\n"A b" = "batch=8"\n"<script>" = "batch=4"'
    plan = plan_of(write_study(tmp_path, body))
    slugs = [setting.slug for setting in plan.settings]
    assert len({slug.lower() for slug in slugs}) == len(slugs)
    assert all("/" not in slug and "<" not in slug for slug in slugs)


MISTAKES = {
    'sedes = 3\n[changes]\na = "batch=8"': r"sedes: no such key; did you mean 'seeds'",
    'seeds = 0\n[changes]\na = "batch=8"': "seeds: at least one seed",
    'seeds = [1, 1]\n[changes]\na = "batch=8"': "seeds: a seed is named twice",
    'seeds = "many"\n[changes]\na = "batch=8"': "seeds: 'many' is neither",
    'metric = "acuracy"\n[changes]\na = "batch=8"': "unknown metric 'acuracy'; did you mean 'accuracy'",
    'margin = -1\n[changes]\na = "batch=8"': "margin: -1 must be at least 0",
    'baseline = "b"\n[changes]\na = "batch=8"': "baseline: there is no setting 'b'",
    "": "there is nothing to compare",
    '[changes]\na = "batch"': "'batch' is no change: it is written KEY=VALUE",
    '[changes]\na = "bacth=8"': r"setting 'a'.*bacth.*did you mean batch",
    '[changes]\na = "wire.format=e5m"': "setting 'a'.*e5m",
    '[changes]\na = "batch=8"\nb = "batch=8"': "settings 'a' and 'b' are the same recipe",
    '[changes]\na = ["ranks=2", "virtual_ranks=4"]': "setting 'a' cannot be run",
    '[axes]\n"wire.format" = "e5m2"': "axes.wire.format: 'e5m2' is neither a list",
    '[axes]\n"wire.format" = []': "axes.wire.format: at least one value",
    '[axes]\n"wire.format" = ["e5m2", "e5m2"]': "axes.wire.format: 'e5m2' is there twice",
    "[axes]\nbatch = [8, 16]\n[[skip]]\nbacth = 8": r"skip\[0\].bacth: no such axis; did you mean 'batch'",
    "[axes]\nbatch = [8, 16]\n[[skip]]\nbatch = 9": r"skip\[0\].batch: the axis has no '9'",
    "[axes]\nbatch = [8, 16]\n[[skip]]\nbatch = [8, 16]": "no combination of the axes is left",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=[message[:30] for message in MISTAKES.values()])
def test_a_mistake_is_one_line_that_names_it(tmp_path, text, message):
    tables = next((place for place, line in enumerate(text.splitlines()) if line.startswith("[")), 0)
    lines = text.splitlines()
    path = write_study(tmp_path, "\n".join(lines[tables:]), head="\n".join(lines[:tables]))
    with pytest.raises(StudyError, match=message) as caught:
        plan_of(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"base = 1\n", b'name = "a/b"\nbase = "fp32"\n'])
def test_a_file_that_is_no_study_is_refused(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(StudyError, match=r"bad\.toml"):
        read_study(path)


def test_a_study_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises((StudyError, OSError)):
        read_study(tmp_path / "none.toml")
