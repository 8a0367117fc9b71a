"""Parameter groups checked: when they are added, and what was set on them since."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier import kernels
from espalier.checks import flattened, is_dtensor, on_host, refuse_dtensor, refuse_flat, rounded_up
from espalier.groupings import Element, as_grouping, partition_of
from espalier.optim.checkpoint import OBJECTS, Group, named
from espalier.penalties.base import Penalty

if TYPE_CHECKING:
    from espalier.optim.base import StructuredOptimizer

# What a user may set on a group between two steps. The first of these must fit each other and the parameters.
_WATCHED = (*OBJECTS, "fused", "lr", "momentum", "betas", "eps", "weight_decay", "total_steps")


class CheckedGroups:
    """What an optimizer's parameter groups were at their last check."""

    def __init__(self, optimizer: StructuredOptimizer, shapes: dict[Tensor, torch.Size]) -> None:
        self._optimizer = optimizer
        self.shapes = shapes  # of the parameters when they were given
        self._seen: dict[int, list[Any]] = {}

    def add(self, group: Group, index: int) -> None:
        """Raise if a new group is not what it should be."""
        optimizer = self._optimizer
        self.shapes |= {p: p.shape for p in group["params"]}
        optimizer._check_numbers(on_host({k: v for k, v in group.items() if k != "params"}))
        for whole in ("skip_nonfinite", "capturable"):
            if group[whole] != optimizer.defaults[whole]:
                raise ValueError(f"{whole} is for the whole step: give it to the optimizer, not to a group.")
        for p, name in named(group, index):
            if p.is_complex():
                raise ValueError(f"{name} is complex; Espalier's optimizers take real parameters.")
            if group["skip_nonfinite"]:
                refuse_dtensor(p, name, "skip_nonfinite")
        if group["capturable"] and len({p.device for p in group["params"]}) > 1:
            raise ValueError("capturable=True needs each parameter group on one device. Make one for each.")
        _refuse_grouping_alone(group)
        self._check_penalty(group, index)
        self._check_fused(group, index)

    def check_changes(self) -> None:
        """Raise for what was set on a group since the last step as the constructor would have."""
        for j, group in enumerate(self._optimizer.param_groups):
            now = [group.get(k) for k in _WATCHED]
            seen = self._seen.get(j)
            if seen is not None and all(map(is_, now, seen)):
                continue
            self._optimizer._check_numbers(rounded_up(group))
            if seen is None or not all(map(is_, now[: len(OBJECTS)], seen)):
                self._check_penalty(group, j)
                # a penalty may be taken away and leave its grouping; a grouping that comes alone is a mistake
                if seen is not None and seen[:2] == [None, None] and group["penalty"] is None:
                    _refuse_grouping_alone(group)
            if seen is not None and group["fused"] is not seen[len(OBJECTS)]:
                self._check_fused(group, j)
            self._seen[j] = [group.get(k) for k in _WATCHED]

    def check_parameter(self, group: Group, p: Tensor) -> None:
        """Raise if a penalised parameter was sharded or flattened since it was given."""
        if self.shapes.get(p) != p.shape or is_dtensor(p):
            name = next((name for q, name in named(group, 0) if q is p), "a parameter")
            refuse_dtensor(p, name, type(group["penalty"]).__name__)
            self._check_shape(group, p, name)
            self.shapes[p] = p.shape

    def _check_penalty(self, group: Group, index: int) -> None:
        penalty = group["penalty"]
        if penalty is None:
            return
        if not isinstance(penalty, Penalty):
            raise TypeError(f"penalty must be an espalier.Penalty such as espalier.GroupLasso(1e-4), not {penalty!r}.")
        if group["capturable"] and penalty.synchronises:
            raise ValueError(f"capturable=True cannot serve {type(penalty).__name__}, which waits for the device.")
        group["grouping"] = grouping = as_grouping(group["grouping"] or penalty.default_grouping)
        penalty.check(grouping)
        self._optimizer._solver(group)
        for p, name in named(group, index):
            refuse_dtensor(p, name, type(penalty).__name__)
            self._check_shape(group, p, name)
            try:
                partition_of(grouping, p.shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    def _check_shape(self, group: Group, p: Tensor, name: str) -> None:
        if isinstance(group["grouping"], Element):  # single entries are what they are in any shape
            return
        refuse_flat(p, name)
        before = self.shapes.get(p)
        if before is None and p.dim() > 1:  # put in the place of another, and as a whole
            return
        if before != p.shape:
            other = "that of any layer" if before is None else f"{tuple(before)} as when the optimizer was built"
            raise flattened(name, f"has shape {tuple(p.shape)}, not {other}")

    def _check_fused(self, group: Group, index: int) -> None:
        if group["fused"] not in (None, True, False):
            raise ValueError(f"fused must be None, True or False, not {group['fused']!r}.")
        if group["fused"]:
            for p, name in named(group, index):
                if missing := kernels.lacking(self._optimizer, group, p):
                    raise ValueError(f"fused=True cannot serve {name}: {missing}. Use fused=None to fuse where it can.")


def _refuse_grouping_alone(group: Group) -> None:
    if group["penalty"] is None and group["grouping"] is not None:
        raise ValueError("a parameter group has a grouping but no penalty. Give it penalty=... too.")
