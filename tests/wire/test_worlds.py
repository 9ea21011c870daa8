"""Real ranks and virtual ones give the same bits: every codec x reduction x scale of the registries, uneven sizes, 1 to 5 ranks.

All codecs travel together, each in a layer of its own: that is a bucket of mixed formats, too. Everything for one number of ranks
happens in one launch of processes.
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


CODECS = [*(str(fmt) for fmt in FORMATS if travels(fmt)), "e5m4", "e3m1", "fp32", "topk:0.1:e4m3fn", "topk:0.3"]
SIZES = (1, 7, 64, 101, 13)  # primes, one, and what is divisible by everything
VARIANTS = ({}, {"rounding": "stochastic", "seed": 5}, {"kahan": True, "accumulate": "e6m5"}, {"error_feedback": True})
CASES = [
    (str(reduction), str(scale), variant)
    for (reduction, scale), variant in zip(
        itertools.product(REDUCTIONS, SCALES), itertools.cycle(VARIANTS), strict=False
    )
] + [(str(reduction), "local", variant) for reduction in REDUCTIONS for variant in VARIANTS]


def shapes():
    return {f"layer{i}": torch.Size([SIZES[i % len(SIZES)]]) for i in range(len(CODECS))}


def settings(reduction, scale, variant):
    layers = dict(zip(shapes(), CODECS, strict=True))
    return Settings.of("e5m2", scale=scale, reduction=reduction, layers=layers, chunk=300, **variant)


def gradients(rank, step):
    """Layers of very different sizes, a layer of zeros, and tiny and huge ones."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = {}
    for i, (name, shape) in enumerate(shapes().items()):
        magnitude = (1e-3, 1.0, 1e-30, 3e5, 0.0, 1e-7)[i % 6]
        found[name] = torch.randn(shape, generator=generator) * magnitude
    return found


STEPS = 2


def reduce_everything(rank):
    """Every case, two steps each. Rank 0 returns the bits; the others make sure that theirs are the same."""
    results = []
    for reduction, scale, variant in CASES:
        compressor = Compressor(shapes(), settings(reduction, scale, variant), None, torch.device("cpu"))
        for step in range(STEPS):
            sums = compressor.reduce(gradients(rank, step))
            results.append(torch.cat([tensor.view(torch.int32) for tensor in sums.values()]))
        compressor.close()
    mine = torch.stack(results)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(other, mine) for other in everybody), "replicas differ"
    return mine if rank == 0 else None


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_real_and_virtual_ranks_give_the_same_bits(world):
    real = ranks.run(reduce_everything, world, timeout=200)[0]
    position = 0
    for reduction, scale, variant in CASES:
        exchange = VirtualExchange(world, shapes(), settings(reduction, scale, variant))
        for step in range(STEPS):
            sums = exchange.reduce(lambda rank, step=step: gradients(rank, step))
            for (name, virtual), codec, bits in zip(
                sums.items(), CODECS, real[position].split([s.numel() for s in shapes().values()]), strict=True
            ):
                assert torch.equal(virtual.view(torch.int32), bits), (world, reduction, scale, variant, step, name, codec)
            position += 1


def reduce_in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    dist.new_group([1])
    if rank == 1:
        return None
    import lowp

    tensor = gradients(rank, 0)["layer2"]
    lowp.all_reduce(tensor, "e4m3fn", group=group)
    return tensor


def test_subgroups():
    import lowp

    found = ranks.run(reduce_in_a_subgroup, 3)
    wanted = lowp.VirtualWorld(2).all_reduce([gradients(0, 0)["layer2"], gradients(2, 0)["layer2"]], "e4m3fn")
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
