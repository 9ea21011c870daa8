"""Compiled kernels: the same bits as the plain operations, one build each, and a clear word where none can be built."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import lowp

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZES = (1, 2, 15, 16, 17, 65_535, 65_536, 65_537, 1_000_003)


@pytest.fixture
def kernels():
    """Compile at once; afterwards as the other tests want it."""
    lowp.set_kernel_policy("always")
    yield
    lowp.set_kernel_policy("never")


def plain(function):
    """The same call without kernels."""
    lowp.set_kernel_policy("never")
    try:
        return function()
    finally:
        lowp.set_kernel_policy("always")


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bit pattern: all binades, subnormals, infinities and NaN."""
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(count)
    patterns = torch.randint(info.min, info.max, (count,), generator=generator, dtype=integer).view(dtype)
    moderate = torch.randn(count, generator=generator).to(dtype)
    return torch.where(torch.rand(count, generator=generator) < 0.5, patterns, moderate)


def codes(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    integer = INTEGER_OF_SIZE[got.element_size()]
    assert torch.equal(got.contiguous().view(integer), want.contiguous().view(integer))


OPERATIONS = {
    "quantize_e4m3fn": (numbers, torch.float32, lambda x, **o: lowp.quantize(x, "e4m3fn", **o)),
    "quantize_e4m3fn_bfloat16": (numbers, torch.bfloat16, lambda x, **o: lowp.quantize(x, "e4m3fn", **o)),
    "quantize_e5m2_stochastic": (numbers, torch.float32, lambda x, **o: lowp.quantize(x, "e5m2", "stochastic", seed=9, **o)),
    "quantize_dynamic8": (numbers, torch.float32, lambda x, **o: lowp.quantize(x, "dynamic8", **o)),
    "encode_int8": (numbers, torch.float32, lambda x, **o: lowp.encode(x, "int8", nan="zero", **o)),
    "decode_posit8": (codes, torch.uint8, lambda x, **o: lowp.decode(x, "posit8", **o)),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


@every_operation
def test_kernels_equal_plain_operations(kernels, name):
    """Of every size, from one kernel, whatever the mode, the aliasing and the strides."""
    make, dtype, call = OPERATIONS[name]
    call(make(100, dtype))
    built = lowp.kernel_info()["built"]
    assert built > 0
    for size in SIZES:
        x = make(size, dtype)
        want = plain(lambda x=x: call(x))
        assert_same(call(x), want)
        with torch.inference_mode():
            assert_same(call(x), want)
        with torch.no_grad():
            assert_same(call(x), want)
        out = torch.empty_like(want)
        assert call(x, out=out) is out
        assert_same(out, want)
    if dtype.is_floating_point:
        assert_same(call(make(1000, dtype).requires_grad_()), plain(lambda: call(make(1000, dtype))))
    assert lowp.kernel_info()["built"] == built
    assert len(lowp.kernel_info()["seconds"]) == built


@every_operation
def test_kernels_take_any_strides(kernels, name):
    make, dtype, call = OPERATIONS[name]
    call(make(100, dtype))
    built = lowp.kernel_info()["built"]
    memory = make(70_000, dtype)
    views = [
        memory[1:],  # not aligned
        memory[:69_999].view(3, -1).t(),
        memory.view(10, 7, 20, 50).to(memory_format=torch.channels_last),
        memory[::3],
        memory[:1].expand(100, 1000),
        memory.view(70, 1000)[:, 5:900],
        memory[:0],
        memory[0],
    ]
    for view in views:
        want = plain(lambda view=view: call(view.contiguous()))
        assert_same(call(view), want)
    assert lowp.kernel_info()["built"] == built


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name.startswith("quantize")])
@pytest.mark.parametrize("size", [17, 65_537])
def test_kernels_work_in_place(kernels, name, size):
    make, dtype, call = OPERATIONS[name]
    call(make(100, dtype))
    built = lowp.kernel_info()["built"]
    x = make(size, dtype)
    want = plain(lambda: call(x))
    assert call(x, out=x) is x
    assert_same(x, want)
    memory = make(2 * size, dtype)
    source, target = memory[:size], memory[3 : size + 3]
    want = plain(lambda: call(source.clone()))
    call(source, out=target)
    assert_same(target, want)
    assert lowp.kernel_info()["built"] == built


