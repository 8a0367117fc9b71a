"""What each operation of torch does to channels. One that is not here keeps all channels that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from espalier.compact.attributes import followed
from espalier.compact.rules.channelwise import along, batch_norm, instance_norm, norm_over, pool, prelu, reduce
from espalier.compact.rules.common import Arguments, Rule, RuleError, Unknown, names
from espalier.compact.rules.moves import chunk, cut, fresh, item, join, move, pad, reshape, split
from espalier.compact.rules.pointwise import cast_type, noise, pointwise
from espalier.compact.rules.products import addmm, attention, conv, conv_transpose, embedding, linear, matmul
from espalier.compact.trace import Tracer
from espalier.compact.walk import tensors_in

# entry by entry, with broadcasting
_POINTWISE = names("""
    relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid sigmoid logsigmoid tanh softplus
    softsign tanhshrink softshrink hardshrink threshold rrelu exp expm1 log log1p log2 sqrt rsqrt square abs neg
    negative sin cos erf reciprocal sign floor ceil round clamp clamp_min clamp_max clip pow nan_to_num
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    add sub subtract mul multiply div divide true_divide rsub maximum minimum where lerp addcmul addcdiv
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
    __pow__ __rpow__ __neg__
    positive zeros_like ones_like masked_fill
    gt ge lt le eq ne greater greater_equal less less_equal not_equal __gt__ __ge__ __lt__ __le__ __eq__ __ne__
    logical_and logical_or logical_xor logical_not __and__ __or__ __xor__ __invert__ isnan isinf isfinite
""")
_CASTS = names("to type type_as float double half bfloat16 cuda cpu contiguous clone detach data alias")
# change their first operand, beside those whose names end in _
_WRITES = names("__setitem__ __iadd__ __isub__ __imul__ __itruediv__")
_RESHAPES = names("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
_MOVES = names("""
    permute transpose swapaxes swapdims movedim moveaxis t T mT adjoint expand expand_as broadcast_to repeat
""")
_JOINS = names("cat concat concatenate stack")
_CUTS = names("tensor_split unbind select narrow")
_NEW = names("new_zeros new_ones new_full new_empty")
_REDUCTIONS = names("mean sum amax amin")
_ALONG = names("softmax log_softmax softmin normalize cumsum")
_POOLS = names("""
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d interpolate upsample
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
""")
# only look at a tensor's form
_LOOKS = names("""
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
    name, _, overload = name.partition(".")
    out = func(*args, **kwargs)
    noted = False
    given = [] if name in _LOOKS else list(tensors_in([args, kwargs]))
    if not given:
        pass
    elif overload and name.rstrip("_") not in _POINTWISE:  # called past torch's functions, with other arguments
        _leave(tracer, given, f"{name}, in code that goes past torch's functions,")
    elif any(map(is_functorch_wrapped_tensor, given)):
        _leave(tracer, given, f"{name}, under vmap or another transform of torch.func,")
    else:
        known = name if name in RULES else name.rstrip("_")
        noted = _note(tracer, known, args, kwargs, given, out)
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            tracer.written(args[0] if args else out, known in RULES)
    # what an attribute holds must stay, unless a rule saw that it is a number of channels
    for number in followed(args, kwargs) if not noted else ():
        number.must_stay()
    return out


def _note(
    tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], out: Any
) -> bool:
    """Whether the rule has seen to the sizes that are given."""
    given = [x for x in tensors if tracer.tracked(x) or tracer.name(x)]
    if not given:
        return False
    rule, understood = RULES.get(name), False
    tracer.slotted.clear()
    try:
        # labels have no entries where a tensor has none
        if rule is None or "out" in kwargs or not all(x.numel() for x in (*given, *tensors_in(out))):
            raise Unknown
        rule(tracer, name, _by_name(rule, args, kwargs), out)
        understood = True
    except Unknown:
        tracer.pin([args, kwargs], f"{name} is not understood, and keeps all channels")
    except Exception as error:
        place = tracer.place
        way_out = f" Until it is mended, leave the module alone by ignore=[{place!r}]." if place else ""
        raise RuleError(
            f"Espalier's rule for {name} failed{f' in {place}' if place else ''} with {type(error).__name__}: {error}. "
            f"This is a fault of the rule, not of the model.{way_out}"
        ) from error
    # a parameter that a rule did not give channels to is used in a way of its own
    for found in {tracer.name(x) for x in given} - tracer.slotted:
        if found:
            tracer.refuse(
                found, f"read by {name}{'' if understood else ', which is not understood'}: it keeps its size"
            )
    return understood and rule in (reshape, move, split)


def _leave(tracer: Tracer, given: Sequence[Tensor], what: str) -> None:
    """All that an operation is given keeps its channels."""
    for x in given:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        tracer.pin([x], f"{what} is not understood, and keeps all channels")
        tracer.written(x, understood=False)  # perhaps
        if known := tracer.name(x):
            tracer.refuse(known, f"read by {what} which is not understood: it keeps its size")


def _by_name(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments as the rule wants them."""
    if names := _ARGUMENTS.get(rule):
        return dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    for first in ("input", "self", "tensors", "tensor"):
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
    return {"args": args, "kwargs": kwargs}


RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE, pointwise),
    **dict.fromkeys(("rand_like", "randn_like", "empty_like"), noise),
    **dict.fromkeys(_CASTS, cast_type),
    **dict.fromkeys(_RESHAPES, reshape),
    **dict.fromkeys(_MOVES, move),
    **dict.fromkeys(_JOINS, join),
    **dict.fromkeys(_NEW, fresh),
    **dict.fromkeys(_REDUCTIONS, reduce),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(_POOLS, pool),
    **dict.fromkeys(("layer_norm", "group_norm", "rms_norm"), norm_over),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), conv_transpose),
    **dict.fromkeys(("matmul", "mm", "__matmul__"), matmul),
    "chunk": chunk,
    **dict.fromkeys(("split", "split_with_sizes"), split),
    **dict.fromkeys(_CUTS, cut),
    "__getitem__": item,
    "pad": pad,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "linear": linear,
    "addmm": addmm,
    "embedding": embedding,
    "scaled_dot_product_attention": attention,
    "prelu": prelu,
}
# the arguments of rules that want them by name; what is not given is None
_ARGUMENTS: dict[Rule, tuple[str, ...]] = {
    pad: names("input pad mode value"),
    batch_norm: names("input running_mean running_var weight bias training momentum eps cudnn_enabled"),
    instance_norm: names("input running_mean running_var weight bias training momentum eps cudnn_enabled"),
    linear: names("input weight bias"),
    conv: names("input weight bias stride padding dilation groups"),
    conv_transpose: names("input weight bias stride padding output_padding groups dilation"),
    embedding: names("input weight padding_idx max_norm"),
    attention: names("query key value attn_mask"),
    prelu: names("input weight"),
}
