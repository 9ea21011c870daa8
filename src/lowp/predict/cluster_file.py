"""Clusters in TOML: read, written, and the library of known machines.

    name = "four machines"
    source = "measured by lowp calibrate"

    [device]
    name = "A100"
    kind = "cuda"                       # or "cpu"
    memory = "80 GB"
    bandwidth = "2 TB/s"                # of memory
    flops = "312 TFLOP/s"
    efficiency = 0.4                    # of flops that models reach
    samples = { resnet50 = 2470, gpt2 = [[8, 60], [16, 71]] }    # a second; or by batch

    [[levels]]                          # the innermost first
    name = "node"
    ranks = 8
    bandwidth = "300 GB/s"
    latency = "3 us"                    # or by size of the message: [["4 kB", "3 us"], ["1 MB", "9 us"]]

    [[levels]]
    name = "network"
    bandwidth = "200 Gbit/s"
    efficiency = 0.9                    # of the bandwidth
    latency = "5 us"
    overhead = "1 us"
    burst = "64 kB"                     # passes at once after a pause
    processor = "0.5 ns"                # that computation loses for each byte sent, where it shares processors with the network
    shared = 4                          # ranks that share a link
    point_to_point = 0.6                # of the bandwidth: what messages from rank to rank reach, where collectives are faster
    separate = true                     # from the links of the levels inside: both carry at once

    [stragglers]
    variation = 0.02

A mistake is one line that names the file and the key.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lowp.names import did_you_mean
from lowp.predict.cluster import Cluster, CodecSpeed, Device, LinkLevel, ModelTimes, Stragglers
from lowp.predict.codec_speed import TORCH
from lowp.predict.quantities import FLOPS, RATE, SECONDS, SIZE, exact_text
from lowp.predict.toml_keys import ClusterError, TomlKeys, is_number, is_whole
from lowp.predict.wires import KINDS, wire_of
from lowp.training.regular_file import read_regular

LIBRARY = Path(__file__).parent / "clusters"
_LARGEST_FILE = 1 << 22  # bytes; a calibrated file has the times of every layer


def known_clusters() -> dict[str, Path]:
    return {path.stem: path for path in sorted(LIBRARY.glob("*.toml"))}


def cluster_of(text: "str | Path | Cluster") -> Cluster:
    """A cluster by the name of a known one, or from a TOML file."""
    if isinstance(text, Cluster):
        return text
    if isinstance(text, Path) or str(text).endswith(".toml"):
        return read_cluster(Path(text))
    known = known_clusters()
    if text not in known:
        hint = did_you_mean(text, known, "`lowp predict --clusters` lists them")
        raise ClusterError(f"unknown cluster {text!r} (the name of a file ends in .toml); {hint}")
    return _known_cluster(text)


def cluster_here(text: "str | Path | Cluster", device: torch.device) -> Cluster:
    """A cluster for a plan that is carried out on this device: what was measured on GPUs says nothing about processors."""
    cluster = cluster_of(text)
    if cluster.device.kind != device.type:
        raise ClusterError(f"cluster {cluster.name!r} is of {cluster.device.kind} devices, and gradients are on {device.type}")
    return cluster


@lru_cache(maxsize=64)
def _known_cluster(name: str) -> Cluster:
    return read_cluster(known_clusters()[name])


def read_cluster(path: Path) -> Cluster:
    try:
        text = read_regular(path, _LARGEST_FILE).decode("utf-8")
        document = tomllib.loads(text)
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: this is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).removesuffix(")").partition(" (at ")
        raise ClusterError(f"{path}: {where}: {what[0].lower()}{what[1:]}") from None
    except ValueError as error:  # what is no regular file
        raise ClusterError(str(error)) from None
    return cluster_from(document, str(path), default_name=path.stem)


def cluster_from(document: Mapping[str, Any], source: str = "cluster", default_name: str = "cluster") -> Cluster:
    """From dictionaries, as TOML has them."""
    top = TomlKeys(document, source)
    name, where_from = top.text("name", default_name), top.text("source", "")
    with _at(source, "device"):
        device = _device(top.table("device"), top.table("codecs", {}))
    tables = top.tables("levels", [])
    levels = []
    for number, keys in enumerate(tables):
        with _at(source, f"levels[{number}]"):
            levels.append(_level(keys))
    with _at(source, "stragglers"):
        stragglers = _stragglers(top.table("stragglers", {}))
    top.end()
    with _at(source, ""):
        return Cluster(name, device, tuple(levels), stragglers, where_from)


def _device(keys: "TomlKeys", codecs: "TomlKeys") -> Device:
    efficiency = keys.number("efficiency", 1.0, above=0, most=1)
    flops = keys.quantity("flops", FLOPS, None)
    samples = {model: _points(model, value, keys) for model, value in keys.mapping("samples").items()}
    times = {model: _times(keys.inside("times", model)) for model in keys.mapping("times")}
    speeds = {codec: _speed(_known_codec(codec, codecs).inside("", codec)) for codec in codecs.names()}
    device = Device(
        keys.text("name", "device"),
        keys.text("kind", "cuda"),
        keys.quantity("memory", SIZE, None),
        keys.quantity("bandwidth", RATE, None),
        None if flops is None else flops * efficiency,
        samples,
        times,
        speeds,
        keys.number("beside", 0.0, least=0, most=1),
        keys.quantity("step_overhead", SECONDS, 0.0),
        keys.quantity("chunk_overhead", SECONDS, None),
    )
    keys.end()
    return device


def _points(model: str, value: Any, keys: "TomlKeys") -> tuple[tuple[int, float], ...]:
    """A rate for all batches (batch 1 stands for them), or [[batch, rate], ...]."""
    if is_number(value):
        return ((1, float(value)),)
    pairs = isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value)
    if pairs and all(is_whole(b) and is_number(r) for b, r in value):
        return tuple((batch, float(rate)) for batch, rate in value)
    raise keys.wrong(f"samples.{model}", f"{value!r} is neither samples a second nor a list of [batch, samples a second]")


def _times(keys: "TomlKeys") -> ModelTimes:
    layers = {name: keys.number_of(f"layers.{name}", value, SECONDS) for name, value in keys.mapping("layers").items()}
    times = ModelTimes(
        keys.whole("batch", least=1),
        keys.quantity("forward", SECONDS),
        keys.quantity("backward", SECONDS),
        layers,
        keys.quantity("overhead", SECONDS, 0.0),
        _excess(keys),
    )
    keys.end()
    return times


def _excess(keys: "TomlKeys") -> dict[str, float]:
    found = {}
    for kind, value in keys.mapping("excess").items():
        if kind not in KINDS:
            raise keys.wrong(f"excess.{kind}", f"no such kind of wire; there are {', '.join(KINDS)}")
        found[kind] = keys.number_of(f"excess.{kind}", value, SECONDS)
    return found


def _known_codec(name: str, codecs: "TomlKeys") -> "TomlKeys":
    """FORMAT/SCALE, or what torch's hooks cast to. A misspelt name would never be looked up."""
    try:
        wire_of(name.removeprefix(f"{TORCH} "))
    except ValueError as error:
        raise codecs.wrong(name, str(error)) from None
    return codecs


