"""Tests run on plain operations unless they ask for kernels: building one takes seconds."""

import os

import hypothesis
import pytest

import lowp
from lowp import invocation

os.environ[invocation.VARIABLE] = "lowp"  # commands are printed so, however the tests were started

# Machines are shared, and tests run side by side: how long one example takes says nothing.
hypothesis.settings.register_profile("lowp", deadline=None)
hypothesis.settings.load_profile("lowp")


@pytest.fixture(autouse=True)
def _plain_operations():
    lowp.set_kernel_policy("never")
    yield
    lowp.set_kernel_policy("never")
