"""An optimizer's state, for the parameters that are left."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from espalier.compact.rewrite import Kept, get
from espalier.groupings import partition_of
from espalier.penalties.base import group_weight

Group: TypeAlias = dict[str, Any]


def carried_over(optimizer: Optimizer, model: nn.Module, kept: Kept, dense: dict[str, nn.Parameter]) -> Optimizer:
    """An optimizer like this one for the smaller model."""
    names: dict[int, str] = {}
    for name, p in dense.items():
        names.setdefault(id(p), name)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise ValueError(f"the optimizer has parameters that are not the dense model's, of shapes {shapes}.")
    groups: list[Group] = []
    pairs: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        made: dict[Any, Group] = {}
        for p in group["params"]:
            name = names[id(p)]
            if name in kept.gone:
                continue
            small = get(model, kept.renamed.get(name, name))
            pairs.append((p, small, kept.index.get(name, {})))
            own = options | _penalty_of_dense(group, p, small)
            into = made.setdefault(own.get("penalty"), {**own, "params": []})
            into["params"].append(small)
        groups += made.values()
    known = {id(p) for _, p, _ in pairs}
    given = {id(p) for p in dense.values() for g in optimizer.param_groups for q in g["params"] if p is q}
    fresh = [p for n, p in model.named_parameters() if id(p) not in known and n not in dense]
    if fresh and given:
        first = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
        groups.append({**first, **({"penalty": None, "grouping": None} if "penalty" in first else {}), "params": fresh})
    accepted = inspect.signature(type(optimizer)).parameters
    new: Optimizer = type(optimizer)(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})
    for old, now, index in pairs:
        if state := optimizer.state.get(old):
            new.state[now] = {k: _sliced(v, old, index) for k, v in state.items() if k != "radius"}
    return new


def _penalty_of_dense(group: Group, p: Tensor, small: Tensor) -> Group:
    """The penalty with the weight that the dense layer's groups had: √(group size) would change with the size."""
    penalty = group.get("penalty")
    if penalty is None or getattr(penalty, "weight", 0.0) is not None or p.shape == small.shape:
        return {}
    before, after = (partition_of(group["grouping"], x.shape) for x in (p, small))
    weight = group_weight(None, before)
    return {} if group_weight(None, after) == weight else {"penalty": dataclasses.replace(penalty, weight=weight)}


def _sliced(value: Any, p: Tensor, index: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != p.shape:
        return value.clone()
    for dim, kept in index.items():
        value = value.index_select(dim, kept.to(value.device))
    return value.clone(memory_format=torch.preserve_format)
