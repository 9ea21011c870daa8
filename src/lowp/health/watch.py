"""Numeric health of a training run: what under- and overflows, what rounding costs, which updates are lost.

Every n-th optimizer step is *sampled*. From the end of the step before it,

1. every layer carries a forward hook, and compiled code runs eagerly (`torch.compiler.set_stance`), so that the hooks are seen
   and nothing is compiled twice;
2. before the optimizer moves, weights and gradients are measured, and the update that it intends is computed;
3. after it has moved, updates and states are measured; hooks and stance go back to what they were.

Figures are copied to the host without waiting for the device; they are read at the next sample, or when they are asked for.
Between samples a step costs one call of an empty hook.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowp import compat
from lowp.formats import AnyFormat, FormatLike
from lowp.formats import format as parse_format
from lowp.health.eagerness import Eagerness
from lowp.health.intent import Intent, intended_updates, look
from lowp.health.measures import local_part, measure_change, named_tensors, own_format
from lowp.health.measures import sample as sample_of
from lowp.health.samples import HealthLog, Sample, table

ROLES = ("weights", "activations", "gradients", "updates", "states")
SHOWN = ("errors", "sent")  # roles that a watch cannot find by itself: somebody has to show them (`Watch.observe`)

FormatChoice = FormatLike | Mapping[str, FormatLike] | None


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    format: FormatChoice = None,
    every: int = 100,
    path: str | PathLike[str] | None = None,
    *,
    roles: Iterable[str] = ROLES,
    sample: int = 1 << 16,
    keep: int = 16,
    step: int = 0,
) -> "Watch":
    """Measure the numbers of a training run from now on: its first optimizer step, and every `every`-th after it.

        with lowp.health.watch(model, optimizer, {"gradients": "e5m2"}, path="health.jsonl") as health:
            train()
            print(health.table())

    One record for each (step, layer, role). Roles are weights and gradients (as the optimizer finds them), activations (the
    outputs of layers, in all forward passes of the step that have gradients enabled), updates (as intended, before rounding)
    and states of the optimizer. Who rounds numbers elsewhere can show them before and after (`observe`): so `lowp train`
    watches errors, what a rank sends, and the simulated formats. A record holds, of the elements looked at (`sampled`):

    - `underflow`, `overflow`: fractions of the finite non-zero numbers that become zero, or too large, in `format`;
    - `sqnr_db`: 10 log10(sum x^2 / sum (x - q)^2) of those that do not overflow; None if nothing is rounded away;
    - `zeros` (fraction), `nonfinite` (count), `largest` and `smallest` magnitude above zero, `exponents` (count by
      floor(log2 |x|));
    - for updates: `lost_updates`, the share of the intended update d that did not arrive, 1 - a.d / d.d for a change a of the
      weight (with its compensation, if the optimizer keeps one); and `unchanged`, the fraction of elements that should have
      moved but kept their bits. With stochastic rounding the first is about 0 while the second may be large: its very point.

    Args:
        format: one for all roles, or by role. The default is each tensor's own dtype (for updates, the weight's).
        path: a file that JSON lines are added to. On several ranks give each its own, or only one of them any.
        sample: at most this many elements of each tensor, always the same ones.
        keep: how many samples `records` holds; the file gets all of them.
        step: optimizer steps that were done before: a resumed run goes on counting, and samples the steps that it would have.

    What cannot be measured is a record with a `reason` instead of figures. The compiler's stance is the process's: while
    activations are sampled, from this call to the end of the first step say, other compiled models run eagerly too.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes the model, an nn.Module, first; not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"watch takes a torch.optim.Optimizer second, not {type(optimizer).__name__}")
    for name, number in (("every", every), ("sample", sample), ("keep", keep)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} is a number of {'elements' if name == 'sample' else 'steps'} from 1 up, not {number!r}")
    roles = (roles,) if isinstance(roles, str) else tuple(roles)
    _check_roles(roles)
    log = HealthLog(None if path is None else Path(path), keep)
    return Watch(model, optimizer, _formats(format), frozenset(roles), every, sample, log, step)


def _check_roles(roles: Iterable[str]) -> None:
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; it is one of {', '.join(ROLES)}")


def _formats(choice: FormatChoice) -> dict[str, AnyFormat]:
    """The format of each role that does not follow its tensors' dtypes."""
    if choice is None:
        return {}
    if isinstance(choice, Mapping):
        _check_roles(choice)
        return {role: parse_format(chosen) for role, chosen in choice.items()}
    return dict.fromkeys(ROLES, parse_format(choice))


