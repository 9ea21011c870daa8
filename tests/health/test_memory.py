"""Bytes are counted from tensors: exact figures for small models, and nothing twice."""

import re

import pytest
import torch
from torch import nn

from lowp.health.memory import memory


def stepped(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    return memory(model, optimizer)


def test_pure_bf16_adamw_needs_eight_bytes_and_a_step_counter():
    model = nn.Linear(4, 3).bfloat16()  # 15 parameters
    optimizer = torch.optim.AdamW(model.parameters())
    found = stepped(model, optimizer, torch.ones(2, 4).bfloat16())
    assert (found.parameters, found.weights, found.gradients, found.buffers) == (15, 30, 30, 0)
    assert found.state == 2 * 30 + 2 * 4  # each parameter counts its steps in one float32
    assert {(part.dtype, part.bytes) for part in found.parts if part.role == "state"} == {
        (torch.float32, 8),
        (torch.bfloat16, 60),
    }
    assert found.total == 128
    assert found.bytes_per_parameter == 128 / 15
    assert found.bytes_per_parameter_by_role == {"weights": 2.0, "gradients": 2.0, "state": 68 / 15, "buffers": 0.0}
    assert found.measured_peak is None


def test_gradients_that_do_not_exist_yet_are_expected_in_the_parameters_dtype():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    found = memory(model)
    assert (found.weights, found.gradients, found.state) == (60, 48, 0)
    assert [part.expected for part in found.parts if part.role == "gradients"] == [True]
    assert "expected" in str(found)
    model(torch.ones(1, 4)).sum().backward()
    assert memory(model).gradients == 48
    assert "expected" not in str(memory(model))


def test_a_gradient_counts_with_its_own_dtype():
    model = nn.Linear(4, 4, bias=False)
    model.weight.grad = torch.zeros(4, 4)
    model.double()
    model.weight.grad = model.weight.grad.to_sparse()
    assert memory(model).gradients == 0  # no numbers, no indices
    model.weight.grad = torch.ones(4, 4, dtype=torch.float64).to_sparse()
    assert memory(model).gradients == 16 * (8 + 2 * 8)


def test_shared_memory_counts_once():
    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    two.weight = one.weight  # tied
    three = nn.Linear(4, 4, bias=False)
    three.weight = nn.Parameter(one.weight.data)  # another name for the same memory
    model = nn.Sequential(one, two, three)
    assert (memory(model).parameters, memory(model).weights, memory(model).gradients) == (16, 64, 64)


def test_views_of_one_buffer_are_not_the_same_memory():
    flat = torch.zeros(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, piece in zip(model, flat.view(2, 4, 4), strict=True):
        layer.weight = nn.Parameter(piece)
    assert (memory(model).parameters, memory(model).weights) == (32, 128)


def test_buffers_of_batch_norm():
    found = memory(nn.BatchNorm1d(8).half())
    assert found.weights == 32
    assert {(part.dtype, part.bytes) for part in found.parts if part.role == "buffers"} == {
        (torch.float16, 32),
        (torch.int64, 8),
    }


def test_nested_state_is_found():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes = {"codes": torch.zeros(16, dtype=torch.uint8), "scales": [torch.zeros(2), (torch.zeros(1),)], "step": 3}
    optimizer.state[model.weight]["moment"] = codes
    assert memory(model, optimizer).state == 16 + 8 + 4


def test_parameters_of_the_optimizer_alone_count_too():
    extra = nn.Parameter(torch.zeros(10))
    model = nn.Linear(2, 2, bias=False)
    found = memory(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))
    assert (found.parameters, found.weights) == (14, 56)


def test_models_without_memory():
    empty = memory(nn.ReLU())
    assert (empty.total, empty.parameters, empty.bytes_per_parameter) == (0, 0, 0.0)
    assert "total" in str(empty)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    assert (memory(model).parameters, memory(model).weights) == (2_002_000, 8_008_000)


def test_a_dtensor_counts_with_its_local_part(tmp_path):
    from torch import distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = DeviceMesh("cpu", list(range(4)))
        model = nn.Linear(8, 16, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        found = memory(model)
    finally:
        dist.destroy_process_group()
    assert (found.parameters, found.weights, found.gradients) == (32, 128, 128)


def test_the_table():
    model = nn.Linear(4, 3).bfloat16()
    lines = str(memory(model)).splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["role", "dtype", "bytes", "bytes/parameter"]
    assert re.split(r"\s{2,}", lines[1]) == ["weights", "bfloat16", "30", "2.000"]
    assert re.split(r"\s{2,}", lines[2]) == ["gradients", "bfloat16", "30", "2.000", "expected: not made yet"]
    assert re.split(r"\s{2,}", lines[3]) == ["total", "60", "4.000", "15 parameters"]


def test_mistakes_are_told():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        memory(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        memory(nn.Linear(1, 1), "adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown role 'activations'"):
        memory(nn.Linear(1, 1)).bytes_of("activations")
