"""Without a scale, a format of fewer than 8 bits has one for every 32 numbers. Who names another is told once what it costs."""

import json
import logging
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import lowp
from lowp.formats import FORMATS
from lowp.wire import scale_warnings
from lowp.wire.codec import check_format, codec_of
from lowp.wire.settings import UNCOMPRESSED, Settings
from lowp.wire.virtual import VirtualExchange

NARROW = {"e3m2fn", "e2m3fn", "e2m1fn", "e3m0", "int4", "int2", "posit6", "nf4"}
CUSTOM = {
    **dict.fromkeys(["e2m1", "e4m2", "e3m3", "int7", "int3", "fixed1.2", "posit5_1", "posit7"], "block:32"),
    **dict.fromkeys(["e4m4", "e5m4", "int9", "fixed3.5", "topk:0.1", "topk:0.1:e2m1fn", "topk:0.1:e4m3fn"], "local"),
    **dict.fromkeys(["block(e2m1fn, 16, e4m3fn)", "block(int4, 32, e8m0fnu)"], "local"),
}
RESULTS = Path(__file__).parents[2] / "benchmarks/results/amd-epyc-x2-errors.json"


@pytest.fixture(autouse=True)
def not_said_yet(monkeypatch):
    monkeypatch.setattr(scale_warnings, "_said", set())


def travels(fmt):
    try:
        return bool(check_format(fmt))
    except ValueError:
        return False


def test_every_format_of_the_registry():
    found = {str(fmt): str(codec_of(fmt).scale) for fmt in FORMATS if travels(fmt)}
    assert found.keys() > NARROW
    assert found == {name: "block:32" if name in NARROW else "local" for name in found}


@pytest.mark.parametrize(("name", "scale"), CUSTOM.items(), ids=str)
def test_formats_of_ones_own(name, scale):
    assert str(Settings.of(name).codec_at(name, 0).scale) == scale


def test_each_format_of_layers_and_schedules_has_its_own():
    settings = Settings.of({0: "fp16", 5: "e2m1fn"}, layers={"last": "e4m3fn", "first": "int4"}, skip="1d")
    scales = [str(settings.codec(["x"], 2, (), step).scale) for step in (0, 4, 5)]
    assert scales == ["local", "local", "block:32"]
    assert [str(settings.codec(["x"], 2, (end,), 0)) for end in ("first", "last")] == ["int4/block:32", "e4m3fn/local"]
    assert settings.codec(["x"], 1, (), 5) == UNCOMPRESSED
    named = Settings.of({0: "fp16", 5: "e2m1fn"}, layers={"last": "int4"}, scale="aps")
    assert {str(codec.scale) for codec in named.codecs()} == {"aps"}


def test_ranks_and_states_compare_what_is_meant():
    """A scale by default is the same scale when it is named. States of 8 bits that older versions saved say `local`."""

    def described(*arguments, **options):
        return Settings.of(*arguments, **options).describe_codec()

    assert described("e4m3fn") == "format=e4m3fn scale=local rounding=nearest skip=[] layers={} error_feedback=False"
    assert described({0: "fp32", 3: "e4m3fn"}) == described({0: "fp32", 3: "e4m3fn"}, scale="local")
    assert described("e2m1fn") == described("e2m1fn", scale="block:32") != described("e2m1fn", scale="local")
    mixed = {"format": "e2m1fn", "layers": {"last": "fp16"}, "skip": "1d"}
    assert "scale=block:32,local " in described(**mixed)
    assert described(**mixed) not in (described(**mixed, scale="local"), described(**mixed, scale="block:32"))

    def schedule(step):
        return "e5m2" if step < 10 else "e2m1fn"

    assert described(schedule) != described(schedule, scale="local")  # they differ from step 10 on


def gradient(rank, size=4096):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)) ** 3


def said_by(caplog):
    return [record.getMessage() for record in caplog.records]


def test_it_says_once_for_a_format_what_was_measured(caplog):
    world = lowp.VirtualWorld(2)
    for scale in ("local", "local", "none", "aps"):
        world.all_reduce(gradient, "e2m1fn", scale=scale)
    assert said_by(caplog) == [
        "scale='local' for e2m1fn, which has 4 bits: on real gradients the squared error was up to .2 of the square of the "
        "sum, with scale='block:32', the default of formats of fewer than 8 bits, up to .03 (docs/WIRE.md); take that"
    ]
    world.all_reduce(gradient, {0: "fp16", 500: "int4"}, scale="local")  # a format that comes later
    assert "for int4, which has 4 bits" in said_by(caplog)[1]


