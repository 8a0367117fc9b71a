"""Douglas and Rachford's splitting with Anderson mixing, for the nuclear norm under a diagonal metric."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import thresholding
from espalier.reading import Reading, finish
from espalier.solvers.anderson import Anderson
from espalier.solvers.base import Solution, Solver
from espalier.solvers.proximal_gradient import Tolerance
from espalier.solvers.replayed import replayed
from espalier.solvers.splitting import RELAXATION, Posed, angles, descent, judged, reflected, scaled
from espalier.subproblem import Subproblem, as_tensor


@dataclass(frozen=True)
class DouglasRachford(Solver):
    """With ρ a mean of H, V from the start's gradient, and q the smooth part of Q,

        X = prox_{q/ρ}(V) = (b + ρ V) / (H + ρ),   Z = prox_{τψ/ρ}(2 X − V),   V ← V + 1.3 (Z − X),

    where the new V is replaced by Σ c_i V_i over the last few, with the c, of sum 1, for which Σ c_i (Z_i − X_i) is
    shortest (Anderson mixing).

    H enters entry by entry, not through its maximum: the decades it spreads over cost far less than they cost proximal
    gradient. ρ is the power mean of H, over the entries by their share in the start's squares, of exponent
    κ √min(m, n) / ‖b‖, 1 at most: what H is where the matrix lies, <Z, H Z> / <Z, Z>, where low rank averages it over
    rows and columns, and the geometric mean where the penalty is weak and the entries stand alone. A plain mean takes 2
    to 4 times the iterations in a long stage, and after a restart 10 to 30 times: inputs that are hardly active have a
    small H, and small weights.

    Z is a proximal point, hence of exactly low rank. It is returned once it meets the paper's condition, for each
    matrix:

        s = (H − ρ) (Z − X) ∈ ∂Q(Z),   ‖s‖ ≤ ε_t τ λ weight √min(m, n),   Q(Z) ≤ Q(start).

    So ε_t is relative to the largest norm in τ ∂ψ. The bound is square-summable in units of Q/τ, in which Algorithm 1
    calls its solver (the proofs for RAMDA need ‖s‖/α_t → 0) and ProxGen states its problem. What rounding adds to s is
    not asked for: 8 units of it, of the norm of 2 X − V and the mean square of H + ρ. The default is
    0.1 t^(−0.6): 1 % at step 46, 0.1 % at step 2155.

    Attributes:
        tolerance: ε_t.
        max_iters: at most; the last one then starts from the best V, and where even that is not sure to be below the
            start, Z is a step of proximal gradient from there.
        memory: how many V are mixed.
    """

    tolerance: Tolerance = field(default_factory=lambda: Tolerance(1e-1))
    max_iters: int = 200
    memory: int = 5

    resumes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.max_iters >= 1:
            raise ValueError(f"max_iters must be at least 1, not {self.max_iters!r}.")
        if not self.memory >= 1:
            raise ValueError(f"memory must be at least 1, not {self.memory!r}.")

    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        return None if isinstance(penalty, NuclearNorm) else "the nuclear norm"

    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        return finish(self.solving(problem, penalty, start, fused=False))

    def batches(self, penalty: Penalty) -> bool:
        return True

    def solving(self, problem: Subproblem, penalty: Penalty, start: Tensor, fused: bool = True) -> Reading[Solution]:
        assert isinstance(penalty, NuclearNorm)
        kappa = as_tensor(problem.tau * (penalty.lam * penalty.weight), start).expand(len(start), 1, 1)
        metric = as_tensor(problem.metric, start).expand(start.shape)
        tolerance = as_tensor(self.tolerance.at(problem.t), start).expand(kappa.shape)
        posed = Posed(problem.linear, metric, start, kappa, tolerance)
        found = (yield from self._fused(posed)) if fused else None
        if found is not None:
            return found
        penalised: list[bool] = yield (kappa != 0).flatten()
        # κ = 0 is an ordinary case, and a − d/H to the bit
        point = torch.empty_like(start) if all(penalised) else problem.unpenalised()
        iterations = yield from self._plainly(posed, penalised, point)
        return Solution(point, iterations)

    def _fused(self, posed: Posed) -> Reading[Solution | None]:
        """Small matrices by one kernel, larger ones by recorded iterations; None where neither serves."""
        from espalier import kernels

        if self.memory > kernels.MOST_MEMORY or kernels.missing() is not None:
            return None
        if kernels.takes(posed.start):
            from espalier.kernels import splitting

            point, taken = splitting.solve(*Posed(*(x.contiguous() for x in posed)), self.max_iters, self.memory)
            iterations = yield taken
            return Solution(point, max(iterations)) if all(iterations) else None
        place = replayed(posed.start, self.memory)
        if place is None:
            return None
        found = yield from place.solving(posed, self.max_iters)
        return None if found is None else Solution(*found)

    def _plainly(self, posed: Posed, which: list[bool], point: Tensor) -> Reading[int]:
        """Step by step, for some of the matrices, to where the solutions are wanted. Returns the iterations made."""
        batch = (yield from self._begin(posed)).only(which)
        iterations = 0
        while len(batch.v) and iterations < self.max_iters:
            slot = iterations % self.memory
            iterations += 1
            last = iterations == self.max_iters
            if last:
                batch.v = batch.best
            ended = yield from batch.step(slot)
            if last:
                yield from batch.descend([not end for end in ended])
            done = [end or last for end in ended]
            if any(done):
                batch.deliver(done, point)
                batch = batch.only([not end for end in done])
            if len(batch.v):
                batch.mix(slot)
        return iterations

    def _begin(self, posed: Posed) -> Reading[_Batch]:
        start = posed.start
        v, factor, constant, stiffness, kappa, limits = scaled(posed)
        asked: list[list[float]] = yield limits
        count, memory = len(start), self.memory
        return _Batch(
            index=torch.arange(count, device=start.device),
            start=start,
            v=v,
            z=start,
            factor=factor,
            constant=constant,
            stiffness=stiffness,
            kappa=kappa,
            best=v,
            points=start.new_zeros(count, memory, *start.shape[1:]),
            moves=start.new_zeros(count, memory, *start.shape[1:]),
            limits=asked,
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
    numbers: list[list[float]]  # ‖s‖, the gap, and the products of the last move with those in the ring

    def only(self, which: list[bool]) -> _Batch:
        """Some of the matrices."""
        if all(which):
            return self
        here = self._numbers_of(which)
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in parts.items():
            if isinstance(value, Tensor):
                parts[name] = value[here]
            elif isinstance(value, list):
                parts[name] = list(compress(value, which))
        return _Batch(**parts)

    def deliver(self, which: list[bool], point: Tensor) -> None:
        """Copy some of the Z to where the solution is wanted."""
        here = self._numbers_of(which)
        point[self.index[here]] = self.z[here]

    def _numbers_of(self, which: list[bool]) -> Tensor:
        return torch.tensor(list(compress(range(len(which)), which)), dtype=torch.long, device=self.v.device)

    def step(self, slot: int) -> Reading[list[bool]]:
        """The next Z, and from V to the next point of the ring. Returns which matrices it solves."""
        y = reflected(self.v, self.factor, self.constant)
        self.z = yield from thresholding(y, self.kappa)
        move, residual, gap = judged(self.z, y, self.v, self.start, self.stiffness)
        self.points[:, slot] = torch.add(self.v, move, alpha=RELAXATION)
        self.moves[:, slot] = move
        self.numbers = yield torch.cat((residual[:, None], gap[:, None], angles(self.moves, move)), 1)
        done = []
        for (norm, below, *_), (wanted, floor) in zip(self.numbers, self.limits, strict=True):
            # NaN ends it, too
            done.append(not norm > max(wanted, floor) and (below >= 0 or not norm > floor))
        return done

    def descend(self, which: list[bool]) -> Reading[None]:
        """Where Z may lie above the start, take one step of proximal gradient from there, which never does."""
        above = [here and row[1] < 0 for here, row in zip(which, self.numbers, strict=True)]
        if not any(above):
            return
        z = yield from thresholding(*descent(self.start, self.constant, self.stiffness, self.kappa))
        self.z = _choose(above, z, self.z)

    def mix(self, slot: int) -> None:
        """V ← Σ c_i V_i, or back to the best V."""
        judgement = [m.add(slot, row[0], row[2:]) for m, row in zip(self.mixing, self.numbers, strict=True)]
        self.best = _choose([better for better, _ in judgement], self.points[:, slot], self.best)
        memory = self.points.shape[1]
        weights = torch.tensor([m.weights(slot, memory) for m in self.mixing], dtype=self.v.dtype).to(self.v.device)
        self.v = _choose([stray for _, stray in judgement], self.best, (weights[:, :, None, None] * self.points).sum(1))


def _choose(which: list[bool], these: Tensor, others: Tensor) -> Tensor:
    """These matrices where chosen, the others elsewhere."""
    if all(which):
        return these.clone()  # which may be a view of the ring
    if not any(which):
        return others
    return torch.where(torch.tensor(which, device=these.device).reshape(-1, 1, 1), these, others)
