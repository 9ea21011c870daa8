"""Loss scaling: the sequence of scales, what is skipped, what is saved, and who is blamed."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.optim.layer_exponents import TimesPowerOfTwo
from lowp.optim.loss_scale import LossScale, LossScaleExhausted
from wire import ranks

NAN, INF = math.nan, math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Recorder(torch.optim.Optimizer):
    """Steps like SGD with lr 1, in float64, and keeps the gradients that it saw, unscaled."""

    takes_gradient_scale = True

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})
        self.seen, self.scales = {}, None

    @torch.no_grad()
    def step(self, closure=None, *, gradient_scale=1.0):
        self.scales = gradient_scale
        for parameter in self.param_groups[0]["params"]:
            scale = gradient_scale[parameter] if isinstance(gradient_scale, dict) else gradient_scale
            if parameter.grad is not None:
                self.seen[parameter] = parameter.grad.double() / scale


def weight(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def one_step(scale, optimizer, parameter, gradient):
    """A step in which the parameter's unscaled gradient is `gradient`, everywhere."""
    optimizer.zero_grad()
    scale.scale((parameter * torch.tensor(gradient, dtype=parameter.dtype)).sum()).backward()
    return scale.step(optimizer)


# The global scale


def test_sequence_of_scales():
    p = weight(1.0, 2.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scale = LossScale("dynamic", init=2.0**4, interval=3, maximum=2.0**6, minimum=0.5, backoff=0.25)
    script = [1.0] * 3 + [INF] + [1.0] * 2 + [NAN] + [1.0] * 10
    trace = [(one_step(scale, optimizer, p, g), scale.value) for g in script]
    up = [(True, 16.0)] * 2 + [(True, 32.0)]
    broken = [(False, 8.0)] + [(True, 8.0)] * 2 + [(False, 2.0)]
    again = [(True, v) for v in [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]]
    assert trace == up + broken + again
    assert scale.skipped == 2


def test_growth_stops_at_the_maximum():
    p = weight(1.0)
    scale = LossScale(init=2.0, interval=1, maximum=8.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    values = []
    for _ in range(4):
        one_step(scale, optimizer, p, 1.0)
        values.append(scale.value)
    assert values == [4.0, 8.0, 8.0, 8.0]


def test_fp16_gradients_survive_that_would_underflow():
    gradients = []
    for kind in (1.0, 2.0**15):
        p = weight(1.0, -3.0, dtype=torch.float16)
        scale, optimizer = LossScale(kind), Recorder([p])
        small = torch.tensor(2.0**-14, dtype=torch.float16)
        scale.scale((p * p * small * small).sum()).backward()
        assert scale.step(optimizer)
        gradients.append(optimizer.seen[p].tolist())
    assert gradients == [[0.0, -0.0], [2.0**-27, -3 * 2.0**-27]]
    assert optimizer.scales == 2.0**15


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_untouched_and_the_gradient_exact(dtype):
    loss = torch.tensor([60000.0, -0.0, 2.0**-24, NAN, -INF], dtype=dtype, requires_grad=True)
    scaled = LossScale(2.0**12).scale(loss)
    assert scaled.dtype == dtype
    assert torch.equal(scaled.view(torch.uint8), loss.detach().view(torch.uint8))
    back = torch.tensor([1.0, -(2.0**-24), 3 * 2.0**-24, 0.0, -1.5], dtype=dtype)
    scaled.backward(back)
    assert torch.equal(loss.grad, (back.double() * 2.0**12).to(dtype))


def test_large_scales_of_small_fp16_gradients():
    """2^20 and 2^-30 are not FP16 numbers; some numbers times them are."""
    for factor, gradient in ((2.0**20, [2.0**-24, -3 * 2.0**-24, 1.0]), (2.0**-30, [-(2.0**15), 2.0**6, 3 * 2.0**5])):
        x = torch.zeros(3, dtype=torch.float16, requires_grad=True)
        TimesPowerOfTwo.apply(x, factor, 0).backward(torch.tensor(gradient, dtype=torch.float16))
        assert x.grad.tolist() == torch.tensor([g * factor for g in gradient], dtype=torch.float64).half().tolist()


def test_fp16_loss_limits_the_scale():
    p = weight(1.0, dtype=torch.float16)
    scale, optimizer = LossScale(interval=1), torch.optim.SGD([p], lr=0.0)
    assert scale.value == 2.0**16
    for _ in range(3):
        assert one_step(scale, optimizer, p, 1.0)
        assert scale.value == 2.0**15
    with pytest.raises(ValueError, match="an FP16 loss cannot carry a scale of 65536"):
        LossScale(2.0**16).scale(p.sum())


def test_fp16_loss_after_a_float32_one_costs_one_step():
    half, single = weight(1.0, dtype=torch.float16), weight(1.0)
    scale, optimizer = LossScale(interval=1), torch.optim.SGD([half, single], lr=0.0)
    trace = []
    for _ in range(3):
        optimizer.zero_grad()
        scale.scale(single.sum()).backward()
        scale.scale(half.sum()).backward()
        trace.append((scale.step(optimizer), scale.value))
    assert trace == [(False, 2.0**15), (True, 2.0**15), (True, 2.0**15)]


def test_several_losses_and_accumulation():
    p = weight(1.0, 2.0)
    scale, optimizer = LossScale(8.0), Recorder([p])
    scale.scale((p * 3).sum()).backward()
    scale.scale(p * 5).backward(torch.tensor([1.0, -1.0]))
    assert p.grad.tolist() == [64.0, -16.0]
    assert scale.step(optimizer)
    assert optimizer.seen[p].tolist() == [8.0, -2.0]


def test_second_derivatives():
    p = weight(3.0)
    scaled = LossScale(4.0).scale((p**3).sum())
    (first,) = torch.autograd.grad(scaled, p, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), p)
    assert (first.item(), second.item()) == (108.0, 72.0)


def test_no_gradient_no_scaling():
    scale, p = LossScale(), weight(1.0)
    with torch.no_grad():
        loss = p.sum()
        assert scale.scale(loss) is loss
    with pytest.raises(RuntimeError, match=r"call scale.scale\(loss\).backward\(\) first"):
        scale.step(torch.optim.SGD([p], lr=1.0))


def test_a_skipped_step_changes_nothing():
    p, q = weight(1.0, 2.0), weight(3.0)
    optimizer = torch.optim.Adam([p, q], lr=0.1)
    scale = LossScale(init=4.0)
    scale.scale((p * p).sum() + q.sum()).backward()
    assert scale.step(optimizer)
    before, state = [p.detach().clone(), q.detach().clone()], copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    scale.scale((p * p).sum() + (q * INF).sum()).backward()
    assert not scale.step(optimizer)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    after = optimizer.state_dict()
    for i in state["state"]:
        for key in state["state"][i]:
            assert torch.equal(after["state"][i][key], state["state"][i][key])


def test_other_optimizers_get_unscaled_gradients():
    p, q = weight(1.0, -2.0), weight(5.0, dtype=torch.float64)
    scale = LossScale(2.0**10)
    scale.scale((p * 3).sum().double() + (q * q).sum()).backward()
    assert scale.step(torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=0.5))
    assert (p.tolist(), q.tolist()) == ([-2.0, -5.0], [0.0])
    assert (p.grad.tolist(), q.grad.tolist()) == ([3.0, 3.0], [10.0])


