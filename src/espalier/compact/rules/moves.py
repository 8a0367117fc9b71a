"""Operations that move data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from espalier.compact.attributes import Seen, followed
from espalier.compact.rules.common import Arguments, Unknown, along_label, checked
from espalier.compact.trace import Tag, Tracer, shortest, varies


def reshape(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    if not isinstance(out, Tensor) or out.numel() != x.numel() or out.dtype != x.dtype or tracer.name(x):
        raise Unknown
    tag = tracer.tag(x)
    label = tag.label.reshape(out.shape)
    dims = varies(label)
    if len(dims) > 1:
        # blocks go as a whole, so that what is left is a rectangle again
        blocks = shortest(label).movedim(dims[0], 0).flatten(1)
        tracer.trace.units.join(blocks, blocks[:, :1].expand_as(blocks))
    _by_sizes(tracer, name, a, out, label)
    tracer.set(out, label, tag.constant.reshape(out.shape))


def _by_sizes(tracer: Tracer, name: str, a: Arguments, out: Tensor, label: Tensor) -> None:
    """Sizes that are given for channels: an attribute holds them, or they may be written in the code."""
    dim = next(iter(varies(label)), None)
    counted = None if dim is None else _size_of(dim, name, a, out)
    given = [a["args"][1:], a["kwargs"]]
    for number in followed(given):
        if number is counted and dim is not None:
            number.is_size(shortest(label).movedim(dim, 0).flatten(1)[:, 0])
            counted = None  # the same number at another place is none of channels
        else:
            number.must_stay()
    plain = [n for n in tree_leaves(given) if isinstance(n, int) and not isinstance(n, Seen)]
    if dim is not None and out.shape[dim] in plain:
        tracer.trace.risky.append(shortest(label).reshape(-1))


def _size_of(dim: int, name: str, a: Arguments, out: Tensor) -> Seen | None:
    """The followed number that is given as the size of this dimension of the result."""
    if name not in ("view", "reshape", "unflatten", "expand", "broadcast_to"):
        return None
    rest, by_name, first = a["args"][1:], a["kwargs"], 0
    if name == "unflatten":
        first = by_name.get("dim", rest[0] if rest else 0) % a["args"][0].dim()
        given = by_name.get("sizes", rest[1:])
    else:
        given = by_name.get("shape", by_name.get("size", rest))
    if len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    if name in ("expand", "broadcast_to"):
        first = out.dim() - len(given)
    found = given[dim - first] if 0 <= dim - first < len(given) else None
    return found if isinstance(found, Seen) else None


def fresh(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    """A new tensor that has nothing of x but its type, unless its sizes are those of x's channels."""
    x, *rest = a["args"]
    channels = {x.shape[d] for d in varies(tracer.label(x))}
    if channels & set(out.shape) or any(isinstance(v, Tensor) for v in tree_leaves([rest, a["kwargs"]])):
        raise Unknown


