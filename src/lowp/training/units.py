"""How the figures of a run are written for people: one way, in the progress line and in `lowp runs`.

None stands for "not known" and is written as a dash. Bytes are decimal, as on a network: 1 MB is 1,000,000 bytes.
"""

import math

UNKNOWN = "-"


def number_text(value: float | None) -> str:
    """Four digits, however large or small: 0.3121, 12.35, 1234, 3.2e-05, nan."""
    return UNKNOWN if value is None else f"{value:.4g}"


def loss_text(value: float | None) -> str:
    """Four digits, zeros too, so that a line that is drawn again and again stays as wide as it is: 0.4000."""
    return UNKNOWN if value is None else f"{value:#.4g}"


def count_text(value: float | None) -> str:
    """A whole number with separators: 12,345. Below ten a decimal counts too: 3.2."""
    if value is None or not math.isfinite(value):
        return number_text(value)
    return f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:.1f}"


def share_text(value: float | None) -> str:
    """A fraction as a percentage with two decimals: an accuracy of 0.9134 is 91.34 %."""
    return UNKNOWN if value is None else f"{100 * value:.2f} %"


def signed_text(value: float, digits: int) -> str:
    """A difference: +1.20, -0.31; what rounds to nothing is +0.00, whichever side it comes from."""
    text = f"{value:+.{digits}f}"
    return text if float(text) or math.isnan(value) else f"{0.0:+.{digits}f}"


def bytes_text(count: float | None) -> str:
    """Three digits and a unit: 0 B, 812 B, 12.3 MB, 1.02 GB."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.6 kB would be written 1e+03 kB: what rounds to a thousand belongs to the next unit.
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if count >= 100 or count == round(count) else f"{count:.3g} {unit}"


def duration_text(seconds: float | None) -> str:
    """8.2 s, 1:05, 2:03:04."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def share_of_fp32(bytes_sent: float | None, bytes_of_fp32: float | None) -> float | None:
    """What was sent, as a fraction of what fp32 would have sent; None where nothing had to travel."""
    return bytes_sent / bytes_of_fp32 if bytes_sent is not None and bytes_of_fp32 else None
