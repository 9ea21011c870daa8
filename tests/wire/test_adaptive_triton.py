"""Adaptive messages by Triton's kernels, run by Triton's interpreter on a CPU: the bytes and numbers of plain operations.

The interpreter must be chosen before Triton is imported. So this file is also a program, which the test runs.
"""

import math

import torch

from interpreter import needs_triton, run

SMALL, LONG = (1, 63, 64, 65, 0, 1100), (130, 20_000)
# rounding, bits, dtype, shards, messages, divisor, what is special about the numbers, sizes of layers
CASES = (
    ("nearest", 1.0, torch.float32, 1, 1, 1, "mixed", SMALL),
    ("nearest", 1.5, torch.float16, 2, 2, 2, "mixed", SMALL),
    ("nearest", 2.5, torch.float32, 1, 3, 3, "not finite", SMALL),
    ("nearest", 4.0, torch.float32, 1, 1, 1, "huge", SMALL),
    ("nearest", 4.4, torch.bfloat16, 1, 8, 8, "mixed", (65,)),
    ("nearest", 4.4, torch.float32, 1, 1, 1, "mixed", LONG),
    ("nearest", 8.0, torch.float32, 2, 2, 1, "tiny", SMALL),
    ("nearest", 4.4, torch.float32, 1, 1, 1, "zero", LONG),
    ("stochastic", 1.25, torch.float32, 1, 2, 1, "not finite", SMALL),
    ("stochastic", 3.0, torch.bfloat16, 2, 1, 1, "mixed", SMALL),
    ("stochastic", 8.0, torch.float32, 1, 3, 3, "huge", SMALL),
)


def numbers(kind, dtype, seed, count):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(4).exp()
    x[::7], x[1::11], x[2::13], x[128:150], x[300:428] = 0.0, -0.0, 1e-42, 0.0, -0.0
    if kind == "not finite":
        x[100], x[300:] = math.nan, math.inf
    elif kind == "huge":
        x = (x * 1e36).clamp(-3.4e38, 3.4e38)
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "zero":
        x *= -0.0
        x[5000] = -3.0
    return (x if dtype == torch.float32 else x.clamp(-6e4, 6e4)).to(dtype)


def laid_out(rounding, bits, shards, sizes, rank=0):
    """The group of a bucket's messages, their length, how many numbers they have, and the keys of their noise."""
    from lowp.tensor.noise import KEY_SIZE
    from lowp.wire.codec import codec_of
    from lowp.wire.messages import Messages
    from lowp.wire.plan import Layer, chunks_of

    codec = codec_of(f"adaptive:{bits}", rounding)
    layers = tuple(Layer(str(i), size, codec, i) for i, size in enumerate(sizes))
    (chunk,) = chunks_of(layers, shards, (1 << 28, 1 << 28))
    messages = Messages(chunk.shards, lambda part: part.codec, [shard.start for shard in chunk.shards])
    (group,) = messages.groups
    keys = None
    if codec.stochastic:
        keys = torch.empty((KEY_SIZE, len(group.segments)), dtype=torch.int32)
        group.write_keys(noises(rank), keys)
    return group, messages.length, chunk.size, keys


def noises(rank):
    from lowp.tensor.noise import Domain
    from lowp.wire.codec_group import PartNoise

    return PartNoise(Domain.WIRE, 7, 1, 0, 0, rank)


def check(rounding, bits, dtype, shards, messages, divisor, kind, sizes, device="cpu"):
    """Encode and decode by plain operations on a CPU and by kernels on `device`."""
    from lowp.tensor.kernels import set_kernel_policy
    from lowp.wire.adaptive_triton import TritonDecoder, TritonEncoder
    from lowp.wire.workspace import NEW_MEMORY, Workspace

    set_kernel_policy("never")
    device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group, length, count, _ = laid_out(rounding, bits, shards, sizes)
    table, stochastic, workspace = group.adaptive_table(device), rounding == "stochastic", Workspace()
    factors = torch.tensor([2.0**-i if i % 2 else 1.7 for i in range(len(sizes))])
    plain = torch.full((messages, length), 99, dtype=torch.uint8)
    found = plain.to(device, copy=True)
    encoder = TritonEncoder(dtype, stochastic, device)
    for rank in range(messages):
        x, keys = numbers(kind, dtype, rank, count), laid_out(rounding, bits, shards, sizes, rank)[3]
        group.encode(x, plain[rank], factors, noises(rank), NEW_MEMORY)
        keys = None if keys is None else keys.to(device)
        encoder(x.to(device), found[rank], table, factors.to(device), keys, workspace.begin())
    assert torch.equal(plain, found.cpu())
    # The interpreter does not round to bfloat16, it truncates.
    for out_dtype in {dtype, torch.float32} - ({torch.bfloat16} if device.type == "cpu" else set()):
        sums = torch.full((count,), 5.0, dtype=out_dtype)
        others = sums.to(device, copy=True)
        group.decode(plain.view(-1), sums, factors, divisor, messages, length, NEW_MEMORY)
        decoder = TritonDecoder(out_dtype, stochastic, device)
        decoder(found.view(-1), others, table, factors.to(device), divisor, messages, length, workspace.begin())
        others, bits_of = others.cpu(), torch.int32 if out_dtype == torch.float32 else torch.int16
        same = sums.view(bits_of) == others.view(bits_of)
        assert bool((same | (sums.isnan() & others.isnan())).all())


class Interpreted:
    """What a `Launch` is in adaptive_triton.py."""

    def __init__(self, kernel, examples, device, warps=4, **constants):
        self._kernel, self._constants = kernel, constants

    def __call__(self, grid, *arguments):
        self._kernel[grid](*arguments, **self._constants)


@needs_triton
def test_triton_kernels_are_the_plain_operations():
    run(__file__)


if __name__ == "__main__":
    from lowp.wire import adaptive_tables

    adaptive_tables.BLOCK = 32  # so that a few groups are many blocks

    from lowp.wire import adaptive_triton

    adaptive_triton.Launch = Interpreted
    for case in CASES:
        print(*case, flush=True)
        check(*case)