def test_several_optimizers_step_together_or_not():
    p, q = weight(1.0), weight(1.0)
    scale = LossScale(init=2.0)
    scale.scale(p.sum() + (q * INF).sum()).backward()
    assert not scale.step(torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0))
    assert (p.item(), q.item(), scale.value) == (1.0, 1.0, 1.0)


# What is not finite


def stepped_with(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(g.to_dense() if g.is_sparse else g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scale = LossScale()
    scale.scale(weight(1.0).sum()).backward()
    return scale.step(torch.optim.SGD(parameters, lr=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 17, 99])
def test_nonfinite_gradients_are_found(dtype, where):
    for bad in (NAN, -NAN, INF, -INF):
        gradient = torch.full((100,), -1.0, dtype=dtype)
        gradient[where] = bad
        assert not stepped_with(torch.ones(3), gradient, torch.ones(2, dtype=torch.float16)), bad
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert not stepped_with(torch.tensor([0, -1, 0], dtype=bits).view(dtype))  # all ones: a NaN with a sign


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gradients_pass(dtype):
    info = torch.finfo(dtype)
    values = [info.max, info.min, info.tiny, info.smallest_normal / 4, -0.0, 0.0]
    assert stepped_with(torch.tensor(values, dtype=dtype), torch.zeros(3, dtype=dtype))


def test_odd_gradients():
    wide = torch.arange(12.0).view(3, 4).t()
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    assert stepped_with(wide, sparse, torch.empty(0, 3), torch.ones(2, dtype=torch.complex64), torch.tensor(2.0))
    assert not stepped_with(torch.tensor([complex(1.0, NAN)]))
    huge = torch.sparse_coo_tensor([[2, 2]], [3e38, 3e38], (4,), check_invariants=True)  # whose sum is infinite
    assert not stepped_with(huge)


def test_sparse_gradients_are_unscaled():
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(table.weight)
    scale = LossScale(2.0**8)
    scale.scale(table(torch.tensor([1, 1])).sum()).backward()
    assert scale.step(torch.optim.SGD(table.parameters(), lr=1.0))
    assert table.weight.tolist() == [[0.0, 0.0], [-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]]


def test_some_gradients_missing_is_normal_all_missing_is_not():
    p, q = weight(1.0), weight(1.0)
    scale, optimizer = LossScale(init=4.0), torch.optim.SGD([p, q], lr=0.0)
    scale.scale(p.sum()).backward()
    assert scale.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    scale.scale(p.sum()).backward()
    p.grad = None  # as the wire does
    assert not scale.step(optimizer)
    assert (scale.value, scale.skipped) == (2.0, 1)


def test_reported_overflow():
    scale = LossScale(init=4.0, minimum=2.0)
    scale.overflowed()
    assert (scale.value, scale.skipped) == (2.0, 1)
    with pytest.raises(LossScaleExhausted, match=r"smallest scale, 2.0: an overflow was reported by overflowed\(\)"):
        scale.overflowed()


# Exhaustion


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * INF


def poisoned(model, after):
    """The error becomes infinite on its way into module number `after`, from the loss' side."""
    x = torch.ones(2, 3)
    for i, module in enumerate(model):
        x = module(x)
        x = Poison.apply(x) if i == after else x
    return x.sum()


@pytest.mark.parametrize("decay_groups", [False, True])
def test_exhaustion_names_the_layer_nearest_to_the_loss(decay_groups):
    model = chain()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": biases}, {"params": weights}] if decay_groups else model.parameters(), lr=1.0)
    scale = LossScale(init=4.0, model=model)
    for value in (2.0, 1.0):
        scale.scale(poisoned(model, 2)).backward()
        assert not scale.step(optimizer)
        assert scale.value == value
        optimizer.zero_grad()
    scale.scale(poisoned(model, 2)).backward()
    with pytest.raises(
        LossScaleExhausted, match=r"at the smallest scale, 1.0: the gradient of '2.bias', the nearest to the loss of 4,"
    ):
        scale.step(optimizer)
    assert issubclass(LossScaleExhausted, FloatingPointError)


def test_exhaustion_without_a_model():
    model = chain()
    scale = LossScale(init=1.0)
    scale.scale(poisoned(model, 0)).backward()
    with pytest.raises(LossScaleExhausted, match=r"parameter 1 of group 0 with shape \(4,\), the nearest to the loss of 2"):
        scale.step(torch.optim.SGD(model.parameters(), lr=1.0))


def test_static_scale_has_patience():
    p = weight(1.0)
    scale, optimizer = LossScale(8, patience=3), torch.optim.SGD([p], lr=0.0)
    for gradient in [INF, INF, 1.0, NAN, INF]:
        assert one_step(scale, optimizer, p, gradient) == math.isfinite(gradient)
    assert (scale.value, scale.skipped) == (8.0, 4)
    with pytest.raises(LossScaleExhausted, match=r"3 steps in a row overflowed at scale 8.0: the gradient of parameter 0"):
        one_step(scale, optimizer, p, INF)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": 1000.0}, "power of two.* not 1000.0; near it are 512.0 and 1024.0"),
        ({"kind": 0}, "power of two.* not 0"),
        ({"kind": -2.0}, "power of two.* not -2.0"),
        ({"kind": INF}, "power of two.* not inf"),
        ({"kind": True}, "power of two.* not True"),
        ({"kind": None}, "power of two.* not None"),
        ({"kind": "dynamc"}, "unknown kind 'dynamc'"),
        ({"kind": "per_layer"}, "needs model="),
        ({"kind": "per_layer", "model": nn.Linear(1, 1), "interval": 1}, "interval of at least 2"),
        ({"init": 3.0}, "init must be a power of two"),
        ({"init": 2.0**30}, "must lie between minimum=1.0 and maximum=16777216.0"),
        ({"growth": 0.5}, "growth=0.5 must be at least 1"),
        ({"backoff": 1.0}, "backoff=1.0 below 1"),
        ({"interval": 0}, "interval must be an integer of at least 1, not 0"),
        ({"patience": 2.5}, "patience must be an integer"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossScale(**arguments)


def test_bad_losses_and_optimizers():
    scale, p = LossScale(), weight(1.0)
    for loss in (1.0, torch.tensor(3)):
        with pytest.raises(TypeError, match="scale takes a floating-point tensor, not"):
            scale.scale(loss)
    scale.scale(p.sum()).backward()
    with pytest.raises(TypeError, match="step takes optimizers, not Parameter"):
        scale.step(p)
    with pytest.raises(TypeError, match="step takes the optimizer"):
        scale.step()


# State


def test_state_round_trip():
    p = weight(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scale = LossScale(init=8.0, interval=4)
    for gradient in [1.0, INF, 1.0, 1.0, 1.0]:
        one_step(scale, optimizer, p, gradient)
    saved = scale.state_dict()
    other = LossScale(interval=4)
    other.load_state_dict(copy.deepcopy(saved))
    assert other.state_dict() == saved
    for one in (scale, other):
        one_step(one, optimizer, p, 1.0)
        assert one.value == 8.0  # the fourth clean step


GOOD = {"kind": "dynamic", "scale": 4.0, "skipped": 1, "skipped_in_a_row": 0, "clean_steps": 7, "layers": {}}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "not the state of a LossScale.*not nothing"),
        (None, "not the state of a LossScale.*NoneType"),
        ({key: GOOD[key] for key in list(GOOD)[:-1]}, "not the state of a LossScale"),
        (GOOD | {"kind": "static"}, "state of a 'static' scale; this one is 'dynamic'"),
        (GOOD | {"scale": 5.0}, "power of two"),
        (GOOD | {"scale": 2.0**40}, "not between 1.0 and 16777216.0"),
        (GOOD | {"clean_steps": -1}, "clean_steps must be an integer"),
        (GOOD | {"skipped": None}, "skipped must be an integer"),
        (GOOD | {"layers": {"a": [0, 1]}}, "not for this model's layers; they differ in a"),
    ],
)
def test_foreign_states_are_refused_whole(saved, message):
    scale = LossScale()
    before = scale.state_dict()
    with pytest.raises(ValueError, match=message):
        scale.load_state_dict(saved)
    assert scale.state_dict() == before
    scale.load_state_dict(GOOD)
    assert scale.state_dict() == GOOD


# torch.compile


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_compiled_losses():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    p = weight(1.0, 2.0)
    scale, optimizer = LossScale(init=4.0, interval=1), Recorder([p])
    loss = torch.compile(lambda x: scale.scale((p * x).sum()), backend=counter, fullgraph=True)
    for _ in range(5):
        optimizer.zero_grad()
        loss(torch.tensor([3.0, -5.0])).backward()
        assert p.grad.tolist() == [3 * scale.value, -5 * scale.value]
        assert scale.step(optimizer)
        assert optimizer.seen[p].tolist() == [3.0, -5.0]
    assert scale.value == 2.0**7
    assert counter.frame_count <= 3  # once as a constant, once for all other scales, and torch may think again


# Ranks


def overflow_on_one(rank):
    p = weight(1.0, 2.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scale = LossScale(init=8.0, interval=2)
    trace = []
    for step in range(4):
        gradient = NAN if (rank, step) in ((0, 1), (1, 2)) else 0.0
        trace.append((one_step(scale, optimizer, p, gradient), scale.value, p.tolist()))
    return trace


def test_ranks_skip_together():
    first, second = ranks.run(overflow_on_one, 2)
    assert first == second
    assert [entry[:2] for entry in first] == [(True, 8.0), (False, 4.0), (False, 2.0), (True, 2.0)]


def with_wire(rank, nonfinite):
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 2))
    handle = lowp.compress_gradients(net, "e5m2", nonfinite=nonfinite)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    scale, trace = LossScale(init=8.0, model=net), []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((3, 4), INF if (rank, step) == (1, 1) else 1.0)
        before = net.module.weight.detach().clone()
        try:
            scale.scale((net(x) * x[:, :2]).sum()).backward()
        except lowp.NonFiniteGradient:
            scale.overflowed()
            applied = False
        else:
            applied = scale.step(optimizer)
        trace.append((applied, scale.value, torch.equal(before, net.module.weight)))
    handle.remove()
    return trace, net.module.weight.detach()


