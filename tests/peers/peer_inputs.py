"""The inputs on which two implementations are compared, and a comparison that names the smallest case where they differ."""

import torch
from torch import Tensor

from lowp.formats import Format

# Every fp16 and every bf16 number, NaNs and infinities included, as fp32.
_EVERY_16_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
EVERY_FP16 = _EVERY_16_BITS.view(torch.float16)
EVERY_BF16 = _EVERY_16_BITS.view(torch.bfloat16)
EVERY_16_BIT_FLOAT = torch.cat([EVERY_FP16.float(), EVERY_BF16.float()])


def near_decisions(fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every value of the format, every midpoint and the first points of overflow; each with the numbers next to it."""
    values = torch.tensor(fmt.values, dtype=torch.float64)
    steps = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    above = values[-1] + steps * (values[-1] - values[-2])
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, above, -above, -torch.zeros(1, dtype=torch.float64)]).to(dtype)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])


def assert_same_values(x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Equal, zeros in their sign too; NaN matches NaN."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) & (ours.signbit() == theirs.signbit()) | ours.isnan() & theirs.isnan()
    _report(x, ours, theirs, same)


def assert_same_codes(x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    _report(x, ours, theirs, ours.long() == theirs.long())


def _report(x: Tensor, ours: Tensor, theirs: Tensor, same: Tensor) -> None:
    assert x.shape == ours.shape == theirs.shape
    if same.all():
        return
    wrong = [(a, o, t) for a, o, t in zip(x[~same].tolist(), ours[~same].tolist(), theirs[~same].tolist(), strict=True)]
    wrong.sort(key=lambda case: abs(case[0]))
    cases = "\n".join(f"  {a!r} ({a.hex()}): lowp {o!r}, peer {t!r}" for a, o, t in wrong[:5])
    raise AssertionError(f"{len(wrong)} of {x.numel()} inputs differ:\n{cases}")
