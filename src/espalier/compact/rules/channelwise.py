"""Operations on each channel by itself, as long as they do not mix channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.compact.rules.common import Arguments, Unknown, along_label, checked
from espalier.compact.rules.moves import per_channel
from espalier.compact.rules.products import columns_of
from espalier.compact.trace import Tracer, varies


def reduce(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    dims = a["kwargs"].get("dim", a["args"][1] if len(a["args"]) > 1 else None)
    dims = list(range(x.dim())) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    dims = [d % x.dim() for d in dims]
    tag = tracer.tag(x)
    if not isinstance(out, Tensor) or tracer.name(x) or set(dims) & set(varies(tag.label)):
        tracer.pin([x], f"{name} over channels")
        return
    keep = out.dim() == x.dim()
    label = tag.label.amin(dims, keepdim=keep)
    constant = tag.constant.to(torch.int8).amin(dims, keepdim=keep).bool() & (name != "sum")
    tracer.set(out, label, checked(constant, out, label))


def along(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    dim = a["kwargs"].get("dim", next((v for v in a["args"][1:] if isinstance(v, int)), None))
    tag = tracer.tag(x)
    known = isinstance(out, Tensor) and out.shape == x.shape and isinstance(dim, int)
    if not known or tracer.name(x) or dim % x.dim() in varies(tag.label):
        tracer.pin([x], f"{name} over channels")
        return
    tracer.set(out, tag.label)


def pool(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    spatial = int(name[-2]) if name[-1] == "d" else x.dim() - 2
    tag = tracer.tag(x)
    if not isinstance(out, Tensor) or tracer.name(x) or any(d >= x.dim() - spatial for d in varies(tag.label)):
        raise Unknown
    # what is averaged with a border is only the same everywhere where it is zero
    still = (along_label(x, tag.label) == 0).cpu() | (not name.startswith("avg_pool"))
    per_channel(tracer, tag, out, still)


def batch_norm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x = a["input"]
    tag = tracer.tag(x)
    given = [a[k] for k in ("running_mean", "running_var", "weight", "bias") if a[k] is not None]
    if varies(tag.label) not in ([], [1]) or not all(tracer.name(g) for g in given):
        tracer.pin([x], f"{name} of an unknown kind")
        return
    channels = tag.label.movedim(1, 0).flatten(1)[:, 0]
    for g in given:
        tracer.slot(tracer.name(g) or "", 0, channels)
    constant = tag.constant & (not a["training"])
    if a["weight"] is not None and not a["training"]:
        still = (a["weight"] == 0).cpu().reshape(1, -1, *[1] * (x.dim() - 2))
        constant = constant | still
    tracer.set(out, tag.label, checked(constant.expand(out.shape), out, tag.label))


def instance_norm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    batch_norm(tracer, name, {**a, "training": True}, out)


def norm_over(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    """Layer norm and its like mix what they normalise."""
    x = a["args"][0]
    tag = tracer.tag(x)
    shape = a["kwargs"].get("normalized_shape", a["args"][1] if len(a["args"]) > 1 else None)
    over = (
        range(x.dim() - len(shape), x.dim()) if shape is not None and not isinstance(shape, int) else range(1, x.dim())
    )
    if set(over) & set(varies(tag.label)):
        tracer.pin([x], f"{name} needs all of its channels")
    else:
        tracer.set(out, tag.label)


def prelu(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight = a["input"], a["weight"]
    tag = tracer.tag(x)
    known = tracer.name(weight)
    if weight.numel() > 1:
        columns = columns_of(tracer, x, 1)
        if known is None or columns is None:
            tracer.pin([x], "prelu of an unknown kind")
            return
        tracer.slot(known, 0, columns)
    tracer.set(out, tag.label, checked(tag.constant, out, tag.label))
