"""What rules have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from espalier.compact.trace import Tracer, varies
from espalier.compact.verify import ShrinkError

Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Tracer, str, Arguments, Any], None]


class Unknown(Exception):
    """An operation in a form that has no rule: all channels that it is given stay."""


class RuleError(ShrinkError):
    """A rule failed on an operation that ran: a fault of the rule."""


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def along_label(x: Tensor, label: Tensor) -> Tensor:
    """One entry of x for each of the label's channels."""
    keep = varies(label)
    x = x.expand(label.shape)
    for d in range(x.dim()):
        if d not in keep:
            x = x.narrow(d, 0, min(1, x.shape[d]))
    return x


def checked(constant: Tensor, out: Tensor, label: Tensor) -> Tensor:
    """Of the constants, those that do not differ between the positions of a channel: parameters may make them."""
    rest = [d for d in range(out.dim()) if d not in varies(label)]
    constant = along_label(constant, label)
    if not rest or not out.numel() or not out.is_floating_point():
        return constant & False
    if not bool(constant.any()):
        return constant
    return constant & (out.amin(rest, keepdim=True) == out.amax(rest, keepdim=True)).cpu()
