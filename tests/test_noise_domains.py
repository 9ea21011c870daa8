"""No two consumers of noise draw the same numbers: every domain is run for real, and the keys that it uses are compared."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import lowp
from lowp.tensor import noise as noise_module
from lowp.tensor.noise import STREAMS, Domain, Noise, draw, key_columns, key_tensor, stream_of, words_of
from lowp.wire.fsdp import FsdpHandle
from lowp.wire.plan import Part
from lowp.wire.rules import Stage
from lowp.wire.settings import Settings

STEPS = range(3)
CPU = torch.device("cpu")
REDUCTIONS = ["two_shot", "one_shot", "ring", "tree", "sequential", "hierarchical(2)", "hierarchical(2, leaders)"]


class Recorder:
    """All keys go through one function. (An index is part of what is drawn, not of the key.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[tuple[int, ...]] = []
        plain = noise_module._round_keys

        def round_keys(key, low):
            rows = torch.broadcast_tensors(*(torch.as_tensor(number).reshape(-1) for number in (*key, low)))
            self.drawn += zip(*(row.tolist() for row in rows), strict=True)
            return plain(key, low)

        monkeypatch.setattr(noise_module, "_round_keys", round_keys)

    @property
    def keys(self) -> set[tuple[int, ...]]:
        return {drawn[:4] for drawn in self.drawn}

    @property
    def repeated(self) -> int:
        return len(self.drawn) - len(set(self.drawn))


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def parameters(count: int = 5, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(8, 8, dtype=dtype)) for _ in range(count)]
    for p in found:
        p.grad = torch.full_like(p, 2.0**-9)
    return found


def of_user() -> None:
    for step in STEPS:
        for stream in range(5):
            lowp.quantize(torch.ones(8), "e5m2", "stochastic", seed=Noise(0, step, stream))
            lowp.matmul(
                torch.ones(2, 3), torch.ones(3, 2), accumulate="e5m2", rounding="stochastic", seed=Noise(0, step, stream)
            )


def of_user_gradient() -> None:
    for step in STEPS:
        for stream in range(5):
            x = torch.ones(8, requires_grad=True)
            lowp.fake_quantize(x, None, "e5m2", "stochastic", seed=Noise(0, step, stream)).sum().backward()


def of_optimizer() -> None:
    optimizer = lowp.optim.AdamW(parameters(), lr=1e-3, state="fp16")
    for _ in STEPS:
        optimizer.step()


def of_master() -> None:
    optimizer = torch.optim.SGD(parameters(dtype=torch.float32), lr=1e-3)
    lowp.MasterWeights(optimizer, "fp16", "stochastic")
    for _ in STEPS:
        optimizer.step()


def simulated(**roles) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    simulation = lowp.simulate(model, **roles)
    for step in STEPS:
        for rank in range(2):
            simulation.step, simulation.rank = step, rank
            model(torch.ones(4, 8)).sum().backward()


def of_simulation() -> None:
    simulated(weights="e4m3fn", activations="e4m3fn", errors="e5m2", gradients="e5m2", rounding="stochastic")


def of_simulated_sums() -> None:
    simulated(accumulate=lowp.Arithmetic(accumulate="e5m2", rounding="stochastic"))


def of_simulated_products() -> None:
    simulated(products="mxfp4, stochastic")


def of_wire(reduction: str = "two_shot", **options) -> None:
    world = lowp.VirtualWorld(5)
    for step in STEPS:
        gradients = [[torch.ones(20) for _ in range(3)] for _ in range(world.size)]
        world.all_reduce(gradients, "e5m2", rounding="stochastic", reduction=reduction, step=step, **options)


def of_fsdp() -> None:
    handle = FsdpHandle([], seed=0)
    codec = Settings.of("e5m2", rounding="stochastic", scale="local").codec("w", 1, False, 0)
    for _ in STEPS:
        rules = handle.rules(2)
        for owner in range(2):
            for rank in range(2):
                key_tensor(rules.noise(Part(0, codec, owner, 0, 0, 8), Stage.ADDEND, rank), 0, CPU)


CONSUMERS = {
    Domain.USER: of_user,
    Domain.USER_GRADIENT: of_user_gradient,
    Domain.OPTIMIZER: of_optimizer,
    Domain.MASTER: of_master,
    Domain.SIMULATION: of_simulation,
    Domain.SIMULATED_SUMS: of_simulated_sums,
    Domain.SIMULATED_PRODUCTS: of_simulated_products,
    Domain.WIRE: of_wire,
    Domain.FSDP: of_fsdp,
}


def test_every_domain_is_looked_at():
    assert CONSUMERS.keys() == set(Domain) == STREAMS.keys()


def test_no_two_consumers_share_a_stream(recorder):
    found: dict[Domain, set] = {}
    for domain, run in CONSUMERS.items():
        run()  # what is worked out once for a layout of an optimizer draws with example keys
        recorder.drawn.clear()
        run()
        assert recorder.drawn, domain
        assert not recorder.repeated, domain
        found[domain] = recorder.keys
    for one in Domain:
        for other in Domain:
            assert one == other or not found[one] & found[other], (one, other)


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_two_roundings_of_a_reduction_share_a_stream(recorder, reduction, kahan):
    of_wire(reduction, sum_format="fp16", kahan=kahan, scale="local")
    assert recorder.drawn
    assert not recorder.repeated


