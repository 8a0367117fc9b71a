"""Copies of models: a whole one to keep, and one for a run that shares its parameters."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from espalier.compact.walk import left_behind


class ShrinkError(RuntimeError):
    """A shrunk model does not compute what the dense one does, or a model cannot be shrunk."""


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing. Results that an earlier run left on modules lose their graph, which has no copy."""
    _check_hooks(model)
    memo: dict[int, Any] = {id(x): _detached(x) for _, x in left_behind(model, hooks=True) if not x.is_leaf}
    try:
        small = copy.deepcopy(model, memo)
    except Exception as error:
        raise ShrinkError(
            f"the model cannot be copied: copy.deepcopy fails with {type(error).__name__}: {error}\n"
            "Remove what holds no weights, such as open files or processes, from the attributes of its modules."
        ) from error
    for module in small.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy's weights lie apart, of which cuDNN would warn
    return small


def for_a_run(model: nn.Module) -> nn.Module:
    """A copy that shares parameters alone, so that a run leaves nothing on the model: no cache, count or hook."""
    shared = {id(p): p for p in model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            shared.pop(id(module.weight), None)  # it writes into its weight
    memo: dict[int, Any] = {id(x): _detached(x) for _, x in left_behind(model) if not x.is_leaf}
    memo |= shared | _copied_buffers(model)
    # what deepcopy does, in half of its time: most that a module holds is a number or an empty dict
    made = {module: object.__new__(type(module)) for module in model.modules() if _is_plain(type(module))}
    memo |= {id(module): new for module, new in made.items()}
    for module, new in made.items():
        held = {key: x for key, x in vars(module).items() if key != "_compiled_call_impl"}
        vars(new).update({key: _copied_value(x, memo) for key, x in held.items()})
    return copy.deepcopy(model, memo)


def _copied_buffers(model: nn.Module) -> dict[int, Tensor]:
    """Those alone in their memory, by their ids."""
    plain = [b for b in model.buffers() if type(b) is Tensor and b.layout == torch.strided and not b.is_quantized]
    held = Counter(b.untyped_storage().data_ptr() for b in plain)
    return {id(b): _detached(b) for b in plain if b.is_leaf and held[b.untyped_storage().data_ptr()] == 1}


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a module's copy is one of its attributes, and nothing else."""
    names = ("__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__")
    same = all(getattr(kind, name, None) == getattr(nn.Module, name, None) for name in names)
    # a module that is a dict, too, is made by dict.__new__
    return same and kind.__new__ is object.__new__ and not any(vars(base).get("__slots__") for base in kind.__mro__)


def _copied_value(x: Any, memo: dict[int, Any]) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) in (dict, OrderedDict) and not x:
        return memo.setdefault(id(x), type(x)())
    return copy.deepcopy(x, memo)


def _detached(x: Tensor) -> Tensor:
    return x.detach().clone()


def _check_hooks(model: nn.Module) -> None:
    """Raise if a weight is computed by a hook and was left with its graph, which deepcopy does not take."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            match hook:
                case BasePruningMethod():
                    what, leaf, way_out = "pruned by torch.nn.utils.prune", hook._tensor_name, "prune.remove"
                case WeightNorm():
                    what, leaf, way_out = "computed by weight_norm", hook.name, "remove_weight_norm"
                case SpectralNorm():
                    what, leaf, way_out = "computed by spectral_norm", hook.name, "remove_spectral_norm"
                case _:
                    continue
            x = getattr(module, leaf, None)
            if isinstance(x, Tensor) and not x.is_leaf:
                raise ShrinkError(
                    f"{name or 'the model'}: its {leaf} is {what}, a hook that sets it before each run. "
                    f'Make it a parameter first: torch.nn.utils.{way_out}(module, "{leaf}").'
                )


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """To the bit, where NaN is NaN."""
    return a.shape == b.shape and (torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()))
