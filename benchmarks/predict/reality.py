"""Predicted steps against measured ones: on links of known speed, and between NCCL ranks on one GPU.

Rows of a link replace those of the same link in the file of results, so that links can be measured one by one.
"""

import argparse
import json
import os
import statistics
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness import facts_of, file_stem, heading, machine_name, table, write
from benchmarks.links.namespaces import HERE, LOOPBACK, CannotShapeError, Topology, link, network
from benchmarks.links.processes import RanksFailedError, end_on_sigterm, measured_rate, run_ranks
from benchmarks.predict.models import NAMES, ON_GPUS, named
from benchmarks.predict.steps import WIRES

from lowp.lab.mps import mps

MEDIAN, WORST, CHOICE = 0.10, 0.25, 0.05  # what is wanted
BUDGET = 0.3  # of the error of a plan: all wires here are within
NAME = "predict-reality"
CANNOT_RUN = 2


def on_links(options: argparse.Namespace) -> int:
    end_on_sigterm()
    models = options.models or (NAMES[:1] if options.quick else NAMES)
    for ranks in options.ranks:
        for rate in options.rates:
            try:
                with network(top := link(rate, ranks)) as nodes:
                    reached = 1.0 if rate == LOOPBACK else measured_rate(top, nodes)
                    rows = _measured(top, nodes, "cpu", models, options)
            except CannotShapeError as error:
                print(f"benchmarks predict: {error}", file=sys.stderr)
                return CANNOT_RUN
            except RanksFailedError as error:
                print(f"{top.name}: {error}", file=sys.stderr)
                return 1
            record(options.out, "cpu", [row | {"rate": rate, "reached": reached} for row in rows])
    return 0


def on_one_gpu(options: argparse.Namespace) -> int:
    end_on_sigterm()
    top = Topology((LOOPBACK,), options.nccl)
    with mps() if options.mps else nullcontext():
        rows = _measured(top, [HERE], "cuda", options.models or (ON_GPUS[:1] if options.quick else ON_GPUS), options)
    record(options.out, "cuda", [row | {"rate": "NCCL, one GPU" + (", MPS" if options.mps else "")} for row in rows])
    return 0


def again(options: argparse.Namespace) -> int:
    """Predict the steps in a file of results anew, from the calibrations in it: for when the predictor has changed."""
    found = json.loads(options.again.read_text())
    facts, rows = found["facts"], []
    for row in found["rows"]:
        if "cluster" in row:
            link = (row["link"], row["rate"])
            own = [other for other in found["rows"] if "error" in other and (other["link"], other["rate"]) == link]
            steps = [each | {"seconds": each["rounds"]} for each in own]
            models = dict.fromkeys(each["model"] for each in own)
            new = [each for model in models for each in compared(row["cluster"], model, row["ranks"], steps)]
            rows += [old | each for old, each in zip(own, new, strict=True)]
    rows += [row for row in found["rows"] if "error" not in row]
    write(options.out, NAME, facts, {"summary": summary(rows), "rows": rows}, _page(rows, facts))
    print("\n".join(summary(rows)), flush=True)
    return 0


def _page(rows: list[dict], facts: dict) -> list[str]:
    return [*heading("predicted steps against measured ones", facts), "", *summary(rows), "", *details(rows)]


def _measured(top: Topology, nodes: list, device: str, models: Any, options: argparse.Namespace) -> list[dict]:
    """Calibrate, measure and predict on one link: a row for each model and wire."""
    rounds, seconds = (2, 10.0) if options.quick else (options.rounds, options.seconds)
    first = {"kind": "calibrated", "name": top.name, "models": list(models), "wires": WIRES, "seconds": seconds}
    cases = [first, *({"kind": "steps", "model": model, "wires": WIRES, "rounds": rounds} for model in models)]
    found = run_ranks(top, nodes, {"interface": top.interface, "device": device, "cases": cases}, timeout=options.timeout)
    if device == "cuda":  # time on a GPU is dear: what was measured is kept, whatever becomes of the predictions
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{NAME}-measured.json").write_text(json.dumps(found))
    calibrated, *steps = found["rows"]
    print(f"{top.name}: calibrated in {calibrated['seconds_taken']:.0f} s, load {calibrated['load']:.1f}", flush=True)
    rows = [row for model in models for row in compared(calibrated["toml"], model, top.ranks, steps, device)]
    failures = [{"failure": f"{what}: {why}"} for what, why in found["failures"].items()]
    about = {"link": top.name, "ranks": top.ranks, "load": os.getloadavg()[0], "calibration": calibrated["seconds_taken"]}
    return [about | row for row in [*rows, *failures]] + [about | {"cluster": calibrated["toml"]}]


