"""Copies of models: a whole one to keep, and one for a run that shares its parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
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
    # deepcopy takes its time with the dozen empty dicts of each module
    empty = (
        x for m in model.modules() for x in vars(m).values() if type(x) in (dict, OrderedDict, list, set) and not x
    )
    memo |= {id(x): type(x)() for x in empty}
    return copy.deepcopy(model, memo | shared)


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
