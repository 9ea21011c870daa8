"""The README's table of formats is printed by the code."""

from pathlib import Path

import pytest

from lowp.cli.readme import BEGIN, END, format_table_markdown, main, rewritten
from lowp.formats import FORMATS

README = Path(__file__).parents[2] / "README.md"


def test_table_has_every_format_in_equal_columns():
    lines = format_table_markdown().splitlines()
    assert [line.split("`")[1] for line in lines if "`" in line] == [str(entry) for entry in FORMATS]
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {7}
    assert "| `e4m3fn` | 8 | 448 | 0.00195 | 0.125 | NaN, -0 |" in [" ".join(line.split()) for line in lines]


def test_rewrite_then_check(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(readme), "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert "old" in readme.read_text()  # checking changes nothing
    assert main([str(readme)]) == 0
    assert readme.read_text() == f"before\n{BEGIN}\n\n{format_table_markdown()}\n\n{END}\nafter\n"
    assert main([str(readme), "--check"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_marks_must_be_there_once(text):
    with pytest.raises(ValueError, match="formats:begin"):
        rewritten(text)


def test_unreadable_readme(tmp_path, capsys):
    assert main([str(tmp_path / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err


def test_the_readme_is_up_to_date():
    assert main([str(README), "--check"]) == 0
