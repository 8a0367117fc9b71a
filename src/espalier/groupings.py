"""How a tensor is cut into groups.

A `Grouping` says what a group is ("one input channel"); a `Layout` says how a layer stores its weight ("the input is
axis 0 here"); together with a shape they give a `Partition`, on which everything is computed: it views the tensor with
one axis for each index that tells groups apart, so that a group's sum is a sum over the remaining axes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

from espalier.partition import Partition


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
