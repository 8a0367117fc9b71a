"""Espalier's optimizers inside the wrappers of Accelerate, Lightning and torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from espalier.optim.base import StructuredOptimizer

# where a wrapper keeps what it wraps: Accelerate and DeepSpeed, Lightning, ZeroRedundancyOptimizer
_INNER = ("optimizer", "_optimizer", "optim")


def unwrap(optimizer: Any, otherwise: str = "") -> StructuredOptimizer:
    """The Espalier optimizer inside a framework's wrapper; an optimizer that is not wrapped comes back as it is.

    Args:
        optimizer: an optimizer, or what Accelerate, Lightning or `ZeroRedundancyOptimizer` made of one.
        otherwise: what to type instead, for the error.

    Raises:
        TypeError: there is no Espalier optimizer inside.
    """
    *_, inner = _layers(optimizer)
    if not isinstance(inner, StructuredOptimizer):
        raise TypeError(
            f"this needs one of Espalier's optimizers, or a wrapper around one, not {type(inner).__name__}. {otherwise}"
        )
    return inner


@contextmanager
def structured(optimizer: Any) -> Iterator[StructuredOptimizer]:
    """`optimizer.structured()` for an optimizer that a framework wrapped.

    Under `ZeroRedundancyOptimizer` every rank must enter and leave the context: each computes the structured point of
    its own parameters and sends it to the others.
    """
    with unwrap(optimizer).structured() as inner:
        zero = next((layer for layer in _layers(optimizer) if _is_zero(layer)), None)
        if zero is None:
            yield inner
            return
        own = {p for group in inner.param_groups for p in group["params"]}
        others = [p for group in zero.param_groups for p in group["params"] if p not in own]
        weights = [p.detach().clone() for p in others]
        zero._sync_params()
        try:
            yield inner
        finally:
            with torch.no_grad():
                for p, w in zip(others, weights, strict=True):
                    p.copy_(w)


def _layers(optimizer: Any) -> Iterator[Any]:
    """The optimizer, what it wraps, and so on."""
    while optimizer is not None:
        yield optimizer
        held = getattr(optimizer, "__dict__", {})
        # the attribute, not the class: Lightning's wrapper claims the class of what it wraps
        optimizer = next((held[k] for k in _INNER if k in held), None)


def _is_zero(optimizer: Any) -> bool:
    # its module takes two seconds to import, and there is none of it before somebody has
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