class LayerHook:
    """Shows a layer's output to the watch. Copies and pickles of a model that is being sampled get a hook that does nothing."""

    def __init__(self, name: str = "", see: Callable[[str, Any], None] | None = None) -> None:
        self._name, self._see = name, see

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._see is not None and not torch.compiler.is_compiling():
            self._see(self._name, output)

    def __reduce__(self) -> tuple[type["LayerHook"], tuple[()]]:
        return LayerHook, ()


class Watch:
    """A watch that is running: made by `watch`, ended by `close` or by leaving its `with`.

    A step that raises leaves the sample open, and those that follow belong to it until one is completed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        formats: dict[str, AnyFormat],
        roles: frozenset[str],
        every: int,
        sample: int,
        log: HealthLog,
        step: int = 0,
    ) -> None:
        self.step = step  # optimizer steps completed
        self._model, self._optimizer = compat.uncompiled(model), optimizer  # a compiled model's names are its own
        self._formats, self._roles, self._every, self._most = formats, roles, every, sample
        self._log = log
        self._eagerly = Eagerness()
        self._sample: Sample | None = None
        self._intents: dict[str, tuple[Tensor, Intent | str]] = {}
        self._layer_hooks: list[Any] = []
        # Compilers leave these hooks alone, for they count in Python and change the compiler's stance.
        before, after = torch.compiler.disable(self._before_step), torch.compiler.disable(self._after_step)
        self._step_hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        # A watch that is forgotten must not leave the process eager, nor keep its last figures to itself.
        self._at_end = weakref.finalize(self, _finish, log, self._eagerly)
        if step % every == 0:
            self._begin()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the newest samples, oldest first."""
        self.flush()
        return [copy.copy(record) for sample in self._log.samples for record in sample]

    def table(self, rows: int = 20) -> str:
        """The newest sample as text, the worst first."""
        self.flush()
        return table(self._log.samples[-1] if self._log.samples else [], rows)

    @property
    def sampling(self) -> bool:
        """Is a sample open? Outside of one, `observe` does nothing."""
        return self._sample is not None

    def observe(self, role: str, layer: str, numbers: Tensor, rounded: Tensor, label: str, limit: float | None = None) -> None:
        """See numbers before and after somebody has rounded them, to what `label` says ("e5m2/aps").

        What is finite and becomes infinite or NaN has overflowed, and so has what is beyond `limit`. Such numbers count instead
        of those that the watch finds by itself for the same layer and role.
        """
        if self._sample is None or role not in (*self._roles, *SHOWN):
            return
        with torch.no_grad(), self._sample.attempt(layer, role):
            self._sample.see_rounded(layer, role, label, numbers, rounded, limit)

    def flush(self) -> None:
        """Write the samples that are complete."""
        self._log.write()

    def close(self) -> None:
        """Write everything, the beginning of an unfinished sample included, and take all hooks away."""
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []
        self._end()
        self._at_end()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Open a sample: from here to the end of the next optimizer step."""
        self._sample = Sample(self.step + 1, self._most)
        if "activations" in self._roles:
            for name, module in self._model.named_modules():
                if next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None:
                    hook = LayerHook(name or type(module).__name__, self._see_output)
                    self._layer_hooks.append(module.register_forward_hook(hook))
            self._eagerly.enter()  # compiled layers would not call them

    def _end(self) -> None:
        """Close the sample. The figures of the sample before have reached the host by now; the copy of the new ones begins."""
        self._eagerly.leave()
        for hook in self._layer_hooks:
            hook.remove()
        self._layer_hooks, self._intents = [], {}
        if self._sample is not None and self._sample.started:
            self._log.write()
            self._sample.send()
            self._log.waiting.append(self._sample)
        self._sample = None

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self._sample is None:
            return
        closure = _has_arguments(args, kwargs)
        with torch.no_grad():
            self._see_parameters("weights", lambda parameter: parameter)
            if not closure:
                self._see_parameters("gradients", lambda parameter: parameter.grad)
            if "updates" in self._roles:
                self._intents = self._intended(closure, kwargs.get(_SCALE, 1.0))
        if not closure:
            self._eagerly.leave()  # now, so that an optimizer that raises leaves no trace

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self.step += 1
        if self._sample is not None:
            with torch.no_grad():
                if _has_arguments(args, kwargs):
                    self._see_parameters("gradients", lambda parameter: parameter.grad)
                self._see_updates()
                self._see_states()
            self._end()
        if self.step % self._every == 0:
            self._begin()

    def _see_output(self, layer: str, output: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation between two steps is not part of them
            with torch.no_grad():
                for _, tensor in named_tensors(output):
                    self._see("activations", layer, tensor)

    def _see_parameters(self, role: str, of: Callable[[Tensor], Tensor | None]) -> None:
        for name, parameter in self._named_parameters().items():
            if (tensor := of(parameter)) is not None:
                self._see(role, name, tensor)

    def _see_updates(self) -> None:
        assert self._sample is not None
        for name, (parameter, intent) in self._intents.items():
            fmt = self._update_format(parameter)
            if isinstance(intent, str):
                self._sample.fail(name, "updates", fmt, intent)
                continue
            with self._sample.attempt(name, "updates", fmt):
                weight, bits = look(self._optimizer, parameter, self._most, fmt)
                change = measure_change(intent.update, weight - intent.weight, bits == intent.bits)
                self._sample.see(name, "updates", fmt, intent.update, local_part(parameter).numel(), change)

    def _update_format(self, parameter: Tensor) -> AnyFormat | None:
        return self._formats["updates"] if "updates" in self._formats else own_format(parameter.dtype.to_real())

    def _see_states(self) -> None:
        assert self._sample is not None
        decoded = getattr(self._optimizer, "decoded_state", None)
        for name, parameter in self._named_parameters().items():
            if "states" not in self._roles or parameter not in self._optimizer.state:
                continue
            with self._sample.attempt(name, "states"):
                state = self._optimizer.state[parameter] if decoded is None else decoded(parameter)
                for key, tensor in named_tensors(state):
                    if tensor.dim() > 0 or (parameter.dim() == 0 and key != "step"):
                        self._see("states", f"{name}.{key}", tensor)

    def _see(self, role: str, layer: str, tensor: Tensor) -> None:
        if self._sample is None or role not in self._roles or (layer, role) in self._sample.rounded:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            with self._sample.attempt(layer, role):
                fmt = self._formats[role] if role in self._formats else own_format(tensor.dtype.to_real())
                self._sample.see(layer, role, fmt, tensor)

    def _intended(self, closure: bool, gradient_scale: Any) -> dict[str, tuple[Tensor, Intent | str]]:
        """What the optimizer is about to do to each of its parameters that has a gradient, or why that is not known."""
        optimizer = self._optimizer
        moving = [p for group in optimizer.param_groups for p in group["params"] if closure or p.grad is not None]
        known: dict[Tensor, Intent | str] = {}
        try:
            if closure:
                raise ValueError("step() was given a closure or other arguments, so it could not be tried before")
            for parameter, update in intended_updates(optimizer, moving, gradient_scale):
                fmt = self._update_format(parameter)
                known[parameter] = Intent(sample_of(update, self._most, fmt), *look(optimizer, parameter, self._most, fmt))
        except Exception as error:  # whatever somebody's optimizer raises; the user's training goes on
            reason = f"the update that {type(optimizer).__name__} intends is not known: {type(error).__name__}: {error}"
            known |= dict.fromkeys([parameter for parameter in moving if parameter not in known], reason)
        return {
            name: (parameter, known[parameter]) for name, parameter in self._named_parameters().items() if parameter in known
        }

    def _named_parameters(self) -> dict[str, Tensor]:
        """The model's parameters, tied ones once, and the optimizer's that the model does not have."""
        named: dict[str, Tensor] = dict(self._model.named_parameters())
        model_has = set(named.values())
        for group_number, group in enumerate(self._optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter not in model_has:
                    named[f"param_groups.{group_number}.{number}"] = parameter
        return named


_SCALE = "gradient_scale"  # the argument of our optimizers' step: what gradients were multiplied by


def _has_arguments(args: tuple, kwargs: dict) -> bool:
    """Was step() given a closure, inside which the gradients are made, or anything else? (args begin with the optimizer.)"""
    return any(value is not None for value in (*args[1:], *(value for name, value in kwargs.items() if name != _SCALE)))


def _finish(log: HealthLog, eagerly: Eagerness) -> None:
    eagerly.leave()
    log.write()
