"""Tests run on plain operations unless they ask for kernels: building one takes seconds."""

import os

import hypothesis
import pytest

import lowp
from lowp import invocation

os.environ[invocation.VARIABLE] = "lowp"  # commands are printed so, however the tests were started
# torch's compiler tries on a new machine whether programs with each kind of vectors can be compiled: 15 s. What the processor
# has it knows without. (0 makes it try, where the C++ compiler is older than the processor.)
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Machines are shared, and tests run side by side: how long one example takes says nothing.
hypothesis.settings.register_profile("lowp", deadline=None)
hypothesis.settings.load_profile("lowp")

# Files with tests of ten seconds and more. They begin first, so that no worker is left with one at the end.
LONG = (
    "test_vector_widths.py", "test_nccl.py", "test_part_kernels_triton.py", "test_optimizer_kernels_triton.py",
    "test_adaptive_triton.py", "test_worlds.py", "test_site.py", "test_notebooks.py", "test_code_blocks.py", "test_ablation.py",
    "test_papers_tables.py", "test_safety.py", "test_network.py", "test_launch.py", "test_cli_plan.py", "test_faults.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)  # the order within each of the two stays


@pytest.fixture(autouse=True)
def _plain_operations():
    lowp.set_kernel_policy("never")
    yield
    lowp.set_kernel_policy("never")
