"""What a penalty is, and what it may offer beyond that."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.groupings import Grouping
from espalier.partition import Partition
from espalier.subproblem import Scalar, Subproblem, as_tensor


@dataclass(frozen=True)
class Structure:
    """What is exactly structured in a tensor: which groups are zero and, where the groups are matrices, the rank of
    each out of `full_rank`."""

    zero: Tensor
    rank: Tensor | None = None
    full_rank: int | None = None


class Penalty(ABC):
    """ψ. A subclass with `value` and `prox` works with every optimizer, through proximal gradient.

    Tensors arrive in the view of `groups`: `groups.norm(x)`, `groups.sum(x)` and their like give one value a group,
    broadcastable to x. A penalty over single entries may ignore `groups`.
    """

    convex: ClassVar[bool] = True
    # ψ is a sum over groups: each may then take steps of its own size, and `prox` is given one step for each group
    separable: ClassVar[bool] = False
    # `prox` waits for the device anyway (a singular value decomposition does): a solver may then look at its progress
    synchronises: ClassVar[bool] = False
    # groups that it has a meaning on: matrices, sets of entries, or (None) both
    needs_matrices: ClassVar[bool | None] = None
    default_grouping: ClassVar[str] = "element"

    @abstractmethod
    def value(self, x: Tensor, groups: Partition) -> Tensor:
        """ψ(x), a tensor without axes."""

    @abstractmethod
    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        """argmin_y ψ(y) + ‖y − x‖² / (2 step), exactly zero where the solution is."""

    def screen(self, problem: Subproblem, groups: Partition) -> Tensor:
        """Groups that are certainly zero in the subproblem's solution, kept broadcastable; exact for convex ψ.

        0 solves a group's problem (the whole one, where ψ does not separate) when it does with the least curvature
        θ⁻¹ = min(h) in place of h: when prox_{θτψ}(θ b) = 0. For convex ψ the answer is the same for every θ.
        """
        metric = as_tensor(problem.metric, problem.linear).expand(groups.shape)
        theta = 1 / (groups.min(metric) if self.separable else metric.amin())
        zero = groups.max(self.prox(problem.linear * theta, problem.tau * theta, groups).abs()) == 0
        return zero if self.separable else zero & zero.all()

    def structure(self, x: Tensor, groups: Partition) -> Structure:
        """The structure of a point, from its entries alone."""
        return Structure(zero=groups.zero(x))

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({settings})"

    def check(self, grouping: Grouping) -> None:
        """Raise where this penalty has no meaning on these groups."""
        if self.needs_matrices is not None and self.needs_matrices != grouping.of_matrices:
            wanted = "matrices" if self.needs_matrices else "sets of entries"
            raise ValueError(
                f"{type(self).__name__} does not fit {type(grouping).__name__} groups: it works on {wanted}. "
                f'Use grouping="{self.default_grouping}", or another penalty.'
            )


@dataclass(frozen=True)
class Radial:
    """A subproblem that depends on a group, but for a linear term, through its norm r = ‖x_g‖ alone:

    min ½ <x, h x> − <b, x> + κ r (1 − r / 2R) for r ≤ R, and + κ R / 2 beyond.

    Attributes:
        linear: b, after whatever thresholding the penalty does entry by entry.
        kappa: κ = τ λ weight.
        groups: the groups whose norms count; for L1 the single entries.
        flat: R, beyond which the penalty is constant; None where there is no such radius.
    """

    linear: Tensor
    kappa: Scalar
    groups: Partition
    flat: Scalar | None = None


class RadialPenalty(Penalty):
    """A penalty whose subproblem is solved exactly, under any diagonal metric, by finding each group's norm."""

    separable: ClassVar[bool] = True
    needs_matrices: ClassVar[bool | None] = False

    @abstractmethod
    def radial(self, problem: Subproblem, groups: Partition) -> Radial:
        """The subproblem in its radial form."""


def soft_threshold(x: Tensor, threshold: Scalar) -> Tensor:
    """sign(x) max(|x| − threshold, 0)."""
    threshold = as_tensor(threshold, x)
    return x - x.clamp(-threshold, threshold)


def group_weight(weight: float | None, groups: Partition) -> float:
    """The factor of a group's norm: √(group size) unless another is given."""
    return math.sqrt(groups.size) if weight is None else weight