def in_turn(rank, function, cases):
    return [function(rank, case) for case in cases]


def test_with_the_wire():
    results = ranks.run(in_turn, 2, with_wire, ["propagate", "skip", "raise"])
    for (first, weights), (second, others) in zip(*results, strict=True):
        assert first == second == [(True, 8.0, False), (False, 4.0, True), (True, 4.0, False)]
        assert torch.equal(weights, others)
        assert weights.isfinite().all()


# An exponent for every layer


def gradients_of(model, loss_of, kind):
    """A model's unscaled gradients in float64 after some steps without updates, and the scale."""
    optimizer = Recorder(model.parameters())
    scale = LossScale(kind, model=model, **({"init": 2.0**4} if isinstance(kind, str) else {}))
    for _ in range(6):
        optimizer.zero_grad()
        scale.scale(loss_of(model)).backward()
        assert scale.step(optimizer)
    gradients = {name: optimizer.seen[p] for name, p in model.named_parameters() if p in optimizer.seen}
    scale.remove()
    return gradients, scale, optimizer


class Recurrent(nn.Module):
    """Tuples in and out, keyword arguments, and an integer tensor among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Bilinear(4, 4, 2)

    def forward(self, tokens):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), torch.tensor([3, 2]), batch_first=True)
        output, (h, c) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return self.head(input1=padded[:, 0], input2=(h + c)[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


class Residual(nn.Module):
    """In-place activations, a shared layer called twice, a residual path, a frozen layer, a layer nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.twice, self.unused = (nn.Linear(4, 4) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)
        self.token = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.frozen(nn.functional.relu(self.first(x + self.token), inplace=True))
        z = self.norm(self.twice(y).relu_()) + y
        return self.last(z + self.twice(z).tanh())


