"""Numeric health: exact figures for constructed tensors, and a watch that changes nothing and waits for nothing."""

import copy
import io
import json
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.health.eagerness import current_stance
from lowp.health.measures import measure, merge, sample, summary
from lowp.health.watch import ROLES, watch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NASTY = [0.0, -0.0, 1.0, -1.5, 2.0**-20, -(2.0**-24), 65504.0, -448.0, math.inf, -math.inf, math.nan]


def figures(values, fmt, dtype=torch.float32):
    numbers = torch.tensor(values, dtype=dtype)
    return summary(measure(numbers, None if fmt is None else lowp.format(fmt)).tolist())


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


def only(records, **wanted):
    found = [record for record in records if all(record[name] == value for name, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


# --- statistics


def test_counts_in_e4m3fn():
    """Its smallest number is 2^-9, whose half ties to zero; its largest 448, to which 464 still rounds."""
    found = figures([0.0, -0.0, 2.0**-10, -1.5 * 2.0**-10, 464.0, -465.0, 1e30, math.inf, -math.inf, math.nan], "e4m3fn")
    assert found["sampled"] == 10
    assert found["zeros"] == 2 / 10
    assert found["nonfinite"] == 3
    assert found["underflow"] == 1 / 5
    assert found["overflow"] == 2 / 5
    assert (found["largest"], found["smallest"]) == (torch.tensor(1e30).item(), 2.0**-10)


def test_subnormals_underflow_only_below_half_of_the_smallest():
    assert figures([2.0**-149, -(2.0**-148), 2.0**-126], "fp32")["underflow"] == 0
    assert figures([2.0**-133, 2.0**-134, -1.5 * 2.0**-134, 2.0**-149], "bf16")["underflow"] == 2 / 4
    assert figures([2.0**-149, -(2.0**-150), 1e-300], "fp32", torch.float64)["underflow"] == 2 / 3
    assert figures([2.0**-24, -(2.0**-25), 2.0**-130], "fp16", torch.bfloat16)["underflow"] == 2 / 3


def test_sqnr_is_of_the_numbers_that_survive():
    values = [1.0625, -3.25, 448.0, 2.0**-11, 1e30, math.inf, math.nan]
    rounded = [1.0, -3.25, 448.0, 0.0]
    signal = sum(x * x for x in values[:4])
    noise = sum((x - q) ** 2 for x, q in zip(values[:4], rounded, strict=True))
    assert figures(values, "e4m3fn")["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exponents(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = [
        0.0,
        1.0,
        1.99,
        -2.0,
        0.5,
        2.0**-14,
        2.0**-15,
        -3 * 2.0**-24,
        65504.0,
        3 * smallest,
        -smallest,
        math.inf,
        math.nan,
    ]
    numbers = torch.tensor(values, dtype=torch.float64).to(dtype)
    expected = {}
    for value in numbers.tolist():
        if value and math.isfinite(value):
            exponent = min(max(math.frexp(value)[1] - 1, -150), 128)
            expected[str(exponent)] = expected.get(str(exponent), 0) + 1
    assert summary(measure(numbers, None).tolist())["exponents"] == expected


def test_every_subnormal_of_float16_has_its_exponent():
    numbers = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    found = summary(measure(numbers, None).tolist())["exponents"]
    assert found == {str(exponent): 2 ** (exponent + 24) for exponent in range(-24, -14)}


@pytest.mark.parametrize(
    ("fmt", "inside", "outside"),
    [
        ("int8", 127.25, 127.5),
        ("e2m1fn", 6.75, 7.0),  # the next number would be 8
        ("posit8", 2.0**24, 2.0**25),
        ("e5m2", 61439.0, 61440.0),
        ("e4m3fn", 464.0, 464.125),
        ("fixed3.16", 8.0 - 2.0**-16, 8.0),
        ("nf4", 1.0, 1.5),
    ],
)
def test_overflow_is_what_rounds_beyond_the_largest_number(fmt, inside, outside):
    assert figures([inside, -inside, 0.0], fmt)["overflow"] == 0
    assert figures([outside, -outside, inside, 0.0], fmt)["overflow"] == 2 / 3


def test_squares_of_large_and_tiny_numbers_neither_overflow_nor_vanish():
    high = figures([60000.0] * 1000, "e5m2", torch.float16)
    assert high["sqnr_db"] == pytest.approx(20 * math.log10(60000 / (60000 - 57344)), rel=1e-12)
    wide = figures([3.0e38, -3.0e38], "e8m3")
    low = figures([2.0**-130 + 2.0**-140] * 2, "bf16")
    assert wide["sqnr_db"] is not None
    assert low["sqnr_db"] == pytest.approx(20 * math.log10(2**10 + 1), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "posit8", "mxfp8_e4m3", "nvfp4", "dynamic8", "bf16"])
def test_nothing_crashes(fmt, dtype):
    for values in ([], [0.0] * 40, [math.nan] * 40, [math.inf, -math.inf], NASTY):
        found = figures(values, fmt, dtype)
        json.dumps(found, allow_nan=False)
        assert sum(found["exponents"].values()) + found["nonfinite"] + round(found["zeros"] * len(values)) == len(values)


def test_two_samples_together():
    one, other = [1.0625, 0.0, math.nan, 500.0], [2.0**-12, -7.0]
    fmt = lowp.format("e4m3fn")
    apart = merge(measure(torch.tensor(one), fmt), measure(torch.tensor(other), fmt))
    assert torch.equal(apart, measure(torch.tensor(one + other), fmt))


def test_a_sample_is_small_spread_out_and_always_the_same():
    x = torch.arange(512 * 384).reshape(512, 384).float()
    taken = sample(x, 1000)
    assert 500 < taken.numel() <= 1000
    assert len({int(value) % 384 for value in taken}) > 300  # not just a few columns
    assert torch.equal(sample(x.t().contiguous().t(), 1000), taken)  # by meaning, whatever the strides
    assert torch.equal(sample(x, x.numel()), x.reshape(-1))
    rows = sample(x, 4000, lowp.format("mxfp4"))
    assert rows.shape[1] == 384
    assert rows.numel() <= 4000
    assert sample(torch.zeros(0, 5), 10).numel() == 0


# --- lost updates


def lost(optimizer_class, weight, gradient, dtype, **options):
    model = nn.Linear(4, 4, bias=False).to(dtype)
    nn.init.constant_(model.weight, weight)
    optimizer = optimizer_class(model.parameters(), **options)
    with watch(model, optimizer, roles="updates") as health:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        return only(health.records, role="updates")


def test_updates_below_half_an_ulp_are_lost():
    found = lost(torch.optim.SGD, 1.0, 2.0**-10, torch.bfloat16, lr=1.0)
    assert (found["lost_updates"], found["unchanged"]) == (1.0, 1.0)
    assert (found["largest"], found["smallest"], found["exponents"]) == (2.0**-10, 2.0**-10, {"-10": 16})


def test_updates_that_fit_arrive():
    for dtype in (torch.float32, torch.float64):
        found = lost(torch.optim.SGD, 1.0, 2.0**-10, dtype, lr=1.0)
        assert (found["lost_updates"], found["unchanged"]) == (0.0, 0.0)
    found = lost(torch.optim.AdamW, 0.5, 0.3, torch.float32, lr=1e-3)
    assert abs(found["lost_updates"]) < 1e-3
    assert found["unchanged"] == 0.0


def test_updates_are_lost_in_float32_too():
    found = lost(torch.optim.SGD, 1.0, 2.0**-26, torch.float32, lr=1.0)
    assert (found["lost_updates"], found["unchanged"]) == (1.0, 1.0)


def test_a_rounded_update_is_lost_in_part():
    """bf16 numbers below 1 are 2^-8 apart: of 1.25 steps one arrives."""
    found = lost(torch.optim.SGD, 1.0, 1.25 * 2.0**-8, torch.bfloat16, lr=1.0)
    assert (found["lost_updates"], found["unchanged"]) == (1 - 1 / 1.25, 0.0)


def test_no_intention_has_no_loss():
    found = lost(torch.optim.SGD, 1.0, 0.0, torch.float32, lr=1.0)
    assert (found["lost_updates"], found["reason"]) == (None, "the optimizer intended no change")


class Compensated(torch.optim.SGD):
    """Says itself what it intends, as the optimizers of lowp do, and keeps what rounding takes away."""

    def intended_update(self, parameter):
        return -parameter.grad.float() * self.param_groups[0]["lr"]

    def full_weight(self, parameter):
        return parameter.detach().float() + self.state[parameter].get("compensation", torch.zeros(()))

    def decoded_state(self, parameter):
        return {"compensation": self.state[parameter]["compensation"]}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            full = self.full_weight(parameter) + self.intended_update(parameter)
            parameter.copy_(full)
            self.state[parameter]["compensation"] = full - parameter.float()


def test_compensation_is_part_of_the_weight():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = Compensated(model.parameters(), lr=1.0)
    with watch(model, optimizer, every=1) as health:
        for _ in range(3):
            model.weight.grad = torch.full_like(model.weight, 2.0**-10)
            optimizer.step()
        for number in (1, 2, 3):
            found = only(health.records, role="updates", step=number)
            assert (found["lost_updates"], found["format"]) == (0.0, "bf16")
            assert found["unchanged"] == (1.0 if number < 3 else 0.0)  # 2 * 2^-10 is a tie, and goes to the even neighbour
        assert only(health.records, role="states", step=1)["exponents"] == {"-10": 16}
        assert only(health.records, role="states", step=1)["layer"] == "weight.compensation"


# --- the watch


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_watching_changes_no_bit(name, dtype):
    results = []
    for watching in (False, True):
        model = network(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # it wraps optimizer.step
        health = watch(model, optimizer, "e4m3fn", every=2) if watching else None
        for number in range(3):
            step(model, optimizer, torch.full((2, 6), 0.5 + number, dtype=dtype))
            schedule.step()
        results.append([*(p.detach() for p in model.parameters()), torch.rand(3), torch.tensor(schedule.get_last_lr())])
        if health is not None:
            health.close()
            updates = [record for record in health.records if record["role"] == "updates"]
            assert len(updates) == 2 * 4
            for record in updates:
                assert "reason" not in record or record["reason"] == "the optimizer intended no change", record["reason"]
                if dtype == torch.float32 and record["lost_updates"] is not None:
                    assert abs(record["lost_updates"]) < 1e-3
    for without, watched in zip(*results, strict=True):
        assert torch.equal(without, watched)


def test_steps_layers_and_roles():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with watch(model, optimizer, {"gradients": "e5m2", "states": "int8"}, every=3) as health:
        for _ in range(8):
            step(model, optimizer, torch.ones(2, 6))
        records = health.records
    names = [name for name, _ in model.named_parameters()]
    assert {record["step"] for record in records} == {1, 4, 7}
    by_role = {role: {r["layer"] for r in records if r["role"] == role} for role in {r["role"] for r in records}}
    assert by_role == {
        "weights": set(names),
        "gradients": set(names),
        "updates": set(names),
        "activations": {"0", "1", "2"},
        "states": {f"{name}.momentum_buffer" for name in names},
    }
    assert {(r["role"], r["format"]) for r in records} == {
        ("weights", "fp32"), ("gradients", "e5m2"), ("updates", "fp32"), ("activations", "fp32"), ("states", "int8")
    }  # fmt: skip
    assert only(records, role="activations", layer="1", step=1)["elements"] == 16


def test_figures_are_those_of_the_tensors():
    model = nn.Sequential(nn.Identity())
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    x = torch.tensor(NASTY, requires_grad=True)
    with watch(model, optimizer, "e4m3fn") as health:
        model(x)
        with torch.no_grad():
            model(torch.ones(100))  # an evaluation
        model(x[:3])  # another micro-batch
        optimizer.step()
        found = only(health.records, role="activations")
    expected = figures(NASTY + NASTY[:3], "e4m3fn")
    assert {name: found[name] for name in expected} == expected


def test_large_tensors_are_sampled():
    model = nn.Linear(100, 99, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, sample=1000) as health:
        step(model, optimizer, torch.ones(1, 100))
        for role in ("weights", "gradients", "updates"):
            found = only(health.records, role=role)
            assert found["elements"] == 9900
            assert 700 < found["sampled"] <= 1000


class Waits(TorchDispatchMode):
    """Fails on the operations that would make the host wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.bincount,
            torch.ops.aten.masked_select,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fmt", ["e4m3fn", "mxfp8_e4m3", "posit8", "int8", None])
def test_a_sampled_step_waits_for_nothing(fmt):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer, fmt, every=2, sample=20) as health:
        with Waits():
            for _ in range(2):
                step(model, optimizer, torch.ones(2, 6))
        assert all("reason" not in record for record in health.records)


def test_json_lines(tmp_path):
    path = tmp_path / "health.jsonl"
    model = network()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(math.nan))
        model[2].weight.copy_(torch.tensor(math.inf))
    optimizer = torch.optim.Adam(model.parameters())
    with watch(model, optimizer, "e5m2", every=1, path=path, keep=1) as health:
        step(model, optimizer, torch.ones(2, 6))
        assert path.read_text() == ""  # nobody has waited for it yet
        step(model, optimizer, torch.ones(2, 6))
        assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {1}
        health.flush()
        assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {1, 2}

    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert health.records == [record for record in records if record["step"] == 2]  # keep=1
    found = only(records, step=1, layer="0.weight", role="weights")
    assert (found["nonfinite"], found["sqnr_db"], found["largest"]) == (48, None, None)


def test_the_table_has_the_worst_first():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[0].weight, 2.0**-30)
    nn.init.ones_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, "e4m3fn", roles=["weights", "updates"]) as health:
        assert health.table() == "no step has been sampled yet"
        step(model, optimizer, torch.ones(2, 4))
        lines = health.table(rows=3).splitlines()
    assert lines[0] == "step 1"
    assert lines[2].split()[:5] == ["0.weight", "weights", "e4m3fn", "100.00%", "0.00%"]
    assert lines[5:] == ["and 1 more", "updates: the optimizer intended no change"]


def test_odd_models():
    """Tied, frozen, unused and empty parameters; parameters of the optimizer alone; a layer with several outputs; float64."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.two.bias.requires_grad_(False)
            self.unused, self.empty = nn.Linear(2, 2), nn.Parameter(torch.zeros(0, 3))
            self.memory = nn.LSTM(4, 3)
            self.index = nn.Embedding(5, 4, sparse=True)
            self.wide = nn.Linear(3, 1).double()

        def forward(self, x):
            out, _ = self.memory(self.two(self.one(x + self.index(torch.tensor([1, 1, 2])))))
            return self.wide(out.double()).sum() + self.empty.sum()

    model, extra = Odd(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with watch(model, optimizer, every=1) as health:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)) + extra.sum()).backward()
            optimizer.step()
        records = health.records
    assert [r for r in records if "reason" in r and r["layer"] != "empty"] == []
    updates = {r["layer"] for r in records if r["role"] == "updates" and r["step"] == 2}
    assert {"one.weight", "index.weight", "empty", "param_groups.0.13", "wide.bias"} <= updates
    assert not {"two.weight", "two.bias", "unused.weight"} & updates
    assert only(records, step=1, layer="memory", role="activations")["elements"] == 9 + 3 + 3
    assert only(records, step=1, layer="index.weight", role="gradients")["elements"] == 12  # what is there of it
    assert only(records, step=1, layer="wide.weight", role="weights")["format"] == "fp64"


