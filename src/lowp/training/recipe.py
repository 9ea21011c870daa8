"""A recipe: everything that decides what a run computes, as data.

A run is a function of its recipe. Each section below is a table of the TOML file, each field a key; the descriptions are the
comments that `lowp recipes NAME --toml` prints. What can be wrong about one key is checked here, what can be wrong about keys
together in check.py, both before any process starts.

`precision` names a format for every role. The three that torch computes in (fp32, fp16, bf16) are stored and computed for real;
any other is simulated: a float32 model whose numbers are rounded to the format wherever the role says.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lowp import former_names

STORED = ("fp32", "fp16", "bf16")  # formats that torch computes in
LONGEST_NAME = 100  # characters: it becomes the name of a directory

# Bounds that no run comes near. Beyond them a number is a mistake, and a run with it would not end, start or compute anything.
_MOST_STEPS = 10**12
_MOST_EPOCHS = 10**6
_LARGEST_BATCH = 1 << 24
PLAN = "plan"  # in place of a wire's format: it is chosen at the start (lowp/predict/recipe_plan.py)
_LARGEST = 1e6  # of a factor; the arithmetic is float32's
_SMALLEST = 1e-30  # of what must not be 0 in float32
LARGEST_RATE = 1e38  # float32 ends at 3.4e38; before that a run diverges, and says so

Beta = Annotated[float, Field(ge=0, lt=1)]
Epoch = Annotated[float, Field(ge=0, le=_MOST_EPOCHS)]
Factor = Annotated[float, Field(ge=0, le=_LARGEST)]


class _TakesFormerNames(type(BaseModel)):
    """`Recipe(accumulate=4)` is understood as documents are. (pydantic's validators would make JSON's lists Python's.)"""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        return super().__call__(*args, **with_current_keys(given, cls))


class Section(BaseModel, metaclass=_TakesFormerNames):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    former_keys: ClassVar[Mapping[str, str]] = {}  # keys that have another name now


def with_current_keys(given: Any, section: Any, where: str = "") -> Any:
    """A document whose keys have their names of today (lowp/former_names.py), before others are merged with it."""
    if not isinstance(given, dict):
        return given
    found = former_names.with_current_names(given, section.former_keys, "key", where)
    kinds = {name: field.annotation for name, field in section.model_fields.items() if name in found}
    inner = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
    return {
        key: with_current_keys(value, kinds[key], f" of [{key}]") if key in inner else value for key, value in found.items()
    }


class ModelSettings(Section):
    """What is trained."""

    name: str = Field("mlp", description="a model of `lowp recipes --models`, torchvision:NAME or module:function")
    options: dict[str, Any] = Field({}, description="its arguments: hidden = [256, 256]")
    channels_last: bool = Field(False, description="images in channels-last memory: faster convolutions on CUDA")
    compile: bool = Field(False, description="torch.compile the model")


class DataSettings(Section):
    """What it is trained on."""

    name: str = Field(
        "fashion14", description="fashion14 (embedded), mnist, fashion_mnist, cifar10, shakespeare, text:FILE, module:function"
    )
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = Field((), description="of training images: crop, flip, cutout")
    transform: str = Field("", description="module:function(inputs, targets, generator), called on every training batch")
    filter: str = Field("", description="module:function(model, inputs, targets): which samples of a batch to train on")
    limit: int = Field(0, ge=0, le=_MOST_STEPS, description="use only so many training samples (0: all)")
    context: int = Field(128, ge=1, le=1 << 20, description="characters a sample, for text")
    workers: int = Field(2, ge=0, le=256, description="processes that read samples of a module:function set")
    options: dict[str, Any] = Field({}, description="arguments of a module:function set")


class OptimizerSettings(Section):
    """How weights are changed."""

    name: str = Field("sgd", description="sgd, lars, adamw, lamb, or torch:CLASS for one of torch.optim (fp32 weights)")
    lr: float = Field(0.1, ge=_SMALLEST, le=LARGEST_RATE, description="the learning rate at its peak")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd and lars")
    nesterov: bool = Field(False, description="of sgd and lars")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="of adamw and lamb")
    eps: float = Field(1e-8, ge=_SMALLEST, le=1, description="of adamw and lamb")
    weight_decay: float = Field(0.0, ge=0, le=_LARGEST, description="L2 of sgd and lars, decoupled in adamw and lamb")
    decay_vectors: bool = Field(False, description="also let biases and norms decay")
    trust: float = Field(0.001, ge=_SMALLEST, le=_LARGEST, description="the trust coefficient of lars")
    options: dict[str, Any] = Field({}, description="further arguments of a torch:CLASS")


