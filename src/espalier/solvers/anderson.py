"""Proximal gradient with Anderson mixing, for the nuclear norm under a diagonal metric."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import threshold_singular_values
from espalier.solvers.base import Solution, Solver
from espalier.solvers.proximal_gradient import Tolerance
from espalier.subproblem import Subproblem, as_tensor

# A residual this many times the least so far is a failure of mixing.
_STRAY = 2.0
# Added to the squared lengths, 1, of the moves mixed.
_RIDGE = 1e-7
# Of the norm of Z − θ (d + H (Z − a)), in units of its rounding: what no iteration can take away.
_ROUNDING = 8.0


@dataclass(frozen=True)
class Anderson(Solver):
    """Z ← Σ c_i Z⁺_i over the last steps Z⁺_i = prox_{θτψ}(Z_i − θ (d + H (Z_i − a))), with the c, of sum 1, for which
    Σ c_i (Z⁺_i − Z_i) is shortest.

    What is returned is always such a Z⁺, hence of exactly low rank, and satisfies the paper's condition: with
    θ = 2/(max H + min H), for which a step never increases Q,

        s = (1/θ − H) (Z − Z⁺) ∈ ∂Q(Z⁺),   ‖s‖ ≤ ε_t τ λ weight √min(m, n),   Q(Z⁺) ≤ Q(start)

    for each matrix: ε_t is relative to the largest norm that a subgradient of ψ has. In units of Q/τ, in which the
    paper's Algorithm 1 calls its solver and its proofs use ε_t, that is square-summable. What rounding adds to s is
    never asked for. The default, 0.01 t^(−0.6), is as precise as proximal gradient when it stops at rtol = 1e-8.

    Attributes:
        tolerance: ε_t.
        max_iters: at most; then the point of least residual is returned.
        memory: steps that are mixed.
    """

    tolerance: Tolerance = field(default_factory=lambda: Tolerance(1e-2))
    max_iters: int = 200
    memory: int = 6

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
        while len(batch.z) and iterations < self.max_iters:
            done = batch.step(slot=iterations % self.memory, first=iterations == 0)
            iterations += 1
            if bool(done.any()):
                solved = batch.only(done)
                point[solved.index] = solved.point
                batch = batch.only(~done)
            batch.mix(slot=(iterations - 1) % self.memory)
        point[batch.index] = batch.best
        return Solution(point, iterations)

    def _begin(self, problem: Subproblem, kappa: Tensor, start: Tensor) -> _Batch:
        metric = as_tensor(problem.metric, start).expand(start.shape)
        theta = 2 / (metric.amax((1, 2), keepdim=True) + metric.amin((1, 2), keepdim=True))
        tolerance = as_tensor(self.tolerance.at(problem.t), start) * kappa * min(start.shape[1:]) ** 0.5
        count, memory = len(start), self.memory
        return _Batch(
            index=torch.arange(count, device=start.device),
            z=start,
            damping=1 - theta * metric,
            constant=theta * problem.linear,
            kappa=theta * kappa,
            limit=(theta * tolerance).flatten(),
            point=start,
            best=start,
            value=start.new_zeros(count, dtype=torch.float64),
            points=start.new_zeros(count, memory, *start.shape[1:]),
            moves=start.new_zeros(count, memory, *start.shape[1:]),
            products=torch.zeros(count, memory, memory, dtype=torch.float64),
            usable=torch.zeros(count, memory, dtype=torch.bool),
            residual=torch.zeros(count, dtype=torch.float64),
            least=torch.full((count,), torch.inf, dtype=torch.float64),
            pause=torch.ones(count, dtype=torch.long),
            plain=torch.zeros(count, dtype=torch.long),
        )


@dataclass
class _Batch:
    """Matrices of one shape under way, each matrix's problem multiplied by its θ.

    The last six are numbers that decide what comes next, and lie on the host.
    """

    index: Tensor  # of each matrix in the whole batch
    z: Tensor
    damping: Tensor  # 1 − θ H
    constant: Tensor  # θ b
    kappa: Tensor  # θ κ
    limit: Tensor  # of ‖θ s‖
    point: Tensor  # Z⁺
    best: Tensor  # the Z⁺ of least ‖θ s‖
    value: Tensor  # θ Q of the first Z⁺
    points: Tensor  # the last Z⁺, in a ring
    moves: Tensor  # their Z⁺ − Z
    products: Tensor  # the moves' inner products
    usable: Tensor  # which of them may be mixed
    residual: Tensor  # ‖θ s‖
    least: Tensor  # the least so far
    pause: Tensor  # how many steps to make without mixing after the next failure
    plain: Tensor  # how many of those are still to be made

    def only(self, which: Tensor) -> _Batch:
        """Some of the matrices."""
        if bool(which.all()):
            return self
        here = which.nonzero().squeeze(1)
        there = here.to(self.z.device)
        parts: dict[str, Tensor] = {f.name: getattr(self, f.name) for f in fields(self)}
        return _Batch(**{k: v.index_select(0, here if v.device == here.device else there) for k, v in parts.items()})

    def step(self, slot: int, first: bool) -> Tensor:
        """Z⁺ = prox(Z − θ (d + H (Z − a))). Returns, on the host, which matrices it solves."""
        y = torch.addcmul(self.constant, self.damping, self.z)
        self.point, total = threshold_singular_values(y, self.kappa)
        move = self.point - self.z
        residual = (self.damping * move).flatten(1).norm(dim=1)  # θ s = (1 − θ H) (Z − Z⁺)
        self.points[:, slot], self.moves[:, slot] = self.point, move
        products = self.moves.flatten(2) @ move.flatten(1).unsqueeze(-1)
        if first:
            # what rounding adds to s is not asked for
            self.limit = self.limit.maximum(_ROUNDING * torch.finfo(y.dtype).eps * y.flatten(1).norm(dim=1))
            self.value, self.best = self._value(total)[0], self.point
        numbers = torch.cat((residual.unsqueeze(1), self.limit.unsqueeze(1), products.squeeze(-1)), 1).double().cpu()
        self.residual, limit, row = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        self.products[:, slot] = self.products[:, :, slot] = row
        done = ~(self.residual > limit)  # NaN ends it, too
        if not first and bool(done.any()):
            # a step never increases Q, so the first Z⁺ is no worse than the start
            value, size = self._value(total)
            worse = value > self.value + torch.finfo(y.dtype).eps * size
            done &= ~worse.cpu()
        return done

    def _value(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """θ Q = ½ <Z⁺, θ H Z⁺> − <θ b, Z⁺> + θ κ ‖Z⁺‖_* without the constant of Q, and the size of its terms."""
        x = self.point.double()
        curved = 0.5 * (x * x * (1 - self.damping)).sum((1, 2))
        linear = (x * self.constant).sum((1, 2))
        penalty = self.kappa.flatten() * total
        return curved - linear + penalty, curved + linear.abs() + penalty

    def mix(self, slot: int) -> None:
        """Z ← Σ c_i Z⁺_i. A matrix that strays goes back to its best point and makes some steps without mixing, twice
        as many each time: these never increase Q."""
        if not len(self.z):
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
        numbers = torch.cat((weights, better.unsqueeze(1), stray.unsqueeze(1)), 1).to(self.z)
        self.best = torch.where(numbers[:, -2, None, None] > 0, self.point, self.best)
        mixed = numbers[:, None, :-2] @ self.points.flatten(2)
        self.z = torch.where(numbers[:, -1, None, None] > 0, self.best, mixed.reshape(self.z.shape))


def _weights(products: Tensor, usable: Tensor, slot: int) -> Tensor:
    """The c of sum 1 that make Σ c_i f_i shortest, given <f_i, f_j>; 0 for those not usable."""
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    inverse = torch.where(usable & (norms > 0), 1 / norms, 0.0)
    # moves of length 1; the products, sums in the moves' own type, are no more precise than the ridge
    cosines = products * inverse.unsqueeze(1) * inverse.unsqueeze(2)
    ridge = torch.where(usable, _RIDGE, 1.0)
    c = inverse * torch.linalg.solve(cosines + torch.diag_embed(ridge), inverse)
    c = c / c.sum(1, keepdim=True)
    last = torch.zeros_like(c)
    last[:, slot] = 1.0
    return torch.where(c.isfinite().all(1, keepdim=True), c, last)
