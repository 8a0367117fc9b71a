"""What each operation of torch does to channels. One that is not here keeps all channels that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from espalier.compact.trace import Reader, Split, Tag, Tracer, shortest, tensors_in, varies

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
    positive
""")
_CASTS = _names("to type type_as float double half bfloat16 cuda cpu contiguous clone detach data alias")
# operands that are zero wherever one of them is
_PRODUCTS = _names("mul multiply __mul__ __rmul__ __imul__")
_QUOTIENTS = _names("div divide true_divide __truediv__ __itruediv__")
_ARITHMETIC = (
    *_PRODUCTS,
    *_QUOTIENTS,
    *_names("""
    add sub subtract rsub pow lerp addcmul addcdiv clamp clamp_min clamp_max clip where
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __rtruediv__ __pow__ __rpow__
"""),
)
# change their first operand, beside those whose names end in _
_WRITES = _names("__setitem__ __iadd__ __isub__ __imul__ __itruediv__")
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
        known = name if name in RULES else name.rstrip("_")
        _note(tracer, known, args, kwargs, out)
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            tracer.written(args[0] if args else out, known in RULES)
    return out


def _note(tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    given = [x for x in tensors_in([args, kwargs]) if tracer.tracked(x) or tracer.name(x)]
    if not given:
        return
    rule = RULES.get(name)
    tracer.slotted.clear()
    try:
        if rule is None or "out" in kwargs:
            raise NotImplementedError
        rule(tracer, name, _by_name(rule, args, kwargs), out)
    except (NotImplementedError, LookupError, TypeError, ValueError, RuntimeError):
        tracer.pin([args, kwargs], f"{name} is not understood, and keeps all channels")
    # a parameter that a rule did not give channels to is used in a way of its own
    for found in {tracer.name(x) for x in given} - tracer.slotted:
        if found:
            tracer.refuse(found)


def _by_name(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments as the rule wants them."""
    if names := _ARGUMENTS.get(rule):
        return dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    for first in ("input", "self", "tensors", "tensor"):
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
    return {"args": args, "kwargs": kwargs}


# ---------------------------------------------------------------------------------------------------- entry by entry


def _pointwise(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    operands = list(tensors_in([a["args"], a["kwargs"]]))
    if not isinstance(out, Tensor):
        raise NotImplementedError
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
    constants = [_along_label(_fixed(tracer, x, t), result) for x, t in zip(operands, tags, strict=True)]
    zero = [c & (_along_label(x, result) == 0).cpu() for x, c in zip(operands, constants, strict=True)]
    # a number may depend on the sizes of the example inputs: only zero times any number is known
    numbers = name in _ARITHMETIC and any(isinstance(v, float | int) for v in [*a["args"], *a["kwargs"].values()])
    constant = torch.stack(zero if numbers else constants).all(0) & (not numbers or name in (*_PRODUCTS, *_QUOTIENTS))
    if name in _PRODUCTS:
        constant = constant | torch.stack(zero).any(0)
    tracer.set(out, result, _checked(constant, out, result))


def _cast(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    tag = tracer.tag(a["args"][0])
    tracer.set(out, tag.label, tag.constant)


def _fixed(tracer: Tracer, x: Tensor, tag: Tag) -> Tensor:
    """Which entries of an operand are the same for every input; parameters and buffers are."""
    return torch.ones((), dtype=torch.bool).expand(x.shape) if tracer.name(x) else tag.constant


def _along_label(x: Tensor, label: Tensor) -> Tensor:
    """One entry of x for each of the label's channels."""
    keep = varies(label)
    x = x.expand(label.shape)
    for d in range(x.dim()):
        if d not in keep:
            x = x.narrow(d, 0, min(1, x.shape[d]))
    return x


def _checked(constant: Tensor, out: Tensor, label: Tensor) -> Tensor:
    """Of the constants, those that do not differ between the positions of a channel: parameters may make them."""
    rest = [d for d in range(out.dim()) if d not in varies(label)]
    constant = _along_label(constant, label)
    if not rest or not out.numel() or not out.is_floating_point():
        return constant & False
    if not bool(constant.any()):
        return constant
    return constant & (out.amin(rest, keepdim=True) == out.amax(rest, keepdim=True)).cpu()


# ---------------------------------------------------------------------------------------------------- moving data


def _reshape(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    if not isinstance(out, Tensor) or out.numel() != x.numel() or out.dtype != x.dtype or tracer.name(x):
        raise NotImplementedError
    tag = tracer.tag(x)
    label = tag.label.reshape(out.shape)
    dims = varies(label)
    if len(dims) > 1:
        # blocks go as a whole, so that what is left is a rectangle again
        blocks = shortest(label).movedim(dims[0], 0).flatten(1)
        tracer.trace.units.join(blocks, blocks[:, :1].expand_as(blocks))
        tracer.trace.splits.append(Split(tracer.place, blocks.shape[0], blocks.shape[1], blocks[:, 0]))
    _by_sizes(tracer, a, out, label)
    tracer.set(out, label, tag.constant.reshape(out.shape))


def _by_sizes(tracer: Tracer, a: Arguments, out: Tensor, label: Tensor) -> None:
    """Sizes that are given for channels may be written in the code."""
    sizes = [n for n in tree_leaves([a["args"][1:], a["kwargs"]]) if isinstance(n, int)]
    if any(out.shape[d] in sizes for d in varies(label)[:1]):
        tracer.trace.risky.append(shortest(label).reshape(-1))


def _move(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    if tracer.name(x):
        raise NotImplementedError
    tag = tracer.tag(x)
    method = getattr(Tensor, name)

    def moved(t: Tensor) -> Tensor:
        return cast(Tensor, method.__get__(t) if name in ("T", "mT") else method(t, *rest, **a["kwargs"]))

    label = moved(tag.label)
    if name in ("expand", "broadcast_to"):
        _by_sizes(tracer, a, out, label)
    tracer.set(out, label, moved(tag.constant))


def _join(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    xs, *rest = a["args"]
    dim = (rest[0] if rest else a["kwargs"].get("dim", 0)) % out.dim()
    tags = [tracer.tag(x) for x in xs if x.shape != (0,)]
    if name == "stack":
        tags = [Tag(t.label.unsqueeze(dim), t.constant.unsqueeze(dim)) for t in tags]
    if any(len(varies(t.label)) > 1 and dim in varies(t.label) for t in tags):
        raise NotImplementedError
    # along other dimensions than the one that is joined the operands' channels are the same
    fronts = [t.label.narrow(dim, 0, 1) for t in tags]
    for front in fronts[1:] if any(dim not in varies(t.label) and varies(t.label) for t in tags) else ():
        tracer.trace.units.join(fronts[0], front)
    if any(dim in varies(t.label) for t in tags) and any(set(varies(t.label)) - {dim} for t in tags):
        tracer.pin(xs, f"{name} joins channels of different dimensions")
    label, constant = torch.cat([t.label for t in tags], dim), torch.cat([t.constant for t in tags], dim)
    if dim not in varies(label):
        constant = _checked(constant.amin(dim, keepdim=True).expand(out.shape), out, label)
    tracer.set(out, label, constant)


def _chunk(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    tag = tracer.tag(x)
    labels = tag.label.chunk(*rest, **a["kwargs"])
    constants = tag.constant.chunk(*rest, **a["kwargs"])
    dim = (rest[1] if len(rest) > 1 else a["kwargs"].get("dim", 0)) % x.dim()
    if dim in varies(tag.label):
        if tracer.name(x) or len({y.shape for y in out}) > 1:
            raise NotImplementedError
        tracer.trace.equal.append([shortest(label).reshape(-1) for label in labels])
    for y, label, constant in zip(out, labels, constants, strict=True):
        tracer.set(y, label, constant)


def _cut(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x, *rest = a["args"]
    position = 1 if "split" in name else 0
    dim = a["kwargs"].get("dim", rest[position] if len(rest) > position else 0)
    tag = tracer.tag(x)
    if tracer.name(x) or dim % x.dim() in varies(tag.label):
        raise NotImplementedError
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
        raise NotImplementedError
    # which dimensions are left whole
    given = [i for i in index if i is not None and i is not Ellipsis]
    ahead = index.index(Ellipsis) - index[: index.index(Ellipsis)].count(None) if Ellipsis in index else len(given)
    each = [*given[:ahead], *[slice(None)] * (x.dim() - len(given)), *given[ahead:]]
    if any(each[d] != slice(None) for d in varies(tag.label)):
        raise NotImplementedError
    tracer.set(out, tag.label[index], tag.constant[index])


def _pad(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, widths = a["input"], list(a["pad"])
    tag = tracer.tag(x)
    padded = [x.dim() - 1 - i // 2 for i, n in enumerate(widths) if n]
    if tracer.name(x) or set(padded) & set(varies(tag.label)):
        raise NotImplementedError
    # what is put around must be the constant itself, whatever the sizes
    same = (_along_label(x, tag.label) == (a["value"] or 0.0)).cpu() | ((a["mode"] or "constant") != "constant")
    _per_channel(tracer, tag, out, same)


def _per_channel(tracer: Tracer, tag: Tag, out: Tensor, still: Tensor | bool = True) -> None:
    """Something that works on each channel by itself, and leaves these constants alone."""
    label, constant = (_along_label(t, tag.label) for t in (tag.label, tag.constant))
    label = label.expand(out.shape)
    tracer.set(out, label, _checked(constant & still, out, label))


# ---------------------------------------------------------------------------------------------------- along dimensions


def _reduce(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
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
    tracer.set(out, label, _checked(constant, out, label))


def _along(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    dim = a["kwargs"].get("dim", next((v for v in a["args"][1:] if isinstance(v, int)), None))
    tag = tracer.tag(x)
    known = isinstance(out, Tensor) and out.shape == x.shape and isinstance(dim, int)
    if not known or tracer.name(x) or dim % x.dim() in varies(tag.label):
        tracer.pin([x], f"{name} over channels")
        return
    tracer.set(out, tag.label)


def _pool(tracer: Tracer, name: str, a: Arguments, out: Any) -> None:
    x = a["args"][0]
    spatial = int(name[-2]) if name[-1] == "d" else x.dim() - 2
    tag = tracer.tag(x)
    if not isinstance(out, Tensor) or tracer.name(x) or any(d >= x.dim() - spatial for d in varies(tag.label)):
        raise NotImplementedError
    # what is averaged with a border is only the same everywhere where it is zero
    still = (_along_label(x, tag.label) == 0).cpu() | (not name.startswith("avg_pool"))
    _per_channel(tracer, tag, out, still)


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


def _addmm(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    bias, x, weight = a["args"][:3]
    if tracer.name(bias) and tracer.name(weight) and bias.dim() == 1 and not a["kwargs"]:
        _product(tracer, x, weight, bias, out, -1, transposed=True, borders=False)
    else:
        tracer.pin([a["args"]], f"{name} needs all of its channels")


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


def _conv_transpose(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    if (a["groups"] or 1) != 1:
        tracer.pin([a["input"]], "a grouped transposed convolution")
        return
    dim = -int(name[-2]) - 1
    _product(tracer, a["input"], a["weight"], a["bias"], out, dim, transposed=True, borders=True)


def columns_of(tracer: Tracer, x: Tensor, dim: int) -> Tensor | None:
    """The units along the one dimension that a product reads; None where they vary along another."""
    label = tracer.label(x)
    if varies(label) not in ([], [dim % x.dim()]):
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
    if known is None or (bias is not None and known_bias is None) or columns is None or tracer.name(x):
        tracer.pin(
            [x], "a weight that is no parameter" if known is None else "channels in another dimension than it reads"
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
        Reader(known, known_bias, rows, columns, nonzero, folds, values, transposed, module, tuple(x.shape), dim)
    )
    give(tracer, out, dim, rows, ~(nonzero & ~folds).any(1))


def _embedding(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    weight = a["weight"]
    known = tracer.name(weight)
    if known is None or a["max_norm"] is not None:
        return
    constant = (weight.amin(0) == weight.amax(0)).cpu()
    give(tracer, out, -1, tracer.slot(known, 1), constant)


def _attention(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    labels = [tracer.label(x) for x in (q, k, v)]
    known = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and all(
        x.dim() - 2 not in varies(t) for x, t in zip((q, k, v), labels, strict=True)
    )
    if not known or (mask is not None and any(n > 1 for n in mask.shape[1:-2])):
        raise NotImplementedError
    tracer.pin([mask], "attention's mask")
    # a head's queries and keys are read by its outputs, whose channels are those of its values
    per_head = [t.select(-2, 0).reshape(math.prod(q.shape[:-2]), -1) for t in labels]
    for heads in zip(*per_head, strict=True):
        a_head, b_head, read = heads
        tracer.trace.needs.append((read, torch.cat([a_head, b_head])))
    if q.dim() > 3:  # as many heads of each
        tracer.trace.equal.append([t.reshape(-1, *t.shape[-3:])[0, :, 0, 0] for t in labels])
    tracer.set(out, labels[2].narrow(-2, 0, 1))


def _prelu(tracer: Tracer, name: str, a: Arguments, out: Tensor) -> None:
    x, weight = a["input"], a["weight"]
    tag = tracer.tag(x)
    known = tracer.name(weight)
    if weight.numel() > 1:
        columns = columns_of(tracer, x, 1)
        if known is None or columns is None:
            tracer.pin([x], "prelu of an unknown kind")
            return
        tracer.slot(known, 0, columns)
    tracer.set(out, tag.label, _checked(tag.constant, out, tag.label))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_CASTS, _cast),
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
