"""Whole trainings in narrow numbers, as papers did them: what is computed, what is kept, and what is summed.

Each is `fp32`, on the embedded data set, with the paper's formats. Where a recipe changes how it is optimized, `fp32` with the
same optimizer is what to compare it with (benchmarks/papers.py does). What differs from the paper is said.
"""

from lowp.training.reading import with_changes as changed
from lowp.training.recipe import Recipe
from lowp.training.recipes.precisions import fp32
from lowp.training.recipes.registry import named


@named
def fp8_all() -> Recipe:
    """Weights, activations, errors and gradients in e5m2, master weights in FP16, stochastic rounding (arXiv 1905.12334).

    Weights are rounded to nearest for forward and backward, what flows and what is updated stochastically. The logits are in
    FP16: in e5m2, with two bits of mantissa, classes tie. The loss scale is dynamic; the paper's has a floor as well, raised
    twice in the course of a long training, where here it may fall to 1.
    """
    roles = ("weights", "activations", "errors", "gradients")
    return changed(
        fp32(),
        precision={
            **dict.fromkeys(roles, "e5m2"),
            "rounding": dict.fromkeys(roles[1:], "stochastic"),
            "layers": {"last": {"activations": "fp16"}},
            "master": "fp16",
            "update": "stochastic",
            "loss_scale": "dynamic",
        },
    )


@named
def fixed16() -> Recipe:
    """Weights, activations, errors and gradients in 16-bit fixed point, with stochastic rounding (arXiv 1502.02551).

    A sign, 7 bits before the point and 8 after it: the paper's <8, 8>. Sums inside layers are FP32. Errors are not divided by
    the batch before they are rounded (that is the loss scale), and there is no momentum, whose float32 would carry what fixed
    point loses. --set precision.rounding=nearest --set precision.update=nearest shows what stochastic rounding is good for.
    """
    return changed(
        fp32(),
        epochs=10,
        optimizer={"momentum": 0.0},
        precision={
            "weights": "fixed7.8",
            "activations": "fixed7.8",
            "errors": "fixed7.8",
            "gradients": "fixed7.8",
            "rounding": "stochastic",
            "master": "fixed7.8",
            "update": "stochastic",
            "loss_scale": 128.0,
        },
    )


@named
def posit_warmup() -> Recipe:
    """An epoch in FP32, then posit16 with a scale for each tensor (arXiv 1909.03831).

    The scale puts a tensor's largest number where posits begin to lose fraction bits; the paper centres the mean of the
    logarithms instead. Both keep the bulk of the numbers where posits are finest.
    """
    roles = {"weights": "posit16", "activations": "posit16", "errors": "posit16", "gradients": "posit16"}
    return changed(
        fp32(),
        precision={
            "scale": "tensor",
            "schedule": [{"epoch": 1, **roles, "wire": "posit16"}],
        },
        wire={"scale": "none"},
    )


@named
def posit8_quire() -> Recipe:
    """Posit8 with exact sums, and posit16 for what the optimizer keeps (arXiv 2105.00053).

    Every sum of products is exact and rounded once, as in a quire. Errors are not divided by the batch before they are rounded
    (that is the loss scale): posits are finest around 1.
    """
    return changed(
        fp32(),
        precision={
            "weights": "posit8",
            "activations": "posit8",
            "errors": "posit8",
            "gradients": "posit8",
            "accumulate": "posit8",
            "arithmetic": {"quire": True},
            "master": "posit16",
            "update": "nearest",
            "loss_scale": 128.0,
        },
    )


@named
def no_multiply() -> Recipe:
    """No multiplication in forward and backward: bits are added instead (arXiv 2012.03458).

    The bits of two FP32 numbers, added as integers, are roughly those of their product: up to 11 % too small. Sums are FP32.
    """
    return changed(fp32(), precision={"arithmetic": {"approximate": "integer_add"}})
