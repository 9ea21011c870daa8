"""The report's document and page: every number is there, whatever runs are called and whatever is broken about them."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from made_studies import plan_of, pretend, pretend_run, write_study

from lowp.lab.report.document import VERSION, pareto, report_document, rounded
from lowp.lab.results import readable_results, study_results

EVIL = "<script>alert(1)</script>"
BODY = f'[changes]\n"good & cheap" = "batch=16"\n"{EVIL}" = "batch=8"\nlost = "batch=4"'


def accuracy(setting, seed):
    if setting == "lost":
        return "diverged"
    return 0.8 + 0.002 * seed + {"base": 0.0, "good & cheap": 0.001 * (seed % 2), EVIL: -0.2 + 0.001 * seed}[setting]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("report")
    pretend(where / "s", plan_of(write_study(where, BODY, head="seeds = 4")), accuracy, health=True)
    return where / "s"


@pytest.fixture(scope="module")
def document(folder):
    return report_document([study_results(folder)], "lowp report s", "cpu-1g")


def test_the_document_holds_what_the_study_says(folder, document):
    json.dumps(document, allow_nan=False)
    assert document["version"] == VERSION
    (study,) = document["studies"]
    assert [row["setting"] for row in study["settings"]] == ["base", "good & cheap", EVIL, "lost"]
    assert study["settings"] == rounded(study_results(folder).records())
    assert study["states"] == {"finished": 12, "diverged": 4}
    curve = study["curves"]["test accuracy"][0]
    assert curve["step"] == [40, 80, 120]
    assert curve["low"][-1] == pytest.approx(0.8)
    assert curve["high"][-1] == pytest.approx(0.806)
    assert curve["mean"][-1] == pytest.approx(0.803)
    assert study["recipes"]["keys"] == {"batch": ["32", "16", "8", "4"]}
    assert {(each["layer"], each["step"], each["rank"]) for each in study["trouble"]} == {("layers.2", 40, 3)}
    assert study["times"][0]["measured_ms"] == {"input": 0.2, "compute": 10.0, "exchange": 4.0, "update": 1.0}
    assert study["times"][0]["predicted_ms"]["compute"] > 0
    assert study["memory"][0]["bytes"] == {"weights": 400_000, "gradients": 400_000, "states": 400_000}


def test_health_is_kept_by_layer_role_and_step(document):
    health = document["studies"][0]["health"]
    assert len(health) == 4  # of the first seed's runs
    assert health[0]["steps"] == [40, 80, 120]
    row = next(row for row in health[0]["rows"] if (row["role"], row["layer"]) == ("updates", "layers.2"))
    assert row["underflow"] == [0.01, 0.02, 0.03]
    assert row["overflow"] == 0
    assert row["lost_updates"] == [0.2, 0.2, 0.2]
    assert row["exponents"][0][:3] == [-22, 2, 4]


def test_formats_of_the_explorer(document):
    formats = {each["name"]: each for each in document["formats"]}
    assert formats["e4m3fn"]["values"][-1] == 448
    assert len(formats["e2m1fn"]["values"]) == 7
    assert formats["fp16"]["values"] == []
    assert formats["e5m2"]["error"][-1] == pytest.approx(1 / 9, rel=1e-4)


def test_the_pareto_front():
    rows = [
        {"setting": name, "bytes_sent": sent, "mean": mean}
        for name, sent, mean in (("a", 4, 0.9), ("b", 1, 0.8), ("c", 2, 0.7), ("d", 2, 0.85), ("e", 8, 0.9), ("f", 1, None))
    ]
    assert pareto(rows, higher_is_better=True) == ["b", "d", "a"]
    assert pareto(rows, higher_is_better=False) == ["b", "c"]


def test_the_page_is_small_and_names_are_text(folder, document, run_report):
    text = run_report(folder)
    assert len(text.encode()) < 6_000_000
    assert EVIL not in text
    block = re.search(r'<script id="report-data" type="application/json">(.*?)</script>', text, re.DOTALL)
    found = json.loads(block[1])
    assert found["studies"][0]["settings"] == document["studies"][0]["settings"]
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text.partition('<script id="plotly-packed"')[0])


@pytest.fixture
def run_report(tmp_path):
    pytest.importorskip("plotly")
    from typer.testing import CliRunner

    from lowp.cli import app

    def make(*paths: Path, code: int = 0, said: str = "") -> str:
        result = CliRunner().invoke(app, ["report", *map(str, paths), "-o", str(tmp_path / "r.html")])
        assert result.exit_code == code, result.output
        assert said in result.stderr
        return (tmp_path / "r.html").read_text() if code == 0 else ""

    return make


def test_what_is_broken_is_said_and_the_rest_is_reported(tmp_path, run_report):
    """A broken line of metrics and of health, a status that is no JSON, a study of another version, and what is no run."""
    pretend_run(tmp_path / "good", 'name = "good"\n', 0.5, health=True)
    pretend_run(tmp_path / "torn", 'name = "torn"\n[wire]\nformat = "e5m2"\n', 0.6, health=True)
    with (tmp_path / "torn" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with (tmp_path / "torn" / "health.jsonl").open("a") as file:
        file.write("nonsense\n")
    (tmp_path / "torn" / "status.json").write_text("{")
    other = tmp_path / "other"
    other.mkdir()
    (other / "plan.json").write_text('{"version": 99}')
    text = run_report(tmp_path / "good", tmp_path / "torn", other, tmp_path / "none", said="is of version 99")
    assert "skipped 1 damaged" in text
    results, unreadable = readable_results([tmp_path / "good", tmp_path / "torn", other])
    assert [setting.name for setting in results[0].settings] == ["good", "torn"]
    assert len(unreadable) == 1
    assert run_report(tmp_path / "none", code=2, said="is neither a run nor a study") == ""


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("plotly")
    from lowp.lab.live import LiveServer

    pretend_run(tmp_path / "runs" / "one", 'name = "one"\n', 0.5)
    with LiveServer(tmp_path / "runs", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_live_page_follows_the_runs(server, tmp_path):
    def get(path: str, **headers: str) -> str:
        request = urllib.request.Request(server.address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    assert server.server_address[0] == "127.0.0.1"
    first = json.loads(get("state"))["stamp"]
    assert f'"stamp":"{first}"' in get("")
    assert json.loads(get("state"))["stamp"] == first
    time.sleep(0.01)
    pretend_run(tmp_path / "runs" / "two", 'name = "two"\nbatch = 8\n', 0.7)
    second = json.loads(get("state"))["stamp"]
    assert second != first
    assert '"setting":"two"' in get("")
    for path, host, status in (("etc/passwd", "127.0.0.1:1", 404), ("", "evil.example:80", 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(path, Host=host)
        assert refused.value.code == status
        refused.value.close()
