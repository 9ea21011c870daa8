"""How long a codec takes for a number, where nobody has measured it on the device at hand.

CPU: one thread of an AMD EPYC, 2^21 numbers (docs/LOG.md; benchmarks/results/amd-epyc-x2-top-k.md). CUDA: one H200, a bucket of
25 million numbers in 100 layers (benchmarks/results/nvidia-h200-wire.md): of its time 3/10 each are taken for encoding, for
encoding the sum and for decoding, 1/10 for adding; other GPUs in proportion to the bandwidth of their memory, which bounds all
of this. A cluster's file may have speeds that were measured (`[codecs."e5m2/aps"]`).
"""

from lowp.formats import BlockFormat
from lowp.predict.cluster import CodecSpeed, Device
from lowp.wire.codec import Codec

_NS, _PS = 1e-9, 1e-12
H200_BANDWIDTH = 4.8e12
USUAL_BANDWIDTH = {"cuda": 2e12, "cpu": 2e10}  # where a device does not say

HOST_SECONDS = {"cuda": 4e-5, "cpu": 0.0}
"""Of the host for every bucket that is compressed: .03 to .05 ms on CUDA, which the computation waits for where it is bound by
launches. On a CPU it is among what messages cost."""


def _cpu(encode: float, add: float, decode: float) -> CodecSpeed:
    return CodecSpeed(encode * _NS, add * _NS, decode * _NS)


def _cuda(total: float) -> CodecSpeed:
    """Picoseconds a number for an encoding, an addition, the encoding of the sum and a decoding."""
    return CodecSpeed(0.3 * total * _PS, 0.1 * total * _PS, 0.3 * total * _PS)


# By kind of codec, as `_kind` names it.
_SPEEDS: dict[str, dict[str, CodecSpeed]] = {
    "cpu": {
        "plain": _cpu(0.17, 0.17, 0.17),  # a copy
        "elementwise": _cpu(0.28, 0.245, 0.36),
        "narrow": _cpu(0.38, 0.175, 0.38),
        "block": _cpu(0.41, 0.30, 0.40),
        "nvfp4": _cpu(0.75, 0.44, 0.58),
        "adaptive": _cpu(0.66, 0.58, 0.61),
        "adaptive stochastic": _cpu(1.41, 0.55, 0.57),
        "topk": _cpu(0.50, 0.10, 0.10),
        "topk dense": _cpu(1.20, 0.70, 0.26),
    },
    "cuda": {
        "plain": _cuda(6.6),
        "elementwise": _cuda(6.3),
        "narrow": _cuda(4.8),
        "block": _cuda(6.5),
        "nvfp4": _cuda(10.7),
        "adaptive": _cuda(11.7),
        "adaptive stochastic": _cuda(17.0),  # not timed: by the number of its instructions
        "topk": _cuda(740.0),  # torch's operations, not a kernel; not timed
        "topk dense": _cuda(740.0),
    },
}
_MANY_KEPT = 0.05  # of top-k, from which on it takes as long as a tenth


def speed_of(codec: Codec, device: Device) -> CodecSpeed:
    """As measured on the device, under the codec's own name; else that of its kind."""
    for name in (str(codec), str(codec).split("/")[0]):
        if name in device.codecs:
            return device.codecs[name]
    known = _SPEEDS[device.kind][_kind(codec)]
    if device.kind == "cpu":
        return known
    factor = H200_BANDWIDTH / (device.bandwidth or USUAL_BANDWIDTH["cuda"])
    return CodecSpeed(known.encode * factor, known.add * factor, known.decode * factor)


def _kind(codec: Codec) -> str:
    if codec.adaptive:
        return "adaptive stochastic" if codec.stochastic else "adaptive"
    if codec.keep < 1:
        return "topk dense" if codec.keep > _MANY_KEPT else "topk"
    if isinstance(codec.format, BlockFormat):
        return "nvfp4" if codec.format.tensor_scale else "block"
    if codec.format.bits >= 16:
        return "plain"
    return "narrow" if codec.format.bits < 8 else "elementwise"
