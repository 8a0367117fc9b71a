"""An optimizer's state, for the parameters that are left."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from espalier.compact.layout import select
from espalier.compact.rewrite import Kept
from espalier.compact.trace import get
from espalier.groupings import partition_of
from espalier.penalties.base import group_weight

Group: TypeAlias = dict[str, Any]


def carried_over(optimizer: Optimizer, model: nn.Module, kept: Kept, dense: dict[str, nn.Parameter]) -> Optimizer:
    """An optimizer like this one for the smaller model."""
    names: dict[int, str] = {}
    for name, p in dense.items():
        names.setdefault(id(p), name)
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("none of the optimizer's parameters is the dense model's: it is of another model.")
    # names, for reports, where the optimizer has them
    named = {id(p): name for name, p in model.named_parameters()} if "param_names" in optimizer.param_groups[0] else {}
    groups: list[Group] = []
    pairs: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
    fresh = _fresh(model, kept, dense)
    parts = {id(m.weight): m.groups for m in model.modules() if isinstance(m, _ConvNd)}
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        made: list[Group] = []

        def put(p: Tensor, own: Group, made: list[Group] = made) -> None:
            same = (g for g in made if all(g.get(k) == own.get(k) for k in ("penalty", "grouping")))
            if (found := next(same, None)) is None:
                made.append(found := {**own, "params": []})
            found["params"].append((named.get(id(p), "?"), p) if named else p)

        for p in group["params"]:
            own = names.get(id(p))
            # what is not the model's stays as it is
            small = p if own is None else get(model, kept.renamed.get(own, own)) if own not in kept.gone else None
            if small is not None:
                pairs.append((p, small, kept.index.get(own or "", {})))
                put(small, options | _regularization(group, p, small, parts.get(id(small))))
            for q in fresh.pop(own.rpartition(".")[0], []) if own else ():
                put(q, options | ({"penalty": None, "grouping": None} if "penalty" in options else {}))
        groups += made
    accepted = inspect.signature(type(optimizer)).parameters
    new: Optimizer = type(optimizer)(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})
    for old, now, index in pairs:
        if state := optimizer.state.get(old):
            new.state[now] = {k: _sliced(k, v, old, index) for k, v in state.items() if k != "radius"}
    return new


def _fresh(model: nn.Module, kept: Kept, dense: dict[str, nn.Parameter]) -> dict[str, list[Tensor]]:
    """Parameters that the dense model has not, by the dense module that they came from: a bias that takes up constants,
    factors, attention with fewer heads. They train if that module did."""
    modules = {name.rpartition(".")[0] for name in dense}
    taken = {kept.renamed.get(name, name) for name in dense} - kept.gone
    found: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        if name not in taken:
            module = name.rpartition(".")[0]
            while module not in modules:
                module = module.rpartition(".")[0]
            found.setdefault(module, []).append(p)
    return found


def _regularization(group: Group, p: Tensor, small: Tensor, parts: int | None) -> Group:
    """The grouping for as many groups of channels as the smaller convolution has, and the penalty with the weight that
    the dense layer's groups had: √(group size) would change with the size."""
    penalty, grouping = group.get("penalty"), group.get("grouping")
    if penalty is None or grouping is None or p.shape == small.shape:
        return {}
    changed: Group = {}
    its = grouping
    if grouping.layout.parts > 1 and parts is not None:
        its = dataclasses.replace(grouping, layout=dataclasses.replace(grouping.layout, parts=parts))
        changed["grouping"] = its
    if getattr(penalty, "weight", 0.0) is None:
        weight = group_weight(None, partition_of(grouping, p.shape))
        if group_weight(None, partition_of(its, small.shape)) != weight:
            changed["penalty"] = copy.copy(penalty)
            object.__setattr__(changed["penalty"], "weight", weight)  # it may be a frozen dataclass, or none
    return changed


def _sliced(key: str, value: Any, p: Tensor, index: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != p.shape:
        if value.numel() > 1 and index:
            raise ValueError(f"the optimizer's {key!r}, of shape {tuple(value.shape)}, is not one number a weight: "
                             "it cannot be cut to what is left.")  # fmt: skip
        return value.clone()
    for dim, kept in index.items():
        value = select(value, dim, kept.to(value.device))
    return value.clone(memory_format=torch.preserve_format)
