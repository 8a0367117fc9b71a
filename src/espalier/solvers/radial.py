"""The solution of a radial subproblem: find each group's norm r, and x = b r / (h r + κ) follows.

With D = h r + κ, S = Σ b²/D² and T = Σ h b²/D³ over a group, r is the root of S = 1; a group is zero when ‖b‖ ≤ κ.
f(r) = S^(−1/2) is a power mean of affine functions, hence concave. Newton on f(r) = 1 therefore lands at or left of
the root from anywhere, and from the left it climbs to it without ever passing it.

A penalty that ends at a radius R (group MCP) only shifts the metric: D = (h − κ/R) r + κ is positive up to R, so f
stays concave there and its first crossing of 1, from the left, is the one inner minimum beside 0. At r = R the formula
gives b/h, the minimum of the region where the penalty is constant. The better of the two is the global solution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.groupings import Partition
from espalier.penalties.base import RadialPenalty
from espalier.solvers.base import Solution, may_branch
from espalier.subproblem import Subproblem, as_tensor

# (S, T) → how far r moves
Move = Callable[[Tensor, Tensor], Tensor]

# With fewer active groups than this share, copying them out costs less than carrying the zero ones along.
_COMPACT_BELOW = 0.7


@dataclass(frozen=True)
class _Scaled:
    """The problem with each group divided by its largest |b|: no square overflows."""

    b: Tensor
    h: Tensor
    kappa: Tensor
    flat: Tensor | None
    groups: Partition

    @property
    def shift(self) -> Tensor | float:
        """κ/R, by which a penalty that ends at R lowers the metric."""
        return 0.0 if self.flat is None else self.kappa / self.flat

    def denominator(self, r: Tensor) -> Tensor:
        """D = h r + κ (1 − r/R)."""
        kappa = self.kappa if self.flat is None else self.kappa - self.shift * r
        return torch.addcmul(self.groups.stretch(kappa), self.h, self.groups.stretch(r))

    def norms(self, norm_b: Tensor, start: Tensor | None, move: Move, max_iters: int) -> tuple[Tensor, int]:
        """r of each group, 0 where it is screened, and the iterations that took."""
        active = norm_b > self.kappa
        h = self.h if self.flat is None else self.h - self.groups.stretch(self.kappa / self.flat)
        curvature = self.groups.sum(h * self.b.square())
        # Newton's step from r = 0; no later iterate lies below it
        floor = (norm_b - self.kappa) * norm_b.square() / curvature
        if self.flat is not None:
            floor = torch.where(curvature > 0, floor, self.flat).minimum(self.flat)
        # a screened group is given κ = ‖b‖, for which r = 0 is the root, and so never holds up the others
        floor = torch.where(active, floor, 0.0)
        idle = torch.where(norm_b > 0, norm_b, 1.0)
        this = replace(self, kappa=torch.where(active, self.kappa, idle))
        r = floor if start is None else torch.where(active, start.maximum(floor), 0.0)
        noise = 16 * torch.finfo(r.dtype).eps  # of S, a sum over the group
        iteration = 0
        while iteration < max_iters:
            iteration += 1
            d = this.denominator(r)
            q = (self.b / d).square_()
            s = self.groups.sum(q)  # S = Σ b² / D²
            t = self.groups.sum(q.mul_(h).div_(d))  # T = Σ h b² / D³
            # from so far right that S underflows, begin at the floor
            new = torch.maximum(torch.where(s > 0, r + move(s, t), floor), floor)
            if self.flat is not None:
                # f has stopped rising or r has left the region: there is no inner minimum but 0
                new = torch.where(t > 0, new, self.flat).minimum(self.flat)
            new = torch.where(active, new, 0.0)  # rounding must not lift a zero group off zero
            r = new
            if may_branch(s):
                # S ≥ 1 left of the root, where every iterate after the first is
                settled = s - 1 <= noise if iteration > 1 else (s - 1).abs() <= noise
                if bool((settled | ~active).all()):
                    break
        return r, iteration

    def point(self, r: Tensor) -> Tensor:
        """x = b r / D, and 0 where r is."""
        d = self.denominator(r)
        return torch.where(self.groups.stretch(r) > 0, self.b * self.groups.stretch(r) / d, 0.0)

    def objective(self, x: Tensor, r: Tensor, flat: Tensor) -> Tensor:
        """½ <x, h x> − <b, x> + κ r (1 − r/2R) of each group, the last term constant beyond R."""
        inner = r.minimum(flat)
        smooth = self.groups.sum((0.5 * self.h * x - self.b).mul_(x))
        return smooth + self.kappa * inner * (1 - inner / (2 * flat))


def solve_radial(
    problem: Subproblem,
    penalty: RadialPenalty,
    groups: Partition,
    start: Tensor | None,
    move: Move,
    max_iters: int,
) -> Solution:
    """The exact solution. `start` gives the norms to begin at; None begins at the lower bound."""
    form = penalty.radial(problem, groups)
    groups = form.groups
    largest = groups.max(form.linear.abs())
    scale = torch.where(largest > 0, largest, 1.0)
    scaled = _Scaled(
        b=form.linear / groups.stretch(scale),
        h=as_tensor(problem.metric, largest),
        kappa=as_tensor(form.kappa, largest) / scale,
        flat=None if form.flat is None else as_tensor(form.flat, largest) / scale,
        groups=groups,
    )
    norm_b = groups.sum(scaled.b.square()).sqrt_()
    if start is not None:
        start = groups.norm(start) / scale

    if scaled.flat is not None:  # never warm: right of the inner root Newton could run away from it
        r, iterations = scaled.norms(norm_b, None, move, max_iters)
        inner, outer = scaled.point(r), scaled.b / scaled.h
        r_outer = groups.sum(outer.square()).sqrt_()
        better = scaled.objective(outer, r_outer, scaled.flat) < scaled.objective(inner, r, scaled.flat)
        better = groups.stretch((r_outer >= scaled.flat) & better)
        return Solution(torch.where(better, outer, inner).mul_(groups.stretch(scale)), iterations)

    if may_branch(norm_b) and len(groups.group_axes) == 1:
        active = (norm_b > scaled.kappa).reshape(-1)
        if int(active.sum()) < _COMPACT_BELOW * groups.count:
            return _solve_active(scaled, scale, norm_b, start, move, max_iters, active)
    r, iterations = scaled.norms(norm_b, start, move, max_iters)
    return Solution(scaled.point(r).mul_(groups.stretch(scale)), iterations)


def _solve_active(
    scaled: _Scaled,
    scale: Tensor,
    norm_b: Tensor,
    start: Tensor | None,
    move: Move,
    max_iters: int,
    active: Tensor,
) -> Solution:
    """The same, computed for the active groups alone."""
    (axis,) = scaled.groups.group_axes
    index = active.nonzero().squeeze(1)
    x = torch.zeros_like(scaled.b)
    if not len(index):
        return Solution(x, 0)

    def pick(v: Tensor) -> Tensor:
        return v.index_select(axis, index) if v.dim() else v

    shape = list(scaled.groups.shape)
    shape[axis] = len(index)
    few = _Scaled(
        b=pick(scaled.b),
        h=pick(scaled.h),
        kappa=pick(scaled.kappa),
        flat=None,
        groups=replace(scaled.groups, shape=tuple(shape)),
    )
    r, iterations = few.norms(pick(norm_b), None if start is None else pick(start), move, max_iters)
    values = few.point(r).mul_(few.groups.stretch(pick(scale)))
    return Solution(x.index_copy_(axis, index, values), iterations)
