"""ψ(x) = λ ‖x‖₁: single entries at zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.checks import check_number
from espalier.groupings import Element
from espalier.partition import Partition
from espalier.penalties.base import Radial, RadialPenalty, soft_threshold
from espalier.subproblem import Scalar, Subproblem


@dataclass(frozen=True)
class L1(RadialPenalty):
    """λ Σ |x_i|. On other than `"element"` groups it acts the same; structure is then counted by those groups."""

    lam: float

    default_grouping: ClassVar[str] = "element"

    def __post_init__(self) -> None:
        check_number("lam", self.lam)

    def value(self, x: Tensor, groups: Partition) -> Tensor:
        return self.lam * x.abs().sum()

    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        return soft_threshold(x, step * self.lam)

    def radial(self, problem: Subproblem, groups: Partition) -> Radial:
        return Radial(problem.linear, problem.tau * self.lam, Element().partition(groups.shape))
