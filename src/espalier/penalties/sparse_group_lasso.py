"""ψ(x) = λ ((1 − mix) Σ_g weight ‖x_g‖ + mix ‖x‖₁): groups at zero, and zeros within the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.checks import check_number
from espalier.partition import Partition
from espalier.penalties.base import Radial, RadialPenalty, soft_threshold
from espalier.penalties.group_lasso import GroupLasso
from espalier.penalties.l1 import L1
from espalier.subproblem import Scalar, Subproblem


@dataclass(frozen=True)
class SparseGroupLasso(RadialPenalty):
    """λ ((1 − mix) Σ_g weight ‖x_g‖ + mix ‖x‖₁). `weight` is √(group size) unless given."""

    lam: float
    mix: float = 0.5
    weight: float | None = None

    default_grouping: ClassVar[str] = "input"

    def __post_init__(self) -> None:
        check_number("lam", self.lam)
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix must lie in [0, 1], the share of the L1 norm, not {self.mix!r}.")
        if self.weight is not None:
            check_number("weight", self.weight)

    @property
    def _group(self) -> GroupLasso:
        return GroupLasso(self.lam * (1 - self.mix), self.weight)

    @property
    def _l1(self) -> L1:
        return L1(self.lam * self.mix)

    def value(self, x: Tensor, groups: Partition) -> Tensor:
        return self._group.value(x, groups) + self._l1.value(x, groups)

    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        # the proximal map of the sum is the composition: entries first, then groups
        return self._group.prox(self._l1.prox(x, step, groups), step, groups)

    def radial(self, problem: Subproblem, groups: Partition) -> Radial:
        # (h + κ/r) x = soft(b, τ λ mix): group lasso with a thresholded b
        b = soft_threshold(problem.linear, problem.tau * self._l1.lam)
        return Radial(b, self._group.radial(problem, groups).kappa, groups)
