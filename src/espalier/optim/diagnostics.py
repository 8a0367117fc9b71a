"""What the subproblem solves of a step did."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.solvers.base import Solution
from espalier.subproblem import Subproblem, as_tensor
from espalier.tables import table


def residual(problem: Subproblem, penalty: Penalty, groups: Partition, z: Tensor) -> Tensor:
    """The norm of an element of ∂Q beside z, zero exactly where z is stationary.

    One proximal step z⁺ from z gives (z − z⁺)/θ − ∇q(z) ∈ τ ∂ψ(z⁺). At a solution z⁺ = z; elsewhere the norm of
    (z − z⁺)/θ bounds the least subgradient norm of convex Q at z from below.
    """
    metric = as_tensor(problem.metric, z).expand(z.shape)
    curvature = groups.max(metric) if penalty.separable else metric.amax()
    theta = 1 / curvature if penalty.convex else 0.5 / curvature
    after = penalty.prox(z - theta * problem.gradient(z), theta * problem.tau, groups)
    return ((z - after) / theta).square().sum().sqrt() / problem.scale


@dataclass(frozen=True)
class Solve:
    """One subproblem's report."""

    name: str
    iterations: int
    residual: float
    decrease: float
    active: int
    groups: int


@dataclass
class Diagnostics:
    """The latest solve of each parameter seen; what was measured stays on its device until it is asked for."""

    _seen: dict[str, tuple[int | Tensor, Tensor, Tensor, Tensor, int]] = field(default_factory=dict)

    def record(
        self,
        name: str,
        problem: Subproblem,
        penalty: Penalty,
        groups: Partition,
        start: Tensor,
        solution: Solution,
    ) -> None:
        """Measure a solve that has just been made."""
        z = solution.point
        decrease = (problem.value(start, penalty, groups) - problem.value(z, penalty, groups)) / problem.scale
        left = residual(problem, penalty, groups, z)
        self._seen[name] = (solution.iterations, left, decrease, groups.zero(z).sum(), groups.count)

    @property
    def solves(self) -> list[Solve]:
        """One report a parameter."""
        return [
            Solve(name, int(iterations), float(left), float(decrease), count - int(zero), count)
            for name, (iterations, left, decrease, zero, count) in self._seen.items()
        ]

    def __str__(self) -> str:
        rows = [
            (s.name, s.iterations, f"{s.residual:.2e}", f"{s.decrease:.2e}", f"{s.active} / {s.groups}")
            for s in self.solves
        ]
        return table(("parameter", "iterations", "residual", "decrease of Q", "active groups"), rows)
