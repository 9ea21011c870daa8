"""Precisions, on the embedded data set: each is `fp32` and what it changes."""

from lowp.training.reading import with_changes as changed
from lowp.training.recipe import Recipe
from lowp.training.recipes.registry import named


@named
def fp32() -> Recipe:
    """The baseline: everything in FP32.

    A small MLP on fashion14, which lies inside the package: nothing is downloaded.
    """
    return Recipe(
        epochs=6,
        batch=128,
        model={"name": "mlp", "options": {"hidden": [256, 128]}},
        data={"name": "fashion14"},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        learning_rate={"kind": "cosine", "warmup": 0.5},
    )


@named
def mixed() -> Recipe:
    """FP16 with FP32 master weights and a dynamic loss scale (arXiv 1710.03740).

    Weights, optimizer and gradients are FP32; forward and backward compute in FP16 under torch's autocast.
    """
    return changed(fp32(), precision={"activations": "fp16", "loss_scale": "dynamic"})


@named
def pure16() -> Recipe:
    """FP16 everywhere, no FP32 tensor at all: weights, gradients, states, wire.

    Updates are rounded stochastically, the loss scale is dynamic, and the first step runs under lowp.audit. It allows two kinds
    of temporaries: sums inside torch's own kernels, and the wire's sums of several ranks, which are FP32 and rounded once
    (--set wire.reduction=sequential adds in FP16). Slow on CPUs without FP16 units: --set precision.weights=bf16
    --set wire.format=bf16 is faster there.
    """
    return changed(
        fp32(),
        precision={"weights": "fp16", "update": "stochastic", "loss_scale": "dynamic", "audit": True},
        wire={"format": "fp16", "scale": "none"},
    )


@named
def aps8() -> Recipe:
    """Gradients travel in e5m2 with Auto Precision Scaling; sums are FP32, rounded once (not the paper's).

    One power of two for each layer, agreed between ranks by one byte (arXiv 1911.08907). --set wire.scale=none shows what that
    is good for. `aps8-paper` also adds in 8 bits, as the paper does. With one rank nothing travels: --ranks 2.
    """
    return changed(fp32(), wire={"format": "e5m2", "scale": "aps"})


@named
def aps8_paper() -> Recipe:
    """APS as published: every partial sum of the gradients is rounded to e5m2 too (arXiv 1911.08907).

    8 virtual ranks are added one after the other. The paper's 256 ranks are 8 processes of 32 ranks, which are added inside
    the processes first, then between them: --virtual-ranks 256 --set batch=256
    --set "wire.reduction=hierarchical(32, leaders)" --set wire.sum_format=e5m2. That rounds where the paper rounds, but for two
    things: APS is applied once, with room for 256 addends, where the paper applies it on each level; and the processes' sums
    are added as a ring adds, each part beginning at another process.
    """
    return changed(aps8(), virtual_ranks=8, wire={"reduction": "sequential"})


@named
def fp8() -> Recipe:
    """FP8 throughout: weights and activations e4m3fn, gradients e5m2, states and wire 8 bits (arXiv 2310.18313).

    What is multiplied is rounded to FP8, each tensor with its own power of two; sums, in layers and on the wire, are FP32. The
    optimizer's momentum is e4m3fn; the weights that it updates are FP32.
    """
    return changed(
        fp32(),
        precision={
            "weights": "e4m3fn",
            "activations": "e4m3fn",
            "errors": "e5m2",
            "gradients": "e5m2",
            "scale": "tensor",
            "state": "e4m3fn",
        },
        wire={"format": "e5m2", "scale": "aps"},
    )


@named
def posit8() -> Recipe:
    """Weights, activations and errors in posit8, or in a format of your choice.

    Gradients of weights, optimizer states and updates are FP32. --set precision.weights=e3m4 --set precision.activations=int8
    ... tries another one.
    """
    return changed(
        fp32(),
        precision={"weights": "posit8", "activations": "posit8", "errors": "posit8", "scale": "tensor"},
    )


# Formats that change: by layer, by epoch, by what the numbers do.


@named
def hybrid() -> Recipe:
    """Hybrid precision: 4 bits on the wire, 16 for the last layer and FP32 for biases.

    Every 32 numbers of 4 bits have a scale of their own, the default of formats of fewer than 8 bits.
    """
    return changed(fp32(), wire={"format": "e2m1fn", "layers": {"last": "fp16"}, "skip": ["1d"]})


@named
def muppet() -> Recipe:
    """Switch to a wider format when gradients stop being diverse (MuPPET, arXiv 2006.09049)."""
    return changed(fp32(), precision={"scale": "tensor", "switch": {"ladder": ["e4m3fn", "fp16", "fp32"]}})


@named
def promote() -> Recipe:
    """Weights and activations in unscaled e4m3fn; a layer that overflows is promoted to FP16 (arXiv 2301.13464)."""
    return changed(
        fp32(),
        precision={"weights": "e4m3fn", "activations": "e4m3fn", "promote": {"to": "fp16", "after": 1}},
    )
