"""Between an optimizer and its checkpoint: types, devices, and the points that only some checkpoints have."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from espalier.optim.checkpoint import OBJECTS, POINTS, Group, check_fits

if TYPE_CHECKING:
    from espalier.optim.base import StructuredOptimizer

State: TypeAlias = dict[Tensor, dict[str, Tensor]]
# by their names in a checkpoint
Points: TypeAlias = dict[str, dict[Tensor, Tensor]]

# What a captured graph must find on the device, for it changes from stage to stage.
DEVICE_OPTIONS = {"lr", "eps", "ramp", "steps", "floor"}
# How this machine steps: not for a checkpoint to say.
_OWN = ("skip_nonfinite", "fused", "capturable", "method", "evaluating", "params", "param_names")


def own_state(optimizer: StructuredOptimizer, group: Group, p: Tensor, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `source` in the types and on the devices that the parameter's state has."""
    dtype = torch.promote_types(p.dtype, torch.float32)  # float32 for parameters in half precision
    home = clock_device(optimizer, p)
    state = {k: torch.as_tensor(source[k]).to(home, torch.float64, copy=True) for k in optimizer.clock}
    state |= {k: torch.empty_like(p, dtype=dtype).copy_(source[k]) for k in optimizer._buffers(group)}
    if dtype != p.dtype:
        state["master"] = torch.empty_like(p, dtype=dtype).copy_(source.get("master", p))
    # where iterations begin: each group's norm in the kernels, the last z in a solver that resumes
    if "radius" in source:
        state["radius"] = source["radius"].to(p.device, torch.float32, copy=True)
    if "point" in source:
        state["point"] = torch.empty_like(p, dtype=dtype).copy_(source["point"])
    return state


def clock_device(optimizer: StructuredOptimizer, p: Tensor) -> torch.device:
    """Where a parameter's clock is."""
    # with no host synchronisation allowed, only the parameter's device may know whether a step counted
    on_device = optimizer.defaults["skip_nonfinite"] or optimizer.defaults["capturable"]
    return p.device if on_device else torch.device("cpu")


def restored(optimizer: StructuredOptimizer, state_dict: dict[str, Any]) -> tuple[list[Group], State, Points]:
    """A checkpoint's groups, state and points for this optimizer. One that does not fit raises."""
    saved_groups: list[Group] = deepcopy(state_dict["param_groups"])
    check_fits(optimizer, saved_groups, state_dict["state"])
    groups: list[Group] = []
    state: State = defaultdict(dict)
    points: Points = {k: {} for k in POINTS}
    for saved, here in zip(saved_groups, optimizer.param_groups, strict=True):
        for k in DEVICE_OPTIONS & saved.keys():
            if here["capturable"] and isinstance(here[k], Tensor):
                saved[k] = here[k].fill_(float(saved[k]))  # in place, for a captured graph reads it
            elif isinstance(saved[k], Tensor) and not isinstance(here[k], Tensor):
                saved[k] = saved[k].item()
        groups.append({**here, **saved, **{k: here[k] for k in (*OBJECTS, *_OWN) if k in here}})
        for key, p in zip(saved["params"], here["params"], strict=True):
            if key in state_dict["state"]:
                state[p] = own_state(optimizer, groups[-1], p, state_dict["state"][key])
                for k in points.keys() & state_dict["state"][key].keys():
                    points[k][p] = torch.empty_like(p).copy_(state_dict["state"][key][k])
                old = optimizer.state.get(p, {})
                if here["capturable"] and old.keys() == state[p].keys():
                    for k, v in state[p].items():  # in place, likewise
                        old[k].copy_(v)
                    state[p] = old
    return groups, state, points


def add_points(optimizer: StructuredOptimizer, saved: dict[str, Any]) -> None:
    """Into a checkpoint: the z that a restart left, and the weights if eval() took them away."""
    weights = {p: w for p, w, _ in optimizer._away or ()} if optimizer._evaluating else {}
    number = {p: i for i, (_, p, _) in enumerate(optimizer._parameters())}
    for k, points in zip(POINTS, (optimizer._last_points(), weights), strict=True):
        for p, x in points.items():
            saved["state"][number[p]] = {**saved["state"][number[p]], k: x}


def take_points(optimizer: StructuredOptimizer, points: Points) -> None:
    """From a checkpoint. It was made after eval() if it has weights; then the model's checkpoint holds z."""
    optimizer._last = points["last"]
    optimizer._evaluating = bool(points["weight"])
    optimizer._away = [(p, w, None) for p, w in points["weight"].items()] if optimizer._evaluating else None
