"""Other tasks than the embedded one: large batches, the papers' settings, text."""

from lowp.training.reading import with_changes as changed
from lowp.training.recipe import Recipe
from lowp.training.recipes.precisions import fp32
from lowp.training.recipes.registry import named

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

    CPD's loss is a sum over a rank's 512 samples, ranks' gradients are added and never divided, and 0.4 / 512 is its learning
    rate, 5e-4 x 512 its decay. For a mean over all 4,096 samples that is a rate of 3.2 and a decay of 6.25e-5. In its first 62
    steps (5 epochs of 50,000 samples) CPD multiplies the line from 0 to the peak by step / 62: a quadratic warm-up.
    """
    return Recipe(
        epochs=24,
        batch=4096,
        virtual_ranks=8,
        model={"name": "davidnet", "channels_last": True},
        data={"name": "cifar10", "augment": ["crop", "flip", "cutout"]},
        optimizer={"name": "sgd", "lr": 3.2, "momentum": 0.9, "nesterov": True, "weight_decay": 6.25e-5, "decay_vectors": True},
        learning_rate={"kind": "linear", "points": [0, 5, 24], "factors": [0, 1, 0], "warmup": 5.17},
        precision={"tf32": True},
        log={"every": 12},
    )


@named
def davidnet_512() -> Recipe:
    """DavidNet as its author trained it: a batch of 512, here 8 x 64, rate 0.4, decay 5e-4. For a GPU.

    `davidnet` with an eighth of the samples in a step. The learning rate rises linearly over 5 epochs and falls over 19.
    """
    return changed(
        davidnet(),
        batch=512,
        optimizer={"lr": 0.4, "weight_decay": 5e-4},
        learning_rate={"warmup": 0.0},
        log={"every": 97},
    )


@named
def davidnet_aps8() -> Recipe:
    """`davidnet` with gradients in e5m2 and APS; sums are FP32, rounded once (not CPD's).

    --set wire.reduction=sequential rounds every partial sum, as CPD does.
    """
    return changed(davidnet(), wire={"format": "e5m2", "scale": "aps"})


@named
def resnet18_cifar() -> Recipe:
    """ResNet-18 on CIFAR-10: 8 x 512, 100 epochs, gradients in e5m2 with APS (arXiv 1911.08907). For a GPU.

    The learning rate grows from 0.1 to 1.6 over 5 epochs and falls at 40 and 80. Sums are FP32, rounded once;
    --set wire.reduction=sequential rounds every partial sum, as the paper does.
    """
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
        mnist_data_parallel(), wire={"format": "fp32", "scale": ""}, parallel={"kind": "split", "format": "dynamic8"}
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
