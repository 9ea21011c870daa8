"""What is kept between steps must not outlive what it was made of."""

import copy

import pytest
import torch

import lowp


def optimizer_of(kind, **options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(8, 4, 3, 3).bfloat16()), torch.nn.Parameter(torch.randn(16, 16).bfloat16())]
    return parameters, kind(parameters, lr=1e-2, **options)


def take(parameters, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
    optimizer.step()


def weights_after(kind, change, resume=False, **options):
    parameters, optimizer = optimizer_of(kind, **options)
    for step in range(6):
        if step == 3:
            change(optimizer, parameters)
        if step == 4 and resume:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = kind(parameters, lr=1e-2, **options)
            optimizer.load_state_dict(saved)
        take(parameters, optimizer, step)
    return [p.detach().contiguous() for p in parameters], optimizer


def with_setting(name, value):
    def change(optimizer, parameters):
        for group in optimizer.param_groups:
            group[name] = value

    return change


def with_new_states(optimizer, parameters):
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})


def with_new_memory_of_states(optimizer, parameters):
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.clone()


@pytest.mark.parametrize(
    ("kind", "change", "options"),
    [
        (lowp.optim.AdamW, with_setting("betas", (0.97, 0.999)), {}),  # then rounded stochastically
        (lowp.optim.SGD, with_setting("momentum", 0.97), {"momentum": 0.9}),
        (lowp.optim.AdamW, with_setting("state_rounding", "stochastic"), {}),
        (lowp.optim.AdamW, with_setting("update", "kahan"), {}),
        (lowp.optim.AdamW, with_new_states, {}),
        (lowp.optim.AdamW, with_new_memory_of_states, {}),
    ],
)
def test_resumed_is_uninterrupted_whatever_was_changed_before(kind, change, options):
    ours, _ = weights_after(kind, change, **options)
    resumed, _ = weights_after(kind, change, resume=True, **options)
    assert all(map(torch.equal, ours, resumed))


@pytest.mark.parametrize("change", [with_new_states, with_new_memory_of_states])
def test_steps_write_to_the_states_that_are_there(change):
    want, there = weights_after(lowp.optim.AdamW, lambda *_: None)
    got, moved = weights_after(lowp.optim.AdamW, change)
    assert all(map(torch.equal, want, got))
    for a, b in zip(there.state.values(), moved.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def channels_last(optimizer, parameters):
    parameters[0].data = parameters[0].data.contiguous(memory_format=torch.channels_last)


def transposed(optimizer, parameters):
    parameters[1].data = parameters[1].data.t().contiguous().t()


@pytest.mark.parametrize("change", [channels_last, transposed])
@pytest.mark.parametrize("update", ["nearest", "kahan"])
def test_states_follow_their_parameter_to_another_order_in_memory(change, update):
    options = {"update": update, "state_rounding": "nearest"}  # noise is counted in the order of memory
    want, _ = weights_after(lowp.optim.AdamW, lambda *_: None, **options)
    got, _ = weights_after(lowp.optim.AdamW, change, **options)
    assert all(map(torch.equal, want, got))


def test_what_cannot_follow_is_refused():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 64, 3, 3).half())
    optimizer = lowp.optim.AdamW([p], state="e4m3fn")
    take([p], optimizer, 0)
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="another order"):
        take([p], optimizer, 1)


def test_states_in_another_format_are_refused():
    (p, q), optimizer = optimizer_of(lowp.optim.AdamW)
    take([p, q], optimizer, 0)
    with_setting("state", "e4m3fn")(optimizer, [])
    with_setting("state_scale", "tensor")(optimizer, [])
    with pytest.raises(ValueError, match="cannot become"):
        take([p, q], optimizer, 1)


def of_order(memory_format):
    torch.manual_seed(0)
    weight = torch.randn(64, 64, 3, 3).bfloat16().contiguous(memory_format=memory_format)
    p = torch.nn.Parameter(weight)
    return p, lowp.optim.SGD([p], lr=0.1, momentum=0.9, state="e4m3fn")


def test_states_of_blocks_say_in_which_order_they_lie():
    p, optimizer = of_order(torch.contiguous_format)
    take([p], optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    for memory_format, fits in ((torch.contiguous_format, True), (torch.channels_last, False)):
        q, other = of_order(memory_format)
        take([q], other, 1)
        before = copy.deepcopy(other.state_dict())
        if fits:
            other.load_state_dict(saved)
            want, got = optimizer.decoded_state(p), other.decoded_state(q)
            assert torch.equal(want["momentum_buffer"], got["momentum_buffer"])
            continue
        with pytest.raises(ValueError, match="another order"):
            other.load_state_dict(saved)
        for key, value in before["state"][0].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()["state"][0][key]))


def test_states_of_blocks_of_earlier_versions_have_no_order():
    p, optimizer = of_order(torch.channels_last)
    take([p], optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0].pop("memory_order") == 1030402
    q, other = of_order(torch.channels_last)
    other.load_state_dict(saved)
    assert torch.equal(optimizer.decoded_state(p)["momentum_buffer"], other.decoded_state(q)["momentum_buffer"])
    assert other.state_dict()["state"][0]["memory_order"] == 1030402
