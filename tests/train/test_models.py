"""Models: their known sizes, what they make of grey and coloured images and of texts, and 16 bits without an FP32 tensor."""

import sys
import types

import pytest
import torch
from torch import nn

import lowp
from lowp.training.models import MODELS, build_model, model_options


@pytest.fixture(autouse=True)
def _one_thread():
    """Everything here is tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, shape, classes=10, seed=0, **options):
    torch.manual_seed(seed)
    return build_model(name, shape=shape, classes=classes, options=options)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "parameters"),
    [
        ("resnet18", (3, 224, 224), 1000, {}, 11_689_512),  # torchvision's
        ("resnet50", (3, 224, 224), 1000, {}, 25_557_032),  # torchvision's
        ("alexnet", (3, 224, 224), 1000, {"batch_norm": False}, 61_100_840),  # torchvision's
        ("alexnet", (3, 224, 224), 1000, {}, 61_100_840 + 512),
        ("davidnet", (3, 32, 32), 10, {}, 6_573_120),  # the DAWNBench entry's
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),  # the usual CIFAR variant's
        ("mlp", (1, 28, 28), 10, {"hidden": [1024, 1024], "dropout": [0.2, 0.3, 0.3]}, 1_863_690),
    ],
)
def test_numbers_of_parameters_are_the_known_ones(name, shape, classes, options, parameters):
    with torch.device("meta"):
        assert count(build(name, shape, classes, **options)) == parameters


NARROW = {"alexnet": {"hidden": 8}, "davidnet": {"width": 2}, "resnet18": {"width": 2}, "resnet50": {"width": 2}}
IMAGES = [name for name in MODELS if name not in ("lstm", "gpt")]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 14, 14), (3, 12, 20)])
def test_images_grey_and_coloured_of_all_sizes(name, shape):
    model = build(name, shape, 7, **NARROW.get(name, {}))
    logits = model(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["alexnet", "resnet18"])
def test_large_images_enter_by_the_imagenet_stem(name):
    model = build(name, (3, 160, 160), 7, **NARROW[name])
    assert model[0].kernel_size == {"alexnet": (11, 11), "resnet18": (7, 7)}[name]
    assert model(torch.zeros(2, 3, 160, 160)).shape == (2, 7)


@pytest.mark.parametrize(("name", "options"), [("lstm", {"width": 8}), ("gpt", {"width": 8, "layers": 2, "heads": 2})])
def test_text_models_do_not_look_ahead(name, options):
    model = build(name, (12,), 11, **options).eval()
    tokens = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert logits.shape == (2, 12, 11)
    tokens[:, 7:] = 0
    assert torch.equal(model(tokens)[:, :7], logits[:, :7])
    assert not torch.equal(model(tokens)[:, 7:], logits[:, 7:])


def test_a_tied_head_is_the_embedding():
    tied, free = (build("gpt", (8,), 11, width=8, heads=2, tied=tied) for tied in (True, False))
    assert tied.head.weight is tied.embedding.tokens.weight
    assert count(free) - count(tied) == 8 * 11
    with pytest.raises(ValueError, match="positions for 8 tokens, and the text has 9"):
        free(torch.zeros(1, 9, dtype=torch.long))


def test_davidnet_ends_in_the_largest_numbers_and_small_logits():
    model = build("davidnet", (3, 32, 32), 10, width=4).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    features = model.layer3(model.layer2(model.layer1(model.prep(x))))
    assert features.shape == (2, 32, 4, 4)
    assert torch.equal(model(x), model.linear(features.amax((2, 3))) * 0.125)


def test_zero_gamma_makes_every_block_begin_as_the_identity():
    block = build("resnet18", (3, 32, 32), width=4, zero_gamma=True).layer1[0]
    x = torch.rand(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x)


def test_dropout_rates_of_an_mlp():
    rates = [
        module.p for module in build("mlp", (4,), hidden=(8, 8), dropout=(0.2, 0.3, 0.4)) if isinstance(module, nn.Dropout)
    ]
    assert rates == [0.2, 0.3, 0.4]
    rates = [module.p for module in build("mlp", (4,), hidden=(8, 8), dropout=0.5) if isinstance(module, nn.Dropout)]
    assert rates == [0.5, 0.5]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_weights(name):
    shape = (8,) if name in ("lstm", "gpt") else (1, 16, 16)
    one, two, other = (build(name, shape, seed=seed, **NARROW.get(name, {})).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


TINY = {
    "mlp": ((1, 8, 8), {"hidden": (16,), "dropout": 0.1}),
    "cnn": ((1, 8, 8), {"channels": (4, 4), "hidden": 8}),
    "alexnet": ((3, 8, 8), {"hidden": 8}),
    "davidnet": ((3, 8, 8), {"width": 2}),
    "resnet18": ((3, 8, 8), {"width": 2}),
    "resnet50": ((3, 8, 8), {"width": 2}),
    "lstm": ((6,), {"width": 8}),
    "gpt": ((6,), {"width": 8, "layers": 1, "heads": 2, "dropout": 0.1, "tied": True}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_pure_16_bit_training_makes_no_fp32_tensor(name, dtype):
    """Forward, backward and a plain update. Fused attention keeps logarithms of sums in FP32, by torch's own doing."""
    shape, options = TINY[name]
    model = build(name, shape, 5, **options).to(dtype)
    generator = torch.Generator().manual_seed(0)
    text, size = len(shape) == 1, 4 if name == "alexnet" else 16  # half-precision convolutions crawl on a CPU
    x = torch.randint(5, (size, *shape), generator=generator) if text else torch.randn(size, *shape, generator=generator)
    x = x if text else x.to(dtype)
    y = torch.full((size, *shape) if text else (size,), 3)  # a bias can learn it: few steps are enough
    losses = []
    with lowp.audit(forbid=(torch.float32, torch.float64), allow=["attention logsumexp"] if name == "gpt" else []) as report:
        for _ in range(6):
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            losses.append(loss.detach())
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
    assert report.clean
    assert min(losses[1:]) < losses[0]


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet81", (3, 32, 32), {}, r"unknown model 'resnet81'; did you mean 'resnet18'"),
        ("perceptron", (4,), {}, r"unknown model 'perceptron'; there are mlp, cnn"),
        ("mlp", (4,), {"hiden": 3}, r"model 'mlp' has no option 'hiden'; it has hidden, dropout$"),
        ("mlp", (4,), {"hidden": (8,), "dropout": (0.1,)}, r"dropout has 1 rates; 1 hidden layers take 2"),
        ("davidnet", (64,), {}, r"davidnet takes images, whose shape is \(channels, height, width\), not \(64,\)"),
        ("davidnet", (3, 4, 4), {}, r"davidnet takes images of 8 x 8 pixels or more, not 4 x 4"),
        ("resnet18", (3, 32, 32), {"stem": "mnist"}, r"resnet18: unknown stem 'mnist'; it is one of cifar, imagenet"),
        ("gpt", (3, 32, 32), {}, r"gpt takes texts"),
        ("gpt", (32,), {"width": 10, "heads": 4}, r"a width of 10 cannot be shared by 4 heads"),
        ("user_models:tower", (4,), {"depth": 1, "width": 2}, r"no option 'width'; it has depth"),
        ("user_models:tower", (4,), {}, r"model 'user_models:tower' needs the option 'depth'"),
        ("user_models:nothing", (4,), {}, r"model 'user_models:nothing' returned NoneType, not a torch.nn.Module"),
        ("user_models:absent", (4,), {}, r"user_models has no function 'absent'"),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_line(user_models, name, shape, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(name, shape, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def user_models(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType("user_models")
    module.tower = lambda shape, depth: nn.Sequential(*[nn.Linear(*shape, *shape) for _ in range(depth)])
    module.any_options = lambda **options: nn.Linear(options["size"], 1)
    module.nothing = lambda: None
    monkeypatch.setitem(sys.modules, "user_models", module)


def test_models_of_ones_own(user_models):
    assert len(build("user_models:tower", (4,), depth=3)) == 3  # takes the shape, and not the classes
    assert build("user_models:any_options", (4,), size=6).in_features == 6


def test_torchvision_models_are_built_with_the_classes_or_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match="model 'torchvision:resnet18' needs torchvision: pip install torchvision"):
        build("torchvision:resnet18", (3, 32, 32))
    models = types.SimpleNamespace(
        list_models=lambda module: ["resnet18", "vgg11"],
        get_model_builder=lambda name: lambda num_classes, **options: nn.Linear(1, num_classes, **options),
    )
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert build("torchvision:resnet18", (3, 32, 32), 6, bias=False).out_features == 6
    with pytest.raises(ValueError, match="unknown torchvision model 'resnet81'; did you mean 'resnet18'"):
        build("torchvision:resnet81", (3, 32, 32))
    with pytest.raises(ValueError, match=r"model 'torchvision:resnet18': .*'widht'"):
        build("torchvision:resnet18", (3, 32, 32), widht=2)


def test_options_are_listed_with_their_defaults():
    assert model_options("mlp") == {"hidden": (256, 256), "dropout": 0.0}
    assert "stem" in model_options("resnet50")
