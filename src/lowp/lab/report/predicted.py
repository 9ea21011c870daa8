"""A step of each setting, predicted for a cluster (lowp.predict): what the same ranks would take there."""

from typing import Any

from lowp.lab.results import SettingRuns, StudyResults


def predicted_steps(results: StudyResults, cluster: str) -> tuple[dict[str, dict[str, float]], str]:
    """Milliseconds of a step by phase, by setting, where it can be said; and why the others have none (the first reason)."""
    if not cluster:
        return {}, ""
    from lowp.predict.cluster_file import cluster_of

    machine = cluster_of(cluster)
    found: dict[str, dict[str, float]] = {}
    reason = ""
    models: dict[str, Any] = {}
    for setting in results.settings:
        try:
            found[setting.name] = _step_of(setting, machine, models)
        except Exception as error:  # of a user's model or data: a report is made without it
            reason = reason or f"{setting.name}: {' '.join(str(error).split()) or type(error).__name__}"
    return found, reason


def _step_of(setting: SettingRuns, machine: Any, models: dict[str, Any]) -> dict[str, float]:
    from lowp.predict.prediction import predict

    recipe = _recipe(setting)
    if recipe.parallel.kind != "data":
        raise ValueError("only data-parallel steps are predicted")
    ranks = max(recipe.ranks, recipe.virtual_ranks)
    workload = _workload(recipe, models)
    wire = recipe.wire
    plain = wire.format in ("fp32", "fp16", "bf16")
    text = wire.format if plain else f"{wire.format}{f'/{wire.scale}' * bool(wire.scale)}@{wire.reduction}"
    batch = max(1, recipe.batch // ranks)
    times = predict(workload, machine, text, ranks, batch=batch, bucket_mb=wire.bucket_mb).steps[0].times
    exchange = {"encode": times.encode, "decode": times.decode, "exposed": times.exposed}
    return {name: 1e3 * seconds for name, seconds in ({"compute": times.compute} | exchange).items()}


def _recipe(setting: SettingRuns) -> Any:
    from lowp.training.reading import read_recipe
    from lowp.training.rundir import RECIPE

    run = next((run for run in setting.runs.values()), None)
    if run is None:
        raise ValueError("it has no run yet")
    return read_recipe(str(run.path / RECIPE))


def _workload(recipe: Any, models: dict[str, Any]) -> Any:
    """One for each model: the layers, and the work of a sample."""
    import torch

    from lowp.predict.architectures import workload_of
    from lowp.training.data import open_data
    from lowp.training.data.base import Request
    from lowp.training.models import build_model
    from lowp.training.toml import plain

    key = repr(plain(recipe)["model"]) + repr(plain(recipe)["data"])
    if key not in models:
        data = open_data(recipe.data, device=torch.device("cpu"), dtype=torch.float32, directory=None)
        model = build_model(recipe.model.name, shape=data.shape, classes=data.classes, options=recipe.model.options)
        inputs, _ = next(iter(data.test.stream([Request(torch.arange(2), ("test", 0))])))
        models[key] = workload_of(model, inputs)
    return models[key]