class LearningRate(Section):
    """The learning rate over time, as a factor of optimizer.lr; times are in epochs."""

    kind: Literal["constant", "poly", "cosine", "linear", "steps"] = Field(
        "constant", description="constant, poly, cosine, linear (between points), steps (times `factor` at each point)"
    )
    warmup: Epoch = Field(0.0, description="epochs of linear growth; it multiplies what the kind gives, points of linear too")
    start: float = Field(0.0, ge=0, le=1, description="the factor that the warm-up starts from")
    power: float = Field(2.0, gt=0, le=100, description="of poly")
    points: tuple[Epoch, ...] = Field((), description="epochs: corners of linear, falls of steps")
    factors: tuple[Factor, ...] = Field((), description="of linear, one for each point")
    factor: float = Field(0.1, ge=_SMALLEST, le=_LARGEST, description="of steps")


class Roles(Section):
    """Formats that can change while a run goes on: rounded to in a float32 model."""

    weights: str | None = Field(None, description="what forward and backward see of the weights")
    activations: str | None = Field(None, description="outputs of layers")
    errors: str | None = Field(None, description="gradients of activations")
    gradients: str | None = Field(None, description="gradients of weights, before they travel")


class LayerRoles(Roles):
    """Formats of some layers, which can also have a scale and accumulators of their own."""

    scale: str = Field("", description='of all roles of these layers; "": as precision.scale')
    accumulate: str | None = Field(None, description="the format of sums inside these layers; fp32: as torch computes them")
    products: str | None = Field(None, description="what becomes of these layers' operands; fp32: nothing")


class Phase(Roles):
    """Formats from an epoch on; what is not named stays."""

    epoch: int = Field(ge=0, le=_MOST_EPOCHS, description="the first epoch of the phase")
    wire: str | None = Field(None, description="the format on the wire")


class Promote(Section):
    """Give a layer that overflows more room."""

    to: str = Field("fp32", description="the format that it gets, in all roles")
    after: int = Field(1, ge=1, le=_MOST_EPOCHS, description="how many epochs with an overflow it takes")


class Switch(Section):
    """Climb a ladder of formats when gradients stop being diverse (MuPPET, arXiv 2006.09049)."""

    ladder: tuple[str, ...] = Field(("e4m3fn", "fp16", "fp32"), min_length=2, description="formats, the narrowest first")
    roles: tuple[Literal["weights", "activations", "errors", "gradients"], ...] = Field(
        ("weights", "activations", "errors"), min_length=1, description="the roles that climb"
    )
    threshold: float = Field(
        1.5,
        ge=1,
        le=_LARGEST,
        description="a violation: the peak diversity since the last switch, over this epoch's, exceeds it",
    )
    patience: int = Field(2, ge=1, le=_MOST_EPOCHS, description="violations before a switch")
    window: int = Field(5, ge=2, le=_MOST_EPOCHS, description="steps over which diversity is taken")


class ArithmeticSettings(Section):
    """How layers multiply and add, beside precision.accumulate: as narrow hardware does (lowp.Arithmetic)."""

    multiply: str = Field("", description='the format of products; "": exact')
    kahan: bool = Field(False, description="compensate the rounding of sums")
    chunk: int = Field(1, ge=1, le=1 << 20, description="products that are summed before their sum joins the whole")
    quire: bool = Field(False, description="exact sums, rounded once")
    rounding: str = Field("nearest", description="of products and sums")
    approximate: Literal["", "integer_add"] = Field("", description="integer_add: products by adding bits (arXiv 2012.03458)")


class Precision(Section):
    """The format of every role."""

    weights: str = Field("fp32", description="fp32, fp16, bf16 are stored; any other format is simulated")
    activations: str = Field("", description='outputs of layers; "": as the weights. fp16 or bf16 over fp32 weights: autocast')
    errors: str = Field("", description='gradients of activations; "": as computed')
    gradients: str = Field("", description='gradients of weights, before they travel; "": as computed')
    rounding: str | dict[str, str] = Field("nearest", description="of the simulated roles, or by role (others: nearest)")
    scale: str | dict[str, str] = Field(
        "none", description="of the simulated roles, or by role: none, tensor, channel, aps, block:N, delayed, delayed:N"
    )
    exempt_first_last: bool = Field(False, description="leave the first and the last layer with a matrix as they are")
    accumulate: str = Field("", description='sums of products inside layers, in a format; "": as torch computes them')
    arithmetic: ArithmeticSettings = ArithmeticSettings()
    products: str = Field(
        "",
        description='operands of linear layers: a format, then stochastic, square, hadamard N, errors FORMAT; "": as they are',
    )
    state: str | dict[str, str] = Field("", description='optimizer states: a format of 8 to 16 bits; "": as the weights')
    master: str = Field("", description='what the optimizer keeps of the weights, in a float32 model: a format; "": fp32')
    update: Literal["", "nearest", "stochastic", "kahan"] = Field(
        "", description='how stored 16-bit weights and master weights take an update; "": stochastic (fp32: nearest)'
    )
    loss_scale: str | float = Field("none", description="none, dynamic, per_layer, or a power of two")
    layers: dict[str, LayerRoles] = Field({}, description='simulated formats of some layers: "last" = { weights = "fp16" }')
    schedule: tuple[Phase, ...] = Field((), description="formats by epoch: [[precision.schedule]] epoch = 1, weights = ...")
    promote: Promote | None = Field(None, description="give layers that overflow a wider format")
    switch: Switch | None = Field(None, description="climb a ladder of formats by gradient diversity")
    tf32: bool = Field(False, description="on CUDA: FP32 products in TF32, of 10 mantissa bits")
    audit: bool = Field(False, description="run the first step under lowp.audit: no FP32 tensor may exist")


