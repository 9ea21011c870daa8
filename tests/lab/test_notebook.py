"""What formats, runs, studies and descriptions show in a notebook."""

from html.parser import HTMLParser

import pytest
import torch
from made_studies import plan_of, pretend, pretend_run, write_study

import lowp
from lowp.formats import FORMATS
from lowp.lab.results import study_results
from lowp.training.runs import Run


class Table(HTMLParser):
    """Rows of text; every element is closed, and no others than those of a table are there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.caption = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        else:
            self.caption += data


@pytest.mark.parametrize("name", [str(fmt) for fmt in FORMATS])
def test_every_format_shows_itself(name):
    fmt = lowp.format(name)
    table = Table(fmt._repr_html_())
    assert table.caption.startswith(name)
    assert dict(zip(*table.rows, strict=True))["bits"] == f"{fmt.bits:g}"


def test_a_description_shows_itself():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    assert "is not simulated" in Table(lowp.describe(model)._repr_html_()).caption
    lowp.simulate(model, weights="e4m3fn")
    rows = Table(lowp.describe(model)._repr_html_()).rows
    assert rows[0][:4] == ["layer", "type", "role", "format"]
    assert any("e4m3fn" in row for row in rows)


def test_a_run_and_a_study_show_themselves_and_escape_names(tmp_path):
    path = tmp_path / "<script>alert(1)<"
    pretend_run(path, 'name = "x"\n', 0.5)
    table = Table(Run.read(path)._repr_html_())
    assert table.caption == "<script>alert(1)<"
    assert dict(zip(*table.rows, strict=True))["accuracy"] == "50.00 %"
    body = '[changes]\n"<b>bold</b>" = "batch=16"'
    pretend(tmp_path / "s", plan_of(write_study(tmp_path, body)), lambda setting, seed: 0.5 + 0.01 * seed)
    rows = Table(study_results(tmp_path / "s")._repr_html_()).rows
    assert [row[0] for row in rows] == ["setting", "base", "<b>bold</b>"]
