"""Real ranks and virtual ones give the same bits: every codec x reduction x scale of the registries, uneven
sizes, 1 to 5 ranks.

Codecs travel together, each in a layer of its own: that is a bucket of mixed formats, too. Everything for one number of ranks
happens in one launch of processes. By default codecs and variants (stochastic, Kahan, error feedback) take turns, so that any
two of codec, reduction, scale and variant meet: three ranks take all codecs, other numbers of ranks some of them.
`make test-slow` crosses everything.
"""

import itertools
from typing import NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist

from lowp.formats import FORMATS
from lowp.wire.codec import check_format
from lowp.wire.compressor import Compressor
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


CODECS = (*(str(fmt) for fmt in FORMATS if travels(fmt)), "e5m4", "e3m1", "fp32", "topk:0.1:e4m3fn", "topk:0.3", "adaptive:3")
SOME = ("e5m2", "e2m1fn", "posit8", "dynamic8", "int8", "fp16", "mxfp4", "e5m4", "fp32", "topk:0.1:e4m3fn", "adaptive:4.5")
SIZES = (1, 7, 64, 101, 13)  # primes, one, and what is divisible by everything
MAGNITUDES = (1e-3, 1.0, 1e-30, 3e5, 0.0, 1e-7)
VARIANTS = ({}, {"rounding": "stochastic", "seed": 5}, {"kahan": True, "sum_format": "e6m5"}, {"error_feedback": True})


class Case(NamedTuple):
    """One bucket: a layer for each codec. `turn` says with which size and magnitude the layers begin."""

    turn: int
    reduction: str
    scale: str
    variant: dict
    codecs: tuple[str, ...]

    @property
    def shapes(self):
        return {f"layer{i}": torch.Size([SIZES[(self.turn + i) % len(SIZES)]]) for i in range(len(self.codecs))}

    @property
    def settings(self):
        layers = dict(zip(self.shapes, self.codecs, strict=True))
        return Settings.of("e5m2", scale=self.scale, reduction=self.reduction, layers=layers, chunk=300, **self.variant)

    @property
    def steps(self):
        """Two where something is remembered."""
        return 2 if self.scale == "aps_delayed" or "error_feedback" in self.variant else 1

    def gradients(self, rank, step):
        """Layers of very different sizes, a layer of zeros, and tiny and huge ones."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        magnitudes = itertools.islice(itertools.cycle(MAGNITUDES), self.turn % len(MAGNITUDES), None)
        return {
            name: torch.randn(shape, generator=generator) * magnitude
            for (name, shape), magnitude in zip(self.shapes.items(), magnitudes, strict=False)
        }


TURNS = 5  # no more than there are scales or reductions: a codec would not meet them all


def in_turns(codecs):
    """Every reduction with every scale, each with one variant and one codec of five."""
    pairs = itertools.product(enumerate(REDUCTIONS), enumerate(SCALES))
    return [
        Case(2 * i + j, str(reduction), str(scale), VARIANTS[(j - i) % len(VARIANTS)], codecs[(i + j) % TURNS :: TURNS])
        for (i, reduction), (j, scale) in pairs
    ]


def crossed(codecs, variants):
    product = itertools.product(enumerate(REDUCTIONS), enumerate(SCALES), enumerate(variants))
    return [
        Case(2 * i + j + k, str(reduction), str(scale), variant, codecs) for (i, reduction), (j, scale), (k, variant) in product
    ]


@pytest.mark.parametrize("codecs", [CODECS, SOME], ids=["all", "some"])
def test_any_two_values_meet_in_turns(codecs):
    met = [
        (codec, case.reduction, case.scale, VARIANTS.index(case.variant), size.numel())
        for case in in_turns(codecs)
        for codec, size in zip(case.codecs, case.shapes.values(), strict=True)
    ]
    everything = codecs, [str(r) for r in REDUCTIONS], [str(s) for s in SCALES], range(len(VARIANTS)), SIZES
    for (one, values), (other, others) in itertools.combinations(enumerate(everything), 2):
        assert {(row[one], row[other]) for row in met} == set(itertools.product(values, others))


def reduce_everything(rank, cases):
    """Rank 0 returns the bits; the others make sure that theirs are the same."""
    results = []
    for case in cases:
        compressor = Compressor(case.shapes, case.settings)
        for step in range(case.steps):
            sums = compressor.reduce(case.gradients(rank, step))
            results.append(torch.cat([tensor.view(torch.int32) for tensor in sums.values()]))
        compressor.close()
    mine = torch.cat(results)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(other, mine) for other in everybody), "replicas differ"
    return results if rank == 0 else None


def compare(world, cases, timeout):
    real = iter(ranks.run(reduce_everything, world, cases, timeout=timeout)[0])
    for case in cases:
        exchange = VirtualExchange(world, case.shapes, case.settings)
        sizes = [shape.numel() for shape in case.shapes.values()]
        for step in range(case.steps):
            sums = exchange.reduce(lambda rank, case=case, step=step: case.gradients(rank, step))
            for name, codec, bits in zip(sums, case.codecs, next(real).split(sizes), strict=True):
                assert torch.equal(sums[name].view(torch.int32), bits), (case, step, name, codec)


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_real_and_virtual_ranks_give_the_same_bits(world):
    compare(world, in_turns(SOME), 150)


def test_every_codec_on_three_ranks():
    compare(3, in_turns(CODECS), 250)


@pytest.mark.slow
def test_every_codec_with_every_reduction_and_scale():
    compare(3, crossed(CODECS, VARIANTS[:1]), 250)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_everything_crossed(world):
    compare(world, crossed(CODECS, VARIANTS), 3000)


def some_gradient(rank):
    return torch.randn(64, generator=torch.Generator().manual_seed(rank))


def reduce_in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    dist.new_group([1])
    if rank == 1:
        return None
    import lowp

    tensor = some_gradient(rank)
    lowp.all_reduce(tensor, "e4m3fn", group=group)
    return tensor


def test_subgroups():
    import lowp

    found = ranks.run(reduce_in_a_subgroup, 3)
    wanted = lowp.VirtualWorld(2).all_reduce([some_gradient(0), some_gradient(2)], "e4m3fn")
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


def reduce_within_and_after_inference_mode(rank):
    import lowp

    found = []
    for within in (True, False, True):
        with torch.inference_mode(within):
            tensor = some_gradient(rank)
            lowp.all_reduce(tensor, "e4m3fn")
        found.append(tensor.clone())
    return found


def test_memory_of_inference_mode_is_not_used_outside_of_it():
    for first, *others in ranks.run(reduce_within_and_after_inference_mode, 2):
        assert all(torch.equal(first, other) for other in others)
