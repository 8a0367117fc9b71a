"""Whether a shrunk model still runs in training mode, where its code may use what eval mode does not."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from espalier.compact.copies import ShrinkError, copied
from espalier.compact.examples import Call, call, cloned
from espalier.compact.runs import kept_random, named
from espalier.compact.sizes import resized, sizes_of_batch

Shapes: TypeAlias = dict[str, tuple[int, ...]]


class Training:
    """The shapes of the dense model's outputs in training mode."""

    def __init__(self, dense: nn.Module, inputs: Call) -> None:
        self._inputs, self._shapes = inputs, dict[str, tuple[int, ...]]()
        # batch norm takes no batch of one, and more than two show nothing new
        for given in (resized(inputs, sizes_of_batch(inputs, 2)), inputs):
            try:
                self._inputs, self._shapes = given, _shapes(dense, given)
            except Exception:
                continue
            break

    def check(self, small: nn.Module) -> None:
        """Raise if the small model fails where the dense one runs, or gives other shapes."""
        if not self._shapes:
            return
        try:
            found = _shapes(small, self._inputs)
        except Exception as error:
            raise ShrinkError(
                f"in training mode the shrunk model fails with {type(error).__name__}: {error}"
            ) from error
        for name, shape in self._shapes.items():
            if found.get(name) != shape:
                what = f"has the shape {found.get(name)}, not {shape}"
                raise ShrinkError(f"in training mode output{name} of the shrunk model {what}")


def _shapes(model: nn.Module, inputs: Call) -> Shapes:
    """Of a copy that shares nothing: in training mode models may write into parameters, too."""
    model = copied(model)
    for module in model.modules():
        module.training = True
    with kept_random(model), torch.no_grad():
        return {name: tuple(x.shape) for name, x in named(call(model, cloned(inputs)), model).items()}
