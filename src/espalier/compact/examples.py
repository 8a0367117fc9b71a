"""Example inputs of a model: calling it with them, and random ones like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from espalier.compact.walk import mapped

T = TypeVar("T")
Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class OtherSizes(tuple[Any, ...]):
    """Arguments and keyword arguments of other sizes than the examples."""


def as_given(inputs: Inputs) -> Call:
    """Inputs as a user gives them, as arguments and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if not isinstance(inputs, Sequence):
        raise TypeError(
            f"inputs must be a tensor, a tuple of arguments or a dict by name, not a {type(inputs).__name__}."
        )
    return tuple(inputs), {}


def as_call(inputs: tuple[Any, ...]) -> Call:
    """Arguments and keyword arguments: inputs are either arguments alone, or the pair of a tuple and a dict."""
    if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return inputs
    return inputs, {}


def cloned(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs for one run: models write into theirs, by inplace=True."""
    return mapped(inputs, lambda t: t.detach().clone())


def call(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    args, kwargs = as_call(inputs)
    return model(*args, **kwargs)


def random_like(inputs: T, seed: int) -> T:
    """Random inputs like the examples: normal of their mean and deviation; integers and booleans permuted.

    The range of integers is not known, so their own entries are all that can be taken. Single numbers and tensors that
    hold NaN or Inf, such as masks, stay as they are; a constant tensor gets deviation 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        t = t.detach()
        if t.numel() < 2 or (t.is_floating_point() and not t.isfinite().all()):
            return t.clone()
        if not t.is_floating_point():
            order = torch.randperm(t.numel(), generator=generator).to(t.device)
            return t.flatten()[order].view(t.shape)
        x = t.cpu().double()
        std, mean = torch.std_mean(x, correction=0)
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return (mean + noise * (std if x.min() < x.max() else 1.0)).to(t.device, t.dtype)

    return mapped(inputs, draw)
