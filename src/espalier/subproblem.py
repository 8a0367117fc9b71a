"""The one subproblem that every method poses, each step and for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from espalier.partition import Partition

if TYPE_CHECKING:
    from espalier.penalties.base import Penalty

Scalar = float | Tensor  # a number on the host, or a tensor without axes that stays on the device


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """A scalar as a tensor; a number is filled in on the device, for copying it there would wait for the device."""
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def add_scaled(x: Tensor, y: Tensor, s: Scalar) -> Tensor:
    """x ← x + s y."""
    return x.add_(y * s) if isinstance(s, Tensor) else x.add_(y, alpha=s)


@dataclass(frozen=True)
class Subproblem:
    """argmin_x Q(x) = <d, x> + ½ <x − a, H (x − a)> + τ ψ(x), H diagonal and positive.

    Attributes:
        anchor: a.
        direction: d, but for the factor `pull`.
        metric: H; a tensor shaped like a, or a scalar for a multiple of the identity.
        tau: τ.
        t: the step that poses the problem, for tolerances that shrink with it.
        pull: a factor of the direction; a method that scales its average need not copy it.
        scale: Q as posed is this times the method's own objective, in whose units tolerances and residuals are.
    """

    anchor: Tensor
    direction: Tensor
    metric: Scalar
    tau: Scalar
    t: Scalar = 1
    pull: Scalar = 1.0
    scale: Scalar = 1.0

    @cached_property
    def linear(self) -> Tensor:
        """b = H a − d, so that Q(x) = ½ <x, H x> − <b, x> + τ ψ(x) + constant."""
        return add_scaled(self.metric * self.anchor, self.direction, -self.pull)

    @property
    def is_scalar(self) -> bool:
        """Whether H is a multiple of the identity."""
        return not isinstance(self.metric, Tensor) or self.metric.dim() == 0

    def split(self, groups: Partition) -> Subproblem:
        """The same problem in the partition's view."""
        metric = groups.split(self.metric) if isinstance(self.metric, Tensor) and self.metric.dim() else self.metric
        return replace(
            self,
            anchor=groups.split(self.anchor),
            direction=groups.split(self.direction),
            metric=metric,
        )

    def unpenalised(self) -> Tensor:
        """The solution for ψ = 0: a − d / H, which is a to the bit where d = 0."""
        if isinstance(self.metric, Tensor) or isinstance(self.pull, Tensor):
            return self.anchor - (self.direction / self.metric).mul_(self.pull)
        return torch.sub(self.anchor, self.direction, alpha=self.pull / self.metric)

    def gradient(self, x: Tensor) -> Tensor:
        """Of the smooth part: d + H (x − a)."""
        return add_scaled((x - self.anchor).mul_(self.metric), self.direction, self.pull)

    def value(self, x: Tensor, penalty: Penalty, groups: Partition) -> Tensor:
        """Q(x) − <d, a>: without that constant differences of Q keep their digits."""
        step = x - self.anchor
        smooth = add_scaled(0.5 * self.metric * step, self.direction, self.pull).mul_(step).sum()
        return smooth + self.tau * penalty.value(x, groups)


def together(problems: Sequence[Subproblem]) -> Subproblem:
    """Problems over stacks of matrices as one problem, over all of them."""
    first = problems[0]
    if len(problems) == 1:
        return first

    def stack(name: str) -> Scalar:
        values = [getattr(problem, name) for problem in problems]
        if all(not isinstance(v, Tensor) and v == values[0] for v in values):
            return float(values[0])
        each = zip(values, problems, strict=True)
        return torch.cat([as_tensor(v, q.anchor).reshape(1, 1, 1).expand(len(q.anchor), 1, 1) for v, q in each])

    return Subproblem(
        anchor=torch.cat([q.anchor for q in problems]),
        direction=torch.cat([q.direction for q in problems]),
        metric=stack("metric") if first.is_scalar else torch.cat([cast(Tensor, q.metric) for q in problems]),
        tau=stack("tau"),
        t=stack("t"),
        pull=stack("pull"),
        scale=stack("scale"),
    )
