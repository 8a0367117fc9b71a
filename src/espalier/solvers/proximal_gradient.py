"""Algorithm 2 of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import RESOLUTION
from espalier.reading import Reading
from espalier.solvers.base import Solution, Solver, may_branch
from espalier.subproblem import Scalar, Subproblem, add_scaled, as_tensor

# rtol from which `_value_after` has digits enough, and rows or columns of matrices whose singular values cost little
_COARSE, _FEW = 1e-3, 64


@dataclass(frozen=True)
class Tolerance:
    """ε_t = scale · t^(−power), square-summable as the paper's condition (eps) asks."""

    scale: float
    power: float = 0.6

    def __post_init__(self) -> None:
        check_number("scale", self.scale, open_low=True)
        if not self.power > 0.5:
            raise ValueError(f"power must exceed 1/2 for Σ ε_t² to be finite, not {self.power!r}.")

    def at(self, t: Scalar) -> Scalar:
        """ε_t."""
        return self.scale * t**-self.power


@dataclass(frozen=True)
class ProximalGradient(Solver):
    """Z ← prox_{θτψ}(Z − θ (d + H (Z − a))) from the current weights.

    Attributes:
        max_iters: T₂.
        min_iters: iterations made before the first look at the stopping rule.
        rtol: stop when (Q(Z^{j−1}) − Q(Z^j)) / (|Q(Z^j)| + 1) < rtol; None for no such rule.
        tolerance: in place of rtol, stop when a subgradient of Q at Z^j has norm ≤ ε_t and Q(Z^j) ≤ Q(Z⁰), the paper's
            condition.
        step: "bound" takes θ = 1/max(H), for each group where ψ separates over groups, halved for nonconvex ψ;
            "backtracking" needs no bound: it starts at the mean curvature and halves θ until the step decreases Q
            enough.

    On a GPU the rules freeze Z when they hold and the loop runs on, unless the penalty waits for the device anyway.
    """

    max_iters: int = 100
    min_iters: int = 2
    rtol: float | None = 1e-8
    tolerance: Tolerance | None = None
    step: Literal["bound", "backtracking"] = "bound"

    groupwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_iters <= self.max_iters:
            raise ValueError(f"1 ≤ min_iters ≤ max_iters must hold, not {self.min_iters} and {self.max_iters}.")
        if self.rtol is not None and not self.rtol >= 0:
            raise ValueError(f"rtol must be a number ≥ 0 or None, not {self.rtol!r}.")
        if self.step not in ("bound", "backtracking"):
            raise ValueError(f'step must be "bound" or "backtracking", not {self.step!r}.')

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        return None

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        metric = as_tensor(problem.metric, start).expand(start.shape)
        if self.step == "bound":
            curvature = groups.max(metric) if penalty.separable else metric.amax()
        else:
            curvature = metric.mean()
        theta = curvature.reciprocal() if penalty.convex else 0.5 / curvature

        look = may_branch(start) or penalty.synchronises
        constant = problem.pull * (problem.direction * problem.anchor).sum()  # that problem.value leaves out
        z, first = start, problem.value(start, penalty, groups)
        before = first
        if penalty.separable:
            z = torch.where(penalty.screen(problem, groups), 0.0, start)
            before = problem.value(z, penalty, groups)
        done = torch.zeros((), dtype=torch.bool, device=start.device)
        iterations = torch.zeros((), dtype=torch.int64, device=start.device)
        for j in range(1, self.max_iters + 1):
            if self.step == "bound":
                new = penalty.prox(z - theta * problem.gradient(z), theta * problem.tau, groups)
            else:
                new, theta = self._backtrack(problem, penalty, groups, metric, z, theta, look)
            new = torch.where(done, z, new)
            iterations += ~done
            value = problem.value(new, penalty, groups)
            if j >= self.min_iters:
                if self.rtol is not None and self.tolerance is None:
                    done = done | ((before - value) / ((value + constant).abs() + problem.scale) < self.rtol)
                if self.tolerance is not None:
                    # prox gives (Z − Z⁺)/θ − ∇q(Z) ∈ τ ∂ψ(Z⁺), hence (1/θ − H)(Z − Z⁺) ∈ ∂Q(Z⁺)
                    subgradient = (1 / theta - metric) * (z - new)
                    small = subgradient.square().sum().sqrt() <= problem.scale * self.tolerance.at(problem.t)
                    done = done | (small & (value <= first))
            z, before = new, value
            if look and bool(done):
                break
        return Solution(z, int(iterations) if look else iterations)

    def batches(self, penalty: Penalty) -> bool:
        # where no rule asks for Q at the start or for many digits of it, which take its singular values
        ruled = self.tolerance is not None or (self.rtol is not None and (self.rtol < _COARSE or self.min_iters == 1))
        # a subclass may have another `prox`
        return type(penalty) is NuclearNorm and self.step == "bound" and not ruled

    def solving(self, problem: Subproblem, penalty: Penalty, start: Tensor, fused: bool = True) -> Reading[Solution]:
        assert isinstance(penalty, NuclearNorm)
        metric = as_tensor(problem.metric, start).expand(start.shape)
        theta, widest = (1 / f(metric, (1, 2), keepdim=True) for f in (torch.amax, torch.amin))
        z = start
        # as penalty.screen does: 0 where ‖b‖ ≤ κ, which the norm of a row or a column often rules out
        b, kappa = problem.linear, as_tensor(problem.tau * (penalty.lam * penalty.weight), start)
        sure = (1 + RESOLUTION) * kappa.reshape(-1, 1, 1)
        if not (yield (_longest(b) > sure).all()):
            screened = yield from penalty.proximal(widest * b, widest * problem.tau, fused)
            z = torch.where((screened == 0).all((1, 2), keepdim=True), 0.0, start)
        before, done = (torch.zeros(len(z), dtype=kind, device=z.device) for kind in (torch.float64, torch.bool))
        for j in range(1, self.max_iters + 1):
            x = z - theta * problem.gradient(z)
            new = yield from penalty.proximal(x, theta * problem.tau, fused, z)
            if self.rtol is not None:
                if j > self.min_iters:
                    new = torch.where(done.reshape(-1, 1, 1), z, new)
                if self.min_iters - 1 <= j < self.max_iters:
                    value = _value_after(problem, penalty, x, new, theta)
                    if j >= self.min_iters:
                        scale = value.abs() + as_tensor(problem.scale, z).flatten()
                        done = done | ((before - value) / scale < self.rtol)
                        if all((yield done)):
                            return Solution(new, j)
                    before = value
            z = new
        return Solution(z, self.max_iters)

    @staticmethod
    def _backtrack(
        problem: Subproblem,
        penalty: Penalty,
        groups: Partition,
        metric: Tensor,
        z: Tensor,
        theta: Tensor,
        look: bool,
    ) -> tuple[Tensor, Tensor]:
        """Halve θ until q(Z⁺) ≤ q(Z) + <∇q(Z), Z⁺ − Z> + ‖Z⁺ − Z‖²/2θ; twice less θ for nonconvex ψ."""
        slack = 1.0 if penalty.convex else 0.5
        gradient = problem.gradient(z)
        new = z
        # without looking, enough halvings for a metric whose maximum is 2³⁰ times its mean
        for _ in range(1000 if look else 30):
            new = penalty.prox(z - theta * gradient, theta * problem.tau, groups)
            step = new - z
            # q is quadratic, so the condition is <Δ, H Δ> ≤ ‖Δ‖²/θ
            short = (metric * step * step).sum() <= slack * step.square().sum() / theta
            if look and bool(short):
                break
            theta = torch.where(short, theta, theta / 2)
        return new, theta


