"""What a user asks for, checked, and what follows from it for every parameter."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Size

from lowp.formats import AnyFormat, FormatLike, usual_name
from lowp.formats import format as parse_format
from lowp.formats.floats import FP32
from lowp.former_names import ARGUMENTS_OF_THE_WIRE, renamed_arguments
from lowp.names import SMALL, covers, unmatched
from lowp.wire.adaptive import layer_budgets
from lowp.wire.codec import Codec, check_format, codec_for, codec_of
from lowp.wire.naming import end_layers
from lowp.wire.plan import Bucket, Layer
from lowp.wire.reductions import reduction_of
from lowp.wire.reductions.base import Reduction, default_sum_format
from lowp.wire.scaling import Scale, scale_of

NONFINITE = ("propagate", "skip", "raise")
Formatish = FormatLike | Codec
Scheduled = Formatish | Mapping[int, Formatish] | Callable[[int], Formatish]

UNCOMPRESSED = Codec(FP32, scale=Scale("none"))


@dataclass(frozen=True)
class Settings:
    """How gradients travel. Everything here must be the same on all ranks, and is compared when they meet."""

    format: Scheduled
    scale: Scale | None = None  # the format's own: `default_scale`
    rounding: str = "nearest"
    reduction: str | Reduction = "two_shot"
    sum_format: AnyFormat | None = None
    kahan: bool = False
    skip: tuple[str, ...] = ()
    layers: Mapping[str, Scheduled] = field(default_factory=dict)
    error_feedback: bool = False
    nonfinite: str = "propagate"
    seed: int = 0
    measure: bool = False
    chunk: int | None = None

    @classmethod
    @renamed_arguments(ARGUMENTS_OF_THE_WIRE)
    def of(
        cls,
        format: Scheduled,
        *,
        scale: "str | Scale | None" = None,
        rounding: str = "nearest",
        reduction: "str | Reduction" = "two_shot",
        sum_format: "FormatLike | None" = None,
        kahan: bool = False,
        skip: "str | Iterable[str]" = (),
        layers: "Mapping[str, Scheduled] | None" = None,
        error_feedback: bool = False,
        nonfinite: str = "propagate",
        seed: int = 0,
        measure: bool = False,
        chunk: int | None = None,
    ) -> "Settings":
        """Check what a user says; the names are those of `compress_gradients`."""
        if nonfinite not in NONFINITE:
            raise ValueError(f"unknown nonfinite={nonfinite!r}; it is one of {', '.join(NONFINITE)}")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is a whole number from 0 on, not {seed!r}")
        for name, value in (("kahan", kahan), ("error_feedback", error_feedback), ("measure", measure)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, not {value!r}")
        if layers is not None and not isinstance(layers, Mapping):
            raise TypeError(f"layers maps patterns of names to formats, as {{'*.bias': 'fp16'}}, not {layers!r}")
        if not isinstance(skip, Iterable):
            raise TypeError(f"skip is a pattern of names such as '*.bias', or several, not {skip!r}")
        skip = (skip,) if isinstance(skip, str) else tuple(skip)
        for pattern in (*skip, *(layers or {})):
            if not isinstance(pattern, str):
                raise TypeError(f"layers are named by patterns such as '*.bias', not {pattern!r}")
        for choice in (format, *(layers or {}).values()):
            steps = choice if isinstance(choice, Mapping) else ()
            if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in steps):
                raise TypeError(f"a schedule maps steps, whole numbers from 0 on, to formats, not {choice!r}")
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int)):
            raise TypeError(f"chunk is a number of elements, not {chunk!r}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"a chunk has at least one element, not {chunk}")
        if reduction != "auto":
            reduction = reduction_of(reduction)
        settings = cls(
            format=_usual(format),
            scale=None if scale is None else scale_of(scale),
            rounding=rounding,
            reduction=reduction,
            sum_format=None if sum_format is None else check_format(parse_format(sum_format)),
            kahan=kahan,
            skip=skip,
            layers={pattern: _usual(choice) for pattern, choice in (layers or {}).items()},
            error_feedback=error_feedback,
            nonfinite=nonfinite,
            seed=seed,
            measure=measure,
            chunk=chunk,
        )
        settings.codecs()  # refuses what is no format or no schedule
        return settings

    @property
    def _choices(self) -> "tuple[Scheduled, ...]":
        return (self.format, *self.layers.values())

    def codecs(self) -> list[Codec]:
        """Of every format that is named, once, as far as schedules tell."""
        found: dict[Codec, None] = {}
        for choice in self._choices:
            for step in sorted({0, *choice}) if isinstance(choice, Mapping) else [0]:
                found[self.codec_at(choice, step)] = None
        return list(found)

    @property
    def switches(self) -> list[int]:
        """The steps from which on formats are others, as far as they are known: a function of the step does not tell."""
        return sorted({0}.union(*(choice for choice in self._choices if isinstance(choice, Mapping))))

    def codec_at(self, choice: Scheduled, step: int) -> Codec:
        """The codec of a schedule at a step: {first step: format, ...}, a function of the step, or one format for all."""
        if isinstance(choice, Mapping):
            if not choice or min(choice) > 0:
                raise ValueError(f"a schedule maps first steps to formats and begins with step 0, not {dict(choice)!r}")
            choice = choice[max(first for first in choice if first <= step)]
        elif callable(choice):
            choice = choice(step)
        codec = codec_of(choice, self.rounding, self.scale)
        return UNCOMPRESSED if codec.format == FP32 and codec.keep == 1 else codec

    def codec(self, names: Iterable[str], dimensions: int, ends: Collection[str], step: int) -> Codec:
        """The codec of one parameter: its own entry in `layers`, else float32 if it is skipped, else the common one.

        Patterns (names.py) are for any of the parameter's names. `ends`: is it of the "first" or the "last" layer?
        """

        def meant(pattern: str) -> bool:
            if pattern in ends or (pattern == SMALL and dimensions <= 1):
                return True
            return any(covers(pattern, name) for name in names)

        for pattern, choice in self.layers.items():
            if meant(pattern):
                return self.codec_at(choice, step)
        return UNCOMPRESSED if any(meant(pattern) for pattern in self.skip) else self.codec_at(self.format, step)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that match no parameter: surely a mistake."""
        return unmatched([*self.layers, *self.skip], names)

    @property
    def scheduled(self) -> bool:
        """Does a format depend on the step?"""
        return any(isinstance(c, Mapping) or (callable(c) and not isinstance(c, Codec)) for c in self._choices)

    def sums(self, reduction: Reduction) -> AnyFormat | None:
        return default_sum_format(reduction, self.sum_format)

    def describe(self) -> str:
        """One line for people and for comparing ranks. Words are compared (communicator.py): no spaces within one."""
        return (
            f"{self.describe_codec()} reduction={str(self.reduction).replace(' ', '')} sum_format={self.sum_format} "
            f"kahan={self.kahan} nonfinite={self.nonfinite} seed={self.seed} measure={self.measure} chunk={self.chunk}"
        )

    def describe_codec(self) -> str:
        """The part of `describe` that residuals and delayed scales depend on (state.py)."""

        def text(choice: Scheduled) -> str:
            if isinstance(choice, Mapping):
                return "{" + ",".join(f"{step}:{text(format)}" for step, format in choice.items()) + "}"
            return (
                getattr(choice, "__qualname__", "a schedule")
                if callable(choice) and not isinstance(choice, Codec)
                else str(choice)
            )

        layers = ",".join(f"{pattern}:{text(choice)}" for pattern, choice in self.layers.items())
        return (
            f"format={text(self.format)} scale={self._describe_scale()} rounding={self.rounding} "
            f"skip=[{','.join(self.skip)}] layers={{{layers}}} error_feedback={self.error_feedback}"
        )

    def _describe_scale(self) -> str:
        """The scale, or those that the formats have by default: `local` whether it was named or not, as in older states.

        A function of the step does not tell its formats, so `default` and a scale that is named are told apart there.
        """
        if self.scale is not None:
            return str(self.scale)
        if any(callable(choice) and not isinstance(choice, Codec) for choice in self._choices):
            return "default"
        return ",".join(dict.fromkeys(str(codec.scale) for codec in self.codecs() if codec != UNCOMPRESSED)) or "local"


