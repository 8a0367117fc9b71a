"""The minimax concave penalty on group norms: like group lasso near zero, and no shrinkage of large groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.partition import Partition
from espalier.penalties.base import Radial, RadialPenalty, group_weight
from espalier.subproblem import Scalar, Subproblem, as_tensor


@dataclass(frozen=True)
class GroupMCP(RadialPenalty):
    """Σ_g p(‖x_g‖) with p(r) = μ r − r² / 2γ for r ≤ γ μ and γ μ² / 2 beyond, μ = λ weight.

    Nonconvex. `gamma` sets where the penalty ends: groups with a norm above γ μ are not shrunk at all.
    `weight` is √(group size) unless given.
    """

    lam: float
    gamma: float = 3.0
    weight: float | None = None

    convex: ClassVar[bool] = False
    default_grouping: ClassVar[str] = "input"

    def __post_init__(self) -> None:
        check_number("lam", self.lam)
        check_number("gamma", self.gamma, open_low=True)
        if self.weight is not None:
            check_number("weight", self.weight)

    def _slope(self, groups: Partition) -> float:
        """μ, the slope at zero."""
        return self.lam * group_weight(self.weight, groups)

    def value(self, x: Tensor, groups: Partition) -> Tensor:
        mu = self._slope(groups)
        r = groups.norm(x).clamp(max=self.gamma * mu)
        return (mu * r - r.square() / (2 * self.gamma)).sum()

    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        mu = self._slope(groups)
        norm = groups.norm(x)
        step = as_tensor(step, x)
        # step < γ: 0 up to step μ, then (‖x‖ − step μ) / (1 − step/γ), and ‖x‖ itself from γ μ on
        firm = (norm - step * mu) / norm / (1 - step / self.gamma)
        firm = torch.where(norm <= step * mu, 0.0, torch.where(norm >= self.gamma * mu, 1.0, firm))
        # step ≥ γ: the objective is concave up to γ μ, so the solution is 0 or x, whichever is better
        hard = torch.where(norm <= mu * (step * self.gamma).sqrt(), 0.0, 1.0).to(x.dtype)
        return x * groups.stretch(torch.where(step < self.gamma, firm, hard))

    def radial(self, problem: Subproblem, groups: Partition) -> Radial:
        mu = self._slope(groups)
        return Radial(problem.linear, problem.tau * mu, groups, flat=self.gamma * mu if mu else None)
