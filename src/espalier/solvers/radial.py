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

from espalier.partition import Partition
from espalier.penalties.base import Radial, RadialPenalty
from espalier.solvers.base import Solution, may_branch
from espalier.subproblem import Subproblem, as_tensor

# (S, T) → how far r moves
Move = Callable[[Tensor, Tensor], Tensor]

# With fewer active groups than this share, copying them out costs less than carrying the zero ones along.
_COMPACT_BELOW = 0.7
# Between these a group's ‖b‖² has lost nothing to the range of float32.
_SAFE_SQUARES = (1e-20, 1e20)


@dataclass(frozen=True)
class _Scaled:
    """The problem with each group divided by a number of b's size, so that no square leaves the range of its type."""

    b: Tensor
    h: Tensor
    norm_b: Tensor
    kappa: Tensor
    flat: Tensor | None
    groups: Partition

    def norms(self, start: Tensor | None, move: Move, max_iters: int) -> tuple[Tensor, int]:
        """r of each group, 0 where it is screened, and the iterations that took."""
        active = self.norm_b > self.kappa
        # D = h r + κ (1 − r/R): a penalty that ends at R lowers the metric by κ/R
        h = self.h if self.flat is None else self.h - self.groups.stretch(self.kappa / self.flat)
        q = self.b.square()
        curvature = self.groups.sum(q.mul_(h))  # Σ h b²
        # Newton's step from r = 0; no later iterate lies below it
        floor = (self.norm_b - self.kappa) * self.norm_b.square() / curvature
        if self.flat is not None:
            floor = torch.where(curvature > 0, floor, self.flat).minimum(self.flat)
        floor = torch.where(active, floor, 0.0)
        # a screened group is given κ = ‖b‖, for which r = 0 is the root, and so never holds up the others
        kappa = self.groups.stretch(torch.where(active, self.kappa, torch.where(self.norm_b > 0, self.norm_b, 1.0)))
        r = floor if start is None else torch.where(active, start.maximum(floor), 0.0)
        eps = torch.finfo(r.dtype).eps
        # r |f''| ≤ 3 f', so a step of relative length δ leaves an error below 1.5 δ²; not so with a lowered metric
        short = 0.5 * eps**0.5 if self.flat is None else 4 * eps
        d = torch.empty_like(q)
        iteration = 0
        while iteration < max_iters:
            iteration += 1
            torch.addcmul(kappa, h, self.groups.stretch(r), out=d)
            torch.div(self.b, d, out=q).square_()
            s = self.groups.sum(q)  # S = Σ b² / D²
            t = self.groups.sum(q.mul_(h).div_(d))  # T = Σ h b² / D³
            # fmax ignores the NaN of a start so far right that S underflows
            new = torch.fmax(r + move(s, t), floor)
            if self.flat is not None:
                # f has stopped rising or r has left the region: there is no inner minimum but 0
                new = torch.where(t > 0, new, self.flat).minimum(self.flat)
            new = torch.where(active, new, 0.0)  # rounding must not lift a zero group off zero
            if may_branch(s):
                settled = (new - r).abs() <= short * new
                if iteration > 4:  # S = 1 but for rounding
                    settled |= (s - 1).abs() <= 16 * eps
                if bool(settled.all()):
                    return new, iteration
            r = new
        return r, iteration

    def active_norms(self, start: Tensor | None, move: Move, max_iters: int) -> tuple[Tensor, int]:
        """The same, computed for the active groups alone where they are few."""
        active = (self.norm_b > self.kappa).reshape(-1)
        if len(self.groups.group_axes) != 1 or int(active.sum()) >= _COMPACT_BELOW * self.groups.count:
            return self.norms(start, move, max_iters)
        (axis,) = self.groups.group_axes
        index = active.nonzero().squeeze(1)
        r = torch.zeros_like(self.norm_b)
        if not len(index):
            return r, 0

        def pick(v: Tensor) -> Tensor:
            return v.index_select(axis, index)

        shape = list(self.groups.shape)
        shape[axis] = len(index)
        few = _Scaled(
            b=pick(self.b),
            h=pick(self.h),
            norm_b=pick(self.norm_b),
            kappa=pick(self.kappa),
            flat=None,
            groups=replace(self.groups, shape=tuple(shape)),
        )
        found, iterations = few.norms(None if start is None else pick(start), move, max_iters)
        return r.index_copy_(axis, index, found), iterations

    def point(self, r: Tensor) -> Tensor:
        """x = b / (h + κ (1/r − 1/R)), and 0 where r is."""
        shift = self.kappa / r if self.flat is None else self.kappa * (1 / r - 1 / self.flat)
        shift = torch.where(r > 0, shift, torch.inf)
        return self.b / (self.h + self.groups.stretch(shift))

    def objective(self, x: Tensor, r: Tensor, flat: Tensor) -> Tensor:
        """½ <x, h x> − <b, x> + κ r (1 − r/2R) of each group, the last term constant beyond R."""
        inner = r.minimum(flat)
        smooth = self.groups.sum((0.5 * self.h * x - self.b).mul_(x))
        return smooth + self.kappa * inner * (1 - inner / (2 * flat))

    def better_of_two(self, r: Tensor) -> Tensor:
        """The point at r or, where that has the lower objective, b/h from the region where the penalty is constant."""
        assert self.flat is not None
        inner, outer = self.point(r), self.b / self.h
        r_outer = self.groups.sum(outer.square()).sqrt_()
        # of an objective that is NaN because R is too small to be divided by, the outer point is the better one
        inner_is = self.objective(inner, r, self.flat) <= self.objective(outer, r_outer, self.flat)
        return torch.where(self.groups.stretch((r_outer >= self.flat) & ~inner_is), outer, inner)


def _scale(form: Radial, h: Tensor) -> tuple[_Scaled, Tensor]:
    """The scaled problem, and the scale of each group."""
    b, groups = form.linear, form.groups
    squares = groups.sum(b.square())
    low, high = _SAFE_SQUARES
    scale = torch.ones_like(squares)
    if not (may_branch(b) and bool(((squares > low) & (squares < high)).all())):
        largest = groups.max(b.abs())
        scale = torch.where(largest > 0, largest, 1.0)
        b = b / groups.stretch(scale)
        squares = groups.sum(b.square())
    kappa = as_tensor(form.kappa, scale) / scale
    flat = None if form.flat is None else as_tensor(form.flat, scale) / scale
    return _Scaled(b, h, squares.sqrt_(), kappa, flat, groups), scale


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
    scaled, scale = _scale(form, as_tensor(problem.metric, form.linear).expand(form.linear.shape))
    if scaled.flat is not None:  # never warm: right of the inner root Newton could run away from it
        r, iterations = scaled.norms(None, move, max_iters)
        return Solution(scaled.better_of_two(r).mul_(form.groups.stretch(scale)), iterations)
    if start is not None:
        start = form.groups.sum(start.square()).sqrt_() / scale
    search = scaled.active_norms if may_branch(scale) else scaled.norms
    r, iterations = search(start, move, max_iters)
    return Solution(replace(scaled, b=form.linear).point(r), iterations)