def test_inside_lowp_noise_is_made_with_a_domain():
    """`Noise(...)` without one is the user's: only where a user's seed is read."""
    root = Path(lowp.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
            if name == "Noise" and not any(keyword.arg == "domain" for keyword in call.keywords):
                found.add(str(path.relative_to(root)))
    assert found == {"tensor/ops.py", "tensor/matmul/arguments.py", "cli/rounder.py", "cli/tour_experiments.py"}


@pytest.mark.parametrize("domain", [domain for domain in Domain if len(STREAMS[domain]) > 1], ids=lambda d: d.name)
def test_streams_have_room_for_each_of_their_numbers(domain):
    bits = list(STREAMS[domain].values())
    assert sum(bits) <= 64
    edges = [(0, 1, 2, (1 << b) - 1) for b in bits]
    places = list(torch.cartesian_prod(*(torch.tensor(edge) for edge in edges)).unique(dim=0).tolist())
    places = [place for place in places if all(n < 1 << b for n, b in zip(place, bits, strict=True))]
    assert len({stream_of(domain, *place) for place in places}) == len(places)
    for i, b in enumerate(bits):
        with pytest.raises(ValueError, match="and cannot count"):
            stream_of(domain, *(1 << b if k == i else 0 for k in range(len(bits))))


GOLDEN = {
    Domain.USER: [210621067, 507863076],
    Domain.USER_GRADIENT: [691587460, 722793539],
    Domain.OPTIMIZER: [1018473879, 507070915],
    Domain.MASTER: [700535178, 751211247],
    Domain.SIMULATION: [724400849, 201124928],
    Domain.SIMULATED_SUMS: [726861001, 826147214],
    Domain.SIMULATED_PRODUCTS: [560791944, 242163318],
    Domain.WIRE: [1002367036, 894205437],
    Domain.FSDP: [399182978, 708263533],
}


@pytest.mark.parametrize("domain", Domain, ids=lambda d: d.name)
def test_noise_does_not_change_from_version_to_version(domain):
    """Or resumed runs would. The same from integers, from tensors and for many tensors at once."""
    drawn = [key_tensor(Noise(*parts, 3, domain=domain), 0, CPU) for parts in ((1, 2), (torch.tensor(1), torch.tensor(2)))]
    columns = key_columns(domain, words_of(1), words_of(2), torch.tensor([3]), torch.tensor([0]))
    for key in (*drawn, torch.cat(columns)):
        assert draw(key, torch.empty(2), 30).tolist() == GOLDEN[domain]


# Decisions, up or down, about the same parameter at the same step with the same seed.

COUNT = 1 << 14
HALF = 1 + 2.0**-8  # halfway between two numbers of bf16


def decided_by_optimizer() -> torch.Tensor:
    p = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, -(2.0**-8))
    lowp.optim.SGD([p], lr=1.0).step()
    return p


def decided_by_master() -> torch.Tensor:
    p = nn.Parameter(torch.ones(COUNT))
    p.grad = torch.full_like(p, -(2.0**-8))
    optimizer = torch.optim.SGD([p], lr=1.0)
    lowp.MasterWeights(optimizer, "bf16", "stochastic")
    optimizer.step()
    return p


def decided_by_simulation() -> torch.Tensor:
    model = nn.Linear(COUNT, 1, bias=False)
    nn.init.constant_(model.weight, HALF)
    lowp.simulate(model, weights="bf16", rounding="stochastic").step = 1
    return model.weight.reshape(-1)


def decided_by_wire() -> torch.Tensor:
    return lowp.VirtualWorld(1).all_reduce(
        [torch.full((COUNT,), HALF)], "bf16", rounding="stochastic", reduction="one_shot", step=1
    )


def decided_by_user() -> torch.Tensor:
    return lowp.quantize(torch.full((COUNT,), HALF), "bf16", "stochastic", seed=Noise(0, 1))


DECISIONS = [decided_by_optimizer, decided_by_master, decided_by_simulation, decided_by_wire, decided_by_user]


def test_roundings_of_one_parameter_are_independent():
    up = torch.stack([decide().detach().float() > 1 for decide in DECISIONS])
    assert (up.float().mean(1) - 0.5).abs().max() < 0.02
    for i in range(len(up)):
        for k in range(i):
            assert abs((up[i] == up[k]).float().mean().item() - 0.5) < 0.02, (DECISIONS[i].__name__, DECISIONS[k].__name__)


def test_a_simulated_layer_trains_if_its_loop_begins_with_step_1():
    """A weight that decays: it moves by less than it resolves, and the simulation rounds it again. With one noise it stands."""
    model = nn.Linear(32, 32, bias=False).bfloat16()
    nn.init.constant_(model.weight, 0.75)
    optimizer = lowp.optim.SGD(model.parameters(), lr=2**-11)
    simulation = lowp.simulate(model, weights="int8", rounding="stochastic")
    x = torch.eye(32).bfloat16()
    for step in range(1, 101):
        simulation.step = step
        optimizer.zero_grad()
        (model(x).float() ** 2).sum().mul(0.5).backward()
        optimizer.step()
    assert next(model.parameters()).float().mean().item() == pytest.approx(0.75 * (1 - 2**-11) ** 100, abs=0.005)
