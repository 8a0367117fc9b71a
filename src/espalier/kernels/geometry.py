"""How a tensor's groups lie in memory, and the tiles that programs work on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from espalier.partition import Partition

# Height, columns, warps and registers of a tile of rows; a tile of whole groups has as many entries. Measured: see
# docs/performance.md.
ROWS_TILE = (64, 32, 4, 96)
# A group's neighbouring entries in a row: up to this many a tile has columns of several groups, above it rows.
_LONG_RUN = 64
# Programs of a panel that a processor may have to run at a time: it has room for five, of which another stream's step
# may take some.
RESIDENT = 2


@dataclass(frozen=True)
class Geometry:
    """A tensor in the order of its memory: `batch` × `rows` × `groups` × `run`.

    A group is `rows` runs of `run` neighbouring entries; each member of the batch has groups of its own.
    """

    batch: int
    rows: int
    groups: int
    run: int


@lru_cache(maxsize=4096)
def geometry(groups: Partition, shape: tuple[int, ...], stride: tuple[int, ...]) -> Geometry | None:
    """The geometry of a tensor with these strides; None where its memory has gaps or its groups another order."""
    if groups.swapped:
        return None
    view = torch.empty_strided(shape, stride, device="meta").view(groups.shape)
    axes = sorted((a for a, n in enumerate(view.shape) if n > 1), key=view.stride, reverse=True)
    runs: list[tuple[bool, int]] = []  # whether it tells groups apart, and its length
    length = 1
    for axis in reversed(axes):
        if view.stride(axis) != length:
            return None
        length *= view.shape[axis]
        grouped = axis in groups.group_axes
        if runs and runs[-1][0] == grouped:
            runs[-1] = (grouped, runs[-1][1] * view.shape[axis])
        else:
            runs.append((grouped, view.shape[axis]))
    # from the innermost outward, with ones for what is missing
    found = []
    for grouped in (False, True, False, True):
        found.append(runs.pop(0)[1] if runs and runs[0][0] == grouped else 1)
    if runs:
        return None
    run, count, rows, batch = found
    return Geometry(batch, rows, count, run)


@dataclass(frozen=True)
class Tile:
    """What a program works on: `height` rows of `columns` entries.

    axis 0: a group is `run` neighbouring columns, and a panel `columns` groups: `run` tiles side by side, and as many
    below each other as the rows need. axis 1: a group is a row, and a panel `height` of them: as many tiles as a
    group's entries need. The programs of a panel share its groups.
    """

    axis: int
    run: int
    height: int
    columns: int
    warps: int
    registers: int | None = None
    shared: bool = True
    single: bool = True  # axis 1: a group lies in one run

    @property
    def width(self) -> int:
        """How many groups a panel has."""
        return self.columns if self.axis == 0 else self.height

    @property
    def few(self) -> int:
        """How many groups a tile's columns belong to at most, where that is far less than there are columns; else 0."""
        most = power_of_two((self.columns - 2) // self.run + 2)
        return most if self.axis == 0 and 2 * most <= self.columns else 0

    def across(self, at: Geometry) -> int:
        """How many tiles lie side by side, over all panels."""
        return math.ceil(at.groups * self.run / self.width)

    def shares(self, at: Geometry) -> int:
        """How many programs share a tile's columns (rows, for axis 1)."""
        return math.ceil(at.rows / self.height) if self.axis == 0 else math.ceil(at.rows * at.run / self.columns)

    def sharers(self, at: Geometry) -> int:
        """How many programs of a panel wait for each other."""
        return self.shares(at) * self.run if self.shared else 0


def tile_of(at: Geometry, processors: int | None) -> Tile | None:
    """The tile for a geometry; None where a group is too large for all processors together.

    Without `processors`, in the interpreter, programs run one after the other and none may wait for another.
    """
    height, columns, warps, registers = ROWS_TILE
    if at.rows == 1 or at.run > _LONG_RUN:
        entries = height * columns
        columns = power_of_two(at.rows * at.run)
        if processors:
            columns = min(columns, entries)
        height = min(max(1, entries // columns), power_of_two(at.groups))
        tile = Tile(1, 1, height, columns, warps, registers, single=at.rows == 1)
    else:
        if not processors:
            height, columns = power_of_two(at.rows), power_of_two(at.groups * at.run)
        tile = Tile(0, at.run, height, columns, warps, registers)
    alone = tile.shares(at) * tile.run == 1
    # all programs of a panel must be able to run at a time, for they wait for each other
    if processors and tile.shares(at) * tile.run > RESIDENT * processors:
        return None
    return replace(tile, shared=not alone)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
