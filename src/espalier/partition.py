"""A tensor cut into groups, and the sums over them.

Every sum over a group goes through `Partition`. A sharded tensor, or a group made of slices of several tensors, needs
its partial sums added up here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

# Values per group are stretched over the axes behind the group axis when these are short: torch's broadcasting loops
# over the innermost axis, and a loop of 9 (a 3×3 kernel) costs 4-5× a loop over a whole row on a CPU.
_STRETCH_BELOW = 256


@dataclass(frozen=True)
class Partition:
    """A tensor's view, and the axes of that view whose indices tell its groups apart.

    `swapped`: axes 0 and 1 of the tensor, of each of its `parts`, change places before the view is taken.
    """

    shape: tuple[int, ...]
    group_axes: tuple[int, ...]
    swapped: bool = False
    parts: int = 1

    @cached_property
    def member_axes(self) -> tuple[int, ...]:
        """The axes along which a group extends."""
        return tuple(a for a in range(len(self.shape)) if a not in self.group_axes)

    @cached_property
    def size(self) -> int:
        """Elements in a group."""
        return math.prod(self.shape[a] for a in self.member_axes)

    @cached_property
    def count(self) -> int:
        """Number of groups."""
        return math.prod(self.shape[a] for a in self.group_axes)

    def split(self, x: Tensor) -> Tensor:
        """The tensor in the partition's view; shares its memory wherever the strides allow."""
        if self.swapped:
            # (parts · rows, columns, …) → (parts, columns, rows, …)
            x = x.reshape(self.parts, x.shape[0] // self.parts, *x.shape[1:]).transpose(1, 2)
        return x.reshape(self.shape)

    def merge(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Undo `split` for a tensor of this shape."""
        if not self.swapped:
            return x.reshape(shape)
        x = x.reshape(self.parts, shape[1], shape[0] // self.parts, *shape[2:])
        return x.transpose(1, 2).flatten(0, 1)

    @cached_property
    def _reductions(self) -> tuple[tuple[int, ...], ...]:
        # One run of neighbouring axes at a time, the outermost first: on a CPU 4-8× faster than one reduction over
        # axes on both sides of the groups.
        runs: list[tuple[int, ...]] = []
        for axis in self.member_axes:
            if runs and runs[-1][-1] == axis - 1:
                runs[-1] += (axis,)
            else:
                runs.append((axis,))
        return tuple(runs)

    def sum(self, x: Tensor) -> Tensor:
        """Σ over each group, kept broadcastable to x."""
        return self._reduce(torch.sum, x)

    def max(self, x: Tensor) -> Tensor:
        """The largest entry of each group, kept broadcastable to x."""
        return self._reduce(torch.amax, x)

    def min(self, x: Tensor) -> Tensor:
        """The smallest entry of each group, kept broadcastable to x."""
        return self._reduce(torch.amin, x)

    def _reduce(self, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not self.member_axes:
            return x.clone()  # never the argument itself: callers work on the result in place
        if not self.size:  # amax of nothing raises; a group without entries is zero
            return x.new_zeros([n if a in self.group_axes else 1 for a, n in enumerate(self.shape)])
        for axes in self._reductions:
            x = operation(x, axes, keepdim=True)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """‖x_g‖ of each group, kept broadcastable to x, with no square leaving the range of its type."""
        squares = self.sum(x.square())
        if x.device.type == "cpu" and bool(((squares > 1e-20) & (squares < 1e20)).all()):
            return squares.sqrt_()
        largest = self.max(x.abs())
        scale = torch.where(largest > 0, largest, 1.0)
        return self.sum((x / self.stretch(scale)).square_()).sqrt_().mul_(scale)

    def zero(self, x: Tensor) -> Tensor:
        """Which groups are exactly zero, one entry a group."""
        return (self.sum(x != 0) == 0).reshape(self.count)

    def stretch(self, per_group: Tensor) -> Tensor:
        """Values per group, laid out for fast broadcasting against the whole tensor."""
        if not self.group_axes or per_group.dim() == 0 or per_group.device.type != "cpu":
            return per_group
        tail = self.shape[self.group_axes[-1] + 1 :]
        if not 1 < math.prod(tail) < _STRETCH_BELOW:
            return per_group
        head = per_group.shape[: len(self.shape) - len(tail)]
        return per_group.expand(*head, *tail).contiguous()

    def blocks(self, elements: int) -> tuple[Block, ...]:
        """Cut between groups into pieces of about `elements`."""
        return _blocks(self, elements)


@dataclass(frozen=True)
class Block:
    """The indices `start` to `start + length` of an axis of a partition's view, and the partition of that piece."""

    axis: int
    start: int
    length: int
    groups: Partition


@lru_cache(maxsize=1024)
def _blocks(whole: Partition, elements: int) -> tuple[Block, ...]:
    if not whole.group_axes or math.prod(whole.shape) <= elements:
        return (Block(0, 0, whole.shape[0] if whole.shape else 1, whole),)
    axis = max(whole.group_axes, key=lambda a: whole.shape[a])
    length = whole.shape[axis]
    most = max(1, elements * length // math.prod(whole.shape))
    step = -(-length // -(-length // most))  # no longer than that, and all about equal
    blocks = []
    for start in range(0, length, step):
        size = min(step, length - start)
        shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
        blocks.append(Block(axis, start, size, replace(whole, shape=shape)))
    return tuple(blocks)
