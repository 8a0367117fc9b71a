"""Scalar metrics: one proximal map."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.reading import Reading
from espalier.solvers.base import Solution, Solver
from espalier.subproblem import Subproblem


@dataclass(frozen=True)
class ClosedForm(Solver):
    """z = prox_{(τ/H) ψ}(a − d/H), exact where H is a multiple of the identity."""

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        return None if scalar_metric else "a metric that is a multiple of the identity"

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        return Solution(penalty.prox(problem.unpenalised(), problem.tau / problem.metric, groups), 1)

    def batches(self, penalty: Penalty) -> bool:
        return type(penalty) is NuclearNorm  # a subclass may have another `prox`

    def solving(self, problem: Subproblem, penalty: Penalty, start: Tensor, fused: bool = True) -> Reading[Solution]:
        assert isinstance(penalty, NuclearNorm)
        point = yield from penalty.proximal(problem.unpenalised(), problem.tau / problem.metric, fused, start)
        return Solution(point, 1)
