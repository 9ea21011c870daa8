"""Tests run on plain operations unless they ask for kernels: building one takes seconds."""

import pytest

import lowp


@pytest.fixture(autouse=True)
def _plain_operations():
    lowp.set_kernel_policy("never")
    yield
    lowp.set_kernel_policy("never")
