"""All kernels that a run needs are built at registration, and none that it does not need.

Nothing is compiled here: a kernel is replaced by the plain operations or by zeros, and by a note that it was built or called.
"""

import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.tensor import block_kernels, elementwise, kernels, number_kernels
from lowp.tensor.lists import parts
from lowp.wire import adaptive_group, top_k, warm_up

STEPS = 5
CALLS_BEFORE_BUILD = 2  # of a kernel for small tensors, instead of 32: what 40 steps would build, 5 do
SHAPES = {"large": (700,), "tiny": (100, 3), "small": (7, 9), "zero": (12,)}

CASES = [
    ("e5m2", {}),
    ("e2m1fn", {"reduction": "one_shot", "scale": "aps"}),
    ("e4m3fn", {"reduction": "ring", "scale": "aps_delayed", "rounding": "stochastic", "kahan": True}),
    ("int8", {"reduction": "sequential", "sum_format": "fp16", "error_feedback": True}),
    ("posit8", {"reduction": "tree", "scale": "none"}),
    ("dynamic8", {}),
    ("e3m2fn", {"scale": "block:32", "reduction": "by_size"}),
    ("mxfp4", {"error_feedback": True}),
    ("e6m9", {"reduction": "hierarchical(2)", "sum_format": "bf16"}),
    ("topk:0.05:e4m3fn", {"reduction": "hierarchical(2, leaders)"}),
    ("topk:0.05", {"reduction": "hierarchical(2, gather)", "sum_format": "bf16"}),
    ("adaptive:3", {"rounding": "stochastic", "error_feedback": True}),
    ("fp16", {"layers": {"small": "e5m2", "la*": "int4"}, "skip": "zero", "measure": True}),
    ("nf4", {"scale": "block:32", "layers": {"tiny": "fp32", "zero": "fp32"}}),  # one pass, but not beside float32
    ({0: "fp16", 2: "e5m2", 1000: "e2m1fn"}, {"scale": "aps"}),
]


class Pretended:
    """Kernels that were built since, and those that were called."""

    def __init__(self):
        self.called = set()
        outer = self

        class Kernel:
            def __init__(self, operation, device):
                self._operation = operation

            def __call__(self, stored, tables, key, out):
                outer.called.add(self._operation)
                out.copy_(self._operation(stored, tables, key))

        def of_parts(function, device):
            def call(source, target, table, *_, **__):
                outer.called.add(function)
                if target is not None:
                    target.zero_()  # which kernels are called does not depend on numbers

            return call

        def of_adaptive(function, device):
            return of_parts(function, device)

        def of_blocks(operation, device):
            def call(*_):
                outer.called.add(operation)
                return False  # plain operations serve

            return call

        def of_kept(kind, device):
            def call(table, *arguments):
                outer.called.add(kind)
                arguments[2].zero_()  # the message of a choice, or the sum

            return call

        def of_few(chain, device):
            def call(tensors, out, numbers, *_):
                outer.called.add(chain)
                for room, found in zip(out, chain.function(*tensors, numbers), strict=True):
                    room.copy_(found)

            return call

        number_kernels._build, parts._build, block_kernels._build = Kernel, of_parts, of_blocks
        elementwise._build_elementwise, top_k._build = of_few, of_kept
        adaptive_group.AdaptiveFunction.build = of_adaptive
        kernels.CALLS_BEFORE_BUILD = CALLS_BEFORE_BUILD
        lowp.set_kernel_policy("auto")

    def forget(self):
        kernels._state.kernels.clear()
        kernels._state.small_calls.clear()
        warm_up._warm.clear()
        self.called.clear()

    @property
    def built(self):
        return {what for what, _ in kernels._state.kernels}


def gradients(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["tiny"] *= 1e-30  # its scale is beyond what one pass can do
    found["zero"].zero_()
    return found


def train(rank):
    pretended, results = Pretended(), []
    for format, options in CASES:
        pretended.forget()
        compressor = lowp.Compressor({name: torch.Size(shape) for name, shape in SHAPES.items()}, format, **options)
        built, last = pretended.built, 1000 if isinstance(format, dict) else 0
        pretended.called.clear()
        for step in range(STEPS):
            if step == STEPS - 1:
                compressor.state.step += last
            compressor.reduce(gradients(rank, step), [["large", "tiny"], ["small", "zero"]])
        compressor.close()
        late, idle = pretended.built - built, built - pretended.called
        results.append((f"{format} {options}", [*map(str, late)], [*map(str, idle)]))
        assert built
    return results


def test_no_kernel_is_built_during_training():
    for results in zip(*ranks.run(train, 3), strict=True):
        names, late, idle = zip(*results, strict=True)
        assert not any(late), (names[0], late)  # built when the others waited
        assert set.intersection(*map(set, idle)) == set(), (names[0], idle)  # built for nothing, on all ranks


def without_parameters(rank):
    lowp.set_kernel_policy("auto")
    lowp.Compressor({}, "e2m1fn").close()
    return lowp.kernel_info()["built"]


def test_a_model_without_parameters_needs_no_kernel():
    assert ranks.run(without_parameters, 1) == [0]


def never(rank):
    lowp.set_kernel_policy("never")
    lowp.Compressor({"a": (70_000,)}, "e5m2").close()
    return lowp.kernel_info()["built"]


def test_with_the_policy_never_nothing_is_built():
    assert ranks.run(never, 1) == [0]


def train_with_a_function(rank):
    """Formats that a function of the step names are not known before: all their kernels are built in one step."""
    pretended = Pretended()
    pretended.forget()
    ddp = DistributedDataParallel(nn.Linear(300, 300))
    handle = lowp.compress_gradients(ddp, lambda step: "e5m2" if step < 3 else "e2m1fn")
    counts = []
    for _ in range(STEPS):
        ddp(torch.randn(3, 300)).square().mean().backward()
        counts.append(len(pretended.built))
    handle.remove()
    return [step for step in range(1, STEPS) if counts[step] != counts[step - 1]]


def test_a_function_of_the_step_builds_when_it_names_a_format():
    assert ranks.run(train_with_a_function, 2) == [[3], [3]]
