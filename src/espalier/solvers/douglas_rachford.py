"""Douglas and Rachford's splitting with Anderson mixing, for the nuclear norm under a diagonal metric."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.linalg import vector_norm

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import threshold_singular_values
from espalier.solvers.base import Solution, Solver
from espalier.solvers.proximal_gradient import Tolerance
from espalier.subproblem import Subproblem, as_tensor

# The share of Z − X that a step without mixing adds to V; below 2 it converges.
_RELAXATION = 1.3
# A residual this many times the least so far is a failure of mixing.
_STRAY = 2.0
# Added to the squared lengths, 1, of the moves mixed: their products are no more precise in float32.
_RIDGE = 1e-7
# Units of rounding of its terms that the residual is not asked to fall below.
_ROUNDING = 8.0


@dataclass(frozen=True)
class DouglasRachford(Solver):
    """With ρ the geometric mean of H, V from the start's gradient, and q the smooth part of Q,

        X = prox_{q/ρ}(V) = (b + ρ V) / (H + ρ),   Z = prox_{τψ/ρ}(2 X − V),   V ← V + 1.3 (Z − X),

    where the new V is replaced by Σ c_i V_i over the last few, with the c, of sum 1, for which Σ c_i (Z_i − X_i) is
    shortest (Anderson mixing).

    H enters entry by entry, not through its maximum: the decades it spreads over cost far less than they cost proximal
    gradient. Z is a proximal point, hence of exactly low rank. It is returned once it meets the paper's condition, for
    each matrix:

        s = (H − ρ) (Z − X) ∈ ∂Q(Z),   ‖s‖ ≤ ε_t τ λ weight √min(m, n),   Q(Z) ≤ Q(start).

    So ε_t is relative to the largest norm that a subgradient of ψ has; in units of Q/τ, in which the paper's
    Algorithm 1 calls its solver and its proofs use ε_t, the bound is square-summable. What rounding adds to s is not
    asked for. The default, 0.01 t^(−0.6), is as precise as proximal gradient is when it stops at rtol = 1e-8.

    Attributes:
        tolerance: ε_t.
        max_iters: at most; the last Z is returned then.
        memory: how many V are mixed.
    """

    tolerance: Tolerance = field(default_factory=lambda: Tolerance(1e-2))
    max_iters: int = 200
    memory: int = 5

    def __post_init__(self) -> None:
        if not self.max_iters >= 1:
            raise ValueError(f"max_iters must be at least 1, not {self.max_iters!r}.")
        if not self.memory >= 1:
            raise ValueError(f"memory must be at least 1, not {self.memory!r}.")

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        return None if isinstance(penalty, NuclearNorm) else "the nuclear norm"

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        assert isinstance(penalty, NuclearNorm)
        kappa = as_tensor(problem.tau * (penalty.lam * penalty.weight), start).expand(len(start), 1, 1)
        free = (kappa == 0).flatten().cpu()
        # κ = 0 is an ordinary case, and a − d/H to the bit
        point = problem.unpenalised() if bool(free.any()) else torch.empty_like(start)
        batch = self._begin(problem, kappa, start).only(~free)
        iterations = 0
        while len(batch.v) and iterations < self.max_iters:
            slot = iterations % self.memory
            iterations += 1
            done = batch.step(slot)
            if iterations == self.max_iters:
                done = torch.ones_like(done)
            if bool(done.any()):
                solved = batch.only(done)
                point[solved.index] = solved.z
                batch = batch.only(~done)
            batch.mix(slot)
        return Solution(point, iterations)

    def _begin(self, problem: Subproblem, kappa: Tensor, start: Tensor) -> _Batch:
        metric = as_tensor(problem.metric, start).expand(start.shape)
        rho = metric.log().mean((1, 2), keepdim=True).exp()
        metric, linear = metric / rho, problem.linear / rho
        v = torch.addcmul(start - linear, metric, start)  # at which X is the start
        tolerance = as_tensor(self.tolerance.at(problem.t), start) * kappa / rho * min(start.shape[1:]) ** 0.5
        # the rounding of Z spreads over its entries, and s is |H/ρ − 1| times that
        rounding = torch.finfo(start.dtype).eps * (1 + metric).square_().mean((1, 2)).sqrt_()
        rounding *= vector_norm(2 * start - v, dim=(1, 2))
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
            limit=tolerance.flatten().cpu().double(),
            floor=_ROUNDING * rounding.cpu().double(),
            products=torch.zeros(count, memory, memory, dtype=torch.float64),
            usable=torch.zeros(count, memory, dtype=torch.bool),
            residual=torch.zeros(count, dtype=torch.float64),
            least=torch.full((count,), torch.inf, dtype=torch.float64),
            pause=torch.ones(count, dtype=torch.long),
            plain=torch.zeros(count, dtype=torch.long),
        )


@dataclass
class _Batch:
    """Matrices of one shape under way, the problem of each divided by its ρ: H is H/ρ here, b is b/ρ and κ is κ/ρ.

    From `limit` on, numbers that decide what comes next, on the host.
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
    limit: Tensor  # of ‖s‖
    floor: Tensor  # what rounding leaves of ‖s‖
    products: Tensor  # the moves' inner products
    usable: Tensor  # which of them may be mixed
    residual: Tensor  # ‖s‖
    least: Tensor  # the least so far
    pause: Tensor  # how many steps to make without mixing after the next failure
    plain: Tensor  # how many of those are still to be made

    def only(self, which: Tensor) -> _Batch:
        """Some of the matrices."""
        if bool(which.all()):
            return self
        here = which.nonzero().squeeze(1)
        there = here.to(self.v.device)
        parts: dict[str, Tensor] = {f.name: getattr(self, f.name) for f in fields(self)}
        return _Batch(**{k: v.index_select(0, here if v.device == here.device else there) for k, v in parts.items()})

    def step(self, slot: int) -> Tensor:
        """The next Z. Returns, on the host, which matrices it solves."""
        y = torch.addcmul(self.constant, self.factor, self.v)  # 2 X − V
        self.z = threshold_singular_values(y, self.kappa)
        move = torch.sub(self.z, y.add_(self.v), alpha=0.5)  # Z − X
        subgradient = self.stiffness * move  # s = (H − 1) (Z − X)
        torch.add(self.v, move, alpha=_RELAXATION, out=self.points[:, slot])
        self.moves[:, slot] = move
        products = self.moves.flatten(2) @ move.flatten(1).unsqueeze(-1)
        residual = vector_norm(subgradient, dim=(1, 2))
        numbers = torch.cat((residual.unsqueeze(1), products.squeeze(-1)), 1).cpu().double()
        self.residual = numbers[:, 0]
        self.products[:, slot] = self.products[:, :, slot] = numbers[:, 1:]
        done = ~(self.residual > self.limit.maximum(self.floor))  # NaN ends it, too
        if bool(done.any()):
            done &= (self.residual <= self.floor) | self._descends(subgradient).cpu()
        return done

    def _descends(self, subgradient: Tensor) -> Tensor:
        """Q(Z) ≤ Q(start), as follows for s ∈ ∂Q(Z) from Q(start) − Q(Z) ≥ <s, Δ> + ½ <Δ, H Δ>, Δ = start − Z."""
        delta = self.start - self.z
        rise = torch.addcmul(subgradient + 0.5 * delta, self.stiffness, delta, value=0.5).mul_(delta).sum((1, 2))
        return ~(rise < 0)

    def mix(self, slot: int) -> None:
        """V ← Σ c_i V_i. A matrix that strays goes back to its best V and makes some steps without mixing, twice as
        many each time: these converge."""
        if not len(self.v):
            return
        better = self.residual < self.least
        stray = self.residual > _STRAY * self.least
        self.least = torch.where(better, self.residual, self.least)
        self.usable[:, slot] = True
        self.usable &= ~stray.unsqueeze(1)
        self.plain = torch.where(stray, self.pause, (self.plain - 1).clamp(min=0))
        self.pause = torch.where(stray, 2 * self.pause, self.pause)
        alone = torch.zeros_like(self.usable)
        alone[:, slot] = True
        weights = _weights(self.products, torch.where((self.plain > 0).unsqueeze(1), alone, self.usable), slot)
        self.best = _choose(better, self.points[:, slot], self.best)
        mixed = weights.unsqueeze(1).to(self.v) @ self.points.flatten(2)
        self.v = _choose(stray, self.best, mixed.reshape(self.v.shape))


def _choose(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A copy of a for the matrices chosen, b for the others."""
    if not bool(which.any()):
        return b
    return a.clone() if bool(which.all()) else torch.where(which.to(a.device).reshape(-1, 1, 1), a, b)


def _weights(products: Tensor, usable: Tensor, slot: int) -> Tensor:
    """The c of sum 1 that make Σ c_i f_i shortest, given <f_i, f_j>; 0 for those not usable."""
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    inverse = torch.where(usable & (norms > 0), 1 / norms, 0.0)
    cosines = products * inverse.unsqueeze(1) * inverse.unsqueeze(2)
    ridge = torch.where(usable, _RIDGE, 1.0)
    c = inverse * torch.linalg.solve(cosines + torch.diag_embed(ridge), inverse)
    c = c / c.sum(1, keepdim=True)
    last = torch.zeros_like(c)
    last[:, slot] = 1.0
    return torch.where(c.isfinite().all(1, keepdim=True), c, last)
