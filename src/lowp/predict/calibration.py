"""`lowp calibrate`: the machine at hand, measured by all ranks at once, as a cluster that predictions can be made for.

1. The device: copies, products. The kernels of the codecs are built, by one rank of every machine for all.
2. The links of every level (probes/link.py), where there is more than one rank.
3. Seconds a number of every codec (probes/codec_times.py).
4. The models, layer by layer (probes/model.py), and how unevenly ranks run.
5. What computation, codecs and messages take from each other (probes/sharing.py).
6. Whole steps of the models, as they are trained (probes/whole_step.py): what they take beyond the sum of these parts.

All of it has a limit in seconds. What does not fit in is left out, and said: codecs that were not measured are predicted from
those that were.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import torch

from lowp.predict.candidates import CODECS
from lowp.predict.cluster import Cluster, CodecSpeed, Device, LinkLevel, ModelTimes, Stragglers
from lowp.predict.codec_speed import TORCH
from lowp.predict.probes import sharing
from lowp.predict.probes.codec_times import CASTS, CodecRun, cast_speed, codec_speed, prepare
from lowp.predict.probes.device import bare_device, with_speeds
from lowp.predict.probes.link import RingNeighbours, link_levels
from lowp.predict.probes.meeting import Meeting
from lowp.predict.probes.model import model_times, plain_step
from lowp.predict.probes.whole_step import PROBES, with_excess
from lowp.predict.quantities import rate_text, seconds_text
from lowp.predict.subjects import Subject
from lowp.predict.wires import COMPRESSED, WireChoice, wire_of
from lowp.wire.reductions.two_shot import TwoShot

LIMIT = 120.0  # seconds of everything
SHORTEST = 5.0
# What each part may take of the limit, and never more than what is left: most parts take less than they may, and whole steps,
# which come last, take what remains.
SHARES = {"device": 0.02, "build": 0.3, "links": 0.08, "codecs": 0.12, "models": 0.12, "sharing": 0.06, "steps": 0.6}
MESSAGE = 1 << 20  # bytes, of those that are exchanged beside the computation
Say = Callable[[str], None]


@dataclass
class Calibration:
    """`say` is told what was found, as it is found; on rank 0."""

    meeting: Meeting
    subjects: Sequence[Subject] = ()
    codecs: Sequence[WireChoice] = ()
    limit: float = LIMIT
    ranks_here: int = 1
    say: Say = lambda text: None
    _began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.subjects and self.codecs and self.meeting.ranks > 1:  # whole steps are measured with one of these
            self.codecs = codecs_of([*(wire.text for wire in self.codecs), PROBES[COMPRESSED]])

    def run(self, name: str) -> Cluster:
        meeting = self.meeting
        device = with_speeds(meeting, bare_device(meeting.device, self.ranks_here), self._share("device"))
        self.say(f"device   {device.name}, a rank: copies {rate_text(device.bandwidth or 1)}")
        levels = self._links()
        codecs, overhead = self._codecs()
        models, variation = self._models()
        device = replace(device, codecs=codecs, times=models, chunk_overhead=overhead)
        if meeting.device.type == "cpu":
            device, levels = self._sharing(device, levels)
        cluster = Cluster(name, device, tuple(levels), Stragglers(variation), self._source())
        return self._whole_steps(cluster) if levels else cluster

    def _share(self, part: str, of: int = 1) -> float:
        """Seconds for one of `of` things of a part: no more than what is left of the limit."""
        left = self.limit - self._elapsed()
        return max(0.0, min(self.limit * SHARES[part], 0.9 * left)) / max(1, of)

    def _elapsed(self) -> float:
        return self.meeting.largest([time.perf_counter() - self._began])[0]

    def _links(self) -> list[LinkLevel]:
        if self.meeting.ranks == 1:
            self.say("links    none: one rank has nobody to send to. --ranks N, or torchrun, measures links")
            return []
        levels = link_levels(self.meeting, self.ranks_here, self._share("links"))
        for level in levels:
            small, large = (1e-30 + level.latency_of(size) for size in (256, 1 << 20))
            shared = f", shared by {level.shared}" if level.shared > 1 else ""
            self.say(
                f"links    {level.name}: {rate_text(level.bandwidth)}{shared}, latency {seconds_text(small)} (256 B) to "
                f"{seconds_text(large)} (1 MiB), {seconds_text(level.overhead)} a message"
            )
        return levels

    def _codecs(self) -> tuple[dict[str, CodecSpeed], float | None]:
        found: dict[str, CodecSpeed] = {}
        chunks: list[float] = []
        wires = self._built()
        left_out = [wire.text for wire in self.codecs if wire not in wires]
        for wire in wires:
            codec = wire.settings.codecs()[0]
            speed, chunk = codec_speed(self.meeting, wire.settings, self._share("codecs", len(wires) + len(CASTS)))
            found[str(codec)] = speed
            chunks += [] if chunk is None else [chunk]
            self.say(f"codec    {codec!s:18} {_nanoseconds(speed)}")
        for name in CASTS if wires else ():
            found[f"{TORCH} {name}"] = speed = cast_speed(self.meeting, name, self._share("codecs", len(wires) + len(CASTS)))
            self.say(f"codec    {TORCH + ' ' + name:18} {_nanoseconds(speed)}")
        if left_out:
            self.say(f"codec    no time was left for {', '.join(left_out)}: predicted from the others")
        return found, statistics.median(chunks) if chunks else None

    def _built(self) -> list[WireChoice]:
        """The codecs whose kernels could be built in time. One rank of every machine builds, and the others load."""
        found: list[WireChoice] = []
        limit = self._elapsed() + self._share("build")
        first = int(os.environ.get("LOCAL_RANK", 0)) == 0
        for wire in self.codecs:
            for builds in (True, False):
                if builds == first:
                    prepare(wire.settings.codecs(), self.meeting.device)
                self.meeting.together()
            found.append(wire)
            if self._elapsed() > limit:
                break
        return found

    def _models(self) -> tuple[dict[str, ModelTimes], float]:
        found: dict[str, ModelTimes] = {}
        variations: list[float] = []
        for subject in self.subjects:
            times, variation = model_times(self.meeting, subject, self._share("models", len(self.subjects)))
            found[subject.name] = times
            variations.append(variation)
            self.say(
                f"model    {subject.name}: batch {times.batch}, forward {seconds_text(times.forward)}, backward "
                f"{seconds_text(times.backward)} in {len(times.layers)} layers"
            )
        return found, statistics.median(variations) if variations else 0.0

    def _sharing(self, device: Device, levels: list[LinkLevel]) -> tuple[Device, list[LinkLevel]]:
        meeting, compute = self.meeting, self._computation(device.times)
        seconds = self._share("sharing", 2)
        if self.codecs and device.codecs:
            run = CodecRun(self.codecs[0].settings, TwoShot(), torch.randn(1 << 18))
            run()
            device = replace(device, beside=sharing.beside(meeting, compute, run, seconds))
            self.say(f"sharing  {100 * device.beside:.0f} % of encoding and decoding runs beside the computation")
        if levels:
            outer, size = levels[-1], min(MESSAGE, max(4096, int(levels[-1].bandwidth * 0.1)))
            neighbours = RingNeighbours(meeting, list(range(meeting.ranks)), size)
            taken = sharing.processor(
                meeting, compute, lambda: neighbours.send_receive(1, size), size, outer.bandwidth, self._share("sharing", 2)
            )
            levels = [replace(level, processor=taken) for level in levels]
            self.say(f"sharing  {seconds_text(taken)} of computation are lost for each byte that a rank sends")
        return device, levels

    def _whole_steps(self, cluster: Cluster) -> Cluster:
        kinds = {
            kind: wire for kind, wire in PROBES.items() if kind != COMPRESSED or _codec_name(wire) in cluster.device.codecs
        }
        found = cluster
        for number, subject in enumerate(self.subjects):
            seconds = self._share("steps", len(self.subjects) - number)
            times, steps = with_excess(self.meeting, subject, cluster, kinds, seconds)
            found = found.with_times(subject.name, times)
            said = ", ".join(f"{kinds[kind]} {seconds_text(took)}" for kind, took in steps.items())
            beyond = " / ".join(dict.fromkeys(seconds_text(own) for own in times.excess.values()))
            what = f"{said} a step; {beyond} beyond the parts" if steps else "no time was left: predicted from the parts alone"
            self.say(f"steps    {subject.name}: {what}")
        return found

    def _computation(self, models: Mapping[str, ModelTimes]) -> Callable[[], object]:
        """A step of the first model, unless that takes long; else a product."""
        for subject in self.subjects:
            times, step = models[subject.name], plain_step(subject)
            if times.forward + times.backward > sharing.PERIOD:
                continue
            step()
            if self.meeting.largest([self.meeting.seconds(step)])[0] < sharing.PERIOD / 8:
                return step
        a = torch.randn(256, 256, device=self.meeting.device)
        product = torch.empty_like(a)
        return lambda: torch.mm(a, a, out=product)

    def _source(self) -> str:
        ranks = "1 rank" if self.meeting.ranks == 1 else f"{self.meeting.ranks} ranks, {self.ranks_here} on a machine"
        return f"measured by lowp calibrate on {datetime.now().astimezone():%Y-%m-%d}, {ranks}"


def _codec_name(wire: str) -> str:
    return str(wire_of(wire).settings.codecs()[0])


def _nanoseconds(speed: CodecSpeed) -> str:
    return f"encode {1e9 * speed.encode:.2f}, add {1e9 * speed.add:.2f}, decode {1e9 * speed.decode:.2f} ns a number"


def codecs_of(texts: Iterable[str] = CODECS) -> list[WireChoice]:
    """Codecs by name, each once; a mistake names it."""
    found: dict[str, WireChoice] = {}
    for text in texts:
        wire = wire_of(text)
        found.setdefault(str(wire.settings.codecs()[0]), wire)
    return list(found.values())


def check_limit(seconds: float) -> None:
    if not SHORTEST <= seconds < math.inf:
        raise ValueError(f"seconds: {seconds:g} must be at least {SHORTEST:g}")


def calibrate_cluster(
    *,
    name: str = "this machine",
    subjects: Sequence[Subject] = (),
    codecs: Iterable[str] = CODECS,
    seconds: float = LIMIT,
    device: "torch.device | str" = "cpu",
    group: Any = None,
    say: Say = lambda text: None,
) -> Cluster:
    """Measure this machine through the process group, if there is one. All ranks call it, with the same arguments.

        cluster = calibrate_cluster(subjects=[subject_of("cnn")])
        lowp.predict("cnn", cluster, wire=["fp32", "e4m3fn"], ranks=2)

    Args:
        subjects: models whose layers are timed (`lowp.predict.subjects.subject_of`).
        codecs: as `lowp predict --wire` takes them.
        seconds: in all, at most about.
        say: called on rank 0 with a line for everything that was found.
    """
    check_limit(seconds)
    meeting = Meeting(torch.device(device), group)
    here = min(meeting.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    quiet: Say = lambda text: None  # noqa: E731
    run = Calibration(meeting, subjects, codecs_of(codecs), seconds, here, say if meeting.rank == 0 else quiet)
    return run.run(name)
