"""Calibration: scales learned from a few passes over typical data, and fixed from then on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lowp.simulation.simulate import simulation_of


@contextmanager
def calibrate(model: nn.Module, agree: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    """Learn the scales of all roles of a simulated model whose scale is "calibrated", from what runs inside.

        simulate(model, weights="e4m3fn", activations="e4m3fn", scale="calibrated")
        with lowp.calibrate(model):
            for batch in batches:
                model(batch)

    Forward passes give the scales of weights and activations, backward passes those of errors and gradients. Each scale is the
    power of two that brings the largest number that was met just below the format's. Meanwhile tensors are rounded with
    scales of their own. Another calibration replaces what it meets again. After an error nothing has changed.

    Args:
        agree: takes the maxima of this rank, a tensor, and returns those of all ranks (an all-reduce with MAX, say).
    """
    simulation = simulation_of(model)
    simulation.ranges.start_calibration()
    simulation.calibrating = True
    try:
        yield
        simulation.ranges.end_calibration(agree)
    finally:
        simulation.calibrating = False