class Wire(Section):
    """How gradients travel between ranks, real or virtual."""

    former_keys = former_names.ARGUMENTS_OF_THE_WIRE

    format: str = Field("fp32", description="any format of up to 16 bits, topk:FRACTION, adaptive:BITS, plan; fp32: as stored")
    scale: str = Field(
        "", description='none, aps, aps_delayed, local, block:N; "": block:32 for formats of fewer than 8 bits, else local'
    )
    reduction: str = Field("two_shot", description="two_shot, one_shot, ring, tree, sequential, hierarchical(k), by_size")
    rounding: str = Field("nearest", description="any of lowp's")
    skip: tuple[str, ...] = Field((), description='what stays in fp32: "1d", "last", name patterns')
    layers: dict[str, str] = Field({}, description='formats of some parameters: "last" = "fp16"')
    sum_format: str = Field("", description='the format of sums of gradients; "": the reduction\'s own')
    kahan: bool = Field(False, description="compensate the rounding of sums")
    error_feedback: bool = Field(False, description="add what rounding lost to the next gradient")
    bucket_mb: float = Field(25.0, ge=0.001, le=_LARGEST, description="megabytes of gradients that travel together")
    max_error: float = Field(0.1, ge=0, le=_LARGEST, description="for plan: the largest relative error of a step's gradients")
    cluster: str = Field("", description='for plan: a cluster of lowp predict, or a TOML file; "": measured at the start')

    @field_validator("reduction")
    @classmethod
    def _current_reduction(cls, name: str) -> str:
        return former_names.current(name, former_names.REDUCTIONS, "reduction")


class Parallel(Section):
    """What is divided among the ranks."""

    kind: Literal["data", "split", "pipeline"] = Field(
        "data", description="data (each rank its samples), split (each a part of every linear layer), pipeline (two stages)"
    )
    format: str = Field("fp32", description="of activations and their gradients between ranks, for split and pipeline")
    scale: str = Field("", description='none, local or block:N, for split and pipeline; "": as for wire.scale')


class Checkpoints(Section):
    """How often the run is saved."""

    every: int = Field(0, ge=0, le=_MOST_STEPS, description="steps between checkpoints (0: at the end of every epoch)")
    keep: int = Field(2, ge=1, le=_MOST_STEPS, description="how many are kept")


class Log(Section):
    """What is written down."""

    every: int = Field(20, ge=1, le=_MOST_STEPS, description="steps between lines of metrics.jsonl")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field((), description="tensorboard, wandb, trackio")
    health: int = Field(0, ge=0, le=_MOST_STEPS, description="steps between samples of numeric health (0: none)")


class Recipe(Section):
    """Everything that decides what a run computes."""

    former_keys = former_names.KEYS_OF_A_RECIPE

    name: str = Field(
        "custom", min_length=1, max_length=LONGEST_NAME, pattern=r"^[\w.-]+$", description="names the run's directory"
    )
    description: str = Field("", description="one line about it")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of everything that is drawn")
    epochs: int = Field(5, ge=1, le=_MOST_EPOCHS, description="passes over the training data")
    batch: int = Field(256, ge=1, le=_LARGEST_BATCH, description="samples a step, over all ranks")
    micro_batches: int = Field(
        1,
        ge=1,
        le=_LARGEST_BATCH,
        description="parts that each rank's share of a step is divided into: their gradients are added",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="of the cross-entropy")
    test_every: int = Field(1, ge=0, le=_MOST_EPOCHS, description="epochs between tests (0: only at the end)")
    test_flip: bool = Field(False, description="test each image and its mirror image, and average the two outputs")
    ranks: int = Field(1, ge=1, le=1 << 16, description="real processes (under torchrun: as many as it starts)")
    virtual_ranks: int = Field(1, ge=1, le=1 << 16, description="ranks that one process stands in for")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is one")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads a rank (0: OMP_NUM_THREADS, or the cores divided by the ranks)"
    )
    deterministic: bool = Field(False, description="on CUDA: the same bits run after run (a CPU's always are)")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    learning_rate: LearningRate = LearningRate()
    precision: Precision = Precision()
    wire: Wire = Wire()
    parallel: Parallel = Parallel()
    checkpoints: Checkpoints = Checkpoints()
    log: Log = Log()

    @property
    def shares(self) -> int:
        """Into how many ranks' shares a step's samples are divided. Split and pipeline ranks all see all of them."""
        return max(self.ranks, self.virtual_ranks) if self.parallel.kind == "data" else 1