def test_it_advises_nothing_where_both_scales_lose_the_same(caplog):
    lowp.VirtualWorld(2).all_reduce(gradient, "posit6", scale="local")
    assert said_by(caplog)[0].endswith("up to .022 (docs/WIRE.md)")


@pytest.mark.parametrize(("format", "bits", "options"), [("e4m2", 7, {}), ("int4", 4, {"rounding": "stochastic"})])
def test_where_nothing_was_measured_it_says_so(format, bits, options, caplog):
    lowp.VirtualWorld(2).all_reduce(gradient, format, scale="none", **options)
    assert said_by(caplog) == [
        f"scale='none' for {format}, which has {bits} bits: its error was not measured; take scale='block:32', the default of "
        "formats of fewer than 8 bits"
    ]


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("e2m1fn", {}),
        ("e2m1fn", {"scale": "block:64"}),
        ("e2m1fn", {"scale": "block:16", "rounding": "stochastic"}),
        ("topk:0.1:e2m1fn", {}),
        ("topk:0.1:e2m1fn", {"scale": "local"}),
        ("mxfp4", {"scale": "local"}),
        ("nvfp4", {}),
        ("e4m3fn", {"scale": "local"}),
        ("fp16", {"scale": "none"}),
        ("e4m3fn", {"layers": {"x": "int4"}, "skip": "1d"}),
    ],
    ids=str,
)
def test_what_costs_little_is_not_mentioned(format, options, caplog):
    lowp.VirtualWorld(2).all_reduce(gradient, format, **options)
    assert said_by(caplog) == []


def test_the_figures_are_those_of_the_results():
    """In the form in which the table of docs/WIRE.md has them."""
    found = {}
    for row in json.loads(RESULTS.read_text())["rows"]:
        name, *options = row["codec"].split()
        if name in NARROW and options[0] in ("block:32", "local", "aps", "none"):
            found[row["codec"]] = max(row["vnmse"], found.get(row["codec"], 0.0))
    assert {codec: f"{error:.2g}".removeprefix("0") for codec, error in found.items()} == scale_warnings.MEASURED
    assert {f"{name} {scale}" for name in NARROW - {"int2"} for scale in ("local", "block:32")} <= found.keys()
    for name, scale, *rounding in map(str.split, found):
        assert " ".join([name, "block:32", *rounding]) in found, scale  # so that both can be told


SHAPES = {"first": (40, 33), "norm": (33,), "middle": (70, 41), "last": (9, 41)}
MIXED = {"layers": {"last": "fp16"}, "skip": "1d"}


def gradients(rank, step):
    draws = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(shape, generator=draws) ** 3 for name, shape in SHAPES.items()}


def real(rank, call):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lowp").addHandler(handler)
    if call == "means":
        compressor = lowp.Compressor({n: torch.Size(s) for n, s in SHAPES.items()}, "e2m1fn", error_feedback=True, **MIXED)
        means = [compressor.reduce(gradients(rank, step)) for step in range(2)]
        compressor.close()
        lowp.all_reduce(total := gradient(rank), "nf4")
        return means, total, said
    if call == "compressor":
        lowp.Compressor({"weight": torch.Size([3, 3])}, "e5m2", layers={"last": "e2m1fn"}, scale="local").close()
    elif call == "all_reduce":
        lowp.all_reduce(gradient(rank), "e2m1fn", scale="none")
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        net = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
        lowp.fsdp.compress(net, reduce="e2m1fn", gather="int4").remove()
        assert said == []
        lowp.fsdp.compress(net, reduce="e2m1fn", gather="e4m3fn", scale="local").remove()
    return said


def test_real_ranks_send_what_virtual_ones_send():
    virtual = VirtualExchange(2, {n: torch.Size(s) for n, s in SHAPES.items()}, "e2m1fn", error_feedback=True, **MIXED)
    wanted = [virtual.reduce(lambda rank, step=step: gradients(rank, step)) for step in range(2)]
    for means, total, said in ranks.run(real, 2, "means"):
        for got, mean in zip(means, wanted, strict=True):
            assert all(torch.equal(got[name], mean[name]) for name in SHAPES)
        assert torch.equal(total, lowp.VirtualWorld(2).all_reduce(gradient, "nf4", scale="block:32"))
        assert said == []


@pytest.mark.parametrize("call", ["compressor", "all_reduce", "fsdp"])
def test_one_real_rank_says_so(call):
    first, second = ranks.run(real, 2, call)
    assert ["for e2m1fn, which has 4 bits" in text for text in first] == [True]
    assert second == []
