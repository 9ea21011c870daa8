"""Sinks: what they are sent, once, whatever happens; and the progress that a terminal or a file shows."""

import io
import math
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lowp.training import sinks as module
from lowp.training.progress import Progress, fitting, summary_rows
from lowp.training.sinks import curves, open_sinks
from lowp.training.units import bytes_text, count_text, duration_text, loss_text, number_text, share_of_fp32, share_text

RECIPE = {"name": "aps8", "wire": {"format": "e5m2"}}


def train(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "train",
        "step": step,
        "epoch": step / 60,
        "loss": 0.5,
        "accuracy": 0.8,
        "lr": 0.1,
        "samples_per_second": 12345.6,
        "seconds": 0.02 * step,
        "bytes_sent": 100_000 * step,
        "bytes_of_fp32": 400_000 * step,
        "loss_scale": None,
        "skipped": 0,
        "wire": "e5m2 aps",
    }
    return record | changes


def result(step: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "test", "step": step, "epoch": step / 60, "loss": 0.4, "accuracy": 0.91} | changes


def event(step: int, message: str) -> dict[str, Any]:
    return {"kind": "event", "step": step, "message": message}


class FakeTracker:
    """A module with the interface that wandb and trackio share. `broken` is raised by what it names."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.broken: dict[str, Exception] = {}

    def init(self, **options: Any) -> Any:
        self._break("init")
        self.started.append(options)
        return SimpleNamespace(log=self._log)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._break("log")
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self._break("finish")
        self.finished += 1

    def _break(self, place: str) -> None:
        if place in self.broken:
            raise self.broken[place]


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch) -> tuple[str, FakeTracker]:
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, request.param, fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return request.param, fake


def test_curves_are_the_numbers_of_a_record():
    assert curves(result(60)) == {"test/epoch": 1.0, "test/loss": 0.4, "test/accuracy": 0.91}
    assert not {"train/loss_scale", "train/wire", "train/step", "train/kind"} & curves(train(20)).keys()
    assert curves(event(3, "resumed")) == {}


def test_tracker_gets_every_number_at_its_step(tracker, tmp_path):
    name, fake = tracker
    (sink,) = open_sinks([name], tmp_path, RECIPE, resumed_at=0)
    for record in (train(20), event(20, "promoted"), result(20)):
        sink.write(record)
    sink.close()
    assert fake.logged == [(20, curves(train(20))), (20, curves(result(20)))]
    assert fake.finished == 1
    (started,) = fake.started
    assert started["project"] == "lowp"
    assert started["config"] == RECIPE
    assert started["resume"] == "allow"


def test_tracker_knows_a_resumed_run_and_gets_nothing_twice(tracker, tmp_path):
    name, fake = tracker
    (first,) = open_sinks([name], tmp_path, RECIPE, resumed_at=0)
    for record in (train(20), train(40), result(40), train(60)):  # killed before the test at 60
        first.write(record)
    (again,) = open_sinks([name], tmp_path, RECIPE, resumed_at=20)
    for record in (train(40), result(40), train(60), result(60), train(80)):
        again.write(record)
    assert [(step, next(iter(numbers)).split("/")[0]) for step, numbers in fake.logged] == [
        (20, "train"),
        (40, "train"),
        (40, "test"),
        (60, "train"),
        (60, "test"),
        (80, "train"),
    ]
    key = {"wandb": "id", "trackio": "name"}[name]
    assert fake.started[0][key] == fake.started[1][key]
    assert fake.started[0][key].startswith(tmp_path.name)


def test_two_runs_of_one_name_are_two_runs(tracker, tmp_path):
    name, fake = tracker
    for place in ("here", "there"):
        (tmp_path / place / "aps8-001").mkdir(parents=True)
        open_sinks([name], tmp_path / place / "aps8-001", RECIPE, resumed_at=0)
    key = {"wandb": "id", "trackio": "name"}[name]
    assert fake.started[0][key] != fake.started[1][key]


def test_numbers_that_are_not_finite_are_sent(tracker, tmp_path):
    name, fake = tracker
    (sink,) = open_sinks([name], tmp_path, RECIPE, resumed_at=0)
    sink.write(train(20, loss=math.nan, loss_scale=math.inf))
    numbers = fake.logged[0][1]
    assert math.isnan(numbers["train/loss"])
    assert numbers["train/loss_scale"] == math.inf


def test_a_sink_that_fails_is_reported_once_and_dropped(tracker, tmp_path):
    name, fake = tracker
    said: list[str] = []
    (sink,) = open_sinks([name], tmp_path, RECIPE, resumed_at=0, report=said.append)
    sink.write(train(20))
    fake.broken = {"log": ConnectionError("the network\nis down"), "finish": OSError("so is the disk")}
    sink.write(train(40))
    fake.broken = {}
    sink.write(train(60))
    sink.close()
    assert said == [f"{name} failed at step 40 and is dropped: the network is down"]
    assert [step for step, _ in fake.logged] == [20]


def test_a_sink_that_fails_at_the_end_is_reported(tracker, tmp_path):
    name, fake = tracker
    (sink,) = open_sinks([name], tmp_path, RECIPE, resumed_at=0)
    fake.broken = {"finish": TimeoutError()}
    with pytest.warns(RuntimeWarning, match=f"{name} failed at the end: TimeoutError"):
        sink.close()
    sink.close()


def test_a_sink_that_cannot_be_opened_stops_a_new_run_only(tracker, tmp_path):
    name, fake = tracker
    fake.broken = {"init": RuntimeError("not logged in")}
    with pytest.raises(ValueError, match=f"cannot log to {name}: not logged in"):
        open_sinks([name], tmp_path, RECIPE, resumed_at=0)
    said: list[str] = []
    assert open_sinks([name], tmp_path, RECIPE, resumed_at=20, report=said.append) == []
    assert said == [f"cannot log to {name}: not logged in; the training goes on without it"]


def test_sinks_opened_before_one_that_fails_are_closed(monkeypatch, tmp_path):
    good, bad = FakeTracker(), FakeTracker()
    bad.broken = {"init": RuntimeError("no")}
    monkeypatch.setitem(sys.modules, "wandb", good)
    monkeypatch.setitem(sys.modules, "trackio", bad)
    with pytest.raises(ValueError, match="cannot log to trackio"):
        open_sinks(["wandb", "trackio"], tmp_path, RECIPE, resumed_at=0)
    assert good.finished == 1


def test_project_of_wandb(monkeypatch, tmp_path):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "formats")
    open_sinks(["wandb"], tmp_path, RECIPE, resumed_at=0)
    assert fake.started[0]["project"] == "formats"


@pytest.mark.parametrize("name", list(module.SINKS))
def test_a_package_that_is_missing(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ValueError, match=f"cannot log to {name}: the package {name} is not installed; pip install {name}"):
        open_sinks([name], tmp_path, RECIPE, resumed_at=0)


def test_unknown_sink(tmp_path):
    with pytest.raises(ValueError, match="unknown sink 'tensorbord'; the sinks are tensorboard, wandb, trackio"):
        open_sinks(["tensorbord"], tmp_path, RECIPE, resumed_at=0)


def test_damaged_notes_of_a_tracker(tracker, tmp_path):
    name, _ = tracker
    (tmp_path / f"{name}.json").write_text('{"id": "aps')
    with pytest.raises(ValueError, match=f"{name}.json is damaged"):
        open_sinks([name], tmp_path, RECIPE, resumed_at=0)


class TestTensorBoard:
    @pytest.fixture
    def read(self, tmp_path):
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        def curve(name: str) -> list[tuple[int, float]]:
            events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
            return [(scalar.step, scalar.value) for scalar in events.Scalars(name)]

        return curve

    def test_a_resumed_run_has_every_step_once(self, read, tmp_path):
        (first,) = open_sinks(["tensorboard"], tmp_path, RECIPE, resumed_at=0)
        for step in (20, 40, 60, 80):
            first.write(train(step, loss=1.0))
        (again,) = open_sinks(["tensorboard"], tmp_path, RECIPE, resumed_at=40)  # the first was killed: it is not closed
        for step in (60, 80, 100):
            again.write(train(step, loss=2.0))
        assert read("train/loss") == [(20, 1.0), (40, 1.0), (60, 2.0), (80, 2.0), (100, 2.0)]
        for sink in (first, again):
            sink.close()

    def test_a_run_that_begins_again_forgets_all(self, read, tmp_path):
        for loss in (1.0, 2.0):
            (sink,) = open_sinks(["tensorboard"], tmp_path, RECIPE, resumed_at=0)
            sink.write(result(0, loss=loss))
            sink.write(result(20, loss=loss))
            sink.close()
        assert read("test/loss") == [(0, 2.0), (20, 2.0)]

    def test_numbers_that_are_not_finite(self, read, tmp_path):
        (sink,) = open_sinks(["tensorboard"], tmp_path, RECIPE, resumed_at=0)
        sink.write(train(20, loss=math.nan, loss_scale=math.inf))
        sink.write(event(20, "the loss is nan"))
        sink.close()
        assert math.isnan(read("train/loss")[0][1])
        assert read("train/loss_scale") == [(20, math.inf)]


def make_progress(**options: Any) -> tuple[Progress, io.StringIO]:
    """180 steps in 3 epochs, into a buffer that is no terminal unless `terminal` says so."""
    out = io.StringIO()
    terminal = options.pop("terminal", False)
    environment = {"TERM": "xterm"}
    console = Console(
        file=out, width=options.pop("width", 80), force_terminal=terminal, color_system=None, _environ=environment
    )
    return Progress(180, 60, "aps8, 2 ranks", console=console, unit="images", **options), out


def test_a_file_gets_plain_lines():
    progress, out = make_progress()
    with progress:
        for step in (20, 40, 60):
            progress.step(train(step))
        progress.tested(result(60))
        progress.message("promoted [layer] fc1")
    lines = out.getvalue().splitlines()
    assert lines[0] == "aps8, 2 ranks"
    # Three records within seconds are one line.
    assert lines[1].startswith(
        "epoch 1/3  step 20/180  loss 0.5000  accuracy 80.00 %  12,346 images/s  2 MB sent, 25.00 % of fp32"
    )
    assert lines[2].split() == ["epoch", "train", "loss", "test", "loss", "accuracy", "lr", "sent", "of", "fp32", "images/s"]
    assert lines[3].split() == ["1", "0.5000", "0.4000", "91.00", "%", "0.1", "6", "MB", "25.00", "%", "12,346"]
    assert lines[4:] == ["promoted [layer] fc1"]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert max(map(len, lines[2:])) <= 80


def test_an_epoch_without_a_test_has_its_row_and_epochs_before_a_resume_have_none():
    progress, out = make_progress()
    for step in (80, 100, 120, 140):
        progress.step(train(step))
    rows = [line.split()[:4] for line in out.getvalue().splitlines() if line.startswith("     ")]
    assert rows == [["2", "0.5000", "-", "-"]]


def test_quiet_prints_only_the_end():
    progress, out = make_progress(quiet=True)
    progress.step(train(20))
    progress.tested(result(60))
    progress.message("resumed")
    assert out.getvalue() == ""
    progress.close({"accuracy": 0.9, "seconds": 65.0})
    assert out.getvalue() == "test accuracy  90.00 %\ntime           1:05\n"


def test_a_terminal_has_a_live_line_that_is_gone_at_the_end():
    progress, out = make_progress(terminal=True, width=140)
    with progress:
        progress.step(train(20))
        deadline = time.monotonic() + 1.5
        while "step 20/180" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    drawn = out.getvalue()
    assert "step 20/180  loss 0.5000  accuracy 80.00 %  12,346 images/s  2 MB sent, 25.00 % of fp32" in drawn
    assert "━" in drawn
    assert drawn.endswith("\x1b[2K")
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
    progress.close({})
    assert out.getvalue() == drawn


@pytest.mark.parametrize(
    ("room", "text"), [(99, "a  bb  ccc"), (10, "a  bb  ccc"), (9, "a  bb"), (5, "a  bb"), (1, "a"), (0, "a")]
)
def test_what_does_not_fit_a_terminal_is_left_out(room, text):
    assert fitting(["a", "bb", "ccc"], room) == text


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_live_line_is_one_line(width):
    progress, out = make_progress(terminal=True, width=width)
    with progress:
        progress.step(train(20))
    while_the_cursor_is_hidden = out.getvalue().split("\x1b[?25l")[1].split("\x1b[?25h")[0]
    last_frame = while_the_cursor_is_hidden.split("\x1b[2K")[-1]
    assert "step 20/180" in last_frame
    assert last_frame.count("\n") <= 1  # the one that ends it
    assert len(last_frame.strip()) < width


def test_a_step_costs_next_to_nothing():
    progress, _ = make_progress(terminal=True)
    with progress:
        began = time.perf_counter()
        for step in range(20_000):
            progress.step_done(step)
        assert (time.perf_counter() - began) / 20_000 < 20e-6


def test_rows_at_the_end():
    end = train(180, kind="end", best_accuracy=0.92, step_ms=18.3, memory_bytes=3_200_000, bytes_per_parameter=12.0)
    assert summary_rows(end, "images") == [
        ("test accuracy", "80.00 % (best 92.00 %)"),
        ("test loss", "0.5000"),
        ("sent by a rank", "18 MB (25.00 % of fp32)"),
        ("memory", "3.2 MB (12 B a parameter)"),
        ("step", "18.3 ms"),
        ("speed", "12,346 images/s"),
        ("time", "3.6 s"),
    ]
    assert summary_rows({"accuracy": None}) == []


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        *((bytes_text, *pair) for pair in [(None, "-"), (0, "0 B"), (812, "812 B"), (999.6, "1 kB"), (999_600, "1 MB")]),
        *((bytes_text, *pair) for pair in [(12_345_678, "12.3 MB"), (1.02e9, "1.02 GB"), (5e15, "5000 TB")]),
        *(
            (duration_text, *pair)
            for pair in [(None, "-"), (8.24, "8.2 s"), (59.97, "1:00"), (65, "1:05"), (7384.2, "2:03:04")]
        ),
        *((duration_text, *pair) for pair in [(math.inf, "-"), (3599.9, "1:00:00")]),
        *((count_text, *pair) for pair in [(None, "-"), (12345.6, "12,346"), (3.21, "3.2"), (3, "3"), (math.nan, "nan")]),
        *((share_text, *pair) for pair in [(None, "-"), (0.9134, "91.34 %"), (math.nan, "nan %")]),
        *((loss_text, *pair) for pair in [(None, "-"), (0.4, "0.4000"), (math.inf, "inf")]),
        *((number_text, *pair) for pair in [(None, "-"), (0.4, "0.4"), (3.2e-5, "3.2e-05")]),
    ],
)
def test_figures_as_text(write, value, text):
    assert write(value) == text


def test_share_of_fp32():
    assert share_of_fp32(1, 4) == 0.25
    assert share_of_fp32(0, 0) is None
    assert share_of_fp32(None, 4) is None
