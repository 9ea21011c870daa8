"""What a scale that was asked for costs, said once by the logger `lowp`.

**A format of fewer than 8 bits without a scale for each block.** `local`, `aps` and `none` bring a whole layer into the range
of a format that has few numbers. `MEASURED` is the error of such codecs on real gradients, from the table in docs/WIRE.md.

**The headroom of `aps`.** Its bound is a bound of the sum: log2(world) of a format's binades are headroom, which a rank's own
numbers do not use. A format has `binades` from its smallest number to the largest power of two: 31 in e5m2, 17 in e4m3fn, 6 in
int8, 3 in e2m1fn. Where n are left for a rank's numbers, the sum of normal ones has a relative error of about 2.3 / 2^n or the
format's own, whichever is larger: .14 for n = 4, .28 for 3, .57 for 2, and all is zero below (measured, docs/LOG.md).
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from lowp.formats import AnyFormat, BlockFormat
from lowp.tensor.carrier import exponent_below
from lowp.wire.codec import Codec
from lowp.wire.scaling import Scale, default_scale, emax_of

logger = logging.getLogger("lowp")

ENOUGH_BINADES = 4
MEASURED = {
    "e2m3fn block:32": ".0018",
    "e2m3fn local": ".013",
    "e3m2fn block:32": ".0058",
    "e3m2fn local": ".0058",
    "posit6 block:32": ".022",
    "posit6 local": ".022",
    "e2m1fn aps": "1",
    "e2m1fn block:32": ".03",
    "e2m1fn block:32 stochastic": ".062",
    "e2m1fn local": ".2",
    "e2m1fn local stochastic": ".72",
    "int4 block:32": ".051",
    "int4 block:32 stochastic": ".099",
    "int4 local": ".42",
    "nf4 block:32": ".025",
    "nf4 local": ".2",
    "e3m0 block:32": ".078",
    "e3m0 local": ".093",
}
"""The largest vNMSE of a codec in benchmarks/results/amd-epyc-x2-errors.json, over models, moments and numbers of ranks."""


def warn_of_scales(codecs: Iterable[Codec], world: int) -> None:
    """Warn once of each format whose scale is too coarse for it, else of each scale that leaves too little of a format."""
    for codec in codecs:
        if default_scale(codec.format, codec.keep).block and not codec.scale.block:
            _say_once((str(codec.format),), _coarse(codec))
            continue
        left = binades_left(codec.format, codec.scale, world)
        if world > 1 and left is not None and left < ENOUGH_BINADES:
            _say_once((str(codec.format), codec.scale, world), _headroom(codec, left, world))


def _coarse(codec: Codec) -> str:
    """With the figures of both scales where they were measured. A few formats lose nothing: there it gives no advice."""
    best = default_scale(codec.format)
    error, with_best = _measured(codec), _measured(replace(codec, scale=best))
    about = f"scale='{codec.scale}' for {codec.format}, which has {codec.format.bits} bits"
    instead = f"scale='{best}', the default of formats of fewer than 8 bits"
    if error is None:
        return f"{about}: its error was not measured; take {instead}"
    advice = "" if error == with_best else "; take that"
    return (
        f"{about}: on real gradients the squared error was up to {error} of the square of the sum, with {instead}, up to "
        f"{with_best} (docs/WIRE.md){advice}"
    )


def _measured(codec: Codec) -> str | None:
    name = f"{codec.format} {codec.scale}"
    return MEASURED.get(name if codec.rounding == "nearest" else f"{name} {codec.rounding}")


def _headroom(codec: Codec, left: int, world: int) -> str:
    return (
        f"scale='{codec.scale}' leaves {max(0, left)} of the {binades(codec.format)} binades of {codec.format} to gradients on "
        f"{world} ranks: the others are headroom for the sum. {'Most' if left > 1 else 'Nearly all'} numbers round to zero; "
        "take scale='local' or 'block:<n>'"
    )


def binades_left(fmt: AnyFormat, scale: Scale, world: int) -> int | None:
    """How many binades the headroom of `aps` leaves for a rank's own numbers; None where nothing is taken from them."""
    if not scale.kind.startswith("aps") or isinstance(fmt, BlockFormat):  # whose blocks have scales of their own
        return None
    return binades(fmt) - (world - 1).bit_length() - (scale.kind == "aps_delayed")


def binades(fmt: AnyFormat) -> int:
    return emax_of(fmt) - exponent_below(fmt.smallest)


def _say_once(about: tuple[object, ...], text: str) -> None:
    if about not in _said:
        _said.add(about)
        logger.warning(text)


_said: set[tuple[object, ...]] = set()
