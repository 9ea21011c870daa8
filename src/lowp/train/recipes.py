"""Named recipes. Each is a function that returns a complete recipe; a variant is another one and what it changes.

The docstring's first line is what `lowp recipes` lists, the rest what it explains.
"""

from collections.abc import Callable

from lowp.train.reading import with_changes as changed
from lowp.train.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {}


def named(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Enter a recipe under its function's name, with - for _."""
    name = function.__name__.replace("_", "-")

    def complete() -> Recipe:
        return function().model_copy(update={"name": name, "description": (function.__doc__ or "").splitlines()[0]})

    complete.__doc__ = function.__doc__
    RECIPES[name] = complete
    return complete


# Precisions, on the embedded data set.


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

    Updates are rounded stochastically, the loss scale is dynamic, and the first step runs under lowp.audit. Slow on CPUs
    without FP16 units: --set precision.weights=bf16 --set wire.format=bf16 is faster there.
    """
    return changed(
        fp32(),
        precision={"weights": "fp16", "update": "stochastic", "loss_scale": "dynamic", "audit": True},
        wire={"format": "fp16"},
    )


@named
def aps8() -> Recipe:
    """Gradients travel in 8 bits with Auto Precision Scaling (arXiv 1911.08907).

    e5m2 with one power of two for each layer, agreed between ranks by one byte. --set wire.scale=none shows what that is
    good for.
    """
    return changed(fp32(), wire={"format": "e5m2", "scale": "aps"})


@named
def fp8() -> Recipe:
    """FP8 throughout: weights and activations e4m3fn, gradients e5m2, states and wire 8 bits (arXiv 2310.18313).

    Float32 weights are updated; what is multiplied is rounded to FP8, each tensor with its own power of two.
    """
    return changed(
        fp32(),
        precision={
            "weights": "e4m3fn",
            "activations": "e4m3fn",
            "errors": "e5m2",
            "gradients": "e5m2",
            "scale": "tensor",
            "state": "fp16",
        },
        wire={"format": "e5m2", "scale": "aps"},
    )


@named
def simulate() -> Recipe:
    """A whole model in a format of your choice: posit8 here.

    --set precision.weights=e3m4 --set precision.activations=int8 ... tries another one.
    """
    return changed(
        fp32(),
        precision={"weights": "posit8", "activations": "posit8", "errors": "posit8", "scale": "tensor"},
    )


# Formats that change: by layer, by epoch, by what the numbers do.


@named
def hybrid() -> Recipe:
    """Hybrid precision: 4 bits on the wire, 16 for the last layer and FP32 for biases."""
    return changed(fp32(), wire={"format": "e2m1fn", "scale": "local", "layers": {"last": "fp16"}, "skip": ["1d"]})


@named
def posit_warmup() -> Recipe:
    """An epoch in FP32, then posit16 (arXiv 1909.03831)."""
    roles = {"weights": "posit16", "activations": "posit16", "errors": "posit16", "gradients": "posit16"}
    return changed(
        fp32(),
        precision={
            "scale": "tensor",
            "schedule": [{"epoch": 1, **roles, "wire": "posit16"}],
        },
    )


@named
def muppet() -> Recipe:
    """Switch to a wider format when gradients stop being diverse (MuPPET, arXiv 2006.09049)."""
    return changed(fp32(), precision={"scale": "tensor", "switch": {"ladder": ["e4m3fn", "fp16", "fp32"]}})


@named
def promote() -> Recipe:
    """Everything in unscaled e4m3fn; a layer that overflows is promoted to FP16 (arXiv 2301.13464)."""
    return changed(
        fp32(),
        precision={"weights": "e4m3fn", "activations": "e4m3fn", "promote": {"to": "fp16", "after": 1}},
    )


# Large batches.


@named
def lars_64k() -> Recipe:
    """A batch of 65,536 with LARS, warm-up, no decay on biases and norms, label smoothing (arXiv 1807.11205).

    256 virtual ranks of 256 Fashion-MNIST images, gradients in e5m2 with APS. The batch is larger than the data
    set: a step, which is an epoch here, is a pass and a bit.
    """
    return changed(
        fp32(),
        batch=65536,
        virtual_ranks=256,
        epochs=60,
        label_smoothing=0.1,
        data={"name": "fashion_mnist"},
        model={"name": "mlp", "options": {"hidden": [512, 256]}},
        optimizer={"name": "lars", "lr": 10.0, "weight_decay": 1e-4, "trust": 0.01},
        learning_rate={"kind": "poly", "warmup": 10},
        wire={"format": "e5m2", "scale": "aps"},
        log={"every": 1},
        test_every=10,
        checkpoints={"every": 10},
    )


# The papers' settings.


@named
def davidnet() -> Recipe:
    """DavidNet on CIFAR-10: 8 x 512, 24 epochs, as CPD has it (arXiv 1911.08907). For a GPU.

    The published loss is a sum over the batch with lr / batch and decay x batch; a mean with lr and decay is the same.
    """
    return Recipe(
        epochs=24,
        batch=4096,
        virtual_ranks=8,
        model={"name": "davidnet", "channels_last": True},
        data={"name": "cifar10", "augment": ["crop", "flip", "cutout"]},
        optimizer={"name": "sgd", "lr": 0.4, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_vectors": True},
        learning_rate={"kind": "linear", "points": [0, 5, 24], "factors": [0, 1, 0]},
        precision={"tf32": True},
        log={"every": 12},
    )


@named
def davidnet_aps8() -> Recipe:
    """The same with gradients in e5m2 and APS."""
    return changed(davidnet(), wire={"format": "e5m2", "scale": "aps"})


@named
def resnet18_cifar() -> Recipe:
    """ResNet-18 on CIFAR-10: 8 x 512, 100 epochs, lr 0.1 to 1.6 over 5, falling at 40 and 80. For a GPU."""
    return Recipe(
        epochs=100,
        batch=4096,
        virtual_ranks=8,
        model={"name": "resnet18", "options": {"stem": "cifar"}, "channels_last": True},
        data={"name": "cifar10", "augment": ["crop", "flip"]},
        optimizer={"name": "sgd", "lr": 1.6, "momentum": 0.9, "weight_decay": 1e-4, "decay_vectors": True},
        learning_rate={"kind": "steps", "warmup": 5, "start": 0.0625, "points": [40, 80]},
        wire={"format": "e5m2", "scale": "aps"},
        log={"every": 12},
    )


@named
def mnist_data_parallel() -> Recipe:
    """MNIST, 784-1024-1024-10 with dropout and RMSProp, two ranks' gradients in dynamic8 (arXiv 1511.04561)."""
    return Recipe(
        epochs=5,
        batch=128,
        ranks=2,
        model={"name": "mlp", "options": {"hidden": [1024, 1024], "dropout": [0.2, 0.3, 0.3]}},
        data={"name": "mnist"},
        optimizer={"name": "torch:RMSprop", "lr": 0.0003},
        wire={"format": "dynamic8", "scale": "local"},
    )


@named
def mnist_model_parallel() -> Recipe:
    """The same network split over two ranks: activations and their gradients travel in dynamic8."""
    return changed(
        mnist_data_parallel(), wire={"format": "fp32", "scale": "none"}, parallel={"kind": "split", "format": "dynamic8"}
    )


# Text.


@named
def gpt() -> Recipe:
    """A small GPT on the characters of Shakespeare, gradients in e4m3fn. Comfortable on a GPU."""
    return Recipe(
        epochs=5,
        batch=64,
        model={"name": "gpt", "options": {"layers": 4, "width": 128, "heads": 4}},
        data={"name": "shakespeare", "context": 128},
        optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]},
        learning_rate={"kind": "cosine", "warmup": 0.2},
        wire={"format": "e4m3fn", "scale": "local"},
    )


@named
def lstm() -> Recipe:
    """An LSTM on the same text, gradients in FP16, as RNNs over MPI (arXiv 1912.00286)."""
    return changed(
        gpt(),
        model={"name": "lstm", "options": {"layers": 2, "width": 256}},
        optimizer={"lr": 2e-3, "weight_decay": 0.0},
        wire={"format": "fp16", "scale": "none"},
    )
