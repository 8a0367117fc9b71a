"""What RAMDA and RMDA share: sums weighted by s_t = η √t from an anchor W⁰, and averaging with c."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.optim.base import Clock, Group, StructuredOptimizer
from espalier.subproblem import Scalar, as_tensor


class DualAveraging(StructuredOptimizer):
    """Abstract: a dual averaging method, with `ramp` to let c grow to 1 in the last stage."""

    anchored: ClassVar[bool] = True
    clock: ClassVar[tuple[str, ...]] = ("step", "alpha")

    def _check_group(self, group: Group) -> None:
        check_number("momentum", group["momentum"], low=0, high=1)
        super()._check_group(group)

    def _tick(self, clock: Clock, group: Group) -> Clock:
        t = clock["step"] + 1
        s = group["lr"] * t**0.5  # s_t = η √t
        return {"step": t, "alpha": clock["alpha"] + s, "s": s}  # α_t = α_{t−1} + s_t

    def _averaging(self, clock: Clock, group: Group) -> Scalar:
        c, ramp = 1 - group["momentum"], group["ramp"]
        if isinstance(ramp, Tensor):
            return torch.where(ramp != 0, as_tensor(ramped(c, clock["step"]), ramp), c)
        return ramped(c, clock["step"]) if ramp else float(c)


def ramped(c: float, i: Scalar) -> Scalar:
    """c_t = min(c √i, 1) in the last stage."""
    # 1 − 0.9 falls 3e-17 short of 0.1; without the slack step (1/c)² would leave 1e-16 w in place of a zero
    grown = c * i**0.5 * (1 + 1e-9)
    return torch.clamp(grown, max=1.0) if isinstance(grown, Tensor) else min(grown, 1.0)


def ramp_length(c: float) -> int:
    """Steps until c √i reaches 1: (1/c)²."""
    return math.ceil((1 / (c * (1 + 1e-9))) ** 2)
