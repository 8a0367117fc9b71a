"""A parameter group's options on the device, uploaded when they change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from espalier.kernels import capturing, columns
from espalier.penalties import L1

# beside the group's penalty
_OPTIONS = ("lr", "eps", "ramp", "floor", "betas", "momentum", "weight_decay")
# of these, what may be a tensor on the device
_THERE = {"lr": columns.LR, "eps": columns.EPS, "ramp": columns.RAMP, "floor": columns.FLOOR}
Alignments: TypeAlias = tuple[tuple[torch.dtype, int], ...]


class Options:
    """What a step must know of its group, in one tensor, each number at its column."""

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self._group, self._device = group, device
        self.values = torch.zeros(columns.OPTIONS.value, dtype=torch.float64, device=device)
        self._views = [self.values[at.value :] for at in _THERE.values()]
        self._alignments = _alignments(self._views)
        self._uploaded: list[float] = []
        self._given: list[Any] = []

    def current(self) -> tuple[Sequence[Tensor], Alignments]:
        """lr, eps, ramp and floor on the device, where they may be tensors already; the other options go along."""
        group, penalty = self._group, self._group["penalty"]
        given = [penalty, *map(group.get, _OPTIONS)]
        plain = not any(isinstance(value, Tensor) for value in given)
        if plain and given == self._given:
            return self._views, self._alignments
        self._given = given if plain else []
        first, second = group.get("betas") or (group["momentum"], 0.0)
        mix = getattr(penalty, "mix", 1.0 if isinstance(penalty, L1) else 0.0)
        lam = 0.0 if penalty is None else penalty.lam
        there = {k: group.get(k, 0.0) for k in _THERE}
        values = [0.0] * columns.OPTIONS.value
        for at, value in (
            (columns.FIRST_MOMENT, first),
            (columns.SECOND_MOMENT, second),
            (columns.LOG2_FIRST, _log2(first)),
            (columns.LOG2_SECOND, _log2(second)),
            (columns.WEIGHT_DECAY, group.get("weight_decay", 0.0)),
            (columns.LAM_GROUP, lam * (1 - mix)),
            (columns.LAM_ENTRY, lam * mix),
            (columns.GAMMA, getattr(penalty, "gamma", 0.0)),
            *((at, there[k]) for k, at in _THERE.items()),
        ):
            values[at.value] = 0.0 if on_device(value) else float(value)
        if values != self._uploaded:
            if capturing():
                raise RuntimeError("take a step after a change of options and before capturing one.")
            self.values.copy_(pinned(torch.tensor(values, dtype=torch.float64), self._device), non_blocking=True)
            self._uploaded = values
        if plain:
            return self._views, self._alignments
        found = [
            x.to(self._device) if on_device(x) else view for x, view in zip(there.values(), self._views, strict=True)
        ]
        return found, _alignments(found)


def _alignments(options: Iterable[Tensor]) -> Alignments:
    """What a compiled kernel depends on in these arguments."""
    return tuple((x.dtype, x.data_ptr() % 16) for x in options)


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf


def pinned(x: Tensor, where: torch.device) -> Tensor:
    return x.pin_memory() if where.type == "cuda" else x


def upload(x: Tensor, where: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    return pinned(x, where).to(where, non_blocking=True)
