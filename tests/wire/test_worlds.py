"""Real ranks and virtual ones give the same bits: every codec x reduction x scale of the registries, uneven
sizes, 1 to 5 ranks.

Codecs travel together, each in a layer of its own: that is a bucket of mixed formats, too. Everything for one number of ranks
happens in one launch of processes. By default three ranks take all codecs, other numbers of ranks some of them, and variants
(stochastic, Kahan, error feedback) take turns; `make test-slow` crosses everything.
"""

import itertools

import pytest
import ranks
import torch
import torch.distributed as dist

from lowp.formats import FORMATS
from lowp.wire.compressor import Compressor
from lowp.wire.payload import check_format
from lowp.wire.reductions import REDUCTIONS
from lowp.wire.scaling import SCALES
from lowp.wire.settings import Settings
from lowp.wire.virtual import VirtualExchange


def travels(fmt):
    try:
        check_format(fmt)
    except ValueError:
        return False
    return fmt.bits <= 16.5


CODECS = (*(str(fmt) for fmt in FORMATS if travels(fmt)), "e5m4", "e3m1", "fp32", "topk:0.1:e4m3fn", "topk:0.3")
SOME = ("e5m2", "e2m1fn", "posit8", "dynamic8", "int8", "fp16", "mxfp4", "e5m4", "fp32", "topk:0.1:e4m3fn")
SIZES = (1, 7, 64, 101, 13)  # primes, one, and what is divisible by everything
VARIANTS = ({}, {"rounding": "stochastic", "seed": 5}, {"kahan": True, "accumulate": "e6m5"}, {"error_feedback": True})
PAIRS = [(str(reduction), str(scale)) for reduction, scale in itertools.product(REDUCTIONS, SCALES)]
TURNS = [(*pair, variant) for pair, variant in zip(PAIRS, itertools.cycle(VARIANTS), strict=False)]
PLAIN = [(*pair, {}) for pair in PAIRS]
EVERYTHING = [(*pair, variant) for pair in PAIRS for variant in VARIANTS]


def shapes(codecs):
    return {f"layer{i}": torch.Size([SIZES[i % len(SIZES)]]) for i in range(len(codecs))}


def settings(codecs, reduction, scale, variant):
    layers = dict(zip(shapes(codecs), codecs, strict=True))
    return Settings.of("e5m2", scale=scale, reduction=reduction, layers=layers, chunk=300, **variant)


def gradients(codecs, rank, step):
    """Layers of very different sizes, a layer of zeros, and tiny and huge ones."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = {}
    for i, (name, shape) in enumerate(shapes(codecs).items()):
        magnitude = (1e-3, 1.0, 1e-30, 3e5, 0.0, 1e-7)[i % 6]
        found[name] = torch.randn(shape, generator=generator) * magnitude
    return found


def steps_of(scale, variant):
    """Two where something is remembered."""
    return 2 if scale == "aps_delayed" or "error_feedback" in variant else 1


def reduce_everything(rank, codecs, cases):
    """Rank 0 returns the bits; the others make sure that theirs are the same."""
    results = []
    for reduction, scale, variant in cases:
        compressor = Compressor(shapes(codecs), settings(codecs, reduction, scale, variant))
        for step in range(steps_of(scale, variant)):
            sums = compressor.reduce(gradients(codecs, rank, step))
            results.append(torch.cat([tensor.view(torch.int32) for tensor in sums.values()]))
        compressor.close()
    mine = torch.stack(results)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(other, mine) for other in everybody), "replicas differ"
    return mine if rank == 0 else None


def compare(world, codecs, cases, timeout):
    real = iter(ranks.run(reduce_everything, world, codecs, cases, timeout=timeout)[0])
    sizes = [shape.numel() for shape in shapes(codecs).values()]
    for reduction, scale, variant in cases:
        exchange = VirtualExchange(world, shapes(codecs), settings(codecs, reduction, scale, variant))
        for step in range(steps_of(scale, variant)):
            sums = exchange.reduce(lambda rank, step=step: gradients(codecs, rank, step))
            for name, codec, bits in zip(sums, codecs, next(real).split(sizes), strict=True):
                assert torch.equal(sums[name].view(torch.int32), bits), (reduction, scale, variant, step, name, codec)


@pytest.mark.parametrize("world", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_real_and_virtual_ranks_give_the_same_bits(world):
    compare(world, SOME, TURNS, 150)


def test_every_codec_with_every_reduction_and_scale():
    compare(3, CODECS, PLAIN, 250)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_everything_crossed(world):
    compare(world, CODECS, EVERYTHING, 3000)


def reduce_in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    dist.new_group([1])
    if rank == 1:
        return None
    import lowp

    tensor = gradients(SOME, rank, 0)["layer2"]
    lowp.all_reduce(tensor, "e4m3fn", group=group)
    return tensor


def test_subgroups():
    import lowp

    found = ranks.run(reduce_in_a_subgroup, 3)
    wanted = lowp.VirtualWorld(2).all_reduce([gradients(SOME, 0, 0)["layer2"], gradients(SOME, 2, 0)["layer2"]], "e4m3fn")
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[2], wanted)


def reduce_odd_shapes(rank):
    import lowp

    found = []
    for shape in ((0,), (), (1,), (3, 5, 7), (0, 4)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            tensor = torch.full(shape, float(rank + 1), dtype=dtype)
            lowp.all_reduce(tensor, "e5m2", op="mean")
            found.append(tensor)
    transposed = torch.arange(12.0).view(3, 4).t()
    lowp.all_reduce(transposed, "fp16")
    return [*found, transposed]


def test_empty_tensors_scalars_dtypes_and_strides():
    for found in ranks.run(reduce_odd_shapes, 3):
        *rest, transposed = found
        for tensor in rest:
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))
        assert torch.equal(transposed, 3 * torch.arange(12.0).view(3, 4).t())