@pytest.mark.parametrize("size", [1000, 100_000])
def test_kernels_write_to_sliced_out_and_nowhere_else(kernels, size):
    memory, x = torch.full((2 * size,), 99.0), numbers(2 * size).nan_to_num()[::2]
    want = plain(lambda: lowp.quantize(x.contiguous(), "e4m3fn"))
    lowp.quantize(x, "e4m3fn", out=memory[::2])
    assert_same(memory[::2], want)
    assert (memory[1::2] == 99.0).all()


@pytest.mark.parametrize("size", [100, 1_000_003])
def test_kernels_refuse_nan(kernels, size):
    x = numbers(size).nan_to_num()
    want = plain(lambda: lowp.encode(x, "int8", nan="zero"))
    assert_same(lowp.encode(x, "int8"), want)
    x[-1] = math.nan
    with pytest.raises(ValueError, match="x holds NaN and int8 has none"):
        lowp.encode(x, "int8")


def test_threads_share_one_kernel(kernels):
    built = lowp.kernel_info()["built"]
    x = numbers(70_000)
    want = plain(lambda: lowp.quantize(x, "e2m4"))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: lowp.quantize(x, "e2m4"), range(8)))
    for result in results:
        assert_same(result, want)
    assert lowp.kernel_info()["built"] == built + 1


# When kernels are built


def test_small_calls_build_at_the_32nd(kernels):
    lowp.set_kernel_policy("auto")
    x = numbers(1000)
    want = lowp.quantize(x, "e3m3")
    built = lowp.kernel_info()["built"]
    for _ in range(30):
        lowp.quantize(x, "e3m3")
    assert lowp.kernel_info()["built"] == built
    assert_same(lowp.quantize(x, "e3m3"), want)
    assert lowp.kernel_info()["built"] == built + 1
    assert_same(lowp.quantize(x, "e3m3"), want)
    assert lowp.kernel_info()["built"] == built + 1


def test_never_means_never():
    built = lowp.kernel_info()["built"]
    for _ in range(40):
        lowp.quantize(torch.ones(10), "e1m2")
    lowp.quantize(torch.ones(70_000), "e1m2")
    info = lowp.kernel_info()
    assert info["policy"] == "never"
    assert info["built"] == built