def test_shards_are_seen_as_what_this_rank_holds():
    from torch import distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = DeviceMesh("cpu", list(range(4)))
        model = nn.Linear(8, 16, bias=False).bfloat16()
        model.weight = nn.Parameter(distribute_tensor(torch.ones(16, 8).bfloat16(), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.9)
        with watch(model, optimizer) as health:
            model.weight.grad = distribute_tensor(torch.ones(16, 8).bfloat16(), mesh, [Shard(0)])
            optimizer.step()
            assert {(r["role"], r["elements"]) for r in health.records} == {
                (role, 32) for role in ("weights", "gradients", "updates", "states")
            }
            assert only(health.records, role="updates")["lost_updates"] == 1.0
    finally:
        dist.destroy_process_group()


def test_autocast_changes_no_figure():
    found = []
    for enabled in (False, True):
        model, x = nn.Sequential(nn.ReLU()), torch.linspace(-3, 3, 50, requires_grad=True)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with watch(model, optimizer, "e4m3fn") as health:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                model(x)
            optimizer.step()
            found.append(only(health.records, role="activations"))
    assert found[0] == found[1]


class Picky(torch.optim.SGD):
    """Of somebody else's making: it keeps its parameters under another name, draws noise, and wants them in float32."""

    def __init__(self, parameters, picky, **options):
        super().__init__(parameters, **options)
        self.picky = picky
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.mine:
            if self.picky and parameter.dtype != torch.float32:
                raise RuntimeError("float32 only")
            parameter.sub_(parameter.grad * torch.rand(()))


@pytest.mark.parametrize("picky", [False, True])
def test_optimizers_of_others(picky):
    results = []
    for watching in (False, True):
        model = network()
        optimizer = Picky(model.parameters(), picky, lr=0.1)
        health = watch(model, optimizer, every=1) if watching else None
        torch.manual_seed(0)
        step(model, optimizer, torch.ones(2, 6))
        results.append([p.detach() for p in model.parameters()])
        if health is not None:
            health.close()
            updates = [record for record in health.records if record["role"] == "updates"]
            for record in updates:
                if picky:
                    assert record["lost_updates"] is None
                    assert "Picky intends is not known: RuntimeError: float32 only" in record["reason"]
                else:
                    assert abs(record["lost_updates"]) < 1e-5
            assert len(updates) == 4
            assert not picky or "float32 only" in health.table(100)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_numbers_that_cannot_be_seen_are_told():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.vmap(self.layer)(x)

    model = Mapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as health:
        step(model, optimizer, torch.ones(2, 4))
        found = only(health.records, role="activations")
        assert "torch.func" in found["reason"]
        assert "torch.func" in health.table()


def test_closures_are_seen_but_their_updates_are_not_known():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with watch(model, optimizer) as health:
        optimizer.step(closure)
        assert {r["role"] for r in health.records} >= {"weights", "gradients", "activations", "updates"}
        assert "closure" in only(health.records, role="updates", layer="weight")["reason"]
    assert current_stance().stance == "default"


def test_mistakes_are_told(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases = [
        (ValueError, "every is a number of steps from 1 up, not 0", {"every": 0}),
        (ValueError, "sample is a number of elements", {"sample": 0}),
        (ValueError, "unknown format 'e4m3fm'; did you mean 'e4m3fn'", {"format": "e4m3fm"}),
        (ValueError, "unknown role 'weight'; it is one of weights", {"format": {"weight": "fp16"}}),
        (ValueError, "unknown role 'loss'", {"roles": ["loss"]}),
        (TypeError, "a format is a name", {"format": 8}),
        (FileNotFoundError, "nowhere", {"path": tmp_path / "nowhere" / "health.jsonl"}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            watch(model, optimizer, **options)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        watch(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        watch(model, model)  # type: ignore[arg-type]
    assert current_stance().stance == "default"


# --- hooks, stances, compilers


def hooks_of(model, optimizer):
    modules = sum(len(module._forward_hooks) for module in model.modules())
    return modules, len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def test_hooks_are_there_for_sampled_steps_only():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    health = watch(model, optimizer, every=2)
    assert (hooks_of(model, optimizer), current_stance().stance) == ((3, 1, 1), "force_eager")
    step(model, optimizer, torch.ones(2, 6))
    assert (hooks_of(model, optimizer), current_stance().stance) == ((0, 1, 1), "default")
    step(model, optimizer, torch.ones(2, 6))
    assert (hooks_of(model, optimizer), current_stance().stance) == ((3, 1, 1), "force_eager")
    health.close()
    health.close()
    assert (hooks_of(model, optimizer), current_stance().stance) == ((0, 0, 0), "default")


def test_a_model_is_copied_and_saved_in_the_middle_of_a_sample():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, roles="activations") as health:
        twin = copy.deepcopy(model)
        twin(torch.ones(2, 6))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.load(file, weights_only=False)(torch.ones(2, 6))
        step(model, optimizer, torch.ones(2, 6))
        assert only(health.records, layer="0")["elements"] == 16


class Raises(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")


def test_the_stance_comes_back_when_a_step_raises():
    model = network()
    optimizer = Raises(model.parameters(), lr=0.1)
    health = watch(model, optimizer)
    with pytest.raises(RuntimeError, match="no step"):
        step(model, optimizer, torch.ones(2, 6))
    assert current_stance().stance == "default"
    health.close()
    assert {record["role"] for record in health.records} >= {"weights", "activations"}  # what was seen is not lost
    with pytest.raises(RuntimeError, match="shapes"), watch(model, optimizer):
        model(torch.ones(2, 7))
    assert current_stance().stance == "default"
    assert hooks_of(model, optimizer) == (0, 0, 0)


def test_a_forgotten_watch_writes_and_restores(tmp_path):
    import gc

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, every=1, path=tmp_path / "health.jsonl")
    step(model, optimizer, torch.ones(2, 6))
    del model, optimizer
    gc.collect()
    assert current_stance().stance == "default"
    assert (tmp_path / "health.jsonl").read_text().count("\n") == 3 + 4 * 3


def test_stances_of_others_are_respected():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.compiler.set_stance("eager_on_recompile"), watch(model, optimizer):
        step(model, optimizer, torch.ones(2, 6))
        assert current_stance().stance == "eager_on_recompile"
    health = watch(model, optimizer, every=1)
    with torch.compiler.set_stance("force_eager"):  # begins in our sample, ends after it
        step(model, optimizer, torch.ones(2, 6))
        assert current_stance().stance == "force_eager"
        health.close()
        assert current_stance().stance == "force_eager"
    assert current_stance().stance == "default"


def exact_training(kind, backend, roles):
    """Seven steps whose every sum is exact, so that no order of additions matters: records, weights, graphs so far."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 16).round() / 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64, momentum=0.5)
    health = watch(model, optimizer, "e4m3fn", every=3, roles=roles)
    compiled = torch.compile(model, backend=backend) if kind == "model" else model

    def train(x):
        compiled(x).sum().div(4).backward()
        optimizer.step()
        optimizer.zero_grad()

    train = torch.compile(train, backend=backend) if kind == "everything" else train
    graphs = []
    generator = torch.Generator().manual_seed(5)
    for _ in range(7):
        train(torch.randint(-2, 3, (4, 6), generator=generator).float())
        graphs.append(counters["stats"]["unique_graphs"])
    health.close()
    return health.records, [p.detach() for p in model.parameters()], graphs


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::UserWarning", "default::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "backend", "roles"),
    [("model", "inductor", ROLES), ("everything", "aot_eager", ROLES), ("everything", "aot_eager", ("weights", "updates"))],
)
def test_compiled_training_has_the_same_figures_and_is_compiled_once(kind, backend, roles):
    expected, weights, _ = exact_training("eager", backend, roles)
    records, compiled_weights, graphs = exact_training(kind, backend, roles)
    assert records == expected
    assert {(record["step"], record["role"]) for record in records} == {(step, role) for step in (1, 4, 7) for role in roles}
    assert all("reason" not in record for record in records)
    assert all(torch.equal(a, b) for a, b in zip(weights, compiled_weights, strict=True))
    eager_first = "activations" in roles
    assert (graphs[0] == 0) == eager_first
    assert graphs[1] > 0
    assert len(set(graphs[1:])) == 1  # nothing is compiled for steps 4 and 7, nor again after them
