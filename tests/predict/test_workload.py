"""Workloads: models as they are counted on tensors without memory, and how long they take on a device."""

import pytest
import torch
from torch import nn

import lowp
from lowp.predict.architectures import ARCHITECTURES, workload_of
from lowp.predict.cluster import Device, ModelTimes
from lowp.predict.tracing import CannotTrace, traced

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "alexnet": 61_100_840,
    "inception_v3": 27_161_264,
    "inception_v3_no_aux": 23_834_568,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
}
FORWARD = {"resnet50": 4.089, "vgg16": 15.47, "alexnet": 0.7142, "inception_v3_no_aux": 5.713}  # 10^9 multiply-adds


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_operations(name):
    workload = workload_of(name)
    assert workload.parameters == PARAMETERS[name]
    if name in FORWARD:  # torchvision's figures
        assert workload.forward.flops / 2e9 == pytest.approx(FORWARD[name], rel=0.002)
    # Backward multiplies twice for every product of forward, but for the first layer's inputs.
    assert 1.85 <= workload.backward.flops / workload.forward.flops <= 2.1


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*PARAMETERS, "lstm", "gpt2-large", "gpt2-xl")])
def test_all_known_models_can_be_traced(name):
    workload = workload_of(name)
    assert sorted(layer.turn for layer in workload.layers) == list(range(len(workload.layers)))
    assert workload.saved > 0


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_what_is_counted_by_hand():
    workload = traced("net", net(), torch.zeros(3, 8))
    assert workload.forward.flops == 2 * (8 * 16 + 16 * 4)
    by_name = {layer.name: layer for layer in workload.layers}
    assert by_name["2.weight"].forward.flops == 2 * 16 * 4
    # Of the last layer: its weight's gradient and its input's; of the first one: its weight's alone.
    assert by_name["2.weight"].backward.flops + by_name["2.bias"].backward.flops == 2 * 2 * 16 * 4
    assert workload.backward.flops == 2 * (2 * 16 * 4 + 8 * 16)
    assert [workload.layers[i].name for i in workload.order][-2:] in (["0.bias", "0.weight"], ["0.weight", "0.bias"])
    assert workload.saved == 4 * (8 + 16)  # the inputs of both products: of ReLU its output is kept, which is the second


def test_gradients_are_ready_in_autograds_order_not_in_that_of_registration():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.last(self.first(x).relu())

    workload = traced("turned", Turned(), torch.zeros(2, 4))
    assert [workload.layers[i].name for i in workload.order] == ["last.weight", "first.weight"]


def test_a_tied_weight_is_ready_with_its_last_use():
    workload = workload_of("gpt2")
    assert workload.layers[workload.order[-1]].name == "embedding.tokens.weight"


def test_the_users_model_is_not_touched():
    model = net()
    before = [parameter.clone() for parameter in model.parameters()]
    traced("net", model.eval(), torch.zeros(2, 8))
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert next(model.parameters()).device.type == "cpu"


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Peeks())

    def forward(self, x):
        return self.inner(x)


class Peeks(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (
            Looks(),
            torch.zeros(2, 4),
            r"model m: it does not run on tensors without memory in its module 'inner.1', at aten._local_scalar",
        ),
        (net(), torch.zeros(2, 7), r"model m: it does not run on tensors without memory in its module '0'"),
        (Half(), torch.zeros(2, 4), r"model m: backward reached no gradient of unused.weight, unused.bias"),
        (nn.ReLU(), torch.zeros(2, 4), r"model m: it has no parameter that takes a gradient"),
        (net(), "text", r"model m: the example batch has no tensor whose first dimension counts samples"),
    ],
)
def test_what_cannot_be_traced_is_named(model, inputs, said):
    with pytest.raises(CannotTrace, match=said) as error:
        traced("m", model, inputs)
    assert "\n" not in str(error.value)


def test_models_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(
        "import torch\ndef good():\n    return torch.nn.Linear(3, 2), torch.zeros(5, 3)\n"
        "def bad():\n    return torch.nn.Linear(3, 2)\n"
    )
    assert workload_of("own_models:good").parameters == 8
    with pytest.raises(ValueError, match=r"'own_models:bad': it must return the model and an example batch, .* not Linear"):
        workload_of("own_models:bad")
    with pytest.raises(ValueError, match="has no function 'god'"):
        workload_of("own_models:god")
    with pytest.raises(ValueError, match="unknown model 'resnet5'; did you mean 'resnet50'"):
        workload_of("resnet5")
    with pytest.raises(ValueError, match="inputs: is missing"):
        lowp.predict(net(), "ethernet-1g")
    assert lowp.predict(net(), "ethernet-1g", inputs=torch.zeros(2, 8), ranks=2).steps[0].throughput > 0


def test_seconds_from_the_device():
    workload = workload_of("resnet50")
    by_rate = workload.on(Device("d", samples={"resnet50": ((1, 100.0),)}), 32)
    assert by_rate.total == pytest.approx(0.32)
    assert by_rate.forward / by_rate.total == pytest.approx(1 / 3, abs=0.08)
    by_flops = workload.on(Device("d", flops=1e13, bandwidth=1e12), 1)
    work = workload.forward.flops + workload.backward.flops
    moved = workload.forward.bytes + workload.backward.bytes
    assert by_flops.total == pytest.approx(work / 1e13 + moved / 1e12)
    with pytest.raises(ValueError, match=r"device d: it does not say how fast it runs resnet50: neither samples .* nor flops"):
        workload.on(Device("d", flops=1e13), 1)
    with pytest.raises(ValueError, match="batch: 0 must be at least 1"):
        workload.on(Device("d", flops=1e13, bandwidth=1e12), 0)


def test_measured_times_come_first():
    workload = traced("net", net(), torch.zeros(3, 8))
    layers = {layer.name: 1e-3 * (1 + i) for i, layer in enumerate(workload.layers)}
    device = Device("d", samples={"net": ((1, 1.0),)}, times={"net": ModelTimes(4, 2e-3, 1e-2, layers)})
    found = workload.on(device, 8)
    assert found.forward == pytest.approx(4e-3)
    assert found.backward == pytest.approx([2 * seconds for seconds in layers.values()])
    whole = workload.on(Device("d", times={"net": ModelTimes(4, 2e-3, 1e-2)}), 4)
    assert sum(whole.backward) == pytest.approx(1e-2)
    with pytest.raises(ValueError, match=r"times.net.layers: '0.bias' is missing"):
        workload.on(Device("d", times={"net": ModelTimes(4, 2e-3, 1e-2, {"0.weight": 1.0})}), 4)
    with pytest.raises(ValueError, match=r"device.times.net: forward and backward together must take more than 0 s"):
        workload.on(Device("d", times={"net": ModelTimes(4, 0.0, 0.0)}), 4)
