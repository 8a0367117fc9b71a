"""What a user gives, checked where it is given."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any

from torch import Tensor


def check_number(name: str, value: object, *, low: float = 0.0, high: float = math.inf, open_low: bool = False) -> None:
    """A number in [low, high), or in (low, high); NaN and infinity are never one. A tensor may hold it.

    A tensor on a GPU is not read, because that would wait for the device.
    """
    if not isinstance(value, Real | Tensor):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, not a tensor of {value.numel()}.")
        if value.device.type != "cpu":
            return
    number = float(value)
    if not (low <= number < high) or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a finite number in {bracket}{low:g}, {high:g}), not {value!r}.")


# Settings of torch's optimizers that not every method here has, and what to give in their place.
_HABITS = {
    "weight_decay": "A penalty shrinks the weights, so weight decay is rarely needed; ProxGen has it",
    "betas": "Give momentum=0.9, the share of the past that a step keeps, in place of betas=(0.9, ...)",
    "momentum": "Give betas=(0.9, 0.999), whose first number is the momentum",
    "eps": "Its metric needs none",
    "nesterov": "Leave it out: there is only one form of momentum here",
    "dampening": "Leave it out: the gradient average is dampened by 1 − momentum",
    "foreach": "Leave it out: fused=None takes the fastest code that serves",
    "differentiable": "Leave it out: steps cannot be differentiated",
}


def with_hints(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, with errors that say what to give in place of a setting of torch's that it does not have."""
    known = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return init  # a subclass that takes any setting may know what to do with these

    @wraps(init)
    def checked(self: object, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name in _HABITS and name not in known:
                raise TypeError(f"{type(self).__name__} has no {name}. {_HABITS[name]}.")
        init(self, *args, **settings)

    return checked


def on_host(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with what lies on a GPU read: for checks at a time when waiting is no matter."""
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}


def rounded_up(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with lr = 0 for what a schedule that ends at 0 has rounded to just below (LinearLR does)."""
    lr = options["lr"]
    return {**options, "lr": 0.0} if isinstance(lr, float) and -1e-12 < lr < 0 else options


def is_dtensor(x: object) -> bool:
    """Whether this is a DTensor. Its module is not imported: a program that has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_dtensor(x: object, name: str, what: str) -> None:
    """Raise if this is a DTensor, whose sums would be those of one shard."""
    if is_dtensor(x):
        raise ValueError(
            f"{name} is a DTensor (FSDP2 or tensor parallelism), and {what} would see one shard of it at a time. "
            "That is not supported yet: use DistributedDataParallel, or train it without a penalty and without "
            "skip_nonfinite."
        )


def refuse_flat(p: Tensor, name: str, needed: int | None = None) -> None:
    """Raise if a weight has lost its axes to a framework that flattens and shards weights.

    `needed`: the axes that the weight of its layer has, if they are known.
    """
    flat = p.dim() <= 1 and getattr(p, "_fsdp_flattened", False)  # FSDP1's mark on what it flattened
    if flat or (needed is not None and p.dim() != needed):
        raise flattened(name, f"has shape {tuple(p.shape)}" + (f" and should have {needed} axes" if needed else ""))


def flattened(name: str, what: str) -> ValueError:
    """The error for a weight whose groups are no longer to be seen in its shape."""
    return ValueError(
        f"{name} {what}: FSDP1 and DeepSpeed ZeRO flatten and shard weights, and its groups are lost. Use "
        'DistributedDataParallel (ZeRO stage 0), grouping="element", or no penalty.'
    )
