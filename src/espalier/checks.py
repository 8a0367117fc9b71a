"""Numbers that a user gives, checked where they are given."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor


def check_number(name: str, value: object, *, low: float = 0.0, high: float = math.inf, open_low: bool = False) -> None:
    """A number in [low, high), or in (low, high); NaN and infinity are never one."""
    if not isinstance(value, Real | Tensor) or (isinstance(value, Tensor) and value.dim() != 0):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    number = float(value)
    if not (low <= number < high) or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a finite number in {bracket}{low:g}, {high:g}), not {value!r}.")
