"""Douglas and Rachford's splitting with Anderson mixing, for the nuclear norm under a diagonal metric."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import thresholding
from espalier.reading import Reading, finish
from espalier.solvers.anderson import Anderson
from espalier.solvers.base import Solution, Solver
from espalier.solvers.proximal_gradient import Tolerance
from espalier.subproblem import Subproblem, as_tensor

# The share of Z − X that a step without mixing adds to V; below 2 it converges.
_RELAXATION = 1.3
# A power mean of this exponent is the geometric mean, but for a rounding of 1e-5.
_LEAST_POWER = 0.01
# Units of rounding of its terms that the residual is not asked to fall below.
_ROUNDING = 8.0


@dataclass(frozen=True)
class DouglasRachford(Solver):
    """With ρ a mean of H, V from the start's gradient, and q the smooth part of Q,

        X = prox_{q/ρ}(V) = (b + ρ V) / (H + ρ),   Z = prox_{τψ/ρ}(2 X − V),   V ← V + 1.3 (Z − X),

    where the new V is replaced by Σ c_i V_i over the last few, with the c, of sum 1, for which Σ c_i (Z_i − X_i) is
    shortest (Anderson mixing).

    H enters entry by entry, not through its maximum: the decades it spreads over cost far less than they cost proximal
    gradient. ρ is the power mean of exponent κ √min(m, n) / ‖b‖, 1 at most: the arithmetic mean where low rank averages
    H over rows and columns, the geometric where the penalty is weak and the entries stand alone. Either of these alone
    takes up to twice the iterations.

    Z is a proximal point, hence of exactly low rank. It is returned once it meets the paper's condition, for each
    matrix:

        s = (H − ρ) (Z − X) ∈ ∂Q(Z),   ‖s‖ ≤ ε_t τ λ weight √min(m, n),   Q(Z) ≤ Q(start).

    So ε_t is relative to the largest norm in τ ∂ψ. The bound is square-summable in units of Q/τ, in which Algorithm 1
    calls its solver (the proofs for RAMDA need ‖s‖/α_t → 0) and ProxGen states its problem. What rounding adds to s is
    not asked for: 8 units of it, of the norm of 2 X − V and the mean square of H + ρ. The default, 0.01 t^(−0.6), is as
    precise as proximal gradient is when it stops at rtol = 1e-8.

    Attributes:
        tolerance: ε_t.
        max_iters: at most; the last one then starts from the best V.
        memory: how many V are mixed.
    """

    tolerance: Tolerance = field(default_factory=lambda: Tolerance(1e-2))
    max_iters: int = 200
    memory: int = 5

    batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.max_iters >= 1:
            raise ValueError(f"max_iters must be at least 1, not {self.max_iters!r}.")
        if not self.memory >= 1:
            raise ValueError(f"memory must be at least 1, not {self.memory!r}.")

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        return None if isinstance(penalty, NuclearNorm) else "the nuclear norm"

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        return finish(self.solving(problem, penalty, start))

    def solving(self, problem: Subproblem, penalty: Penalty, start: Tensor) -> Reading[Solution]:
        """The solution, by a work that others may go on beside."""
        assert isinstance(penalty, NuclearNorm)
        kappa = as_tensor(problem.tau * (penalty.lam * penalty.weight), start).expand(len(start), 1, 1)
        penalised: list[bool] = yield (kappa != 0).flatten()
        # κ = 0 is an ordinary case, and a − d/H to the bit
        point = torch.empty_like(start) if all(penalised) else problem.unpenalised()
        batch = (yield from self._begin(problem, kappa, start)).only(penalised)
        iterations = 0
        while len(batch.v) and iterations < self.max_iters:
            slot = iterations % self.memory
            iterations += 1
            last = iterations == self.max_iters
            if last:
                batch.v = batch.best
            solved_now = yield from batch.step(slot)
            done = [ended or last for ended in solved_now]
            if any(done):
                solved = batch.only(done)
                point[solved.index] = solved.z
                batch = batch.only([not d for d in done])
            if len(batch.v):
                batch.mix(slot)
        return Solution(point, iterations)

    def _begin(self, problem: Subproblem, kappa: Tensor, start: Tensor) -> Reading[_Batch]:
        metric = as_tensor(problem.metric, start).expand(start.shape)
        size = min(start.shape[1:]) ** 0.5
        p = (kappa * size / vector_norm(problem.linear, dim=(1, 2), keepdim=True)).clamp(_LEAST_POWER, 1)
        rho = metric.pow(p).mean((1, 2), keepdim=True).pow(1 / p)
        metric, linear = metric / rho, problem.linear / rho
        v = torch.addcmul(start - linear, metric, start)  # at which X is the start
        tolerance = as_tensor(self.tolerance.at(problem.t), start) * kappa / rho * size
        # the rounding of Z spreads over its entries, and s is |H/ρ − 1| times that
        rounding = torch.finfo(start.dtype).eps * (1 + metric).square_().mean((1, 2)).sqrt_()
        rounding *= vector_norm(2 * start - v, dim=(1, 2))
        limits = yield torch.stack((tolerance.flatten(), _ROUNDING * rounding), 1)
        inverse = 1 / (1 + metric)
        count, memory = len(start), self.memory
        return _Batch(
            index=torch.arange(count, device=start.device),
            start=start,
            v=v,
            z=start,
            factor=2 * inverse - 1,
            constant=2 * linear * inverse,
            stiffness=metric - 1,
            kappa=kappa / rho,
            best=v,
            points=start.new_zeros(count, memory, *start.shape[1:]),
            moves=start.new_zeros(count, memory, *start.shape[1:]),
            limits=limits,
            mixing=[Anderson() for _ in range(count)],
            numbers=[[] for _ in range(count)],
        )


@dataclass
class _Batch:
    """Matrices of one shape under way, the problem of each divided by its ρ: H is H/ρ here, b is b/ρ and κ is κ/ρ.

    The lists are what the host knows of each matrix.
    """

    index: Tensor  # of each matrix in the whole batch
    start: Tensor
    v: Tensor
    z: Tensor
    factor: Tensor  # 2/(H + 1) − 1
    constant: Tensor  # 2 b/(H + 1)
    stiffness: Tensor  # H − 1
    kappa: Tensor
    best: Tensor  # V after the step of least ‖s‖
    points: Tensor  # the last V, each after its step, in a ring
    moves: Tensor  # their Z − X
    limits: list[list[float]]  # of ‖s‖: what is asked for, and what rounding leaves
    mixing: list[Anderson]
    numbers: list[list[float]]  # ‖s‖ and the products of the last move with those in the ring

    def only(self, which: list[bool]) -> _Batch:
        """Some of the matrices."""
        if all(which):
            return self
        here = [i for i, chosen in enumerate(which) if chosen]
        there = torch.tensor(here, dtype=torch.long, device=self.v.device)
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in parts.items():
            parts[name] = value[there] if isinstance(value, Tensor) else [value[i] for i in here]
        return _Batch(**parts)

    def step(self, slot: int) -> Reading[list[bool]]:
        """The next Z. Returns which matrices it solves."""
        y = torch.addcmul(self.constant, self.factor, self.v)  # 2 X − V
        self.z = yield from thresholding(y, self.kappa)
        move = torch.sub(self.z, y.add_(self.v), alpha=0.5)  # Z − X
        subgradient = self.stiffness * move  # s = (H − 1) (Z − X)
        torch.add(self.v, move, alpha=_RELAXATION, out=self.points[:, slot])
        self.moves[:, slot] = move
        products = self.moves.flatten(2) @ move.flatten(1).unsqueeze(-1)
        residual = vector_norm(subgradient, dim=(1, 2), keepdim=True)
        self.numbers = yield torch.cat((residual, products), 1).squeeze(-1)
        residuals = [row[0] for row in self.numbers]
        # NaN ends it, too
        done = [not r > max(limits) for r, limits in zip(residuals, self.limits, strict=True)]
        if any(done):
            descend = yield self._descends(subgradient)
            ends = zip(done, residuals, self.limits, descend, strict=True)
            done = [small and (descends or not r > floor) for small, r, (_, floor), descends in ends]
        return done

    def _descends(self, subgradient: Tensor) -> Tensor:
        """Q(Z) ≤ Q(start), as follows for s ∈ ∂Q(Z) from Q(start) − Q(Z) ≥ <s, Δ> + ½ <Δ, H Δ>, Δ = start − Z."""
        delta = self.start - self.z
        gap = torch.addcmul(subgradient + 0.5 * delta, self.stiffness, delta, value=0.5).mul_(delta).sum((1, 2))
        return gap >= 0

    def mix(self, slot: int) -> None:
        """V ← Σ c_i V_i, or back to the best V."""
        judged = [m.add(slot, row[0], row[1:]) for m, row in zip(self.mixing, self.numbers, strict=True)]
        self.best = _choose([better for better, _ in judged], self.points[:, slot], self.best)
        memory = self.points.shape[1]
        weights = torch.tensor([[m.weights(slot, memory)] for m in self.mixing], dtype=self.v.dtype)
        mixed = weights.to(self.v.device) @ self.points.flatten(2)
        self.v = _choose([stray for _, stray in judged], self.best, mixed.reshape(self.v.shape))


def _choose(which: list[bool], a: Tensor, b: Tensor) -> Tensor:
    """A copy of a for the matrices chosen, b for the others."""
    if not any(which):
        return b
    return a.clone() if all(which) else torch.where(torch.tensor(which, device=a.device).reshape(-1, 1, 1), a, b)
