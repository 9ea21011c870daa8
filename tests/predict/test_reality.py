"""Steps that were measured (`python -m benchmarks predict --links`): the predictions in the results are those of this code."""

import importlib
import json
import statistics
import tomllib
from pathlib import Path

import pytest

from lowp.predict.cluster_file import cluster_from
from lowp.predict.prediction import predict

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-predict-reality.json"))


@pytest.fixture
def reality(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.predict.reality")


@pytest.fixture(params=RESULTS, ids=lambda path: path.stem)
def found(request):
    return json.loads(request.param.read_text())


def test_there_are_results():
    assert RESULTS


def test_recorded_predictions_are_this_codes(found, reality):
    clusters = {(row["link"], row["rate"]): row["cluster"] for row in found["rows"] if "cluster" in row}
    steps = [row for row in found["rows"] if "error" in row]
    for link, toml in clusters.items():
        cluster = cluster_from(tomllib.loads(toml))
        for model in dict.fromkeys(row["model"] for row in steps):
            own = [row for row in steps if (row["link"], row["rate"], row["model"]) == (*link, model)]
            batch = cluster.device.times[reality.named(model)].batch
            predicted = predict(reality.named(model), cluster, [row["wire"] for row in own], own[0]["ranks"], batch=batch).steps
            assert [step.step for step in predicted] == pytest.approx([row["predicted"] for row in own], rel=1e-9)


def test_the_summary_is_of_these_rows(found, reality):
    assert found["summary"] == reality.summary(found["rows"])


def test_what_is_wanted_was_reached(found, reality):
    """A median error of 10 %, none above 25 %, all plans within 5 % of the fastest that was measured; on every link."""
    steps = [row for row in found["rows"] if "error" in row]
    for link in {(row["link"], row["rate"]) for row in steps}:
        errors = [abs(row["error"]) for row in steps if (row["link"], row["rate"]) == link]
        assert statistics.median(errors) <= reality.MEDIAN == 0.1
        assert max(errors) <= reality.WORST == 0.25
    plans = [row["over_fastest"] for row in steps if row["chosen"]]
    assert len(plans) == len({(row["link"], row["rate"], row["model"]) for row in steps})
    assert max(plans) <= reality.CHOICE == 0.05


def test_all_links_were_measured():
    steps = [row for path in RESULTS for row in json.loads(path.read_text())["rows"] if "error" in row and "bit" in row["rate"]]
    rates = ("100mbit", "200mbit", "1gbit", "10gbit")
    assert {(row["rate"], row["ranks"]) for row in steps} == {(rate, ranks) for rate in rates for ranks in (2, 4)}
    assert {row["model"] for row in steps} == {"mlp", "resnet18", "gpt"}
