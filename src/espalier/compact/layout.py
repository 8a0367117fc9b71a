"""How tensors lie in memory: what is channels last stays so in a smaller model, and layers are timed in that layout."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def channels_last(x: Tensor) -> bool:
    """Whether images, or volumes, lie in memory pixel by pixel. As convolutions do, it asks the strides: a part of such
    a tensor is one, too."""
    if x.dim() < 4:
        return False
    _, channel, *rows = x.stride()
    return 0 < channel * x.shape[1] <= rows[-1] and all(a >= b for a, b in pairwise(rows))


def to_channels_last(x: Tensor) -> Tensor:
    """A copy that is channels last, also where strides of dimensions of one entry tell."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x[index along dim], channels last where x is: index_select gives that up, and so would all layers after it."""
    # compilers lay tensors out themselves, and what they export is for all
    if torch.compiler.is_compiling() or not channels_last(x):
        return x.index_select(dim, index)
    dim, y = range(x.dim())[dim], x.movedim(1, -1)
    # along the last dimension a CPU is much faster so
    found = y.gather(-1, index.expand(*y.shape[:-1], -1)) if dim == 1 else y.index_select(max(0, dim - 1), index)
    return found.movedim(-1, 1)


class Given(NamedTuple):
    """A tensor that a layer is given, but for its values."""

    shape: tuple[int, ...] = ()
    channels_last: bool = False

    @classmethod
    def like(cls, x: Tensor) -> Given:
        return cls(tuple(x.shape), channels_last(x))

    def of(self, channels: int, dim: int) -> Given:
        """The same with so many channels, which are in this dimension."""
        shape = list(self.shape)
        shape[dim] = channels
        return self._replace(shape=tuple(shape))

    def zeros(self, like: Tensor) -> Tensor:
        """Of the dtype and on the device of `like`."""
        x = torch.zeros(self.shape, dtype=like.dtype, device=like.device)
        return to_channels_last(x) if self.channels_last else x
