"""What each operation of torch does to channels. One that is not here keeps all channels that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from espalier.compact.trace import Reader, Split, Tracer, shortest, tensors_in, varies

Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Tracer, str, Arguments, Any], None]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# entry by entry, with broadcasting
_POINTWISE = _names("""
    relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid sigmoid logsigmoid tanh softplus
    softsign tanhshrink softshrink hardshrink threshold rrelu exp expm1 log log1p log2 sqrt rsqrt square abs neg
    negative sin cos erf reciprocal sign floor ceil round clamp clamp_min clamp_max clip pow nan_to_num
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    add sub subtract mul multiply div divide true_divide rsub maximum minimum where lerp addcmul addcdiv
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
    __pow__ __rpow__ __neg__
    to type float double half bfloat16 cuda cpu contiguous clone detach data alias positive
""")
# operands that are zero wherever one of them is
_PRODUCTS = _names("mul multiply __mul__ __rmul__ __imul__")
_RESHAPES = _names("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
_MOVES = _names("""
    permute transpose swapaxes swapdims movedim moveaxis t T mT adjoint expand expand_as broadcast_to repeat
""")
_JOINS = _names("cat concat concatenate stack")
_CUTS = _names("split split_with_sizes tensor_split unbind select narrow")
_REDUCTIONS = _names("mean sum amax amin")
_ALONG = _names("softmax log_softmax softmin normalize cumsum")
_POOLS = _names("""
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d interpolate upsample
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
""")
# only look at a tensor's form
_LOOKS = _names("""
    size dim stride numel is_contiguous get_device ndimension element_size storage_offset is_floating_point is_complex
    data_ptr __len__ shape ndim dtype device is_cuda requires_grad is_nested layout is_sparse is_quantized grad_fn names
    _version itemsize nbytes is_leaf is_mkldnn is_meta is_inference requires_grad_ __hash__ __repr__ __format__
    dim_order
