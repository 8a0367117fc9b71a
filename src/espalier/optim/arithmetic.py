"""Updates in place, with coefficients on the host or on the device."""

from __future__ import annotations

from torch import Tensor

from espalier.subproblem import Scalar


def average(w: Tensor, z: Tensor, c: Scalar) -> None:
    """w ← (1 − c) w + c z, and z to the bit at c = 1: w + c (z − w) would round its zeros away."""
    if not isinstance(c, Tensor):
        w.copy_(z) if c == 1 else w.lerp_(z, c)
    else:
        w.mul_(1 - c).add_(z * c)


def add_square(x: Tensor, y: Tensor, s: Scalar) -> None:
    """x ← x + s y²."""
    x.addcmul_(y, y * s) if isinstance(s, Tensor) else x.addcmul_(y, y, value=s)
