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
    """`axis` 0: `height` rows of `columns` columns that hold whole groups of `run` each; a large group's rows are
    shared by several programs. `axis` 1: `height` groups of `columns` entries each, likewise."""

    axis: int
    run: int
    height: int
    columns: int
    warps: int
    single: bool
    shared: bool

    @property
    def groups(self) -> int:
        """How many groups a tile has."""
        return self.columns // self.run if self.axis == 0 else self.height

    @property
    def width(self) -> int:
        """How many sums it has: one a column, or one a row."""
        return self.columns if self.axis == 0 else self.height

    def shares(self, at: Geometry) -> int:
        """How many programs share a tile's groups."""
        return math.ceil(at.rows / self.height) if self.axis == 0 else math.ceil(at.rows * at.run / self.columns)


def tile_of(at: Geometry, processors: int | None) -> Tile | None:
    """The tile for a geometry; None where a group is too large for all processors together.

    Without `processors`, in the interpreter, programs run one after the other and a tile holds any group whole.
    """
    most = _ENTRIES if processors else power_of_two(at.rows) * power_of_two(at.groups * at.run)
    if at.rows == 1 or at.run > _LONG_RUN:
        size = at.rows * at.run
        columns = power_of_two(size)
        shared = columns > most
        if shared:
            columns = 2048
            while columns < most and math.ceil(size / columns) > processors:
                columns *= 2
        tile = Tile(1, 1, max(1, _ENTRIES // columns), columns, _WARPS, at.rows == 1, shared)
    else:
        columns = 32 if at.run == 1 else max(64, power_of_two(at.run))
        height = _ENTRIES // columns
        if processors is None:
            height = power_of_two(at.rows)
        elif at.run == 1:
            while columns > 8 and math.ceil(at.rows / height) > processors:
                columns, height = columns // 2, height * 2
        tile = Tile(0, at.run, height, columns, _WARPS, True, at.rows > height)
    return tile if tile.shares(at) <= (processors if tile.shared and processors else 1) else None


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
