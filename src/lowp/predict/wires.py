"""How gradients travel, as text: `FORMAT[/SCALE][/ROUNDING][@REDUCTION]`.

    fp32                 torch's own all-reduce in float32
    fp16                 the same in float16, as torch's fp16_compress_hook does it
    e5m2/aps             lowp's two_shot with Auto Precision Scaling
    e2m1fn/block:32@ring partial sums in 4 bits around a ring
    fp32@hierarchical(8, leaders)

`fp32`, `fp16` and `bf16` without a scale or a reduction of lowp's are torch's; everything else is lowp's (`two_shot` unless
another is named). `hierarchical` without a number takes the cluster's nodes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.formats import Rounding
from lowp.predict.topologies import topology_of
from lowp.predict.topologies.all_reduce import AllReduce
from lowp.predict.topologies.base import Topology
from lowp.predict.topologies.counted import CountedReduction
from lowp.wire.reductions.base import Reduction
from lowp.wire.settings import Settings

PLAIN = ("fp32", "fp16", "bf16")  # formats that torch reduces in
FP32, HOOK, COMPRESSED = KINDS = ("fp32", "hook", "compressed")
_OWN = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # other dtypes: fp32


@dataclass(frozen=True)
class WireChoice:
    """`settings` say the codec of every parameter. `plain`: numbers travel in a dtype of torch's, nobody encodes them."""

    text: str
    settings: Settings
    reduction: "str | Reduction | Topology"
    plain: bool

    @property
    def kind(self) -> str:
        """Who sends: torch's own all-reduce in float32; a hook of torch's, which casts; a codec of lowp's."""
        return COMPRESSED if not self.plain else FP32 if self.settings.format == "fp32" else HOOK

    def topology(self, node: int) -> Topology:
        """`node`: ranks of a node of the cluster."""
        return topology_of(self.reduction, self.settings.kahan, node)


def wire_of(wire: "str | Mapping[str, Any] | WireChoice") -> WireChoice:
    """From text, or from a dictionary with the arguments of `compress_gradients`: {"format": "e5m2", "skip": "1d", ...}."""
    if isinstance(wire, WireChoice):
        return wire
    if isinstance(wire, Mapping):
        return _chosen(
            _described(wire), {key: value for key, value in wire.items() if key != "reduction"}, wire.get("reduction")
        )
    arguments = compress_arguments(wire)
    return _chosen(wire, {key: value for key, value in arguments.items() if key != "reduction"}, arguments.get("reduction"))


def compress_arguments(wire: str) -> dict[str, Any]:
    """The arguments of `lowp.compress_gradients` that a text says."""
    if not isinstance(wire, str) or not wire.strip():
        raise ValueError(f"wire: it is written FORMAT[/SCALE][@REDUCTION], say e5m2/aps or fp32@ring, not {wire!r}")
    what, at, reduction = wire.partition("@")
    if at and not reduction.strip():
        raise ValueError(f"wire {wire!r}: after @ comes a reduction, say ring or hierarchical(8)")
    return _arguments(what.strip()) | ({"reduction": reduction.strip()} if at else {})


def uncompressed(dtype: torch.dtype) -> str:
    """How gradients of a dtype travel where nobody compresses them."""
    return _OWN.get(dtype, FP32)


def uncompressed_of(parameters: Iterable[Tensor]) -> str:
    """The same for a model: by the dtype that most of its numbers have."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        counts[parameter.dtype] += parameter.numel()
    return uncompressed(counts.most_common(1)[0][0]) if counts else FP32


def wires_of(wires: "str | Mapping[str, Any] | WireChoice | Iterable[Any]") -> tuple[WireChoice, ...]:
    if isinstance(wires, (str, Mapping, WireChoice)):
        return (wire_of(wires),)
    found = tuple(wire_of(wire) for wire in wires)
    if not found:
        raise ValueError("wire: at least one is wanted")
    return found


def _arguments(text: str) -> dict[str, Any]:
    name, *words = text.split("/")
    arguments: dict[str, Any] = {"format": name}
    for word in words:
        key = "rounding" if word in tuple(Rounding) else "scale"
        if key in arguments:
            raise ValueError(f"wire {text!r}: a format has one scale and one rounding")
        arguments[key] = word
    return arguments


def _described(wire: Mapping[str, Any]) -> str:
    extra = [f"{key}={value}" for key, value in wire.items() if key not in ("format", "scale", "rounding", "reduction")]
    words = [str(wire[key]) for key in ("format", "scale", "rounding") if wire.get(key)]
    return (
        "/".join(words) + (f"@{wire['reduction']}" if wire.get("reduction") else "") + (f" {' '.join(extra)}" if extra else "")
    )


def _chosen(text: str, arguments: dict[str, Any], reduction: "str | Reduction | Topology | None") -> WireChoice:
    try:
        settings = Settings.of(**arguments)
        bare = set(arguments) == {"format"} and arguments["format"] in PLAIN
        topology = topology_of(reduction) if reduction else AllReduce() if bare else None
    except (ValueError, TypeError) as error:
        raise ValueError(f"wire {text!r}: {error}") from None
    plain = bare and not isinstance(topology, CountedReduction)
    if isinstance(topology, AllReduce) and not plain:
        raise ValueError(f"wire {text!r}: torch's all_reduce takes {', '.join(PLAIN)} without a scale")
    return WireChoice(text, settings, reduction or ("all_reduce" if plain else "two_shot"), plain)
