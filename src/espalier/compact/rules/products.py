"""Products with a weight, and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from espalier.compact.layout import Given
from espalier.compact.rules.common import Arguments, Unknown
from espalier.compact.trace import Reader, Tracer, varies


def linear(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    _product(tracer, a["input"], a["weight"], a["bias"], out, -1, transposed=False, borders=False)


def matmul(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    operands = [*a["args"], *a["kwargs"].values()]
    x, weight = operands[0], operands[1]
    if tracer.name(weight) and weight.dim() == 2 and not tracer.name(x):
        _product(tracer, x, weight, None, out, -1, transposed=True, borders=False)
    else:
        tracer.pin([a["args"], a["kwargs"]], f"{name} of two tensors needs all of their channels")


def addmm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    if len(a["args"]) == 3 and not a["kwargs"]:
        bias, x, weight = a["args"]
        if tracer.name(bias) and tracer.name(weight) and bias.dim() == 1:
            _product(tracer, x, weight, bias, out, -1, transposed=True, borders=False)
            return
    tracer.pin([a["args"], a["kwargs"]], f"{name} needs all of their channels")


def conv(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight, groups = a["input"], a["weight"], a["groups"] or 1
    dim = -int(name[-2]) - 1
    padding = a["padding"] or 0
    borders = (
        padding != "valid" if isinstance(padding, str) else any((padding,) if isinstance(padding, int) else padding)
    )
    if groups == 1:
        _product(tracer, x, weight, a["bias"], out, dim, transposed=False, borders=borders)
        return
    columns = columns_of(tracer, x, dim)
    known, bias = tracer.name(weight), tracer.name(a["bias"])
    if columns is None or known is None or (a["bias"] is not None and bias is None):
        tracer.pin([x], "a grouped convolution of an unknown kind")
        return
    # whole groups, inputs with outputs
    units = tracer.trace.units
    inputs = columns.reshape(groups, -1)
    units.join(inputs, inputs[:, :1].expand_as(inputs))
    label = inputs[:, :1].expand(groups, weight.shape[0] // groups).reshape(-1)
    label = tracer.slot(known, 0, label)
    if bias is not None:
        tracer.slot(bias, 0, label)
    still = (weight.reshape(weight.shape[0], -1) == 0).all(1).cpu()
    if weight.shape[1] == 1:
        constant, values = constants_of(tracer, x, dim)
        still |= (constant & ((values == 0) | (not borders))).repeat_interleave(weight.shape[0] // groups)
    give(tracer, out, dim, label, still)


def conv_transpose(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    if (a["groups"] or 1) != 1:
        tracer.pin([a["input"]], "a grouped transposed convolution")
        return
    dim = -int(name[-2]) - 1
    _product(tracer, a["input"], a["weight"], a["bias"], out, dim, transposed=True, borders=True)


def columns_of(tracer: Tracer, x: Tensor, dim: int) -> Tensor | None:
    """The units along the one dimension that a product reads; None where they vary along another."""
    label = tracer.label(x)
    if varies(label) not in ([], [dim % x.dim()]) or not x.numel():
        return None
    return label.movedim(dim, 0).flatten(1)[:, 0] if x.dim() > 1 else label


def constants_of(tracer: Tracer, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Which of these are constants, and their values."""
    constant = tracer.tag(x).constant.movedim(dim, 0).reshape(x.shape[dim], -1).all(1)
    return constant, x.movedim(dim, 0).reshape(x.shape[dim], -1)[:, 0].cpu()


def give(tracer: Tracer, out: Tensor, dim: int, label: Tensor, constant: Tensor) -> None:
    shape = [1] * out.dim()
    shape[dim] = -1
    tracer.set(out, label.reshape(shape), constant.reshape(shape))


def _product(
    tracer: Tracer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dim: int,
    transposed: bool,
    borders: bool,
) -> None:
    known, known_bias = tracer.name(weight), tracer.name(bias)
    columns = columns_of(tracer, x, dim)
    named = known is not None and (bias is None or known_bias is not None) and not tracer.name(x)
    if not named or known is None or columns is None or weight.dim() < 2:
        tracer.pin(
            [x, weight, bias],
            "a weight that is no parameter" if known is None else "channels in another dimension than it reads",
        )
        return
    columns = tracer.slot(known, 0 if transposed else 1, columns)
    rows = tracer.slot(known, 1 if transposed else 0)
    if known_bias is not None:
        rows = tracer.slot(known_bias, 0, rows)
    w = weight.transpose(0, 1) if transposed else weight
    nonzero = (w.flatten(2) != 0).any(2).cpu() if w.dim() > 2 else (w != 0).cpu()
    constant, values = constants_of(tracer, x, dim)
    owner = tracer.owner(known)
    module = owner[0] if owner is not None and isinstance(owner[1], nn.Linear | _ConvNd) else None
    # a bias in half precision would not hold the sum exactly, and borders see zeros instead of the constant
    takes = (
        not borders
        and (known_bias is not None or module is not None)
        and weight.dtype in (torch.float32, torch.float64)
    )
    folds = constant & ((values == 0) | takes)
    tracer.trace.readers.append(
        Reader(known, known_bias, rows, columns, nonzero, folds, values, transposed, module, Given.like(x), dim)
    )
    give(tracer, out, dim, rows, ~(nonzero & ~folds).any(1))


def embedding(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    weight = a["weight"]
    known = tracer.name(weight)
    if known is None or a["max_norm"] is not None:
        raise Unknown
    constant = (weight.amin(0) == weight.amax(0)).cpu()
    give(tracer, out, -1, tracer.slot(known, 1), constant)


def attention(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    labels = [tracer.label(x) for x in (q, k, v)]
    known = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and all(
        x.dim() - 2 not in varies(t) for x, t in zip((q, k, v), labels, strict=True)
    )
    if not known or (mask is not None and any(n > 1 for n in mask.shape[1:-2])):
        raise Unknown
    tracer.pin([mask], "attention's mask")
    # a head's queries and keys are read by its outputs, whose channels are those of its values
    per_head = [t.select(-2, 0).reshape(math.prod(q.shape[:-2]), -1) for t in labels]
    for heads in zip(*per_head, strict=True):
        a_head, b_head, read = heads
        tracer.trace.needs.append((read, torch.cat([a_head, b_head])))
    if q.dim() > 3:  # as many heads of each
        tracer.trace.equal.append([t.reshape(-1, *t.shape[-3:])[0, :, 0, 0] for t in labels])
    tracer.set(out, labels[2].narrow(-2, 0, 1))
