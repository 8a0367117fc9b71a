"""A model of which zeros left too little: what no check of equal outputs can find wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from espalier.compact.examples import Call
from espalier.compact.verify import outputs
from espalier.compact.walk import tensors_in
from espalier.regularize import weights_of

_NAMES = 3  # as many names a line lists


def zero_weights(model: nn.Module) -> list[str]:
    """Names of layers' weights that are zero as a whole."""
    found: dict[int, str] = {}
    for owner, module in model.named_modules():
        for short, _ in weights_of(module):
            weight = getattr(module, short, None)
            if isinstance(weight, Tensor) and weight.numel() and not weight.any():
                found.setdefault(id(weight), f"{owner}.{short}" if owner else short)
    return list(found.values())


def nothing_left(model: nn.Module, given: Sequence[Call]) -> tuple[tuple[str, ...], bool]:
    """Lines about layers that are zero as a whole, and whether the model computes the same for all of these inputs."""
    empty = zero_weights(model)
    if not empty:
        return (), False
    names = ", ".join(empty[:_NAMES]) + (f" and {len(empty) - _NAMES} more" if len(empty) > _NAMES else "")
    zero = f"every weight of {names} is zero"
    if not _constant(model, given):
        return (zero,), False
    advice = "If a penalty did that, λ was too large: train again with λ / 10"
    return (f"the model computes the same output for different inputs, because {zero}. {advice}.",), True


def _constant(model: nn.Module, given: Sequence[Call]) -> bool:
    """Whether outputs are equal for inputs that are not. Inputs that are all equal say nothing."""
    first, *others = given
    differing = [x for x in others if not _equal(list(tensors_in(first)), list(tensors_in(x)))]
    wanted = outputs(model, first) if differing else []
    return bool(differing) and all(_equal(wanted, outputs(model, x)) for x in differing)


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
