"""ψ(x) = λ Σ_g weight ‖x_g‖: whole groups at zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.partition import Partition
from espalier.penalties.base import Radial, RadialPenalty, group_weight
from espalier.subproblem import Scalar, Subproblem


@dataclass(frozen=True)
class GroupLasso(RadialPenalty):
    """λ Σ_g weight ‖x_g‖, the paper's penalty. `weight` is √(group size) unless given."""

    lam: float
    weight: float | None = None

    default_grouping: ClassVar[str] = "input"

    def __post_init__(self) -> None:
        check_number("lam", self.lam)
        if self.weight is not None:
            check_number("weight", self.weight)

    def value(self, x: Tensor, groups: Partition) -> Tensor:
        return self.lam * group_weight(self.weight, groups) * groups.norm(x).sum()

    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        kappa = step * self.lam * group_weight(self.weight, groups)
        norm = groups.norm(x)
        # x_g max(1 − κ / ‖x_g‖, 0)
        factor = torch.where(norm > kappa, (norm - kappa) / norm, 0.0)
        return x * groups.stretch(factor)

    def radial(self, problem: Subproblem, groups: Partition) -> Radial:
        kappa = problem.tau * self.lam * group_weight(self.weight, groups)
        return Radial(problem.linear, kappa, groups)
