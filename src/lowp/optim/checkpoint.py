"""What a saved state must look like to be loaded. Everything is looked at before anything is changed."""

from typing import Any

import torch
from torch import Tensor

from lowp.optim.kernels import Layout
from lowp.optim.sharding import is_sharded
from lowp.optim.storing import ORDER, begin

_OWN = ("update", "state", "seed")


def check_groups(saved: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups, which must have the same parameters in the same order."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError("this is no optimizer's state_dict: it needs 'state' and 'param_groups'")
    found = saved["param_groups"]
    if len(found) != len(groups):
        raise ValueError(f"the saved state has {len(found)} parameter groups, the optimizer {len(groups)}")
    for place, (theirs, ours) in enumerate(zip(found, groups, strict=True)):
        missing = [name for name in _OWN if name not in theirs]
        if missing:
            raise ValueError(f"the saved state is another optimizer's: group {place} has no {', '.join(missing)}")
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"the parameters have changed: group {place} had {len(theirs['params'])} of them, now {len(ours['params'])}"
            )
        was, now = theirs.get("param_names"), ours.get("param_names")
        if was and now and was != now:
            gone = [name for name in was if name not in now] or was
            new = [name for name in now if name not in was] or now
            raise ValueError(f"the parameters of group {place} have changed: saved {gone[0]!r}, now {new[0]!r}")
    return found


def check_states(saved: dict[str, Any], wanted: list[list[tuple[str, Tensor, Layout]]]) -> list[tuple[Tensor, dict[str, Any]]]:
    """Each parameter's saved state, copied; a clear error for what is missing or of another shape or format."""
    found = []
    states = saved["state"]
    for theirs, members in zip(saved["param_groups"], wanted, strict=True):
        there = 0
        for key, (name, parameter, layout) in zip(theirs["params"], members, strict=True):
            if states.get(key):
                there += 1
                found.append((parameter, _checked(states[key], begin(parameter, layout), name)))
        if theirs.get("saved_states", there) != there:
            raise ValueError(
                f"the saved state is truncated: it had states of {theirs['saved_states']} parameters, {there} are left"
            )
    return found


def _checked(theirs: dict[str, Any], ours: dict[str, Any], name: str) -> dict[str, Any]:
    if ORDER in ours and theirs.get(ORDER, ours[ORDER]) != ours[ORDER]:
        raise ValueError(
            f"{name} lies in memory in another order than when its states were saved, and these have scales for blocks: "
            "load them into a model of that memory format (channels_last or not)"
        )
    missing = sorted(ours.keys() - theirs.keys() - {ORDER})  # which earlier versions did not save
    if missing:
        raise ValueError(f"the saved state of {name} is truncated: {', '.join(missing)} missing")
    unknown = sorted(theirs.keys() - ours.keys())
    if unknown:
        raise ValueError(f"the saved state of {name} was made with other settings: it also has {', '.join(unknown)}")
    found: dict[str, Any] = {}
    for key, example in ours.items():
        value = theirs.get(key, example)
        if not isinstance(example, Tensor):
            if not isinstance(value, (int, Tensor)) or int(value) < 0:
                raise ValueError(f"the saved {key} of {name} is {value!r}, not a count")
            found[key] = int(value)
            continue
        if not isinstance(value, Tensor) or value.shape != example.shape or value.dtype != example.dtype:
            what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the saved {key} of {name} is {what}, not {example.dtype} of shape {tuple(example.shape)}")
        if is_sharded(example) and not is_sharded(value):
            raise ValueError(f"the saved {key} of {name} is a whole tensor, and the parameter is sharded: load it with DCP")
        with torch.no_grad():
            found[key] = example.copy_(value)
    return found
