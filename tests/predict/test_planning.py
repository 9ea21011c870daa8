"""`lowp plan`: the choice, its reasons, what applies it; errors of gradients; the commands."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowp
from lowp.predict.candidates import candidate_wires, node_sizes, reductions_for
from lowp.predict.cluster import Cluster, Device, LinkLevel, ModelTimes
from lowp.predict.gradients import SampleGradients, cut, gradients_of
from lowp.predict.planning import GAIN, MAX_ERROR, chosen_of, plan
from lowp.predict.subjects import subject_of
from lowp.predict.wires import compress_arguments, uncompressed, uncompressed_of, wire_of
from lowp.wire.settings import Settings

WIRES = ("fp32", "e4m3fn/local", "e2m1fn/block:32")


def cluster(bandwidth=1e7, latency=1e-4, node=None, kind="cpu", overhead=1e-5, **more):
    inner = () if node is None else (LinkLevel("node", 1e10, 1e-5, ranks=node),)
    levels = (*inner, LinkLevel("network", bandwidth, latency, overhead, shared=node or 1))
    return Cluster("c", Device("d", kind, bandwidth=1e10, flops=1e10, **more), levels)


def make(hidden=32):
    """A model of a user's own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 3)), torch.randn(8, 20)


def without_gradient():
    return nn.Sequential(nn.ReLU()), torch.randn(8, 20)


def planned(bandwidth=1e7, **more):
    model, inputs = make()
    return plan(model, cluster(bandwidth), 4, inputs=inputs, wires=WIRES, batch=8, **more)


def test_a_slow_link_wants_fewer_bits_and_a_budget_more():
    few, eight, none = planned(1e5, max_error=0.5), planned(1e5, max_error=0.05), planned(1e5, max_error=0)
    assert few.chosen.wire.startswith("e2m1fn/block:32@")
    assert eight.chosen.wire.startswith("e4m3fn/local@")
    assert none.chosen.wire == "fp32"
    assert few.chosen.step.step < eight.chosen.step.step < none.chosen.step.step
    assert 0 < eight.chosen.error <= 0.05 < few.chosen.error
    assert none.arguments == {}


def test_a_fast_link_wants_float32():
    model, inputs = make()
    found = plan(model, cluster(1e12, 0.0, overhead=0.0), 4, inputs=inputs, wires=WIRES, batch=8)
    assert found.chosen.wire == "fp32"
    assert found.code == "ddp = DistributedDataParallel(model, bucket_cap_mb=25)"


def test_what_applies_it():
    found = planned(1e5, max_error=0.05)
    line = found.code.splitlines()[1]
    assert line.startswith('lowp.compress_gradients(ddp, "e4m3fn", scale="local", reduction="')
    Settings.of(**found.arguments)
    assert wire_of(found.chosen.wire).settings.codecs() == Settings.of(**found.arguments).codecs()
    assert found.recipe == found.arguments | {"bucket_mb": 26.2144}
    assert '[wire]\nformat = "e4m3fn"' in found.recipe_toml


def test_torchs_own_16_bits_are_a_hook_and_no_recipe():
    model, inputs = make()
    found = plan(model, cluster(1e5), 4, inputs=inputs, wires=("fp16",), batch=8)
    assert found.chosen.wire == "fp16"
    assert found.code.startswith("from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n")
    assert found.code.endswith("ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)")
    assert found.recipe is None
    assert "--no-torch" in found.recipe_toml


def test_a_16_bit_model_is_compared_with_its_own_dtype():
    """DistributedDataParallel sends bfloat16 gradients in bfloat16: that is what loses nothing."""
    model, inputs = make()
    wires = ("bf16", *WIRES[1:])

    def of(machine, max_error=0.05):
        return plan(model, machine, 4, inputs=inputs, wires=wires, batch=8, uncompressed="bf16", max_error=max_error)

    fast = of(cluster(1e12, 0.0, overhead=0.0))
    assert fast.chosen.wire == "bf16"
    assert fast.arguments == {}
    assert fast.code == "ddp = DistributedDataParallel(model, bucket_cap_mb=25)"
    assert fast.recipe == {"format": "fp32", "bucket_mb": 26.2144}  # uncompressed, in the dtype of the gradients
    slow = of(cluster(1e5))
    assert slow.chosen.wire.startswith("e4m3fn/local@")
    assert slow.why_not(next(o for o in slow.runners_up if o.wire == "bf16")).endswith("% slower")
    assert of(cluster(1e5), max_error=0.0).chosen.wire == "bf16"  # no budget forbids a model's own dtype


