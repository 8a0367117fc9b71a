"""Operations that work entry by entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.compact.rules.common import Arguments, Unknown, along_label, checked, names
from espalier.compact.trace import Tag, Tracer, shortest, varies
from espalier.compact.walk import tensors_in

# operands that are zero wherever one of them is
_PRODUCTS = names("mul multiply __mul__ __rmul__ __imul__")
_QUOTIENTS = names("div divide true_divide __truediv__ __itruediv__")
_ARITHMETIC = (
    *_PRODUCTS,
    *_QUOTIENTS,
    *names("""
    add sub subtract rsub pow lerp addcmul addcdiv clamp clamp_min clamp_max clip where masked_fill
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __rtruediv__ __pow__ __rpow__
"""),
)


def pointwise(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    operands = list(tensors_in([a["args"], a["kwargs"]]))
    if not isinstance(out, Tensor):
        raise Unknown
    tags = [tracer.tag(x) for x in operands]
    moving = [(x, t, varies(t.label)) for x, t in zip(operands, tags, strict=True) if tracer.tracked(x)]
    leading = next((m for m in moving if m[2]), moving[0] if moving else None)
    if leading is None:
        return
    first, tag, dims = leading
    # from the right, as broadcasting has it
    dims = [d - first.dim() for d in dims]
    result = tag.label.expand(out.shape)
    for x, t in zip(operands, tags, strict=True):
        full = [d for d in dims if x.dim() >= -d and x.shape[d] > 1]
        own = [d - x.dim() for d in varies(t.label)]
        if x is first:
            continue
        if own == dims:
            tracer.trace.units.join(shortest(t.label.expand(out.shape)), shortest(result))
        elif own:
            tracer.pin([first, x], f"{name} joins channels of different dimensions")
        elif tracer.tracked(x):  # one channel for all
            if full:
                tracer.pin([first, x], f"{name} needs all of its channels")
            else:
                tracer.trace.needs.append((shortest(result).reshape(-1), shortest(t.label).reshape(-1)))
        elif full and (known := tracer.name(x)) and len(dims) == 1:
            tracer.slot(known, x.dim() + dims[0], shortest(tag.label).reshape(-1))
        elif full:
            tracer.pin([first], f"{name} with channels that stay")
    constants = [along_label(_fixed(tracer, x, t), result) for x, t in zip(operands, tags, strict=True)]
    zero = [c & (along_label(x, result) == 0).cpu() for x, c in zip(operands, constants, strict=True)]
    # a number may depend on the sizes of the example inputs: only zero times any number is known
    numbers = name in _ARITHMETIC and any(isinstance(v, float | int) for v in [*a["args"], *a["kwargs"].values()])
    constant = torch.stack(zero if numbers else constants).all(0) & (not numbers or name in (*_PRODUCTS, *_QUOTIENTS))
    if name in _PRODUCTS:
        constant = constant | torch.stack(zero).any(0)
    tracer.set(out, result, checked(constant, out, result))


def cast_type(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    tag = tracer.tag(a["args"][0])
    if isinstance(out, Tensor):  # type() gives a name
        tracer.set(out, tag.label, tag.constant)


def noise(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    """New numbers for each entry, which are no constants."""
    tracer.set(out, tracer.label(a["args"][0]))


def _fixed(tracer: Tracer, x: Tensor, tag: Tag) -> Tensor:
    """Which entries of an operand are the same for every input; parameters and buffers are."""
    return torch.ones((), dtype=torch.bool).expand(x.shape) if tracer.name(x) else tag.constant