def move(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    if tracer.name(x):
        raise Unknown
    tag = tracer.tag(x)
    method = getattr(Tensor, name)

    def moved(t: Tensor) -> Tensor:
        return cast(Tensor, method.__get__(t) if name in ("T", "mT") else method(t, *rest, **a["kwargs"]))

    label = moved(tag.label)
    _by_sizes(tracer, name, a, out, label)
    tracer.set(out, label, moved(tag.constant))


def join(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    xs, *rest = a["args"]
    dim = (rest[0] if rest else a["kwargs"].get("dim", 0)) % out.dim()
    tags = [tracer.tag(x) for x in xs if x.shape != (0,)]
    if name == "stack":
        tags = [Tag(t.label.unsqueeze(dim), t.constant.unsqueeze(dim)) for t in tags]
    if any(len(varies(t.label)) > 1 and dim in varies(t.label) for t in tags):
        raise Unknown
    # along other dimensions than the one that is joined the operands' channels are the same
    fronts = [t.label.narrow(dim, 0, 1) for t in tags]
    for front in fronts[1:] if any(dim not in varies(t.label) and varies(t.label) for t in tags) else ():
        tracer.trace.units.join(fronts[0], front)
    if any(dim in varies(t.label) for t in tags) and any(set(varies(t.label)) - {dim} for t in tags):
        tracer.pin(xs, f"{name} joins channels of different dimensions")
    label, constant = torch.cat([t.label for t in tags], dim), torch.cat([t.constant for t in tags], dim)
    if dim not in varies(label):
        constant = checked(constant.amin(dim, keepdim=True).expand(out.shape), out, label)
    tracer.set(out, label, constant)


def chunk(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    tag = tracer.tag(x)
    labels = tag.label.chunk(*rest, **a["kwargs"])
    constants = tag.constant.chunk(*rest, **a["kwargs"])
    dim = (rest[1] if len(rest) > 1 else a["kwargs"].get("dim", 0)) % x.dim()
    if dim in varies(tag.label):
        if tracer.name(x) or len({y.shape for y in out}) > 1:
            raise Unknown
        tracer.trace.equal.append([shortest(label).reshape(-1) for label in labels])
    for y, label, constant in zip(out, labels, constants, strict=True):
        tracer.set(y, label, constant)


def split(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    """In pieces of one size, or of a list of sizes."""
    x, *rest = a["args"]
    tag = tracer.tag(x)
    given = dict(zip(("sizes", "dim"), rest, strict=False))
    given |= {"sizes" if "split" in k else k: v for k, v in a["kwargs"].items()}
    sizes, dim = given["sizes"], given.get("dim", 0) % x.dim()
    lengths = [y.shape[dim] for y in out]
    labels, constants = (torch.split_with_sizes(t, lengths, dim) for t in (tag.label, tag.constant))
    channels = [shortest(label).movedim(dim, 0).flatten(1)[:, 0] for label in labels]
    if dim in varies(tag.label):
        one = isinstance(sizes, int)
        if tracer.name(x) or varies(tag.label) != [dim] or (one and len(set(lengths)) > 1):
            raise Unknown
        if one:
            tracer.trace.equal.append(channels)
        for size, piece in [(sizes, channels[0])] if one else zip(sizes, channels, strict=True):
            if isinstance(size, Seen):
                size.is_size(piece)
            else:
                tracer.trace.risky.append(piece)
    else:
        for number in followed(sizes):
            number.must_stay()
    for number in followed(given.get("dim")):
        number.must_stay()
    for y, label, constant in zip(out, labels, constants, strict=True):
        tracer.set(y, label, constant)


def cut(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    position = 1 if "split" in name else 0
    dim = a["kwargs"].get("dim", rest[position] if len(rest) > position else 0)
    tag = tracer.tag(x)
    if tracer.name(x) or dim % x.dim() in varies(tag.label):
        raise Unknown
    method = getattr(Tensor, name)
    labels, constants = (method(t, *rest, **a["kwargs"]) for t in (tag.label, tag.constant))
    pieces = [(out, labels, constants)] if isinstance(out, Tensor) else zip(out, labels, constants, strict=True)
    for y, label, constant in pieces:
        tracer.set(y, label, constant)


def item(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, index = a["args"]
    index = index if isinstance(index, tuple) else (index,)
    tag = tracer.tag(x)
    plain = all(i is None or i is Ellipsis or (isinstance(i, int | slice) and not isinstance(i, bool)) for i in index)
    if tracer.name(x) or not plain:
        raise Unknown
    # which dimensions are left whole
    given = [i for i in index if i is not None and i is not Ellipsis]
    ahead = index.index(Ellipsis) - index[: index.index(Ellipsis)].count(None) if Ellipsis in index else len(given)
    each = [*given[:ahead], *[slice(None)] * (x.dim() - len(given)), *given[ahead:]]
    if any(each[d] != slice(None) for d in varies(tag.label)):
        raise Unknown
    tracer.set(out, tag.label[index], tag.constant[index])


def pad(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, widths = a["input"], list(a["pad"])
    tag = tracer.tag(x)
    padded = [x.dim() - 1 - i // 2 for i, n in enumerate(widths) if n]
    if tracer.name(x) or set(padded) & set(varies(tag.label)):
        raise Unknown
    # what is put around must be the constant itself, whatever the sizes
    same = (along_label(x, tag.label) == (a["value"] or 0.0)).cpu() | ((a["mode"] or "constant") != "constant")
    per_channel(tracer, tag, out, same)


def per_channel(tracer: Tracer, tag: Tag, out: Tensor, still: Tensor | bool = True) -> None:
    """Something that works on each channel by itself, and leaves these constants alone."""
    label, constant = (along_label(t, tag.label) for t in (tag.label, tag.constant))
    label = label.expand(out.shape)
    tracer.set(out, label, checked(constant & still, out, label))