def test_the_dtype_of_most_numbers_says_what_is_uncompressed():
    assert [uncompressed(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)] == ["fp32", "fp16", "bf16"]
    assert uncompressed_of([torch.ones(3), torch.ones(4, dtype=torch.bfloat16)]) == "bf16"
    assert uncompressed_of([]) == "fp32"


def test_every_option_has_a_reason():
    found = planned(1e5, max_error=0.05)
    assert found.chosen.wire not in {other.wire for other in found.runners_up}
    reasons = {other.wire: found.why_not(other) for other in found.runners_up}
    assert reasons["fp32"].endswith("% slower")
    assert any("is above 0.05" in reason for wire, reason in reasons.items() if wire.startswith("e2m1fn"))
    assert [option.step.step for option in found.options] == sorted(option.step.step for option in found.options)


def test_records_are_flat_and_plans_repeat():
    first, again = planned(1e6), planned(1e6)
    assert first.records() == again.records()
    assert all(isinstance(v, (str, int, float, bool, type(None))) for record in first.records() for v in record.values())
    assert sum(record["chosen"] for record in first.records()) == 1


def test_gradients_decide_not_a_table():
    """Of one number each, all gradients are exact in any format: the fewest bytes win, whatever the budget."""
    ones = SampleGradients(tuple({"0.weight": torch.ones(64, 64)} for _ in range(4)), "ones")
    assert ones.error(wire_of("e2m1fn/block:32"), 4) == 0
    noise = SampleGradients(tuple({"0.weight": torch.randn(64, 64)} for _ in range(4)), "noise")
    errors = [noise.error(wire_of(wire), 4) for wire in ("fp32", "fp16/none", "e4m3fn/local", "e2m1fn/block:32")]
    assert errors == sorted(errors)
    assert errors[0] == 0 < errors[1] < 0.001 < errors[2] < 0.05 < errors[3] < 0.3


def test_the_error_is_the_virtual_worlds():
    torch.manual_seed(1)
    own = [{"a": torch.randn(50), "b": torch.randn(7, 3)} for _ in range(4)]
    found = SampleGradients(tuple(own), "").error(wire_of("e5m2/local@one_shot"), 4)
    sums = lowp.VirtualWorld(4).all_reduce(own, "e5m2", scale="local", reduction="one_shot", op="mean")
    exact = {name: torch.stack([each[name].double() for each in own]).mean(0) for name in own[0]}
    lost = sum(float((sums[name] - exact[name]).square().sum()) for name in exact)
    assert found == pytest.approx(math.sqrt(lost / sum(float(e.square().sum()) for e in exact.values())), rel=1e-12)


def test_what_overflows_is_not_chosen():
    huge = SampleGradients(tuple({"w": torch.full((64,), 1e6)} for _ in range(2)), "huge")
    assert huge.error(wire_of("fp16/none"), 2) > 0.9  # it saturates
    assert huge.error(wire_of("fp16"), 2) > 0.9  # torch's own
    assert huge.error(wire_of("fp16/local"), 2) < 0.001


