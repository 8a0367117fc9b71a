"""An optimizer's state, for the parameters that are left."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
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
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        made: dict[Any, Group] = {}

        def put(p: Tensor, own: Group, made: dict[Any, Group] = made) -> None:
            made.setdefault(own.get("penalty"), {**own, "params": []})["params"].append(
                (named.get(id(p), "?"), p) if named else p
            )

        for p in group["params"]:
            own = names.get(id(p))
            # what is not the model's stays as it is
            small = p if own is None else get(model, kept.renamed.get(own, own)) if own not in kept.gone else None
            if small is not None:
                pairs.append((p, small, kept.index.get(own or "", {})))
                put(small, options | _penalty_of_dense(group, p, small))
            for q in fresh.pop(own.rpartition(".")[0], []) if own else ():
                put(q, options | ({"penalty": None, "grouping": None} if "penalty" in options else {}))
        groups += made.values()
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


def _penalty_of_dense(group: Group, p: Tensor, small: Tensor) -> Group:
    """The penalty with the weight that the dense layer's groups had: √(group size) would change with the size."""
    penalty = group.get("penalty")
    if penalty is None or getattr(penalty, "weight", 0.0) is not None or p.shape == small.shape:
        return {}
    before, after = (partition_of(group["grouping"], x.shape) for x in (p, small))
    weight = group_weight(None, before)
    return {} if group_weight(None, after) == weight else {"penalty": dataclasses.replace(penalty, weight=weight)}


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
