"""Which program works on what."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels import columns
from espalier.kernels.geometry import Geometry, Tile

# entries that a program steps where they do not depend on each other, and its warps
BLOCK, BLOCK_WARPS = 2048, 8


@dataclass(frozen=True)
class Bucket:
    """What tensors must have in common to share a launch."""

    dtype: torch.dtype
    aligned: bool
    wide: bool
    tile: Tile | None  # None: entry by entry


@dataclass(frozen=True)
class Slab:
    """A parameter, or one of its parts whose groups are its own: a row of the table."""

    parameter: int
    start: int  # how many bytes into the gradient
    row: tuple[int, ...]
    geometry: Geometry


def programs(tile: Tile | None, slab: Slab, row: int, panels: int) -> tuple[Tensor, int]:
    """The work list of one row of the table, and how many panels it has."""
    at = slab.geometry
    across, shares = (math.ceil(at.run / BLOCK), 1) if tile is None else (tile.across(at), tile.shares(at))
    run = 1 if tile is None else tile.run
    listed = torch.zeros(across, shares, columns.WORK.value, dtype=torch.int32)
    each = torch.arange(across).unsqueeze(1)
    count = math.ceil(across / run)
    listed[..., columns.TENSOR.value] = row
    listed[..., columns.CLOCK.value] = slab.parameter
    listed[..., columns.FIRST.value] = each
    listed[..., columns.SHARE.value] = torch.arange(shares)
    listed[..., columns.SHARES.value] = shares * torch.where(each // run < count - 1, run, across - (count - 1) * run)
    listed[..., columns.PANEL.value] = panels + each // run
    # by panels, and rows of tiles within
    order = torch.argsort((each // run * shares + torch.arange(shares)).flatten(), stable=True)
    return listed.flatten(0, 1)[order], count if tile is not None and tile.shared else 0