def _speed(keys: "TomlKeys") -> CodecSpeed:
    speed = CodecSpeed(*(keys.quantity(name, SECONDS) for name in ("encode", "add", "decode")))
    keys.end()
    return speed


def _level(keys: "TomlKeys") -> LinkLevel:
    given = keys.take("latency")
    latencies: tuple[tuple[float, float], ...] = ()
    if isinstance(given, list) and given and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        latencies = tuple((keys.number_of("latency", a, SIZE), keys.number_of("latency", b, SECONDS)) for a, b in given)
        latency = latencies[0][1]
    else:
        latency = keys.number_of("latency", given, SECONDS)
    efficiency = keys.number("efficiency", 1.0, above=0, most=1)
    level = LinkLevel(
        keys.text("name", "links"),
        keys.quantity("bandwidth", RATE) * efficiency,
        latency,
        keys.quantity("overhead", SECONDS, 0.0),
        keys.whole("ranks", None, least=1),
        keys.whole("shared", 1, least=1),
        keys.flag("separate"),
        latencies,
        keys.quantity("burst", SIZE, 0.0),
        keys.quantity("processor", SECONDS, 0.0),
        keys.number("point_to_point", 1.0, least=0, most=1),
    )
    keys.end()
    return level


def _stragglers(keys: "TomlKeys") -> Stragglers:
    stragglers = Stragglers(keys.number("variation", 0.0, least=0, most=1))
    keys.end()
    return stragglers