class Attention(nn.Module):
    """nn.MultiheadAttention uses its output projection's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attend, self.outer = nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 1)

    def forward(self, x):
        y = self.inner(x)
        return self.outer(self.attend(y, y, y)[0])


TOKENS = torch.tensor([[1, 2, 3], [4, 0, 0]])
MODELS = {
    "chain": (chain, lambda net: net(torch.linspace(-1, 1, 6).view(2, 3)).square().mean() * 2.0**-20),
    "recurrent": (Recurrent, lambda net: net(TOKENS).square().mean() * 2.0**-12),
    "tied": (Tied, lambda net: net(TOKENS).square().mean() * 2.0**-12),
    "residual": (Residual, lambda net: net(torch.linspace(-2, 3, 12).view(3, 4)).square().mean() * 2.0**-10),
    "attention": (Attention, lambda net: net(torch.linspace(-2, 3, 12).view(3, 1, 4)).square().mean() * 2.0**-10),
    "normed": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda net: net(torch.ones(2, 3)).sum() * 2.0**-12,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_per_layer_gradients_are_the_plain_ones(name):
    """In float32 nothing leaves the range: powers of two change no bit, whatever the exponents."""
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = build()
    plain, _, _ = gradients_of(model, loss_of, 1.0)
    scaled, scale, optimizer = gradients_of(model, loss_of, "per_layer")
    assert plain.keys() == scaled.keys()
    for parameter in plain:
        assert torch.equal(plain[parameter], scaled[parameter]), parameter
    assert max(optimizer.scales.values()) > scale.value
    assert scale.exponents == {}  # removed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_exponents_reach_the_window():
    model = chain()
    scale, optimizer = LossScale("per_layer", model=model), Recorder(model.parameters())
    history = []
    for _ in range(12):
        optimizer.zero_grad()
        scale.scale(MODELS["chain"][1](model)).backward()
        largest = {name: max(p.grad.abs().max().item() for p in model[int(name)].parameters()) for name in ("0", "2", "4")}
        assert scale.step(optimizer)
        history.append(dict(scale.exponents))
    assert all(2.0**8 <= value < 2.0**13 for value in largest.values())
    assert history[-1] == history[-2]
    for earlier, later in zip([dict.fromkeys(history[0], 0), *history], history, strict=False):
        assert all(0 <= later[name] - earlier[name] <= 4 for name in later)
    assert [optimizer.scales[model[i].weight] for i in (0, 2, 4)] == [
        2.0**16 * 2.0 ** scale.exponents[str(i)] for i in (0, 2, 4)
    ]
    assert scale.exponents["0"] > 4


class Narrow(nn.Module):
    """A large gradient holds the global scale down; in a deep, narrow branch small inputs meet small errors.

    All numbers have few bits, so that FP16 rounds nothing but what is too small for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
        self.large = nn.Linear(1, 1, bias=False)
        for layer in self.branch:
            layer.weight.data = torch.tensor([[1.0, 0.5], [-0.5, 1.0]])

    def forward(self, x):
        return self.large(x.new_ones(1, 1)) * 2.0**11 + self.branch(x).sum() * 2.0**-18


