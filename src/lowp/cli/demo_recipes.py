"""The five trainings of `lowp demo`: one network on one data set, and what changes from one to the next.

Why this network: a plain deep MLP with torch's usual first weights has small gradients. Before the first step, those of all
layers but the last are below 2^-10, half of the smallest number that e4m3fn has: as they are, they become 0. After an epoch it
is still half of them and more. LARS gives every layer a step in proportion to its weights, however small its gradients, so in
FP32 all layers learn.
"""

from dataclasses import dataclass
from typing import Any

from lowp.training.recipe import Recipe
from lowp.training.recipes import changed, fp32, pure16

EIGHT_BITS = "e4m3fn"
FOUR_BITS = "e2m1fn"


@dataclass(frozen=True)
class Variant:
    """One training. Its recipe's name is also that of its directory."""

    label: str
    recipe: Recipe


def variants(ranks: int, seed: int, quick: bool) -> list[Variant]:
    """FP32 first: the others are compared with it."""
    base = _base(ranks, seed, quick)
    eight = changed(base, name="unscaled8", wire={"format": EIGHT_BITS, "scale": "none"})
    return [
        Variant("fp32", base),
        Variant("8 bits, unscaled", eight),
        Variant("8 bits, APS", changed(eight, name="aps8", wire={"scale": "aps"})),
        Variant("4 bits, scaled", changed(base, name="block4", wire={"format": FOUR_BITS})),
        Variant(
            "pure FP16", changed(base, name="pure16", precision=_unaudited(pure16()), wire={"format": "fp16", "scale": "none"})
        ),
    ]


def _unaudited(recipe: Recipe) -> dict[str, Any]:
    """Without a compiler, updates are torch's own operations, through FP32 tensors: right, but nothing that passes an audit."""
    return recipe.precision.model_dump() | {"audit": False}


def _base(ranks: int, seed: int, quick: bool) -> Recipe:
    """Everything in FP32, on the CPU: two ranks would not share one GPU.

    One thread each, so that the numbers do not depend on the machine's cores. `quick` shows the works, and teaches nothing.
    """
    epochs = 1 if quick else 6
    return changed(
        fp32(),
        name="fp32",
        description="a training of lowp demo",
        seed=seed,
        ranks=ranks,
        device="cpu",
        threads=1,
        epochs=epochs,
        batch=128,
        model={"options": {"hidden": [128] * 6}},
        optimizer={"name": "lars", "lr": 1.0, "trust": 0.01},
        learning_rate={"kind": "cosine", "warmup": epochs / 6},
        data={"limit": 512 if quick else 0},
        checkpoints={"every": 1 << 20, "keep": 1},  # at the end alone
        log={"every": 6},
    )
