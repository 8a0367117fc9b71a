"""Updates in place, with coefficients on the host or on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.checks import is_dtensor
from espalier.subproblem import Scalar


def rate(group: Mapping[str, Any]) -> Scalar:
    """η; torch takes a tensor of shape (1,), too."""
    lr: Scalar = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def average(w: Tensor, z: Tensor, c: Scalar) -> None:
    """w ← (1 − c) w + c z, and z to the bit at c = 1: w + c (z − w) would round its zeros away."""
    if not isinstance(c, Tensor):
        w.copy_(z) if c == 1 else w.lerp_(z, c)
    else:
        w.mul_(1 - c).add_(z * c)


def add_square(x: Tensor, y: Tensor, s: Scalar) -> None:
    """x ← min(x + s y², the largest finite number): an infinite metric would make NaN of the weights."""
    x.addcmul_(y, y * s) if isinstance(s, Tensor) else x.addcmul_(y, y, value=s)
    x.clamp_max_(torch.finfo(x.dtype).max)  # NaN stays NaN


def follow(master: Tensor, p: Tensor) -> None:
    """Where the parameter is not the master's rounding, somebody has written into it, and what was written counts."""
    rounded = master.to(p.dtype)
    if p.device.type == "cpu" and torch.equal(rounded, p):  # the common case in half the time; a device would wait
        return
    master.copy_(torch.where(rounded == p, master, p))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """A number that changes when x does: the sum of its entries read as integers, which no rounding hides."""
    x = x.detach()
    x = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return x.view(_INTEGERS[x.element_size()]).sum()