def compared(toml: str, model: str, ranks: int, steps: list[dict], device: str = "cpu") -> list[dict]:
    """Measured and predicted seconds of a model's steps, and which of them a plan chooses."""
    from lowp.predict.cluster_file import cluster_from
    from lowp.predict.gradients import gradients_of
    from lowp.predict.planning import plan
    from lowp.predict.prediction import predict
    from lowp.predict.subjects import subject_of

    cluster = cluster_from(tomllib.loads(toml))
    measured = {row["wire"]: row for row in steps if row.get("model") == model}
    if not measured:
        return []
    batch = cluster.device.times[named(model)].batch
    predicted = predict(named(model), cluster, list(measured), ranks, batch=batch).steps
    subject = subject_of(named(model), batch=4 * ranks, device=device)  # the batch of models that come with none
    gradients = gradients_of(subject, ranks)
    chosen = plan(
        named(model),
        cluster,
        ranks,
        wires=list(measured),
        max_error=BUDGET,
        batch=batch,
        bucket_mb=(25.0,),
        gradients=gradients,
    )
    fastest = min(statistics.median(row["seconds"]) for row in measured.values())
    rows = []
    for (wire, row), step in zip(measured.items(), predicted, strict=True):
        seconds = statistics.median(row["seconds"])
        rows.append(
            {
                "model": model,
                "wire": wire,
                "measured": seconds,
                "rounds": row["seconds"],
                "processor": row["processor"],
                "predicted": step.step,
                "error": step.step / seconds - 1,
                "times": {
                    key: getattr(step.times, key) for key in ("compute", "encode", "decode", "exposed", "hidden", "idle")
                },
                "over_fastest": seconds / fastest - 1,
                "chosen": wire == chosen.chosen.wire,
            }
        )
    return rows


def record(folder: Path, device: str, rows: list[dict]) -> None:
    """Write the rows beside those of other links that are there already, and show everything."""
    path = folder / f"{file_stem(machine_name(device))}-{NAME}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    links = {(row["link"], row["rate"]) for row in rows}
    rows = [row for row in before if (row["link"], row["rate"]) not in links] + rows
    facts = facts_of(device, 1)
    write(folder, NAME, facts, {"summary": summary(rows), "rows": rows}, _page(rows, facts))
    print("\n".join(summary(rows)), flush=True)


def summary(rows: list[dict]) -> list[str]:
    """By link: errors, and what plans are from the best."""
    steps = [row for row in rows if "error" in row]
    cells = []
    for name in dict.fromkeys((row["link"], row["rate"]) for row in steps):
        own = [row for row in steps if (row["link"], row["rate"]) == name]
        errors = [abs(row["error"]) for row in own]
        worst = max(own, key=lambda row: abs(row["error"]))
        plans = [row for row in own if row["chosen"]]
        cells.append(
            [
                name[0] if name[0].startswith(name[1]) else f"{name[1]}: {name[0]}",
                str(len(own)),
                f"{100 * statistics.median(errors):.1f} %",
                f"{100 * worst['error']:+.1f} % ({worst['model']}, {worst['wire']})",
                ", ".join(f"{row['model']}: {row['wire']} ({100 * row['over_fastest']:+.1f} %)" for row in plans),
            ]
        )
    errors = [abs(row["error"]) for row in steps]
    late = [row["over_fastest"] for row in steps if row["chosen"]]
    said = (
        f"{len(steps)} steps: median error {100 * statistics.median(errors):.1f} % (wanted {100 * MEDIAN:.0f} %), largest "
        f"{100 * max(errors):.1f} % (wanted {100 * WORST:.0f} %), {sum(error > WORST for error in errors)} above it. "
        f"{sum(each <= CHOICE for each in late)} of {len(late)} plans are within {100 * CHOICE:.0f} % of the fastest measured."
    )
    heads = ["link", "steps", "median error", "largest error", "plan's choice (over the fastest measured)"]
    return [said, "", *table(heads, cells)]


def details(rows: list[dict]) -> list[str]:
    cells = [
        [
            row["link"],
            row["model"],
            row["wire"] + (" *" if row["chosen"] else ""),
            f"{1e3 * row['measured']:.1f}",
            f"{1e3 * min(row['rounds']):.1f} - {1e3 * max(row['rounds']):.1f}",
            f"{1e3 * row['predicted']:.1f}",
            f"{100 * row['error']:+.1f} %",
            " / ".join(f"{1e3 * row['times'][key]:.1f}" for key in ("compute", "encode", "decode", "exposed", "idle")),
        ]
        for row in rows
        if "error" in row
    ]
    heads = [
        "link",
        "model",
        "wire",
        "measured ms",
        "rounds",
        "predicted",
        "error",
        "compute / encode / decode / exposed / idle",
    ]
    failures = [f"- {row['link']}: {row['failure']}" for row in rows if "failure" in row]
    return ["Milliseconds; * is what `lowp plan` chooses among these.", "", *table(heads, cells), "", *failures]
