"""Tests run on plain operations unless they ask for kernels: building one takes seconds."""

import os

# Some virtual machines (Firecracker on an Intel Xeon of 2023) have AMX among their flags, and end a process at its first
# instruction: torch.nn.Linear(8, 300).bfloat16() with gradients is enough. No test is about AMX. Before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

import lowp  # noqa: E402

# Machines are shared, and tests run side by side: how long one example takes says nothing.
hypothesis.settings.register_profile("lowp", deadline=None)
hypothesis.settings.load_profile("lowp")


@pytest.fixture(autouse=True)
def _plain_operations():
    lowp.set_kernel_policy("never")
    yield
    lowp.set_kernel_policy("never")
