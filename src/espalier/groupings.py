"""How a tensor is cut into groups.

A `Grouping` says what a group is ("one input channel"); a `Layout` says how a layer stores its weight ("the input is
axis 0 here"); together with a shape they give a `Partition`, on which everything is computed: it views the tensor with
one axis for each index that tells groups apart, so that a group's sum is a sum over the remaining axes.

Every sum over a group goes through `Partition`. A sharded tensor, or a group made of slices of several tensors, needs
its partial sums added up there and nowhere else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

# Values per group are stretched over the axes behind the group axis when these are short: torch's broadcasting loops
# over the innermost axis, and a loop of 9 (a 3×3 kernel) costs 4-5× a loop over a whole row on a CPU.
_STRETCH_BELOW = 256


@dataclass(frozen=True)
class Layout:
    """How a layer stores its weight.

    Attributes:
        input_dim: the axis of the input channels.
        output_dim: the axis of the output channels.
        parts: axis 0 consists of this many parts that share nothing: the groups of a grouped convolution, the q, k
            and v of a packed projection. An index of axis 1 then means another channel in each part.
        stacked: the output axis holds this many rows for each output: the gates of an LSTM.
    """

    input_dim: int = 1
    output_dim: int = 0
    parts: int = 1
    stacked: int = 1

    def __post_init__(self) -> None:
        for name, least in (("input_dim", 0), ("output_dim", 0), ("parts", 1), ("stacked", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)!r}.")


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


@dataclass(frozen=True)
class Grouping(ABC):
    """What a group is; a subclass is a frozen dataclass. `regularize`, which knows the layer, fills `layout` in."""

    # its groups are matrices (whose rank counts), not mere sets of entries
    of_matrices: ClassVar[bool] = False

    layout: Layout = field(default=Layout(), kw_only=True)

    @abstractmethod
    def partition(self, shape: tuple[int, ...]) -> Partition:
        """The partition of a tensor of this shape; ValueError where the grouping does not apply."""


@lru_cache(maxsize=4096)
def partition_of(grouping: Grouping, shape: tuple[int, ...]) -> Partition:
    """`grouping.partition(shape)`, remembered: a step asks for each parameter's."""
    return grouping.partition(shape)


def _channels(name: str, shape: tuple[int, ...], dim: int, *, parts: int, stacked: int, block: int) -> Partition:
    """One group for `block` neighbouring channels of axis `dim`."""
    if dim >= len(shape):
        raise ValueError(
            f"{name} groups need an axis {dim}, and a tensor of shape {tuple(shape)} has none. "
            'Use "output" or "element" groups for it, or leave it without a penalty.'
        )
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block!r}.")
    view: list[int] = []
    group_axes: list[int] = []
    for axis, length in enumerate(shape):
        if axis == dim:
            if length % stacked:
                raise ValueError(f"axis {dim} of shape {tuple(shape)} does not hold {stacked} rows for each output.")
            if length % (stacked * block):
                raise ValueError(
                    f"{name} groups of {block} cannot cut the {length // stacked} channels of a tensor of "
                    f"shape {tuple(shape)} evenly. Choose a number that divides {length // stacked}."
                )
            view += [stacked] * (stacked > 1)
            group_axes.append(len(view))
            view += [length // (stacked * block)] + [block] * (block > 1)
        elif axis == 0 and parts > 1:
            if length % parts:
                raise ValueError(f"axis 0 of shape {tuple(shape)} does not fall into {parts} parts.")
            group_axes.append(len(view))
            view += [parts, length // parts]
        else:
            view.append(length)
    return Partition(tuple(view), tuple(group_axes))


@dataclass(frozen=True)
class Input(Grouping):
    """One group for each input channel (the paper's channel-wise and input-wise), or for `block` neighbouring ones."""

    block: int = 1

    def partition(self, shape: tuple[int, ...]) -> Partition:
        at = self.layout
        return _channels(
            "input", shape, at.input_dim,
            parts=at.parts if at.input_dim == 1 else 1, stacked=1, block=self.block,
        )  # fmt: skip


@dataclass(frozen=True)
class Output(Grouping):
    """One group for each output channel, or for `block` neighbouring ones."""

    block: int = 1

    def partition(self, shape: tuple[int, ...]) -> Partition:
        at = self.layout
        return _channels(
            "output", shape, at.output_dim,
            parts=at.parts if at.output_dim == 1 else 1, stacked=at.stacked, block=self.block,
        )  # fmt: skip


@dataclass(frozen=True)
class Heads(Grouping):
    """One group for each attention head: its input columns in the output projection, or (`side="output"`) its rows in
    a query, key or value projection. A packed one that stores q, k and v one after the other needs
    `layout=Layout(stacked=3)`; `regularize` knows that of MultiheadAttention."""

    heads: int
    side: Literal["input", "output"] = "input"

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads must be at least 1, not {self.heads!r}.")
        if self.side not in ("input", "output"):
            raise ValueError(f'side must be "input" or "output", not {self.side!r}.')

    def partition(self, shape: tuple[int, ...]) -> Partition:
        at = self.layout
        dim, stacked = (at.input_dim, 1) if self.side == "input" else (at.output_dim, at.stacked)
        if dim >= len(shape) or shape[dim] % (self.heads * stacked):
            raise ValueError(
                f"{self.heads} heads do not divide axis {dim} of a tensor of shape {tuple(shape)}. "
                "Give the number of heads of this layer's attention."
            )
        block = shape[dim] // (self.heads * stacked)
        return _channels("head", shape, dim, parts=1, stacked=stacked, block=block)


@dataclass(frozen=True)
class Element(Grouping):
    """Every entry is a group of its own."""

    def partition(self, shape: tuple[int, ...]) -> Partition:
        return Partition(tuple(shape), tuple(range(len(shape))))


@dataclass(frozen=True)
class Matrix(Grouping):
    """The layer as one out × rest matrix (one for each part of a packed projection), for the nuclear norm."""

    of_matrices: ClassVar[bool] = True

    def partition(self, shape: tuple[int, ...]) -> Partition:
        if len(shape) < 2:
            raise ValueError(
                f'a tensor of shape {tuple(shape)} is no matrix. Leave it without a penalty or use "element" groups.'
            )
        if self.layout.output_dim > 1:
            raise ValueError(f"a matrix needs output_dim 0 or 1, not {self.layout.output_dim}.")
        swapped = self.layout.output_dim == 1
        parts, kernel = self.layout.parts, math.prod(shape[2:])
        if shape[0] % parts:
            raise ValueError(f"axis 0 of shape {tuple(shape)} does not fall into {parts} parts.")
        first = shape[0] // parts
        view = (parts, shape[1], first * kernel) if swapped else (parts, first, shape[1] * kernel)
        return Partition(view, (0,), swapped, parts)


NAMED: dict[str, Grouping] = {
    "input": Input(),
    "output": Output(),
    "element": Element(),
    "matrix": Matrix(),
}


def as_grouping(grouping: str | Grouping) -> Grouping:
    """A grouping from its name; an object passes through."""
    if isinstance(grouping, Grouping):
        return grouping
    try:
        return NAMED[grouping]
    except (KeyError, TypeError):
        known = ", ".join(repr(n) for n in NAMED)
        raise ValueError(
            f"no grouping is called {grouping!r}. Choose one of {known}, or an object such as "
            "espalier.Heads(8) or espalier.Input(block=4)."
        ) from None
