"""Peers are compared with the plain operations: that compiled kernels give the same bits is tested in tests/tensor."""

from collections.abc import Iterator

import pytest

import lowp


@pytest.fixture(autouse=True, scope="session")
def without_compiling() -> Iterator[None]:
    """A kernel for each of hundreds of formats would take an hour."""
    before = lowp.kernel_info()["policy"]
    lowp.set_kernel_policy("never")
    yield
    lowp.set_kernel_policy(before)
