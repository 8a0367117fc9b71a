"""The mathematics of Douglas and Rachford's splitting, for stacks of matrices (L, m, n)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

# The share of Z − X that a step without mixing adds to V; below 2 it converges.
RELAXATION = 1.3
# A power mean of this exponent is the geometric mean, but for a rounding of 1e-5.
LEAST_POWER = 0.01
# Units of rounding of its terms that the residual is not asked to fall below.
ROUNDING = 8.0


class Posed(NamedTuple):
    """Problems, one for each matrix."""

    linear: Tensor  # b
    metric: Tensor  # H
    start: Tensor
    kappa: Tensor  # (L, 1, 1), as is ε_t
    tolerance: Tensor


class Scaled(NamedTuple):
    """A problem divided by its ρ: H is H/ρ here, b is b/ρ and κ is κ/ρ."""

    v: Tensor  # at which X is the start
    factor: Tensor  # 2/(H + 1) − 1
    constant: Tensor  # 2 b/(H + 1)
    stiffness: Tensor  # H − 1
    kappa: Tensor
    limits: Tensor  # of ‖s‖: what is asked for, and what rounding leaves


def scaled(problem: Posed) -> Scaled:
    """Divided by ρ."""
    linear, metric, start, kappa, tolerance = problem
    size = min(start.shape[1:]) ** 0.5
    p = (kappa * size / vector_norm(linear, dim=(1, 2), keepdim=True)).clamp(LEAST_POWER, 1)
    rho = (shares(start) * metric.pow(p)).sum((1, 2), keepdim=True).pow(1 / p)
    metric, linear, kappa = metric / rho, linear / rho, kappa / rho
    v = torch.addcmul(start - linear, metric, start)
    # the rounding of Z spreads over its entries, and s is |H/ρ − 1| times that
    rounding = torch.finfo(start.dtype).eps * (1 + metric).square_().mean((1, 2)).sqrt_()
    rounding *= vector_norm(2 * start - v, dim=(1, 2))
    limits = torch.stack(((tolerance * kappa * size).flatten(), ROUNDING * rounding), 1)
    inverse = 1 / (1 + metric)
    return Scaled(v, 2 * inverse - 1, 2 * linear * inverse, metric - 1, kappa, limits)


def shares(start: Tensor) -> Tensor:
    """The share of each entry in a matrix's squares; all alike where it is zero."""
    top = start.abs().amax((1, 2), keepdim=True)  # lest a square be too small or too large
    square = torch.where(top > 0, start / top, 1.0).square()
    return square / square.sum((1, 2), keepdim=True)


def reflected(v: Tensor, factor: Tensor, constant: Tensor) -> Tensor:
    """2 X − V."""
    return torch.addcmul(constant, factor, v)


def judged(z: Tensor, y: Tensor, v: Tensor, start: Tensor, stiffness: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Z − X; ‖s‖; and a gap, not negative only where Q(Z) ≤ Q(start)."""
    move = torch.sub(z, y + v, alpha=0.5)
    subgradient = stiffness * move  # s = (H − 1) (Z − X)
    # Q(start) − Q(Z) ≥ <s, Δ> + ½ <Δ, H Δ>, Δ = start − Z, for s ∈ ∂Q(Z)
    delta = start - z
    gap = torch.addcmul(subgradient + 0.5 * delta, stiffness, delta, value=0.5).mul_(delta).sum((1, 2))
    return move, vector_norm(subgradient, dim=(1, 2)), gap


def angles(moves: Tensor, move: Tensor) -> Tensor:
    """The products of the last move with those in the ring; as a matrix product they might have the digits of TF32."""
    return (moves * move.unsqueeze(1)).sum((2, 3))


def descent(start: Tensor, constant: Tensor, stiffness: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """What to threshold, and at which κ, for a step of proximal gradient from the start: Q never grows by that."""
    metric = stiffness + 1
    steepest = metric.amax((1, 2), keepdim=True)
    return start - (metric * start - 0.5 * (metric + 1) * constant) / steepest, kappa / steepest