""")


def apply(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation and note what it did to channels."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    out = func(*args, **kwargs)
    if name not in _LOOKS:
        _note(tracer, name if name in RULES else name.rstrip("_"), func, args, kwargs, out)
    return out


def _note(tracer: Tracer, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    rule = RULES.get(name)
    given = [x for x in tensors_in([args, kwargs]) if tracer.tracked(x) or tracer.name(x)]
    if not given:
        return
    if rule is not None:
        names = _ARGUMENTS.get(rule)
        by_name = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs if names else None
        rule(tracer, name, by_name or {"args": args, "kwargs": kwargs}, out)
        return
    tracer.pin([args, kwargs], f"{name} needs all of its channels")
    for x in given:
        if found := tracer.name(x):
            tracer.refuse(found)


# ---------------------------------------------------------------------------------------------------- entry by entry


def _pointwise(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    operands = list(tensors_in([a["args"], a["kwargs"]]))
    if not isinstance(out, Tensor) or (name == "where" and not isinstance(a["args"][-1], Tensor)):
        tracer.pin(operands, f"{name} needs all of its channels")
        return
    tags = [tracer.tag(x) for x in operands]
    moving = [(x, t, varies(t.label)) for x, t in zip(operands, tags, strict=True) if tracer.tracked(x)]
    leading = next((m for m in moving if m[2]), moving[0] if moving else None)
    if leading is None:
        _refuse(tracer, operands)
        return
    first, tag, dims = leading
    # from the right, as broadcasting has it
    dims = [d - first.dim() for d in dims]
    result = _broadcast(tag.label, out)
    for x, t in zip(operands, tags, strict=True):
        full = [d for d in dims if x.dim() >= -d and x.shape[d] > 1]
        own = [d - x.dim() for d in varies(t.label)]
        if x is first:
            continue
        if own == dims:
            tracer.trace.units.join(shortest(_broadcast(t.label, out)), shortest(result))
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
            tracer.pin([first], f"{name} with a tensor whose channels are not known")
            _refuse(tracer, [x])
    constants = [
        _broadcast(t.constant if tracer.tracked(x) else _fixed(tracer, x), out)
        for x, t in zip(operands, tags, strict=True)
    ]
    constant = (
        torch.stack([shortest(c).expand(out.shape) if c.dim() else c for c in constants]).all(0)
        if out.dim()
        else constants[0]
    )
    if name in _PRODUCTS and out.dim():
        zero = [
            shortest(c) & (_front(x.expand(out.shape), shortest(c)) == 0)
            for x, c in zip(operands, constants, strict=True)
            if x.dim()
        ]
        for z in zero:
            constant = constant | z.expand(out.shape)
    tracer.set(out, result, _checked(constant, out, result))


def _fixed(tracer: Tracer, x: Tensor) -> Tensor:
    """Parameters and numbers are constants; they count as such only where they do not differ between positions."""
    return torch.full((), tracer.name(x) is not None or x.dim() == 0).expand(x.shape)


def _front(x: Tensor, like: Tensor) -> Tensor:
    """The first entries of x, as many as `like` has."""
    for d, n in enumerate(like.shape):
        x = x.narrow(d, 0, n)
    return x


def _broadcast(x: Tensor, out: Tensor) -> Tensor:
    return x.expand(out.shape)


def _checked(constant: Tensor, out: Tensor, label: Tensor) -> Tensor:
    """Only what does not differ between the positions of a channel: borders and parameters may make it."""
    keep = varies(label)
    rest = [d for d in range(out.dim()) if d not in keep]
    short = constant
    for d in rest:
        short = short.narrow(d, 0, 1)
    if not rest or not bool(short.any()) or not out.is_floating_point():
        return short & out.is_floating_point() & bool(rest)
    same = (out.amin(rest, keepdim=True) == out.amax(rest, keepdim=True)).cpu()
    return short & same & constant.to(torch.int8).amin(rest, keepdim=True).bool()


def _refuse(tracer: Tracer, operands: Sequence[Tensor]) -> None:
    for x in operands:
        if known := tracer.name(x):
            tracer.refuse(known)


# ---------------------------------------------------------------------------------------------------- moving data


def _reshape(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    if not isinstance(out, Tensor) or out.numel() != x.numel() or out.dtype != x.dtype or tracer.name(x):
        tracer.pin([x], f"{name} needs all of its channels")
        _refuse(tracer, [x])
        return
    tag = tracer.tag(x)
    label = tag.label.reshape(out.shape)
    dims = varies(label)
    if len(dims) > 1:
        # blocks go as a whole, so that what is left is a rectangle again
        blocks = shortest(label).movedim(dims[0], 0).flatten(1)
        tracer.trace.units.join(blocks, blocks[:, :1].expand_as(blocks))
        tracer.trace.splits.append(Split(tracer.place, blocks.shape[0], blocks.shape[1], blocks[:, 0]))
    sizes = [n for n in torch.utils._pytree.tree_leaves(a["args"][1:]) if isinstance(n, int)]
    written = name in ("view", "reshape", "unflatten") and any(out.shape[d] in sizes for d in dims[:1])
    if written:
        tracer.trace.risky.append(shortest(label).reshape(-1))
    tracer.set(out, label, tag.constant.reshape(out.shape))


def _move(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    if tracer.name(x):
        _refuse(tracer, [x])
        return
    tag = tracer.tag(x)
    method = getattr(Tensor, name)

    def moved(t: Tensor) -> Tensor:
        return cast(Tensor, method.__get__(t) if name in ("T", "mT") else method(t, *rest, **a["kwargs"]))

    tracer.set(out, moved(tag.label), moved(tag.constant))


def _join(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    xs, *rest = a["args"] or (a["kwargs"]["tensors"],)
    _refuse(tracer, xs)
    more = {k: v for k, v in a["kwargs"].items() if k == "dim"}
    tags = [tracer.tag(x) for x in xs if x.shape != (0,)]
    func = torch.stack if name == "stack" else torch.cat
    label = func([t.label for t in tags], *rest, **more)
    dim = (rest[0] if rest else more.get("dim", 0)) % out.dim()
    # along other dimensions than the one that is joined the operands' channels are the same
    for d in varies(label):
        if d != dim and name != "stack" and len(tags) > 1:
            first = tags[0].label.narrow(dim, 0, 1)
            for t in tags[1:]:
                tracer.trace.units.join(
                    shortest(first.expand_as(t.label.narrow(dim, 0, 1))),
                    shortest(first) * 0 + _front(t.label, shortest(first)),
                )
    tracer.set(out, label, func([t.constant for t in tags], *rest, **more))


def _chunk(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    tag = tracer.tag(x)
    labels = tag.label.chunk(*rest, **a["kwargs"])
    constants = tag.constant.chunk(*rest, **a["kwargs"])
    for y, label, constant in zip(out, labels, constants, strict=True):
        tracer.set(y, label, constant)
    dim = (rest[1] if len(rest) > 1 else a["kwargs"].get("dim", 0)) % x.dim()
    if dim in varies(tag.label):
        if len({y.shape for y in out}) > 1:
            tracer.pin([x], "chunk into unequal parts")
        tracer.trace.equal.append([shortest(label).reshape(-1) for label in labels])


def _cut(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    position = 1 if "split" in name else 0
    dim = a["kwargs"].get("dim", rest[position] if len(rest) > position else 0)
    tag = tracer.tag(x)
    if tracer.name(x) or dim % x.dim() in varies(tag.label):
        tracer.pin([x], f"{name} of channels, by numbers in the code")
        _refuse(tracer, [x])
        return
    method = getattr(Tensor, name)
    labels, constants = (method(t, *rest, **a["kwargs"]) for t in (tag.label, tag.constant))
    pieces = [(out, labels, constants)] if isinstance(out, Tensor) else zip(out, labels, constants, strict=True)
    for y, label, constant in pieces:
        tracer.set(y, label, constant)


def _item(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, index = a["args"]
    index = index if isinstance(index, tuple) else (index,)
    tag = tracer.tag(x)
    plain = all(i is None or i is Ellipsis or (isinstance(i, int | slice) and not isinstance(i, bool)) for i in index)
    if tracer.name(x) or not plain:
        tracer.pin([x], "an index whose kind is not known")
        _refuse(tracer, [x])
        return
    # which dimensions are left whole
    given = [i for i in index if i is not None and i is not Ellipsis]
    ahead = index.index(Ellipsis) - index[: index.index(Ellipsis)].count(None) if Ellipsis in index else len(given)
    each = [*given[:ahead], *[slice(None)] * (x.dim() - len(given)), *given[ahead:]]
    if any(each[d] != slice(None) for d in varies(tag.label)):
        tracer.pin([x], "channels chosen by numbers in the code")
        return
    tracer.set(out, tag.label[index], tag.constant[index])


def _pad(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, widths = a["input"], list(a["pad"])
    tag = tracer.tag(x)
    padded = [x.dim() - 1 - i // 2 for i, n in enumerate(widths) if n]
    if set(padded) & set(varies(tag.label)):
        tracer.pin([x], "pad adds channels")
        return
    label, constant = (_front(t, shortest(tag.label)) for t in (tag.label, tag.constant))
    tracer.set(out, label, _checked(constant.expand(out.shape), out, label.expand(out.shape)))


# ---------------------------------------------------------------------------------------------------- along dimensions


def _reduce(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    dims = a["kwargs"].get("dim", a["args"][1] if len(a["args"]) > 1 else None)
    dims = list(range(x.dim())) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    dims = [d % x.dim() for d in dims]
    tag = tracer.tag(x)
    if not isinstance(out, Tensor) or tracer.name(x) or set(dims) & set(varies(tag.label)):
        tracer.pin([x], f"{name} over channels")
        _refuse(tracer, [x])
        return
    keep = out.dim() == x.dim()
    label = tag.label.amin(dims, keepdim=keep)
    constant = tag.constant.to(torch.int8).amin(dims, keepdim=keep).bool()
    if name == "sum":
        constant = constant & False
    tracer.set(out, label, _checked(constant, out, label))


def _along(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    dim = a["kwargs"].get("dim", next((v for v in a["args"][1:] if isinstance(v, int)), None))
    tag = tracer.tag(x)
    if (
        not isinstance(out, Tensor)
        or out.shape != x.shape
        or not isinstance(dim, int)
        or dim % x.dim() in varies(tag.label)
    ):
        tracer.pin([x], f"{name} over channels")
        return
    tracer.set(out, tag.label)


def _pool(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    spatial = int(name[-2]) if name[-1] == "d" else x.dim() - 2
    tag = tracer.tag(x)
    if not isinstance(out, Tensor) or any(d >= x.dim() - spatial for d in varies(tag.label)):
        tracer.pin([a["args"]], f"{name} over channels")
        return
    label, constant = (_front(t, shortest(tag.label)) for t in (tag.label, tag.constant))
    tracer.set(out, label, _checked(constant.expand(out.shape), out, label.expand(out.shape)))


# ---------------------------------------------------------------------------------------------------- normalisation


def _batch_norm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
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
    if name == "instance_norm":
        constant = constant & False
    tracer.set(out, tag.label, _checked(constant.expand(out.shape), out, tag.label))


def _instance_norm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    _batch_norm(tracer, name, {**a, "training": True}, out)


def _norm_over(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    """Layer norm and its like mix what they normalise."""
    x = a["args"][0]
    tag = tracer.tag(x)
    shape = a["kwargs"].get("normalized_shape", a["args"][1] if len(a["args"]) > 1 else None)
    over = (
        range(x.dim() - len(shape), x.dim()) if shape is not None and not isinstance(shape, int) else range(1, x.dim())
    )
    _refuse(tracer, list(tensors_in([a["args"][1:], a["kwargs"]])))
    if set(over) & set(varies(tag.label)):
        tracer.pin([x], f"{name} needs all of its channels")
    else:
        tracer.set(out, tag.label)


# ---------------------------------------------------------------------------------------------------- products


def _linear(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    _product(tracer, a["input"], a["weight"], a["bias"], out, -1, transposed=False, borders=False)


def _matmul(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight = a["args"][:2]
    if tracer.name(weight) and weight.dim() == 2 and not tracer.name(x):
        _product(tracer, x, weight, None, out, -1, transposed=True, borders=False)
    else:
        tracer.pin([a["args"]], f"{name} of two tensors needs all of their channels")
        _refuse(tracer, list(tensors_in(a["args"])))


def _addmm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    bias, x, weight = a["args"][:3]
    if tracer.name(bias) and tracer.name(weight) and bias.dim() == 1 and not a["kwargs"]:
        _product(tracer, x, weight, bias, out, -1, transposed=True, borders=False)
    else:
        tracer.pin([a["args"]], f"{name} needs all of its channels")
        _refuse(tracer, list(tensors_in(a["args"])))


def _conv(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight, groups = a["input"], a["weight"], a["groups"] or 1
    dim = -int(name[-2]) - 1
    padding = a["padding"] or 0
    borders = (
        padding != "valid" if isinstance(padding, str) else any((padding,) if isinstance(padding, int) else padding)
    )
    if groups == 1:
        _product(tracer, x, weight, a["bias"], out, dim, transposed=False, borders=borders)
        return
    columns = _columns(tracer, x, dim)
    known, bias = tracer.name(weight), tracer.name(a["bias"])
    if columns is None or known is None or (a["bias"] is not None and bias is None):
        tracer.pin([x], "a grouped convolution of an unknown kind")
        _refuse(tracer, list(tensors_in([weight, a["bias"]])))
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
        constant, values = _constants(tracer, x, dim)
        still |= (constant & ((values == 0) | (not borders))).repeat_interleave(weight.shape[0] // groups)
    _give(tracer, out, dim, label, still)


def _conv_transpose(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    if (a["groups"] or 1) != 1:
        tracer.pin([a["input"]], "a grouped transposed convolution")
        _refuse(tracer, list(tensors_in([a["weight"], a["bias"]])))
        return
    dim = -int(name[-2]) - 1
    _product(tracer, a["input"], a["weight"], a["bias"], out, dim, transposed=True, borders=True)


def _columns(tracer: Tracer, x: Tensor, dim: int) -> Tensor | None:
    """The units along the one dimension that a product reads; None where they vary along another."""
    label = tracer.label(x)
    if varies(label) not in ([], [dim % x.dim()]):
        return None
    return label.movedim(dim, 0).flatten(1)[:, 0] if x.dim() > 1 else label


def _constants(tracer: Tracer, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Which of these are constants, and their values."""
    constant = tracer.tag(x).constant.movedim(dim, 0).reshape(x.shape[dim], -1).all(1)
    return constant, x.movedim(dim, 0).reshape(x.shape[dim], -1)[:, 0].cpu()


