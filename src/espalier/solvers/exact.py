"""The exact solution by a safeguarded Newton iteration on each group's norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.groupings import Partition
from espalier.penalties.base import Penalty, RadialPenalty
from espalier.solvers.base import Solution, Solver
from espalier.solvers.radial import solve_radial
from espalier.subproblem import Subproblem


def _newton_on_f(s: Tensor, t: Tensor) -> Tensor:
    # r⁺ − r = (1 − S^(−1/2)) S^(3/2) / T, arranged so that no power of S above 1 can overflow
    return (s / t) * (s.sqrt() - 1)


@dataclass(frozen=True)
class Exact(Solver):
    """Newton on f(r) = S^(−1/2) = 1, from the current norm; to rounding in at most 11 iterations on metrics spread
    over ten decades. On a GPU all `max_iters` are taken, since looking at the progress would wait for the device."""

    max_iters: int = 16

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        if isinstance(penalty, RadialPenalty):
            return None
        return "a penalty that depends on a group through its norm (a RadialPenalty)"

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        assert isinstance(penalty, RadialPenalty)
        return solve_radial(problem, penalty, groups, start, _newton_on_f, self.max_iters)