def _usual(choice: Scheduled) -> Scheduled:
    """With names that are the same on all ranks and in all states, whatever a user calls a format."""
    if isinstance(choice, Mapping):
        return {step: usual_name(each) for step, each in choice.items()}
    return usual_name(choice)


class Parameters:
    """A model's parameters, by name, in its order: what each is as a layer on the wire.

    `names` are all their names, where some are tied (naming.py).
    """

    def __init__(self, shapes: Mapping[str, Size], settings: Settings, names: Mapping[str, str] | None = None) -> None:
        self._shapes = dict(shapes)
        self._settings = settings
        everything = {n: n for n in shapes} if names is None else {n: k for n, k in names.items() if k in shapes}
        self._names: dict[str, list[str]] = {name: [] for name in shapes}
        for name, known in everything.items():
            self._names[known].append(name)
        self._ends = end_layers(everything, self._shapes)
        has_matrix = any(len(shape) > 1 for shape in shapes.values())
        for word in {"first", "last"}.intersection((*settings.layers, *settings.skip)):
            if not has_matrix and not any(covers(word, name) for name in everything):
                raise ValueError(f"{word!r} is the {word} layer that has a matrix, and no parameter here has two dimensions")
        self.numbers = {name: number for number, name in enumerate(shapes)}
        self._kept: dict[tuple[tuple[str, ...], torch.dtype], Bucket] = {}
        self._budgets_at: tuple[int, dict[str, float]] = -1, {}  # the step that they are for

    def codec(self, name: str, step: int, dtype: torch.dtype = torch.float32) -> Codec:
        """`dtype`: of the gradient that travels."""
        ends = [word for word, parameters in self._ends.items() if name in parameters]
        return codec_for(self._settings.codec(self._names[name], len(self._shapes[name]), ends, step), dtype)

    @property
    def known_codecs(self) -> set[frozenset[Codec]]:
        """All codecs that parameters have at the same step, for every step, as far as schedules tell."""
        return {frozenset(self.codec(name, step) for name in self._shapes) for step in self._settings.switches}

    def bucket(self, names: Iterable[str], step: int, dtype: torch.dtype = torch.float32) -> Bucket:
        """The layers of these parameters. Worked out once, unless there is a schedule: it is asked for in every step."""
        names = tuple(names)
        key = names, dtype
        if key in self._kept:
            return self._kept[key]
        budgets = self._budgets(step)
        layers = (
            Layer(n, self._shapes[n].numel(), self.codec(n, step, dtype), self.numbers[n], budgets.get(n, 0.0)) for n in names
        )
        found = Bucket.of(tuple(layers))
        if not self._settings.scheduled:
            self._kept[key] = found
        return found

    def _budgets(self, step: int) -> dict[str, float]:
        """Bits for each number of every adaptive parameter, wherever its bucket is (adaptive.py)."""
        if self._budgets_at[0] != step:
            alike: dict[Codec, list[str]] = {}
            for name in self._shapes:
                if (codec := self.codec(name, step)).adaptive:
                    alike.setdefault(codec, []).append(name)
            found: dict[str, float] = {}
            for codec, names in alike.items():
                found |= zip(names, layer_budgets([self._shapes[name].numel() for name in names], codec.bits), strict=True)
            self._budgets_at = step, found
        return self._budgets_at[1]
