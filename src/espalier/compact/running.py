"""What is changed of modules while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


@contextmanager
def named_on(module: nn.Module, stack: list[str], name: str) -> Iterator[None]:
    """Keep the name of the module that runs on the stack."""

    def enter(*_: Any) -> None:
        stack.append(name)

    def leave(*_: Any) -> None:
        stack.pop()

    hooks = [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
