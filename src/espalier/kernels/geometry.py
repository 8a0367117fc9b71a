"""How a tensor's groups lie in memory, and the tiles that programs work on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from espalier.partition import Partition

# Entries of a tile: x and k of that many stay in a program's registers.
_ENTRIES = 8192
_WARPS = 8
# Height, columns, warps and registers of a panel's tiles
PANEL = (32, 64, 4, 96)
# A group's neighbouring entries in a row: up to this many a tile has columns of several groups, above it rows.
_LONG_RUN = 64


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
    """What a program works on.

    axis 0: `height` rows of `columns` columns, a group being `run` neighbouring columns. With `panel`, programs go over
    it twice and a panel of `columns` groups is shared by many of them; otherwise it holds whole groups.
    axis 1: `height` groups of `columns` entries each. Where `shared`, a group's entries are spread over programs.
    """

    axis: int
    run: int
    height: int
    columns: int
    warps: int
    registers: int | None = None
    panel: bool = False
    shared: bool = False
    single: bool = True

    @property
    def groups(self) -> int:
        """How many groups a tile has."""
        return self.columns // self.run if self.axis == 0 else self.height

    @property
    def width(self) -> int:
        """How many sums it has: one a column, or one a row."""
        return self.columns if self.axis == 0 else self.height

    def shares(self, at: Geometry) -> int:
        """How many programs a group's entries are spread over, but for the columns of a panel."""
        return math.ceil(at.rows / self.height) if self.axis == 0 else math.ceil(at.rows * at.run / self.columns)


def tile_of(at: Geometry, convex: bool, processors: int | None) -> Tile | None:
    """The tile for a geometry; None where a group is too large for all processors together.

    Without `processors`, in the interpreter, programs run one after the other and none may wait for another.
    """
    if at.rows == 1 or at.run > _LONG_RUN:
        return _row_tile(at, processors)
    if convex and (processors or at.run == 1):
        height = PANEL[0] if processors else power_of_two(at.rows)
        tile = Tile(0, at.run, height, PANEL[1], PANEL[2], PANEL[3], panel=True)
        # programs of a panel may wait for each other, and four of them fit a processor
        return tile if not processors or tile.shares(at) * at.run <= 4 * processors else None
    columns = 32 if at.run == 1 else max(64, power_of_two(at.run))
    height = power_of_two(at.rows)
    if processors:
        height = _ENTRIES // columns
        while columns > max(8, at.run) and math.ceil(at.rows / height) > processors:
            columns, height = columns // 2, height * 2
    tile = Tile(0, at.run, height, columns, _WARPS, shared=at.rows > height)
    return tile if tile.shares(at) <= (processors or 1) else None


def _row_tile(at: Geometry, processors: int | None) -> Tile | None:
    size = at.rows * at.run
    columns = power_of_two(size)
    if processors and columns > _ENTRIES:
        columns = 2048
        while columns < _ENTRIES and math.ceil(size / columns) > processors:
            columns *= 2
    height = min(max(1, _ENTRIES // columns), power_of_two(at.groups))
    tile = Tile(1, 1, height, columns, _WARPS, shared=columns < size, single=at.rows == 1)
    return tile if tile.shares(at) <= (processors or 1) else None


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