def _give(tracer: Tracer, out: Tensor, dim: int, label: Tensor, constant: Tensor) -> None:
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
    columns = _columns(tracer, x, dim)
    if known is None or (bias is not None and known_bias is None) or columns is None or tracer.name(x):
        tracer.pin(
            [x], "a weight that is no parameter" if known is None else "channels in another dimension than it reads"
        )
        _refuse(tracer, [p for p in (x, weight, bias) if p is not None])
        return
    columns = tracer.slot(known, 0 if transposed else 1, columns)
    rows = tracer.slot(known, 1 if transposed else 0)
    if known_bias is not None:
        rows = tracer.slot(known_bias, 0, rows)
    w = weight.transpose(0, 1) if transposed else weight
    nonzero = (w.flatten(2) != 0).any(2).cpu() if w.dim() > 2 else (w != 0).cpu()
    constant, values = _constants(tracer, x, dim)
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
        Reader(known, known_bias, rows, columns, nonzero, folds, values, transposed, module, tuple(x.shape), dim)
    )
    _give(tracer, out, dim, rows, ~(nonzero & ~folds).any(1))


def _embedding(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    weight = a["weight"]
    known = tracer.name(weight)
    if known is None or a["max_norm"] is not None:
        _refuse(tracer, [weight])
        return
    constant = (weight.amin(0) == weight.amax(0)).cpu()
    _give(tracer, out, -1, tracer.slot(known, 1), constant)


def _attention(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    labels = [tracer.label(x) for x in (q, k, v)]
    known = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and all(
        x.dim() - 2 not in varies(t) for x, t in zip((q, k, v), labels, strict=True)
    )
    if not known or (mask is not None and any(n > 1 for n in mask.shape[1:-2])):
        tracer.pin([q, k, v], "attention of an unknown kind")
        return
    # a head's queries and keys are read by its outputs, whose channels are those of its values
    per_head = [t.select(-2, 0).reshape(math.prod(q.shape[:-2]), -1) for t in labels]
    for heads in zip(*per_head, strict=True):
        a_head, b_head, read = heads
        tracer.trace.needs.append((read, torch.cat([a_head, b_head])))
    tracer.set(out, labels[2].narrow(-2, 0, 1))


def _prelu(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight = a["input"], a["weight"]
    tag = tracer.tag(x)
    known = tracer.name(weight)
    if weight.numel() > 1:
        columns = _columns(tracer, x, 1)
        if known is None or columns is None:
            tracer.pin([x], "prelu of an unknown kind")
            _refuse(tracer, [weight])
            return
        tracer.slot(known, 0, columns)
    tracer.set(out, tag.label, _checked(tag.constant, out, tag.label))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(_JOINS, _join),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys(("layer_norm", "group_norm", "rms_norm"), _norm_over),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    **dict.fromkeys(("matmul", "mm", "__matmul__"), _matmul),
    "chunk": _chunk,
    **dict.fromkeys(_CUTS, _cut),
    "__getitem__": _item,
    "pad": _pad,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "prelu": _prelu,
}
# the arguments of rules that want them by name; what is not given is None
_ARGUMENTS: dict[Rule, tuple[str, ...]] = {
    _pad: _names("input pad mode value"),
    _batch_norm: _names("input running_mean running_var weight bias training momentum eps cudnn_enabled"),
    _instance_norm: _names("input running_mean running_var weight bias training momentum eps cudnn_enabled"),
    _linear: _names("input weight bias"),
    _conv: _names("input weight bias stride padding dilation groups"),
    _conv_transpose: _names("input weight bias stride padding output_padding groups dilation"),
    _embedding: _names("input weight padding_idx max_norm"),
    _attention: _names("query key value attn_mask"),
    _prelu: _names("input weight"),
}
