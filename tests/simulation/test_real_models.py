"""Models as torchvision and transformers write them: every number on its grid, and the very same model afterwards."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.simulation import restore, simulate
from lowp.wire.naming import all_names
from lowp.wire.settings import Parameters, Settings

# torch's compiler warns about itself while it is imported
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")

FORMATS = {"weights": "e4m3fn", "activations": "e4m3fn", "errors": "e5m2", "gradients": "e5m2"}
TOKENS = torch.tensor([[1, 4, 2, 36, 0, 9, 30], [3, 3, 5, 11, 2, 17, 8]])
SMALL = {"vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HIDDEN = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def libraries():
    """The wheels of torchvision on PyPI are built for CUDA; beside a torch without it, only their C++ operators are missing.

    No model here uses those, but importing torchvision (which transformers does too) needs their names.
    """
    names = torch.library.Library("torchvision", "FRAGMENT")
    if not torch.backends.cuda.is_built():
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("torchvision").models, pytest.importorskip("transformers"), names


def images(side):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(5))


def resnet(vision, _):
    """Its first two stages: the others have most of the parameters."""
    model = vision.resnet.ResNet(vision.resnet.BasicBlock, [1, 1, 0, 0])
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, 5)
    return model, images(16)


def mobilenet(vision, _):
    """A block of each kind: with squeezing and ReLU, with a stride and hard swish."""
    block = vision.mobilenetv3.InvertedResidualConfig
    blocks = [block(8, 3, 16, 8, True, "RE", 1, 1, 1), block(8, 5, 16, 12, False, "HS", 2, 1, 1)]
    return vision.MobileNetV3(blocks, last_channel=24, num_classes=5), images(16)


def vit(vision, _):
    return vision.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=5), images(16)


def convnext(vision, _):
    block = vision.convnext.CNBlockConfig
    return vision.ConvNeXt([block(8, 16, 1), block(16, None, 1)], num_classes=5), images(16)


def gpt2(_, text):
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return text.GPT2LMHeadModel(text.GPT2Config(**SMALL, **shape)), TOKENS


def bert(_, text):
    return text.BertForSequenceClassification(text.BertConfig(**SMALL, **HIDDEN, max_position_embeddings=16)), TOKENS


def llama(_, text):
    return text.LlamaForCausalLM(text.LlamaConfig(**SMALL, **HIDDEN, num_key_value_heads=1)), TOKENS


def t5(_, text):
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = text.T5Config(**SMALL, **shape, decoder_start_token_id=0)
    return text.T5ForConditionalGeneration(config), TOKENS


MODELS = {make.__name__: make for make in (resnet, mobilenet, vit, convnext, gpt2, bert, llama, t5)}


def made(name, libraries):
    """In evaluation, so that nothing is dropped and no statistics move; parameters large enough for e4m3fn."""
    with torch.random.fork_rng(devices=[]):  # the libraries initialise from the global generator
        model, inputs = MODELS[name](*libraries[:2])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.eval(), inputs


def output(model, inputs):
    """Logits; T5, which translates, is given the same tokens to go on from."""
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    found = model(inputs, decoder_input_ids=inputs) if decodes else model(inputs)
    return found if isinstance(found, torch.Tensor) else found.logits


def on_grid(tensor, format):
    return torch.equal(lowp.quantize(tensor, format), tensor)


def check_on_grid(module, _, result):
    assert on_grid(result if isinstance(result, torch.Tensor) else result[0], "e4m3fn"), type(module)


@pytest.mark.parametrize("name", MODELS)
def test_numbers(name, libraries):
    """Weights as they are read, activations as they are returned, gradients as they are accumulated: all on their grids."""
    model, inputs = made(name, libraries)
    keys = list(model.state_dict())
    simulation = simulate(model, **FORMATS)
    modules = dict(model.named_modules())
    for layer in simulation.layers:
        if "activations" in layer.roles:
            modules[layer.name].register_forward_hook(check_on_grid)
    found = output(model, inputs)
    found.square().sum().backward()
    for path, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                assert torch.equal(getattr(module, key), lowp.quantize(parameter, "e4m3fn")), f"{path}.{key}"
                assert parameter.grad is not None, f"{path}.{key}"
                assert on_grid(parameter.grad, "e5m2"), f"{path}.{key}"
    assert any(parameter.grad.any() for parameter in model.parameters())
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_restoring(name, libraries):
    model, inputs = made(name, libraries)
    kinds, state = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = output(model, inputs)
        simulation = simulate(model, **FORMATS)
        described = str(lowp.simulation.describe(model))
        assert all(layer.name in described for layer in simulation.layers)
        rounded = output(model, inputs)
        assert not torch.equal(rounded, before)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(output(other, inputs), rounded)
        restore(model)
        assert [type(module) for module in model.modules()] == kinds
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        assert torch.equal(output(model, inputs), before)


def test_tiny_weights_are_refused_by_name(libraries):
    """ConvNeXt begins with factors of 1e-6, which e4m3fn cannot hold."""
    model, inputs = convnext(*libraries[:2])
    with pytest.raises(ValueError, match=r"layer_scale.*scale='tensor'"):
        simulate(model, **FORMATS)
    simulate(model, scale="tensor", **FORMATS)
    model(inputs)
    scale = next(module for module in model.modules() if "layer_scale" in module._parameters).layer_scale
    assert bool((scale > 0).all())


def small():
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model, torch.randn(4, 8, generator=generator)


def gradients(model, result):
    model.zero_grad()
    result.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_checkpointing_repeats_its_noise(rounding, reentrant):
    model, x = small()
    simulate(model, rounding=rounding, **FORMATS).step = 3
    x.requires_grad_()
    want = gradients(model, model(x))
    got = gradients(model, checkpoint(model, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast():
    model, x = small()
    simulate(model, **FORMATS)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert on_grid(y, "e4m3fn")
    assert all(on_grid(gradient, "e5m2") for gradient in gradients(model, y.float()))


def test_functional_call():
    """Parameters from outside are rounded as the model's own are."""
    model, x = small()
    simulate(model, **FORMATS)
    twice = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    got = torch.func.functional_call(model, twice, (x,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(model(x), got)


@pytest.mark.other_cpu
def test_one_gradient_for_each_sample():
    """On multiples of 1/4, whose sums are exact: vmap makes products of other shapes, which torch may add up otherwise."""
    model, x = small()
    with torch.no_grad():
        for tensor in (x, *model.parameters()):
            tensor.copy_((4 * tensor).round() / 4)
    simulate(model, **FORMATS)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient = torch.func.grad(lambda values, row: torch.func.functional_call(model, values, (row,)).square().sum())
    rows = torch.func.vmap(gradient, in_dims=(None, 0))(parameters, x)
    for number, row in enumerate(x):
        alone = gradient(parameters, row)
        assert all(torch.equal(rows[name][number], alone[name]) for name in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["resnet", "gpt2", "vit"])
def test_compiled(name, backend, libraries):
    """The inductor fuses what plain torch rounds between operations: its numbers are near; before, they are the same."""
    torch._dynamo.reset()
    model, inputs = made(name, libraries)
    simulate(model, **FORMATS)
    other = copy.deepcopy(model)
    compiled = torch.compile(lambda x: output(other, x), backend=backend)
    y, z = output(model, inputs), compiled(inputs)
    want, got = gradients(model, y), gradients(other, z)
    assert on_grid(z.detach(), "e4m3fn")
    assert all(on_grid(gradient, "e5m2") for gradient in got)
    if backend == "aot_eager":
        assert torch.equal(y, z)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (z - y).norm() < 0.1 * y.norm()  # a sum that lies between two numbers of e4m3fn may go the other way


def masked_bert(_, text):
    return text.BertForMaskedLM(text.BertConfig(**SMALL, **HIDDEN, max_position_embeddings=16)), TOKENS


@pytest.mark.parametrize(
    ("make", "head", "embedding"),
    [
        (gpt2, "lm_head", "transformer.wte.weight"),
        (masked_bert, "cls.predictions.decoder", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_last_is_the_tied_head_in_simulate_and_on_the_wire(make, head, embedding, libraries):
    """The last modules that have parameters of their own are norms there."""
    model, _ = make(*libraries[:2])
    simulation = simulate(model, weights="e4m3fn", layers={"last": {"weights": "fp16"}})
    assert [row.layer for row in simulation.formats() if row.format == "fp16"] == [head]
    restore(model)
    names = all_names(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for pattern in ("last", f"{head}.*"):
        parameters = Parameters(shapes, Settings.of("e5m2", layers={pattern: "fp16"}), names)
        kept = {name for name in shapes if str(parameters.codec(name, 0).format) == "fp16"}
        assert kept == {names[name] for name in names if name.startswith(f"{head}.")}
        assert embedding in kept