def _value_after(problem: Subproblem, penalty: NuclearNorm, x: Tensor, z: Tensor, theta: Tensor) -> Tensor:
    """Q of each matrix at Z = prox(X), X a step of θ, mostly without singular values.

    (X − Z)/θ is in τ ∂ψ(Z), so that its product with Z is τ ψ(Z), ψ being a norm. Z's rounding makes that wrong by 1e-4
    of it (784 × 512, σ = 3e7 κ; 6e-4 at most at 256 × 128), and more in small matrices, which have few entries to even
    it out: on a CPU these have their singular values taken.
    """
    step = z - problem.anchor
    smooth = (problem.metric * step).mul_(step).mul_(0.5)
    value = add_scaled(smooth, problem.direction * z, problem.pull).sum((1, 2), dtype=torch.float64)
    if may_branch(z) and min(z.shape[1:]) <= _FEW:
        singular: Tensor = torch.linalg.svdvals(z.double().nan_to_num(0.0, 0.0, 0.0))  # LAPACK raises on others
        return value + as_tensor(problem.tau, z).flatten() * (penalty.lam * penalty.weight) * singular.sum(1)
    return value + (x - z).div_(theta).mul_(z).sum((1, 2), dtype=torch.float64)


def _longest(x: Tensor) -> Tensor:
    """The norm of the longest row or column of each matrix: a lower bound of the largest singular value."""
    rows, columns = (torch.linalg.vector_norm(x, dim=i, keepdim=True).amax((1, 2), keepdim=True) for i in (2, 1))
    return torch.maximum(rows, columns)