def test_unknown_policy():
    with pytest.raises(ValueError, match="unknown kernel policy 'sometimes'; it is one of auto, always, never"):
        lowp.set_kernel_policy("sometimes")
    assert lowp.kernel_info()["policy"] == "never"


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    paths = [str(Path(lowp.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200)


def test_a_wrong_policy_in_the_environment_is_an_error():
    done = run("import lowp; lowp.kernel_info()", LOWP_KERNELS="sometimes")
    assert done.returncode != 0
    assert "unknown kernel policy 'sometimes'" in done.stderr


WITHOUT_COMPILER = """
import json, warnings
import torch, lowp
x = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [lowp.quantize(x, name) for name in ("e4m3fn", "e5m2", "e4m3fn")]
    codes = lowp.encode(x, "int8")
info = lowp.kernel_info()
lowp.set_kernel_policy("never")
print(json.dumps({
    "warnings": [[w.category.__name__, str(w.message), w.filename] for w in caught],
    "right": [torch.equal(r, lowp.quantize(x, name)) for r, name in zip(results, ("e4m3fn", "e5m2", "e4m3fn"))],
    "codes": torch.equal(codes, lowp.encode(x, "int8")),
    "built": info["built"],
    "policy": info["policy"],
}))
"""


def test_without_a_compiler_results_are_right_and_a_warning_comes_once(tmp_path):
    done = run(WITHOUT_COMPILER, CXX="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), LOWP_KERNELS="always")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours = [(kind, text) for kind, text, _ in found["warnings"] if "lowp" in text]
    assert len(found["warnings"]) == len(ours) == 1, found["warnings"]
    assert ours[0][0] == "RuntimeWarning"
    assert "could not compile a kernel and goes on with plain operations" in ours[0][1]
    assert "/nonexistent" in ours[0][1], "it names the reason"
    assert found["right"] == [True] * 3
    assert found["codes"]
    assert found["built"] == 0
    assert found["policy"] == "always", "as the environment says"


# Noise: seeds and offsets give the same draws in kernels, plain, whole and in pieces


def stochastic(x: torch.Tensor, noise) -> torch.Tensor:
    return lowp.quantize(x, "e5m2", "stochastic", seed=noise)


HALVES = torch.full((100_000,), 1.125)  # a tie of e5m2: either neighbour, evenly


@pytest.mark.parametrize("offset", [0, 1, 65_535, 2**32 - 70_000, 2**32 - 3, 2**33 - 1, 2**40 + 12_345])
def test_pieces_with_offsets_equal_the_whole(kernels, offset):
    whole = stochastic(HALVES, lowp.Noise(5, offset=offset))
    assert_same(whole, plain(lambda: stochastic(HALVES, lowp.Noise(5, offset=offset))))
    cuts = [0, 1, 2, 3, 4, 1000, 65_536, 99_999, 100_000]
    pieces = [stochastic(HALVES[a:b], lowp.Noise(5, offset=offset + a)) for a, b in pairwise(cuts)]
    assert_same(torch.cat(pieces), whole)


@pytest.mark.parametrize("offset", [2**32 - 3, 2**33 - 50_000])
@pytest.mark.parametrize("name", ["mxfp4", "nf4", "posit8"])
def test_pieces_equal_the_whole_beyond_floats(offset, name):
    x = torch.linspace(-1, 1, 96)

    def draw(part, first):
        return lowp.quantize(part, name, "stochastic", seed=lowp.Noise(5, offset=offset + first))

    assert_same(torch.cat([draw(x[:32], 0), draw(x[32:64], 32), draw(x[64:], 64)]), draw(x, 0))


def test_blocks_of_indices_draw_independently():
    """Index 2^32 is not index 0 over again."""
    first, second = (stochastic(HALVES, lowp.Noise(5, offset=offset)) for offset in (0, 2**32))
    assert 0.45 < (first != second).float().mean() < 0.55


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, *(pytest.param(d) for d in (torch.int16, torch.uint8, torch.int8))],
    ids=str,
)
@pytest.mark.parametrize("number", [0, 1, 113, -5])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_tensors_as_seeds_equal_integers(dtype, number, shape):
    if dtype == torch.uint8 and number < 0:
        number = 250
    x, tensor = HALVES[:2000], torch.full(shape, number, dtype=dtype)
    assert_same(stochastic(x, tensor), stochastic(x, number))
    assert_same(stochastic(x, lowp.Noise(3, step=tensor)), stochastic(x, lowp.Noise(3, step=number)))
    assert_same(stochastic(x, lowp.Noise(tensor, 8, 9, 10)), stochastic(x, lowp.Noise(number, 8, 9, 10)))


def test_tensors_as_seeds_in_kernels(kernels):
    assert_same(stochastic(HALVES, torch.tensor(-77)), plain(lambda: stochastic(HALVES, -77)))


SEEDS = (0, 1, -1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), 2**48, 1 << 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_large_and_negative_seeds(kernels, seed):
    got = stochastic(HALVES, seed)
    assert_same(got, plain(lambda: stochastic(HALVES, seed)))
    assert_same(got[:100], plain(lambda: stochastic(HALVES[:100], torch.tensor(seed))))
    assert 0.49 < (got == 1.25).float().mean() < 0.51


def test_all_parts_of_the_key_matter():
    keys = [lowp.Noise(seed) for seed in SEEDS] + [lowp.Noise(0, step=s) for s in (1, -1, 2**40)]
    keys += [lowp.Noise(0, stream=s) for s in (1, 2**40)] + [lowp.Noise(0, offset=1)]
    draws = torch.stack([stochastic(HALVES[:4000], key) for key in keys]) == 1.25
    for i in range(len(keys)):
        for j in range(i):
            assert 0.45 < (draws[i] == draws[j]).float().mean() < 0.55, (keys[i], keys[j])


@pytest.mark.parametrize("seed", [2**64, 2**64 + 1, -(2**63) - 1])
def test_seeds_beyond_64_bits_are_refused(seed):
    with pytest.raises(ValueError, match="64 bits"):
        stochastic(HALVES[:10], seed)
