"""Douglas and Rachford's splitting with Anderson mixing, for the nuclear norm under a diagonal metric."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.penalties.nuclear_norm import NuclearNorm
from espalier.penalties.singular_values import (
    GRAM_BELOW,
    by_svd,
    guess,
    products,
    sufficed,
    thresholding,
    worth_recording,
)
from espalier.reading import Reading, finish
from espalier.recording import Recording
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
# Entries up to which a batch may stay in memory; entries of the rings, half of all, that may in one thread.
_SETTLE_BELOW = 1 << 20
_SETTLED_BELOW = 1 << 26


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
        from espalier import kernels

        if fused and self.memory <= kernels.MOST_MEMORY and kernels.takes(start):
            point, taken = self._by_kernel(problem, kappa, start)
            iterations = yield taken
            if all(iterations):
                return Solution(point, max(iterations))
        penalised: list[bool] = yield (kappa != 0).flatten()
        # κ = 0 is an ordinary case, and a − d/H to the bit
        point = torch.empty_like(start) if all(penalised) else problem.unpenalised()
        batch = (yield from self._begin(problem, kappa, start)).only(penalised).settled()
        left = [True] * len(batch.v)
        iterations = 0
        while any(left) and iterations < self.max_iters:
            slot = iterations % self.memory
            iterations += 1
            last = iterations == self.max_iters
            if last:
                batch.v.copy_(batch.best)
            ended = yield from batch.step(slot)
            done = [here and (end or last) for here, end in zip(left, ended, strict=True)]
            if last:
                yield from batch.descend([here and not end for here, end in zip(left, ended, strict=True)])
            if any(done):
                batch.deliver(done, point)
                left = [here and not d for here, d in zip(left, done, strict=True)]
                if not batch.replays:  # a smaller batch would have to be recorded, too
                    batch = batch.only(left)
                    left = [True] * len(batch.v)
            if any(left):
                batch.mix(slot)
        return Solution(point, iterations)

    def _by_kernel(self, problem: Subproblem, kappa: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """The whole solution by one kernel, and how many iterations each matrix took; 0 where it could not."""
        from espalier.kernels import splitting

        metric = as_tensor(problem.metric, start).expand(start.shape)
        tolerance = as_tensor(self.tolerance.at(problem.t), start).expand(kappa.shape)
        linear, metric, start, kappa, tolerance = (
            x.contiguous() for x in (problem.linear, metric, start, kappa, tolerance)
        )
        return splitting.solve(linear, metric, start, kappa, tolerance, self.max_iters, self.memory)

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
            z=torch.empty_like(start),
            factor=2 * inverse - 1,
            constant=2 * linear * inverse,
            stiffness=metric - 1,
            kappa=kappa / rho,
            best=v.clone(),
            points=start.new_zeros(count, memory, *start.shape[1:]),
            moves=start.new_zeros(count, memory, *start.shape[1:]),
            slot=torch.zeros(1, dtype=torch.long, device=start.device),
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
    slot: Tensor  # where in the ring a step goes
    limits: list[list[float]]  # of ‖s‖: what is asked for, and what rounding leaves
    mixing: list[Anderson]
    numbers: list[list[float]]  # ‖s‖, the gap, and the products of the last move with those in the ring
    recordings: dict[int, Recording[Tensor]] | None = None  # of a step, by the power of 2 that bounds (σ/κ)²
    replays: bool = False  # whether the last step was one of them

    def settled(self) -> _Batch:
        """The same in memory that stays from one call to the next, where steps are worth recording."""
        if self.v.dtype != torch.float32 or self.v.numel() > _SETTLE_BELOW or not worth_recording(self.v):
            return self
        key = (self.v.device, torch.cuda.current_stream(self.v.device).cuda_stream, self.points.shape)
        there = _kept.settled.get(key)
        if there is None:
            if _kept.entries + self.points.numel() > _SETTLED_BELOW:
                return self
            _kept.entries += self.points.numel()
            with torch.inference_mode(False):
                own: dict[str, Any] = {k: x.clone() for k, x in vars(self).items() if isinstance(x, Tensor)}
            there = _kept.settled[key] = replace(self, **own, recordings={})
        else:
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    getattr(there, name).copy_(value)
                elif name != "recordings":
                    setattr(there, name, value)
        there.replays = True
        return there

    def only(self, which: list[bool]) -> _Batch:
        """Some of the matrices."""
        if all(which):
            return self
        here = self._numbers_of(which)
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in parts.items():
            if isinstance(value, Tensor) and name != "slot":
                parts[name] = value[here]
            elif isinstance(value, list):
                parts[name] = list(compress(value, which))
        return _Batch(**{**parts, "recordings": None, "replays": False})

    def deliver(self, which: list[bool], point: Tensor) -> None:
        """Copy some of the Z to where the solution is wanted."""
        here = self._numbers_of(which)
        point[self.index[here]] = self.z[here]

    def _numbers_of(self, which: list[bool]) -> Tensor:
        return torch.tensor(list(compress(range(len(which)), which)), dtype=torch.long, device=self.v.device)

    def step(self, slot: int) -> Reading[list[bool]]:
        """The next Z. Returns which matrices it solves."""
        self.slot.fill_(slot)
        numbers = None if self.recordings is None else (yield from self._replay(self.recordings))
        if numbers is None:
            y = self._reflected()
            z = (yield from thresholding(y, self.kappa)) if self.recordings is None else by_svd(y, self.kappa)
            numbers = yield self._go(y, z)
        self.numbers = numbers
        done = []
        for (residual, gap, *_), (wanted, floor) in zip(self.numbers, self.limits, strict=True):
            # NaN ends it, too
            done.append(not residual > max(wanted, floor) and (gap >= 0 or not residual > floor))
        return done

    def _replay(self, recordings: dict[int, Recording[Tensor]]) -> Reading[list[list[float]] | None]:
        """The same as one recording, from products alone; None where these are not precise enough."""
        while True:
            exponent = guess(self.v)
            if exponent not in recordings:
                recordings[exponent] = Recording(partial(self._record, exponent), self.v.device)
            found: list[list[float]] = yield recordings[exponent]()
            bound = found.pop()[0]
            self.replays = bound < GRAM_BELOW
            if not self.replays:
                return None
            if sufficed(self.v, exponent, bound):
                return found

    def _record(self, exponent: int) -> Tensor:
        y = self._reflected()
        z, bound = products(y, self.kappa, exponent)
        numbers = self._go(y, z)
        return torch.cat((numbers, bound.to(numbers.dtype).expand(1, numbers.shape[1])))

    def _reflected(self) -> Tensor:
        """2 X − V."""
        return torch.addcmul(self.constant, self.factor, self.v)

    def _go(self, y: Tensor, z: Tensor) -> Tensor:
        """From V to the next point of the ring. Returns `numbers`."""
        move = torch.sub(z, y + self.v, alpha=0.5)  # Z − X
        self.z.copy_(z)
        self.points.index_copy_(1, self.slot, torch.add(self.v, move, alpha=_RELAXATION).unsqueeze(1))
        self.moves.index_copy_(1, self.slot, move.unsqueeze(1))
        subgradient = self.stiffness * move  # s = (H − 1) (Z − X)
        residual = vector_norm(subgradient, dim=(1, 2), keepdim=True)
        # Q(Z) ≤ Q(start) where this is not negative: Q(start) − Q(Z) ≥ <s, Δ> + ½ <Δ, H Δ>, Δ = start − Z, s ∈ ∂Q(Z)
        delta = self.start - z
        gap = torch.addcmul(subgradient + 0.5 * delta, self.stiffness, delta, value=0.5).mul_(delta)
        angles = (self.moves * move.unsqueeze(1)).sum((2, 3))  # a matrix product might have the digits of TF32
        return torch.cat((residual.flatten(1), gap.sum((1, 2)).unsqueeze(1), angles), 1)

    def descend(self, which: list[bool]) -> Reading[None]:
        """Where Z may lie above the start, take one step of proximal gradient from there, which never does."""
        above = [here and row[1] < 0 for here, row in zip(which, self.numbers, strict=True)]
        if not any(above):
            return
        metric = self.stiffness + 1
        steepest = metric.amax((1, 2), keepdim=True)
        linear = 0.5 * (metric + 1) * self.constant
        z = yield from thresholding(self.start - (metric * self.start - linear) / steepest, self.kappa / steepest)
        _copy(above, z, self.z)

    def mix(self, slot: int) -> None:
        """V ← Σ c_i V_i, or back to the best V."""
        judged = [m.add(slot, row[0], row[2:]) for m, row in zip(self.mixing, self.numbers, strict=True)]
        _copy([better for better, _ in judged], self.points[:, slot], self.best)
        memory = self.points.shape[1]
        weights = torch.tensor([m.weights(slot, memory) for m in self.mixing], dtype=self.v.dtype).to(self.v.device)
        torch.sum(weights[:, :, None, None] * self.points, 1, out=self.v)
        _copy([stray for _, stray in judged], self.best, self.v)


def _copy(which: list[bool], source: Tensor, there: Tensor) -> None:
    """The matrices chosen."""
    if all(which):
        there.copy_(source)
    elif any(which):
        there.copy_(torch.where(torch.tensor(which, device=there.device).reshape(-1, 1, 1), source, there))


class _Kept(threading.local):
    def __init__(self) -> None:
        self.settled: dict[tuple[torch.device, int, torch.Size], _Batch] = {}
        self.entries = 0


_kept = _Kept()