def test_gradients_of_a_model_leave_it_as_it_was():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gradients_of(subject_of(model, torch.randn(8, 6)), 16)
    assert len(found.ranks) == 4  # two samples each
    assert not torch.equal(found.ranks[0]["0.weight"], found.ranks[1]["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_large_models_are_cut_in_proportion():
    own = {"a": torch.randn(900), "b": torch.randn(100), "c": torch.randn(1)}
    few = cut(SampleGradients((own,), ""), 100).ranks[0]
    assert [few[name].numel() for name in own] == [90, 10, 1]


def test_nodes_are_candidates():
    machine = cluster(node=4)
    assert reductions_for(machine.arrange(2)) == ("two_shot", "one_shot")
    assert node_sizes(machine.arrange(16)) == [2, 4]
    assert "hierarchical(4)" in reductions_for(machine.arrange(16))
    assert "one_shot" not in reductions_for(machine.arrange(16))
    assert node_sizes(machine.arrange(4)) == []


@pytest.mark.parametrize("ranks", [2, 16])
def test_every_candidate_can_be_predicted(ranks):
    machine = cluster(node=4)
    found = lowp.predict("mlp", machine, candidate_wires(machine.arrange(ranks)), ranks, batch=8)
    assert all(0 < step.step < 1e3 for step in found.steps)


def test_nodes_are_planned_for():
    """A network that eight ranks share is slow enough that a node adds up before it sends."""
    machine = cluster(1e6, node=8)
    model, inputs = make()
    found = plan(model, machine, 64, inputs=inputs, wires=("e4m3fn/local",), batch=8)
    assert found.arguments["reduction"].startswith("hierarchical(")


@given(st.floats(1e4, 1e11), st.floats(0, 1e-2), st.floats(0, 0.5))
@settings(max_examples=20)
def test_choices_are_within_the_budget_and_nothing_within_it_is_much_faster(bandwidth, latency, budget):
    model, inputs = make(8)
    found = plan(model, cluster(bandwidth, latency), 2, inputs=inputs, wires=WIRES, batch=8, max_error=budget, bucket_mb=(25,))
    assert found.chosen.error <= budget
    able = [option for option in found.options if option.within]
    assert found.chosen.step.step <= GAIN * min(option.step.step for option in able)
    assert chosen_of(list(reversed(found.options))) is found.chosen


def test_measured_models_bring_their_batch():
    times = ModelTimes(96, 0.01, 0.02)
    found = plan("mlp", cluster().with_times("mlp", times), 2, wires=["fp32"])
    assert found.chosen.step.batch == 96
    assert found.chosen.step.times.compute == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_error": -1}, "max_error: -1 must be at least 0"),
        ({"max_error": math.nan}, "max_error: nan must be at least 0"),
        ({"wires": ("e4m3fm",)}, "did you mean 'e4m3fn'"),
        ({"wires": ()}, "wire: at least one is wanted"),
        ({"wires": ("e2m1fn",), "max_error": 1e-6}, "max_error: nothing is within the budget; the smallest error is"),
        ({"bucket_mb": ()}, "bucket_mb: at least one is wanted"),
        ({"bucket_mb": (0,)}, "bucket_mb: 0 must be above 0"),
        ({"batch": 0}, "batch: 0 must be at least 1"),
    ],
)
def test_mistakes_name_the_field(arguments, message):
    model, inputs = make()
    with pytest.raises(ValueError, match=message):
        plan(model, cluster(), 2, **({"inputs": inputs, "batch": 8, "wires": WIRES} | arguments))


def test_models_that_cannot_be_planned_for():
    with pytest.raises(ValueError, match="inputs: is missing"):
        plan(make()[0], cluster(), 2)
    with pytest.raises(ValueError, match="it has no parameter"):
        plan("test_planning:without_gradient", cluster(), 2, batch=8)
    with pytest.raises(ValueError, match="unknown model 'mpl'; did you mean 'mlp'"):
        plan("mpl", cluster(), 2)
    with pytest.raises(ValueError, match="gradients: that of 'w' on rank 0 is not finite"):
        SampleGradients(({"w": torch.tensor([1.0, math.nan])},), "")
    with pytest.raises(ValueError, match="ranks: 2 need links"):
        plan("mlp", Cluster("one", Device("d", "cpu", bandwidth=1e10, flops=1e10), ()), 2)


def test_the_texts_of_wires_are_arguments():
    assert compress_arguments("e4m3fn/local@one_shot") == {"format": "e4m3fn", "scale": "local", "reduction": "one_shot"}
    assert MAX_ERROR == 0.1
