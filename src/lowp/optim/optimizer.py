"""What all optimizers share: parameters, states, a step that happens whole or not at all, checkpoints.

A step looks at all gradients before it changes anything. On a CPU a gradient that is not finite raises at once. On CUDA nobody
waits
for the device: the kernels themselves leave everything as it is, and the error comes with the next step (or `check`).
"""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowp.optim import scales
from lowp.optim.checkpoint import check_groups, check_states
from lowp.optim.family import Family, Member, Step
from lowp.optim.in_graph import register, step_in_graph
from lowp.optim.kernels import Layout
from lowp.optim.rounding import FORMATS, UPDATES, scale_of_compensation
from lowp.optim.rules import Rule
from lowp.optim.sharding import Placement, is_sharded
from lowp.optim.storing import LONGEST_BLOCK, begin, block_width, decoded, layout_for
from lowp.tensor.errors import NonFiniteGradient
from lowp.tensor.lists.function import LIMIT

GradientScale = float | Mapping[Tensor, float]


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """The base of SGD, LARS, AdamW and LAMB.

    Args that all of them take, beside those of `torch.optim`:
        update: how weights take their updates: "stochastic", "kahan" (16 more bits a weight) or "nearest".
        state: the format of states: "fp16", "bf16", "e4m3fn", "dynamic8", "posit16" ..., or a dict by state. None: as the
            weights.
        state_scale: "tensor" or "block" (256 elements of a row, or what divides it): what shares a power of two. None: blocks
            for formats under 16 bits. (Vectors and small matrices have one scale, and keep states in the weights' dtype instead
            of narrower ones.)
        state_rounding: "nearest" or "stochastic". None: stochastic for averages that move by less than the format resolves.
        seed: of the noise. It is keyed by (seed, step, number of the parameter, place of the element).
        nonfinite: "raise" NonFiniteGradient, with nothing changed, or "propagate" (no check).
    """

    takes_gradient_scale = True
    roots: ClassVar[tuple[str, ...]] = ()  # states that are squares

    def __init__(self, params: Any, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        for name, value in (("update", options["update"]), ("nonfinite", options["nonfinite"])):
            allowed = UPDATES if name == "update" else ("raise", "propagate")
            if value not in allowed:
                raise ValueError(f"unknown {name}={value!r}; it is one of {', '.join(allowed)}")
        self._families: dict[int, list[Family]] | None = None
        self._pending: list[Any] = []
        self._flag: Tensor | None = None  # in pinned memory
        super().__init__(params, {**defaults, **options})
        self._handle = register(self)

    def __getstate__(self) -> dict[str, Any]:
        """As every optimizer's, and what LARS and LAMB have of their own."""
        own = {"_exclude": vars(self)["_exclude"]} if "_exclude" in vars(self) else {}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._families, self._pending, self._flag = None, [], None
        self._handle = register(self)

    # What an optimizer is made of.

    def rule(self, parameter: Tensor, group: dict[str, Any], name: str | None) -> Rule:
        raise NotImplementedError

    def plain_step(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> bool:
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

    def _check_group(self, group: dict[str, Any], place: int) -> None:
        if group["update"] not in UPDATES:
            raise ValueError(f"unknown update={group['update']!r}; it is one of {', '.join(UPDATES)}")
        if group["nonfinite"] != self.defaults["nonfinite"]:
            raise ValueError("nonfinite= is for all groups: a step happens whole or not at all")
        if isinstance(group["lr"], Tensor):
            raise TypeError("lr is a float here: a step is never compiled again when it changes")
        for i, parameter in enumerate(group["params"]):
            name = self._name(group, i, place)
            if parameter.dtype not in FORMATS:
                raise TypeError(f"{name} is {parameter.dtype}; weights are float16, bfloat16 or float32")
            if parameter.dtype == torch.float32 and group["update"] != "nearest":
                raise TypeError(
                    f"{name} is float32, and update={group['update']!r} is for 16-bit weights: convert the model "
                    "(model.half() or model.bfloat16()), or say update='nearest'"
                )
            if parameter.numel() > 1 << 30:
                raise ValueError(f"{name} has {parameter.numel()} elements; up to 2^30 are supported")
            Placement(parameter).check()
            self._layout(parameter, group, self._own_name(group, i), parameter.dtype)

    def _own_name(self, group: dict[str, Any], i: int) -> str | None:
        return group["param_names"][i] if "param_names" in group else None

    def _name(self, group: dict[str, Any], i: int, place: int) -> str:
        own = self._own_name(group, i)
        shape = tuple(group["params"][i].shape)
        return f"parameter {own!r}" if own is not None else f"parameter {i} of group {place}, of shape {shape},"

    def excluded(self, parameter: Tensor, name: str | None, exclude: Any) -> bool:
        """Biases and norms (all of one dimension), unless told otherwise by a function of the parameter, or name patterns."""
        if exclude is None:
            return parameter.dim() <= 1
        if callable(exclude):
            return bool(exclude(parameter))
        if name is None:
            raise ValueError("exclude= by names needs names: give model.named_parameters() to the optimizer")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    # How things are stored.

    def _layout(self, parameter: Tensor, group: dict[str, Any], name: str | None, gradient: torch.dtype) -> Layout:
        return layout_for(parameter, group, self.rule(parameter, group, name), self.roots, gradient)

    def _gather(self) -> dict[int, list[Family]]:
        """All parameters that have gradients, by group and layout; states are begun where there are none."""
        if self._families is not None and not (self._newcomers() or self._moved() or self._other_rules()):
            return self._families
        found: dict[int, list[Family]] = {}
        number = 0
        for place, group in enumerate(self.param_groups):
            alike: dict[Any, list[Member]] = {}
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is not None or self.state.get(parameter):
                    dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
                    layout = self._layout(parameter, group, self._own_name(group, i), dtype)
                    if not {"step", *layout.state_names} <= self.state[parameter].keys():
                        self.state[parameter] = begin(parameter, layout) | self.state[parameter]
                    member = self._member(parameter, layout, number, self._own_name(group, i))
                    alike.setdefault((layout, member.placement.groups, member.placement.local.device), []).append(member)
                number += 1
            found[place] = [self._family(layout, members) for (layout, _, _), members in alike.items()]
        self._families = found
        return found

    def _moved(self) -> bool:
        """Was a parameter given other memory (`p.data = ...`)?"""
        everyone = (m for families in (self._families or {}).values() for each in families for m in each.members)
        return any(m.placement.part_of(m.parameter).data_ptr() != m.placement.local.data_ptr() for m in everyone)

    def _other_rules(self) -> bool:
        """Was something switched on or off in a group, such as momentum or decay?"""
        for place, families in (self._families or {}).items():
            for each in families:
                parameter, group = each.members[0].parameter, self.param_groups[place]
                if self.rule(parameter, group, each.members[0].name) != each.layout.rule:
                    return True
        return False

    def _newcomers(self) -> bool:
        return any(p.grad is not None and not self.state.get(p) for group in self.param_groups for p in group["params"])

    def _member(self, parameter: Tensor, layout: Layout, number: int, name: str | None) -> Member:
        placement, state = Placement(parameter), self.state[parameter]
        width = block_width(parameter.shape, LONGEST_BLOCK) if layout.blocked else 0
        rest = [placement.part_of(state[key]) for key in layout.state_names]
        return Member(parameter, placement, number, name, rest, width)

    def _family(self, layout: Layout, members: list[Member]) -> Family:
        """The bounds of all members lie together; each parameter's state has a view of its own."""
        names = [f"{layout.rule.states[i]}_bound" for i in layout.scaled]
        device = members[0].placement.local.device
        bounds = torch.zeros((len(names), len(members)), dtype=torch.int32, device=device)
        for column, member in enumerate(members):
            state = self.state[member.parameter]
            for row, name in enumerate(names):
                bounds[row, column] = state[name]
                state[name] = bounds[row, column]
        return Family(layout, members, bounds)

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
        self.check()
        steps: list[Step] = []
        plain: list[tuple[dict[str, Any], list[Tensor]]] = []
        for place, members in self._gather().items():
            group = self.param_groups[place]
            for each in members:
                if self._is_plain(each.layout, group):
                    for member in each.members:
                        if member.parameter.grad is not None:
                            _check_gradient(member)
                    plain.append((group, [m.parameter for m in each.members if m.parameter.grad is not None]))
                else:
                    steps += self._steps_of(each, group, gradient_scale)
        worst = self._measure(steps, plain)
        for group, parameters in plain:
            units = [1.0 / _scale_of(gradient_scale, p) for p in parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            gradients = [g if unit == 1 else g * unit for g, unit in zip(gradients, units, strict=True)]
            for p in parameters:
                self.state[p]["step"] += 1
            self.plain_step(group, parameters, gradients)
        for step in steps:
            step.do(worst)
            for member in step.chosen.members:
                self.state[member.parameter]["step"] += 1
        self._remember(steps, worst)

    def _measure(self, steps: list[Step], plain: list[tuple[dict[str, Any], list[Tensor]]]) -> Tensor:
        """Look at all gradients; the largest of all. Raise if it is not finite, where that can be known without waiting."""
        found = [step.measure() for step in steps]
        if self.defaults["nonfinite"] == "propagate" or not found:
            worst = torch.zeros((), dtype=torch.int64, device=found[0].device if found else "cpu")
        else:
            worst = found[0] if len(found) == 1 else torch.stack([each.to(found[0].device) for each in found]).amax()
        if self.defaults["nonfinite"] == "propagate":
            return worst
        if (worst.device.type == "cpu" or plain) and int(worst) >= LIMIT:  # torch's own functions would not leave things alone
            self._raise_nonfinite(steps)
        for p in (p for _, parameters in plain for p in parameters):
            if not bool(torch.isfinite(Placement(p).part_of(p.grad)).all()):
                raise NonFiniteGradient(f"the gradient of {self._name_of(p)} is not finite; nothing was changed")
        return worst

    def _raise_nonfinite(self, steps: list[Step]) -> None:
        for step in steps:
            for member, largest in zip(step.chosen.members, step.chosen.largest.tolist(), strict=True):
                if largest >= LIMIT:
                    name = self._name_of(member.parameter)
                    raise NonFiniteGradient(f"the gradient of {name} is not finite; nothing was changed")

    def _is_plain(self, layout: Layout, group: dict[str, Any]) -> bool:
        everything = layout.update.dtype == layout.gradient == torch.float32
        everything = everything and all(state.dtype == torch.float32 for state in layout.states)
        return everything and self.plain_step(group, [], [])

    def _steps_of(self, each: Family, group: dict[str, Any], gradient_scale: GradientScale) -> list[Step]:
        """Members that have taken the same number of steps (mostly all of them) go together."""
        by_step: dict[int, list[int]] = {}
        for place, member in enumerate(each.members):
            if member.parameter.grad is not None:
                _check_gradient(member)
                by_step.setdefault(self.state[member.parameter]["step"] + 1, []).append(place)
        found = []
        sign = -1.0 if group["maximize"] else 1.0
        rule = each.layout.rule
        for step, places in by_step.items():
            chosen = each.choose(tuple(places))
            call = torch.tensor(scales.constants(rule.averages(group), group["seed"], step), dtype=torch.int32).view(-1, 1)
            if each.device.type != "cpu":
                call = call.to(each.device, non_blocking=True)
            units = [sign / _scale_of(gradient_scale, member.parameter) for member in chosen.members]
            found.append(Step(chosen, call, rule.scalars(group, step), units))
        return found

    def _name_of(self, parameter: Tensor) -> str:
        for place, group in enumerate(self.param_groups):
            for i, own in enumerate(group["params"]):
                if own is parameter:
                    return self._name(group, i, place)
        return "a parameter"

    def _remember(self, steps: list[Step], worst: Tensor) -> None:
        """On CUDA: look at the flag when the next step comes, by which time it has long been there."""
        if worst.device.type == "cpu" or self.defaults["nonfinite"] == "propagate":
            return
        flag = self._flag = torch.empty((), dtype=torch.int64, pin_memory=True) if self._flag is None else self._flag
        flag.copy_(worst, non_blocking=True)  # nobody else reads it: `check` has waited for the last one
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(worst.device))
        self._pending = [(flag, event, steps)]

    def check(self) -> None:
        """Raise NonFiniteGradient if the last step, on CUDA, met a gradient that was not finite (and so changed nothing)."""
        pending, self._pending = self._pending, []
        for flag, event, steps in pending:
            event.synchronize()
            if int(flag) >= LIMIT:
                for step in steps:
                    for member in step.chosen.members:
                        self.state[member.parameter]["step"] -= 1
                self._raise_nonfinite(steps)

    # To look inside.

    @torch.no_grad()
    def intended_update(self, parameter: Tensor, *, gradient_scale: GradientScale = 1.0) -> Tensor:
        """What `step()` would add to this parameter before anything is rounded (float32; this rank's part)."""
        if parameter.grad is None:
            raise ValueError(f"{self._name_of(parameter)} has no gradient, so no step is intended")
        for place, members in self._gather().items():
            for each in members:
                for i, member in enumerate(each.members):
                    if member.parameter is parameter:
                        alone = Family(each.layout, [member], each.bounds[:, i : i + 1].clone())
                        (step,) = self._steps_of(alone, self.param_groups[place], gradient_scale)
                        return step.intended()
        raise ValueError("this parameter is not one of the optimizer's")

    @torch.no_grad()
    def full_weight(self, parameter: Tensor) -> Tensor:
        """The weight with Kahan's compensation, where there is one (float32; this rank's part)."""
        placement, state = Placement(parameter), self.state.get(parameter, {})
        weight = placement.local.to(torch.float32)
        if "compensation" not in state:
            return weight
        return weight + placement.part_of(state["compensation"]).to(torch.float32) / scale_of_compensation(parameter.dtype)

    @torch.no_grad()
    def decoded_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The states as numbers (float32; this rank's part)."""
        for members in self._gather().values():
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

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. What does not fit is refused by name, and nothing is changed."""
        groups = [
            {**ours, **{key: value for key, value in theirs.items() if key not in ("params", "param_names", "saved_states")}}
            for theirs, ours in zip(check_groups(state_dict, self.param_groups), self.param_groups, strict=True)
        ]
        wanted = [
            [
                (self._name(group, i, place), p, self._layout(p, group, self._own_name(group, i), p.dtype))
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


def _scale_of(gradient_scale: GradientScale, parameter: Tensor) -> float:
    scale = gradient_scale[parameter] if isinstance(gradient_scale, Mapping) else gradient_scale
    if not scale > 0:
        raise ValueError(f"gradient_scale must be positive, not {scale}")
    return float(scale)


def _check_gradient(member: Member) -> None:
    gradient = member.parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise TypeError("sparse gradients are not supported: use Embedding(sparse=False)")
    if gradient.shape != member.parameter.shape or gradient.dtype not in FORMATS:
        raise TypeError(f"a gradient of {gradient.dtype} and shape {tuple(gradient.shape)} does not fit its parameter")
    if is_sharded(member.parameter) != is_sharded(gradient):
        raise TypeError("a sharded parameter needs a sharded gradient")
    if is_sharded(gradient) and gradient.placements != member.parameter.placements:  # type: ignore[attr-defined]
        raise TypeError(f"the gradient is placed as {gradient.placements}, its parameter not")  # type: ignore[attr-defined]


def options_of(
    update: str,
    state: Any,
    state_scale: str | None,
    state_rounding: str | None,
    seed: int,
    nonfinite: str,
    maximize: bool,
) -> dict[str, Any]:
    """The arguments that all optimizers share, as they are kept in groups."""
    return {
        "update": update, "state": state, "state_scale": state_scale, "state_rounding": state_rounding, "seed": seed,
        "nonfinite": nonfinite, "maximize": maximize,
    }  # fmt: skip


def at_least(name: str, value: float, least: float = 0.0, below: float | None = None) -> None:
    """A clear error for a hyper-parameter out of range (or NaN)."""
    if not value >= least or (below is not None and not value < below):
        limit = f"at least {least:g}" + ("" if below is None else f" and below {below:g}")
        raise ValueError(f"{name} must be {limit}, not {value}")