def test_per_layer_keeps_what_a_global_scale_loses():
    model = Narrow().half()
    exact = copy.deepcopy(model).double()
    x = torch.tensor([[2.0**-14, -(2.0**-15)]], dtype=torch.float16)
    exact(x.double()).sum().backward()
    found = {}
    for kind in ("dynamic", "per_layer"):
        scale, optimizer = LossScale(kind, model=model, init=2.0, interval=10), Recorder(model.parameters())
        for _ in range(60):
            optimizer.zero_grad()
            scale.scale(model(x).sum()).backward()
            scale.step(optimizer)
        found[kind] = [optimizer.seen[p] for p in model.branch.parameters()]
        assert 1 <= scale.skipped <= 12  # both look for the limit, now and then
        assert 2.0 <= scale.value <= 2.0**5
        scale.remove()
    assert not any(gradient.any() for gradient in found["dynamic"])
    for gradient, parameter in zip(found["per_layer"], exact.branch.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_idle_layers_rise_slowly():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.zeros_(model[1].weight)
    scale, optimizer = LossScale("per_layer", model=model, init=1.0), Recorder(model.parameters())
    history = []
    for _ in range(18):
        optimizer.zero_grad()
        scale.scale(model(torch.ones(1, 2)).sum()).backward()
        assert scale.step(optimizer)
        history.append(scale.exponents["0"])
    assert history == [*range(1, 17), 16, 16]


def test_tied_layers_share_an_exponent():
    scale = LossScale("per_layer", model=Tied())
    assert set(scale.exponents) == {"embed", "mix"}


def test_a_weight_used_outside_its_layer_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    scale = LossScale("per_layer", model=model)
    loss = nn.functional.linear(model(torch.ones(1, 3)), model[0].weight).sum()
    with pytest.raises(ValueError, match=r"the parameter of '0' of shape \(3, 3\) is used outside of that layer's forward"):
        scale.scale(loss)


def test_no_grad_is_left_alone():
    model = chain()
    LossScale("per_layer", model=model)
    with torch.no_grad():
        assert model(torch.ones(1, 3)).grad_fn is None
    with torch.inference_mode():
        model(torch.ones(1, 3))


def test_exponents_change_only_in_step():
    """Accumulation: two backwards of one step carry the same exponents, and checkpointing recomputes with them."""
    model = chain()
    loss_of = MODELS["chain"][1]
    plain, _, _ = gradients_of(model, lambda net: loss_of(net) * 2, 1.0)
    optimizer, scale = Recorder(model.parameters()), LossScale("per_layer", model=model)
    for _ in range(4):
        optimizer.zero_grad()
        before = dict(scale.exponents)
        x = torch.linspace(-1, 1, 6).view(2, 3)
        for _ in range(2):
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            scale.scale(y.square().mean() * 2.0**-20).backward()
        assert scale.exponents == before
        assert scale.step(optimizer)
    assert any(scale.exponents.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.seen[parameter], plain[name])


def warmed(model, loss_of, **options):
    optimizer, scale = Recorder(model.parameters()), LossScale("per_layer", model=model, **options)
    for _ in range(10):
        optimizer.zero_grad()
        scale.scale(loss_of(model)).backward()
        assert scale.step(optimizer)
    optimizer.zero_grad()
    return optimizer, scale


def test_a_layer_that_overflows_alone_is_lowered_alone():
    model = chain()
    optimizer, scale = warmed(model, MODELS["chain"][1])
    before, value = dict(scale.exponents), scale.value
    for expected in (4, 8):
        scale.scale(MODELS["chain"][1](model)).backward()
        model[2].weight.grad[1, 1] = INF
        assert not scale.step(optimizer)
        assert scale.exponents == before | {"2": before["2"] - expected}
        optimizer.zero_grad()
    assert scale.value == value
    for _ in range(3):  # the ceiling keeps it from coming back at once
        scale.scale(MODELS["chain"][1](model)).backward()
        assert scale.step(optimizer)
        optimizer.zero_grad()
    assert scale.exponents["2"] == before["2"] - 8


def test_a_layer_that_overflows_alone_at_0_goes_below():
    model = chain()

    def loss_of(net):
        return net(torch.ones(2, 3)).sum()

    optimizer, scale = warmed(model, loss_of, init=2.0**11)
    assert set(scale.exponents.values()) == {0}
    for expected in (-4, -8, -12, -16):
        scale.scale(loss_of(model)).backward()
        model[4].weight.grad[0, 0] = -INF  # the layers beyond it are finite
        assert not scale.step(optimizer)
        assert scale.exponents == {"0": 0, "2": 0, "4": expected}
        optimizer.zero_grad()
    assert scale.value == 2.0**11
    scale.scale(loss_of(model)).backward()
    model[4].weight.grad[0, 0] = -INF
    assert not scale.step(optimizer)
    assert (scale.value, scale.exponents["4"]) == (2.0**10, -16)


def test_a_layer_that_is_no_longer_called_has_no_exponent():
    model = chain()
    optimizer, scale = warmed(model, MODELS["chain"][1])
    assert scale.exponents["0"] > 0
    scale.scale(nn.functional.linear(torch.ones(1, 3), model[0].weight).sum()).backward()
    assert scale.step(optimizer)
    assert optimizer.scales[model[0].weight] == scale.value
    assert optimizer.seen[model[0].weight].tolist() == [[1.0] * 3] * 4


def test_an_overflow_after_growth_is_the_scale_s():
    model = chain()
    optimizer, scale = warmed(model, MODELS["chain"][1], interval=11)
    before = dict(scale.exponents)
    scale.scale(MODELS["chain"][1](model)).backward()
    assert scale.step(optimizer)  # the eleventh
    assert scale.value == 2.0**17
    assert scale.exponents == {name: exponent - 1 for name, exponent in before.items()}  # what layers carry is unchanged
    scale.scale(MODELS["chain"][1](model)).backward()
    model[2].weight.grad[0, 0] = NAN
    assert not scale.step(optimizer)
    assert scale.value == 2.0**16
    assert scale.exponents == {name: exponent - 1 for name, exponent in before.items()}


def test_layers_at_their_ceiling_are_lowered_together():
    model = chain()
    optimizer, scale = warmed(model, MODELS["chain"][1])
    saved = scale.state_dict()
    layers = {name: [exponent, exponent] for name, (exponent, _) in saved["layers"].items()}
    layers["0"][1] += 1
    scale.load_state_dict(saved | {"layers": layers})
    scale.scale(poisoned(model, 4)).backward()
    assert not scale.step(optimizer)
    assert scale.exponents == {"0": layers["0"][0], "2": layers["2"][0] - 4, "4": layers["4"][0] - 4}


def test_overflow_of_the_errors_ends_in_exhaustion():
    model = chain()
    optimizer, scale = warmed(model, MODELS["chain"][1], init=4.0)
    assert scale.exponents["2"] > 0
    # First the layer nearest to the loss is suspected, down to 0; then the scale goes from 4 to 2 and to 1.
    for _ in range(math.ceil(scale.exponents["2"] / 4) + 2):
        scale.scale(poisoned(model, 2)).backward()
        assert not scale.step(optimizer)
        optimizer.zero_grad()
    assert (scale.exponents["2"], scale.value) == (0, 1.0)
    scale.scale(poisoned(model, 2)).backward()
    with pytest.raises(LossScaleExhausted, match=r"'2\.bias'"):
        scale.step(optimizer)


def test_per_layer_state_round_trip():
    _, scale = warmed(chain(), MODELS["chain"][1])
    saved = scale.state_dict()
    other = LossScale("per_layer", model=chain())
    other.load_state_dict(copy.deepcopy(saved))
    assert other.state_dict() == saved
    assert other.exponents == scale.exponents
    for broken in (
        {"0": [1, 2]},
        saved["layers"] | {"4": [3]},
        saved["layers"] | {"4": [40, 40]},
        saved["layers"] | {"4": [2, 1]},
    ):
        fresh = LossScale("per_layer", model=chain())
        before = fresh.state_dict()
        with pytest.raises(ValueError, match=r"differ in 2, 4|layer '4'"):
            fresh.load_state_dict(saved | {"layers": broken})
        assert fresh.state_dict() == before


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_per_layer_compiled():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model, loss_of = chain(), MODELS["chain"][1]
    plain, _, _ = gradients_of(model, loss_of, 1.0)
    optimizer, scale = Recorder(model.parameters()), LossScale("per_layer", model=model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    history = set()
    for _ in range(6):
        optimizer.zero_grad()
        history.add(tuple(scale.exponents.values()))
        scale.scale(loss_of(compiled)).backward()
        assert scale.step(optimizer)
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.seen[parameter], plain[name])
    assert len(history) > 3
    assert counter.frame_count <= 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, right):
        return self.head((self.right if right else self.left)(x))


