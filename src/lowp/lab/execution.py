"""One run of a study, in this process: in a worker on this machine, or in a worker of Ray's on another."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowp.training.recipe import Recipe
from lowp.training.toml import plain


@dataclass(frozen=True)
class Job:
    """What a worker is told. `ranks` is how many processes the run takes."""

    name: str
    recipe: Recipe
    out: Path
    data: Path | None = None

    @property
    def ranks(self) -> int:
        return self.recipe.ranks

    def text(self) -> str:
        """One line of JSON."""
        where = {"out": str(self.out), "data": None if self.data is None else str(self.data)}
        return json.dumps({"name": self.name, "recipe": plain(self.recipe), **where})

    @classmethod
    def read(cls, text: str) -> "Job":
        told = json.loads(text)
        recipe = Recipe.model_validate_json(json.dumps(told["recipe"]), strict=True)
        return cls(told["name"], recipe, Path(told["out"]), None if told["data"] is None else Path(told["data"]))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, diverged, stopped or failed, and why."""

    name: str
    state: str
    reason: str
    seconds: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


def execute(job: Job) -> Outcome:
    """Begin the run, or go on with it. Whatever it raises is its outcome: the others go on."""
    from lowp.training.divergence import Diverged
    from lowp.training.run import run

    began = time.perf_counter()
    try:
        end = run(job.recipe, job.out, resume=True, data=job.data, quiet=True)
        state, reason = ("stopped", f"by {end['signal']}") if end["kind"] == "stopped" else ("finished", "")
    except Diverged as error:
        state, reason = "diverged", one_line(error)
    except KeyboardInterrupt:
        state, reason = "stopped", "by SIGINT"
    except Exception as error:  # whatever a model, a data set or torch raises
        state, reason = "failed", one_line(error)
    return Outcome(job.name, state, reason, time.perf_counter() - began)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