@contextmanager
def _at(source: str, path: str) -> Iterator[None]:
    """What a dataclass says is wrong with a field of it is wrong with the key at this path."""
    try:
        yield
    except ClusterError:
        raise
    except ValueError as error:
        raise ClusterError(f"{source}: {path}{'.' if path else ''}{error}") from None


def cluster_toml(cluster: Cluster) -> str:
    """The cluster as a file: `read_cluster` of it gives an equal one."""
    device = cluster.device
    lines = [f"name = {_quoted(cluster.name)}", f"source = {_quoted(cluster.source)}", "", "[device]"]
    lines += [f"name = {_quoted(device.name)}", f"kind = {_quoted(device.kind)}"]
    for key, value, unit in (
        ("memory", device.memory, SIZE),
        ("bandwidth", device.bandwidth, RATE),
        ("flops", device.flops, FLOPS),
    ):
        lines += [] if value is None else [f"{key} = {_quoted(exact_text(value, unit))}"]
    lines += [f"beside = {device.beside!r}", f"step_overhead = {_time(device.step_overhead)}"]
    lines += [] if device.chunk_overhead is None else [f"chunk_overhead = {_time(device.chunk_overhead)}"]
    if device.samples:
        lines += ["", "[device.samples]"]
        lines += [
            f"{_quoted(model)} = [{', '.join(f'[{b}, {r!r}]' for b, r in points)}]" for model, points in device.samples.items()
        ]
    for model, times in device.times.items():
        lines += ["", f"[device.times.{_quoted(model)}]", f"batch = {times.batch}"]
        lines += [f"{key} = {_time(getattr(times, key))}" for key in ("forward", "backward", "overhead")]
        if times.excess:
            lines += [f"excess = {{ {', '.join(f'{kind} = {_time(own)}' for kind, own in times.excess.items())} }}"]
        if times.layers:
            lines += ["", f"[device.times.{_quoted(model)}.layers]"]
            lines += [f"{_quoted(name)} = {_time(seconds)}" for name, seconds in times.layers.items()]
    for codec, speed in device.codecs.items():
        lines += ["", f"[codecs.{_quoted(codec)}]"]
        lines += [f"{key} = {_time(getattr(speed, key))}" for key in ("encode", "add", "decode")]
    for level in cluster.levels:
        lines += ["", "[[levels]]", *_level_lines(level)]
    return "\n".join([*lines, "", "[stragglers]", f"variation = {cluster.stragglers.variation!r}", ""])


def _level_lines(level: LinkLevel) -> list[str]:
    by_size = ", ".join(f"[{_quoted(exact_text(size, SIZE))}, {_time(seconds)}]" for size, seconds in level.latencies)
    return [
        f"name = {_quoted(level.name)}",
        *([] if level.ranks is None else [f"ranks = {level.ranks}"]),
        f"bandwidth = {_quoted(exact_text(level.bandwidth, RATE))}",
        f"latency = [{by_size}]" if level.latencies else f"latency = {_time(level.latency)}",
        f"overhead = {_time(level.overhead)}",
        *([f"burst = {_quoted(exact_text(level.burst, SIZE))}"] if level.burst else []),
        *([f"processor = {_time(level.processor)}"] if level.processor else []),
        f"shared = {level.shared}",
        *([f"point_to_point = {level.point_to_point!r}"] if level.point_to_point != 1 else []),
        *(["separate = true"] if level.separate else []),
    ]


def _time(seconds: float) -> str:
    return _quoted(exact_text(seconds, SECONDS))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