def branches(rank, kind):
    """Each rank calls a branch of its own, and data of its own size: exponents must still be the same everywhere."""
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = Recorder(net.parameters())
    scale = LossScale(kind, model=net.module)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.full((2, 3), 2.0 ** (-8 * rank))
        scale.scale(net(x, right=rank == 1).sum() * (INF if (rank, step) == (1, 3) else 2.0**-20)).backward()
        assert scale.step(optimizer) == (step != 3)
    return scale.exponents, scale.value, [optimizer.seen[p] for p in net.parameters()]


def test_ranks_agree_on_exponents():
    results = ranks.run(in_turn, 2, branches, ["per_layer", "dynamic"])
    ((first, value, gradients), (_, _, plain)), ((second, other, others), _) = results
    assert (first, value) == (second, other)
    assert len(set(first.values())) > 1
    for a, b, c in zip(gradients, others, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def sharded(rank, kind):
    from torch.distributed.fsdp import fully_shard

    model = chain()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer)
    scale, optimizer = LossScale(kind, model=model, init=8.0), torch.optim.SGD(model.parameters(), lr=0.5)
    trace = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((2, 3), NAN if (rank, step) == (1, 1) else 1.0)
        scale.scale(model(x).square().mean() * 2.0**-6).backward()
        trace.append((scale.step(optimizer), scale.value))
    return trace, scale.exponents, [p.full_tensor() for p in model.parameters()]


def test_sharded_parameters():
    """FSDP2: a rank may hold no element of a parameter (the last layer has two rows, the ranks are three)."""
    plain, layered = zip(*ranks.run(in_turn, 3, sharded, ["dynamic", "per_layer"]), strict=True)
    for results in (plain, layered):
        assert all(result[:2] == results[0][:2] for result in results)
    assert plain[0][0] == [(True, 8.0), (False, 4.0), (True, 4.0), (True, 4.0)]
    assert [applied for applied, _ in layered[0][0]] == [True, False, True, True]
    assert any(layered[0][1].values())
    for a, b in zip(plain[0][2], layered[0][2], strict=True):
        assert torch.equal(a, b)
