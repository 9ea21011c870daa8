"""What all optimizers share: parameters, states, a step that happens whole or not at all, checkpoints.

A step looks at all gradients before it changes anything. On a CPU a gradient that is not finite raises at once. On CUDA nobody
waits for the device: the kernels themselves leave everything as it is, and the error comes with the next step (or `check`).
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowp import compat
from lowp.optim import scales
from lowp.optim.arguments import GradientScale, check_gradient, check_options, gradient_scale_of, own_name, update_of, with_rate
from lowp.optim.checkpoint import check_groups, check_states
from lowp.optim.family import Family, OtherGradientDtype, Step
from lowp.optim.gathering import Families, gather
from lowp.optim.in_graph import register, step_in_graph
from lowp.optim.kernels import Layout
from lowp.optim.rounding import UPDATES, scale_of_compensation
from lowp.optim.rules import Rule
from lowp.optim.sharding import LocalParameter, NoisePlace
from lowp.optim.storing import decoded, layout_for
from lowp.tensor.carrier import FORMAT_OF_DTYPE
from lowp.tensor.errors import NonFiniteGradient, surely_finite
from lowp.tensor.lists.function import LIMIT


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """The base of SGD, LARS, AdamW and LAMB.

    Args that all of them take, beside those of `torch.optim`:
        update: how weights take their updates: "stochastic", "kahan" (16 more bits a weight) or "nearest". None: stochastic for
            16-bit weights, nearest for float32 ones, which is what torch does.
        state: the format of states: "fp16", "bf16", "e4m3fn", "dynamic8", "posit16" ..., or a dict by state. None: as the
            weights.
        state_scale: "tensor" or "block" (256 elements of a row, or what divides it): what shares a power of two. None: blocks
            for formats under 16 bits. (Vectors and small matrices have one scale, and keep states in the weights' dtype instead
            of narrower ones.)
        state_rounding: "nearest" or "stochastic". None: stochastic for averages that move by less than the format resolves.
        seed: of the noise. It is keyed by (seed, step, number of the parameter, place of the element); of a shard, the place in
            the whole parameter.
        nonfinite: "raise" NonFiniteGradient, with nothing changed, or "propagate" (no check).
        maximize: the objective, instead of minimizing it.
        foreach, fused: hints to torch's own functions, which update float32 weights with float32 states. Other steps are one
            kernel over all parameters, whatever is asked for.
        capturable, differentiable: refused if they are True.

    `lr` may be a tensor of one element. It is read in every step, so it may be changed in place. (On CUDA the host waits.)
    """

    takes_gradient_scale = True
    roots: ClassVar[tuple[str, ...]] = ()  # states that are squares

    def __init__(self, params: Any, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        self._check_settings({**defaults, **options})
        self._families: Families | None = None
        self._noise_places: dict[Tensor, NoisePlace] = {}
        self._pending: list[Step] = []  # that `check` has not looked at yet
        self._flag: tuple[Tensor, Any] | None = None  # in pinned memory; when it is there
        self._joined: tuple[Tensor, Tensor] | None = None
        self._found: Tensor | None = None  # the largest gradient, of all
        super().__init__(params, {**defaults, **options})
        self._handle = register(self)

    def __getstate__(self) -> dict[str, Any]:
        """As every optimizer's, what LARS and LAMB have of their own, and where noise is drawn."""
        own = {name: vars(self)[name] for name in ("_exclude", "_noise_places") if name in vars(self)}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_noise_places": {}} | state)
        for group in self.param_groups:  # of an older version
            group.setdefault("foreach", None)
            group.setdefault("fused", None)
        self._families, self._pending, self._flag, self._joined, self._found = None, [], None, None, None
        self._handle = register(self)

    # What an optimizer is made of.

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise for hyper-parameters of this optimizer that cannot be. (`lr` is looked at for all optimizers.)"""
        raise NotImplementedError

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        raise NotImplementedError

    def plain_step(
        self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]
    ) -> bool:
        """Do the step with torch's own functions, where everything is float32. False: not this optimizer."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        self._families = None

    def _check_settings(self, group: dict[str, Any]) -> None:
        check_options(group, UPDATES)
        with_rate(group)
        self.check_settings(group)

    def _check_group(self, group: dict[str, Any], place: int) -> None:
        self._check_settings(group)
        if group["nonfinite"] != self.defaults["nonfinite"]:
            raise ValueError("nonfinite= is for all groups: a step happens whole or not at all")
        for i, parameter in enumerate(group["params"]):
            name = self._name(group, i, place)
            if parameter.dtype not in FORMAT_OF_DTYPE:
                raise TypeError(f"{name} is {parameter.dtype}; weights are float16, bfloat16 or float32")
            if update_of(group, parameter.dtype) != "nearest" and parameter.dtype == torch.float32:
                raise TypeError(
                    f"{name} is float32, and update={group['update']!r} is for 16-bit weights: convert the model "
                    "(model.half() or model.bfloat16()), or leave update out"
                )
            if parameter.numel() > 1 << 30:
                raise ValueError(f"{name} has {parameter.numel()} elements; up to 2^30 are supported")
            LocalParameter(parameter).check()
            self._layout(parameter, group, own_name(group, i), parameter.dtype)

    def _name(self, group: dict[str, Any], i: int, place: int) -> str:
        own = own_name(group, i)
        shape = tuple(group["params"][i].shape)
        return f"parameter {own!r}" if own is not None else f"parameter {i} of group {place}, of shape {shape},"

    def draw_as_parts(self, places: Mapping[Tensor, NoisePlace]) -> None:
        """Let parameters of a model that is divided among ranks draw the noise of the whole one: each part other noise than the
        rest, and the same wherever it lives."""
        self._noise_places, self._families = dict(places), None

    # How things are stored.

    def _layout(self, parameter: Tensor, group: dict[str, Any], name: str | None, gradient: torch.dtype) -> Layout:
        return layout_for(parameter, group, self.rule(parameter, group, name), self.roots, gradient)

    def _gather(self) -> Families:
        """All parameters that have gradients or states, by group and layout."""
        if self._families is None or not self._families.still_hold(self.param_groups, self.state, self._layout):
            self._families = gather(self.param_groups, self.state, self._layout, self._noise_places)
        return self._families

    # A step.

    def step(self, closure: Callable[[], Any] | None = None, *, gradient_scale: GradientScale = 1.0) -> Any:  # type: ignore[override]
        """One step. `gradient_scale` is what gradients were multiplied by (a loss scale), for all or by parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_dynamo_compiling():
            step_in_graph(self, gradient_scale)
        else:
            with torch.no_grad():
                self._step(gradient_scale)
        return loss

    def _step(self, gradient_scale: GradientScale) -> None:
        try:
            steps, plain = self._prepare(gradient_scale)
        except OtherGradientDtype:
            self._families = None
            steps, plain = self._prepare(gradient_scale)
        try:
            self.check()  # as late as possible: what was prepared until now is not waited for by a device
            worst = self._measure(steps, plain)
            for group, parameters in plain:
                gradients = [p.grad for p in parameters if p.grad is not None]
                if gradient_scale != 1.0:
                    units = [1.0 / gradient_scale_of(gradient_scale, p) for p in parameters]
                    gradients = [g if unit == 1 else g * unit for g, unit in zip(gradients, units, strict=True)]
                states = [self.state[p] for p in parameters]
                for state in states:
                    state["step"] += 1
                self.plain_step(group, parameters, gradients, states)
            self._update(steps, worst)
        finally:
            for step in steps:
                step.chosen.forget_gradients()

    def _prepare(self, gradient_scale: GradientScale) -> tuple[list[Step], list[tuple[dict[str, Any], list[Tensor]]]]:
        """What kernels do, and what torch's own functions do. Nothing is changed yet."""
        steps: list[Step] = []
        plain: list[tuple[dict[str, Any], list[Tensor]]] = []
        for place, members in self._gather().by_group.items():
            group = self.param_groups[place]
            if members:
                self.check_settings(group)  # schedules and users change them at any time
            rated = with_rate(group) if members else group
            for each in members:
                if each.in_float32 and self.plain_step(group, [], [], []):
                    parameters = [p for p in each.parameters if p.grad is not None]
                    for p in parameters:
                        check_gradient(p)
                    plain.append((group, parameters))
                else:
                    steps += self._steps_of(each, rated, gradient_scale)
        return steps, plain

    def _measure(self, steps: list[Step], plain: list[tuple[dict[str, Any], list[Tensor]]]) -> Tensor | None:
        """Look at all gradients; the largest of all. Raise if it is not finite, where that can be known without waiting.

        On CUDA the host looks at it when the next step comes, by which time it has long been there.
        """
        propagate = self.defaults["nonfinite"] == "propagate"
        if propagate and not steps:
            return None
        together = self._together(steps)
        for step in steps:
            step.measure(together, check=not propagate)
        if propagate:
            return None
        worst = self._worst(steps) if together is None else together
        # torch's own functions do not leave a bad step alone
        if worst is not None and (worst.device.type == "cpu" or plain) and int(worst) >= LIMIT:
            self._raise_nonfinite(steps)
        self._refuse_nonfinite([p for _, parameters in plain for p in parameters])
        return worst

    def _update(self, steps: list[Step], worst: Tensor | None) -> None:
        """On CUDA the first kernel that reads `worst` also writes it to pinned memory, for `check`."""
        for i, step in enumerate(steps):
            skip = worst if worst is None or worst.device == step.chosen.device else worst.to(step.chosen.device)
            if i > 0 or skip is None or skip.device.type == "cpu":
                step.number(skip)
            else:
                flag, _ = self._flag or (torch.empty((), dtype=torch.int64, pin_memory=True), None)
                step.number(skip, flag)  # nobody else reads it: `check` has waited for the last one
                self._flag = flag, torch.cuda.current_stream(skip.device).record_event()
                self._pending = steps
            step.update(skip)

    def _together(self, steps: list[Step]) -> Tensor | None:
        """Zero, where the kernels of all steps write the largest gradient; None where ranks must agree on what each finds."""
        devices = {step.chosen.device for step in steps}
        if len(devices) != 1 or self.defaults["nonfinite"] == "propagate" or any(step.chosen.agrees for step in steps):
            return None
        (device,) = devices
        if self._found is None or self._found.device != device:
            self._found = torch.zeros((), dtype=torch.int64, device=device)
        return self._found.zero_()

    def _worst(self, steps: list[Step]) -> Tensor | None:
        """The largest gradient of all steps, in memory that stays where it is."""
        if len(steps) < 2:
            return steps[0].chosen.worst if steps else None
        first = steps[0].chosen.device
        if self._joined is None or self._joined[0].shape != (len(steps),) or self._joined[0].device != first:
            self._joined = torch.empty(len(steps), dtype=torch.int64, device=first), torch.empty_like(steps[0].chosen.worst)
        each, worst = self._joined
        if all(step.chosen.device == first for step in steps):
            torch.stack([step.chosen.worst for step in steps], out=each)
        else:
            each.copy_(torch.stack([step.chosen.worst.to(first) for step in steps]))
        return torch.amax(each, 0, out=worst)

    def _refuse_nonfinite(self, members: list[Tensor]) -> None:
        """Of parameters that torch's own functions update, which would not leave a bad step alone. One wait for all of them."""
        parts = [(p, LocalParameter(p).part_of(p.grad)) for p in members]
        parts = [(p, part) for p, part in parts if part.numel()]  # of a shard with nothing in it there is no largest
        if surely_finite(part for _, part in parts):
            return
        largest = compat.foreach_norm([part for _, part in parts], math.inf)
        finite = torch.stack([each.to(largest[0].device) for each in largest]).isfinite().tolist()
        for (p, _), good in zip(parts, finite, strict=True):
            if not good:
                raise NonFiniteGradient(f"the gradient of {self._name_of(p)} is not finite; nothing was changed")

    def _raise_nonfinite(self, steps: list[Step]) -> None:
        for step in steps:
            for member, largest in zip(step.chosen.members, step.chosen.largest.tolist(), strict=True):
                if largest >= LIMIT:
                    name = self._name_of(member.parameter)
                    raise NonFiniteGradient(f"the gradient of {name} is not finite; nothing was changed")

    def _steps_of(self, each: Family, group: dict[str, Any], gradient_scale: GradientScale) -> list[Step]:
        """Members that have taken the same number of steps (mostly all of them) go together."""
        found = []
        sign = -1.0 if group["maximize"] else 1.0
        rule = each.layout.rule
        for step, chosen in each.due().items():
            chosen.find_gradients()
            if isinstance(gradient_scale, Mapping):
                units = [sign / gradient_scale_of(gradient_scale, p) for p in chosen.parameters]
            else:
                units = [sign / gradient_scale_of(gradient_scale, chosen.parameters[0])] * len(chosen.parameters)
            constants = scales.constants(rule.averages(group), group["seed"], step)
            found.append(Step(chosen, constants, rule.scalars(group, step), units))
        return found

    def _name_of(self, parameter: Tensor) -> str:
        for place, group in enumerate(self.param_groups):
            for i, own in enumerate(group["params"]):
                if own is parameter:
                    return self._name(group, i, place)
        return "a parameter"

    def check(self) -> None:
        """Raise NonFiniteGradient if the last step, on CUDA, met a gradient that was not finite (and so changed nothing)."""
        steps, self._pending = self._pending, []
        if steps and self._flag is not None:
            flag, event = self._flag
            event.synchronize()
            if int(flag) >= LIMIT:
                for step in steps:
                    step.undo_count()
                self._raise_nonfinite(steps)

    # To look inside.

    @torch.no_grad()
    def intended_update(self, parameter: Tensor, *, gradient_scale: GradientScale = 1.0) -> Tensor:
        """What `step()` would add to this parameter before anything is rounded (float32; this rank's part)."""
        if parameter.grad is None:
            raise ValueError(f"{self._name_of(parameter)} has no gradient, so no step is intended")
        for place, members in self._gather().by_group.items():
            for each in members:
                for i, member in enumerate(each.members):
                    if member.parameter is parameter:
                        alone = Family(each.layout, [member], each.bounds[:, i : i + 1].clone())
                        (step,) = self._steps_of(alone, with_rate(self.param_groups[place]), gradient_scale)
                        return step.intended()
        raise ValueError("this parameter is not one of the optimizer's")

    @torch.no_grad()
    def full_weight(self, parameter: Tensor) -> Tensor:
        """The weight with Kahan's compensation, where there is one (float32; this rank's part)."""
        placement, state = LocalParameter(parameter), self.state.get(parameter, {})
        weight = placement.local.to(torch.float32)
        if "compensation" not in state:
            return weight
        return weight + placement.part_of(state["compensation"]).to(torch.float32) / scale_of_compensation(parameter.dtype)

    @torch.no_grad()
    def decoded_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The states as numbers (float32; this rank's part)."""
        for members in self._gather().by_group.values():
            for each in members:
                for i, member in enumerate(each.members):
                    if member.parameter is parameter:
                        return decoded(member, each.layout, each.bounds[:, i])
        return {}

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """As every optimizer's; each group also says of how many of its parameters there are states."""
        self.check()
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["saved_states"] = sum(bool(saved["state"].get(key)) for key in group["params"])
        return saved

    @compat.disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. What does not fit is refused by name, and nothing is changed."""
        groups = [
            {
                **ours,
                **{
                    key: copy.deepcopy(value)
                    for key, value in theirs.items()
                    if key not in ("params", "param_names", "saved_states")
                },
            }
            for theirs, ours in zip(check_groups(state_dict, self.param_groups), self.param_groups, strict=True)
        ]
        for place, group in enumerate(groups):
            try:
                self._check_settings(group)
            except (TypeError, ValueError) as error:
                raise ValueError(f"group {place} of the saved state: {error}") from None
        wanted = [
            [
                (self._name(group, i, place), p, self._layout(p, group, own_name(group, i), p.dtype))
                for i, p in enumerate(group["params"])
            ]
            for place, group in enumerate(groups)
        ]
        loaded = check_states(state_dict, wanted)
        for ours, group in zip(self.param_groups, groups, strict=True):
            ours.update(group)
        self.state.clear()
        self.state.update(loaded)
        self._families, self._pending = None, []
