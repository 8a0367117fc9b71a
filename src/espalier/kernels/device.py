"""What runs on the GPU: one pass over memory for a whole step.

With x = a − d/H, the solution without a penalty, and k = κ/h, the radial subproblem of `solvers/radial.py` reads: find
r with Σ (x / (r + k))² = 1 over a group, then z = x r / (r + k); z = 0 when Σ (x / k)² ≤ 1. A block of groups keeps x
and k in registers while Newton climbs, so that every tensor is read once and written once. A group too large for one
program is spread over several, which add their sums up through global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.kernels.columns import (
    AVERAGING,
    CLOCK,
    ENTRY_KAPPA,
    FIRST,
    FLAT,
    GROUPS,
    KAPPA,
    METRIC,
    PANEL,
    RADIUS,
    ROWS,
    RUN,
    SCALARS,
    SCALE,
    SHARE,
    SHARES,
    TABLE,
    TENSOR,
    TREND,
    WORK,
)
from espalier.kernels.exchange import (
    arrive,
    choose,
    conclude,
    get,
    get_six,
    put,
    put_later,
    put_six,
    wait,
)
from espalier.kernels.methods import (
    address,
    deliver,
    fetch,
    pose,
    reciprocal,
    soft,
)
from espalier.kernels.newton import (
    LEAST_K,
    MOST_PARTS,
    UNITS,
    by_series,
    is_better,
    newton,
    newton_to_end,
    next_norm,
    next_scale,
    own,
    ratio,
    scalar_factor,
)


@triton.jit
def add_six(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def step_entries(
    work, table, scalars, finite,
    METHOD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, AVERAGED: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step where entries do not depend on each other: no penalty, or L1."""
    if SKIP:
        if tl.load(finite) == 0:
            return
    at = work + tl.program_id(0) * WORK
    tensor = tl.load(at + TENSOR)
    row = table + tensor * TABLE
    scalar = scalars + tl.load(at + CLOCK) * SCALARS
    off = tl.load(at + FIRST).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(row + RUN)
    if ALIGNED:
        n = n // 4 * 4  # seen to be one, so that loads are of 16 bytes
    mask = off < n
    x, inverse = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD, MASTER)
    z = soft(x, tl.load(scalar + ENTRY_KAPPA) * inverse)
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)


@triton.jit(do_not_specialize=["max_iters"])
def step_groups(
    work, table, scalars, finite, counters, early, later, max_iters,
    METHOD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, AVERAGED: tl.constexpr, SKIP: tl.constexpr,
    SCALAR: tl.constexpr, CONCAVE: tl.constexpr, ENTRIES: tl.constexpr,
    AXIS: tl.constexpr, RUN_LENGTH: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED: tl.constexpr, SINGLE: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """A step on a tile.

    AXIS 0: the tensor as rows of G · RUN_LENGTH columns, a group being RUN_LENGTH neighbouring ones. A panel is COLUMNS
    groups: RUN_LENGTH tiles side by side, and as many below each other as the rows need.
    AXIS 1: a group is a row of the tile, and HEIGHT of them a panel: as many tiles as a group's entries need.
    The programs of a panel share its groups. They begin one after the other, so that those waited for have begun, or
    will once earlier programs end.
    """
    if SKIP:
        if tl.load(finite) == 0:
            return
    at = work + tl.program_id(0) * WORK
    row = table + tl.load(at + TENSOR) * TABLE
    scalar = scalars + tl.load(at + CLOCK) * SCALARS
    tile = tl.load(at + FIRST)
    share = tl.load(at + SHARE)
    groups = tl.load(row + GROUPS).to(tl.int32)
    # multiples of 4 are made visible, so that loads are of 16 bytes
    if AXIS == 0:
        WIDTH: tl.constexpr = COLUMNS
        width = groups * RUN_LENGTH
        if ALIGNED:
            width = width // 4 * 4
        i = (share * HEIGHT + tl.arange(0, HEIGHT))[:, None]
        j = tile * COLUMNS + tl.arange(0, COLUMNS)
        panel = tile // RUN_LENGTH * COLUMNS  # its first group
        place = j // RUN_LENGTH - panel
        first = tile * COLUMNS // RUN_LENGTH - panel
        inside = j < width
        mask = (i < tl.load(row + ROWS).to(tl.int32)) & inside[None, :]
        if WIDE:
            i = i.to(tl.int64)
        off = i * width + j[None, :]
    else:
        WIDTH: tl.constexpr = HEIGHT
        run = tl.load(row + RUN).to(tl.int32)
        if ALIGNED:
            run = run // 4 * 4
        panel = tile * HEIGHT
        place = tl.arange(0, HEIGHT)
        first = 0
        i = (panel + place)[:, None]
        j = (share * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = panel + place < groups
        if WIDE:
            i = i.to(tl.int64)
        if SINGLE:
            mask = inside[:, None] & (j < run)
            off = i * run + j
        else:
            mask = inside[:, None] & (j < tl.load(row + ROWS).to(tl.int32) * run)
            off = (i + j // run * groups) * run + j % run
    group = panel + tl.arange(0, WIDTH)
    exists = group < groups
    radius_at = address(row, RADIUS, tl.float32, False) + group
    scale_at = address(row, SCALE, tl.float32, False) + group
    trend_at = address(row, TREND, tl.float32, False) + group
    kappa = tl.load(scalar + KAPPA)
    flat = tl.load(scalar + FLAT)
    k0 = kappa / tl.load(scalar + METRIC)  # under a scalar metric
    if CONCAVE and not SCALAR:
        r = tl.zeros([WIDTH], tl.float32)  # from the left only
    else:
        r = tl.load(radius_at, mask=exists, other=0.0)
        r = tl.where((r >= 0) & (r < 1e30), r, 1.0)  # after a NaN any other start will do
    last, trend = r, r
    if METHOD == "prox_gen" and not CONCAVE:
        # its groups shrink steadily on their way to zero; dual averaging's move either way, and gain nothing by this
        trend = tl.load(trend_at, mask=exists, other=0.0)
        trend = tl.where(tl.abs(trend) < 1e30, trend, 0.0)
        r = tl.where(r > 0, tl.maximum(r + trend, 0.0), r)
    scale = tl.load(scale_at, mask=exists, other=1.0)
    scale = tl.maximum(tl.where(scale < 1e30, scale, 1.0), tl.maximum(0.25 * r, 1e-30))  # r + k is no less
    precise = exists | ~exists
    SUMS: tl.constexpr = 1 if SCALAR else 6
    if SHARED:
        panel_at = tl.load(at + PANEL)
        tiles = tl.load(at + SHARES)
        counter = counters + 2 * panel_at
        early += panel_at * SUMS * WIDTH
        later += panel_at * 2 * WIDTH
        # no more parts than this come together in one sum
        parts = tl.cdiv(tl.load(row + ROWS).to(tl.int32), HEIGHT) * RUN_LENGTH if AXIS == 0 else tiles
        units = 1.0 / parts * UNITS
        precise = precise & (parts <= MOST_PARTS)  # more of them, and the first turn's rounding shows

    x, inverse = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD, MASTER)
    if AXIS == 0 and SHARED and AVERAGED and UPDATE:
        if tl.load(scalar + AVERAGING) < 1:
            fetch(row, i, tl.load(row + ROWS), tile * COLUMNS, width, COLUMNS)
    if ENTRIES:
        x = soft(x, tl.load(scalar + ENTRY_KAPPA) * inverse)
    z = x
    if kappa > 0:
        k = tl.maximum(kappa * inverse, LEAST_K)
        turn = 0
        moving = 1
        if SCALAR or not CONCAVE:
            if SCALAR:
                r = tl.maximum(r, 1e-30)
                q = ratio(x, reciprocal(own(r, place, AXIS, RUN_LENGTH)))
                m0 = tl.sum(q * q, AXIS)
                if SHARED:
                    put(early, m0, place, inside, units, first, FEW, WIDTH)
                    arrive(counter)
                    wait(counter, tiles)
                    m0 = get(early, units, WIDTH)
                r, close = next_norm(r, m0)
                close = close & precise
            else:
                inverse = reciprocal(own(r, place, AXIS, RUN_LENGTH) + k)
                q = ratio(x, inverse)
                q = q * q
                y = own(scale, place, AXIS, RUN_LENGTH) * inverse
                q1 = q * y
                q2 = q1 * y
                q3 = q2 * y
                q4 = q3 * y
                m0, m1, m2, m3, m4, m5 = tl.reduce((q, q1, q2, q3, q4, q4 * y), AXIS, add_six)
                if SHARED:
                    put_six(early, m0, m1, m2, m3, m4, m5, place, inside, units, first, FEW, WIDTH)
                    arrive(counter)
                    wait(counter, tiles)
                    m0, m1, m2, m3, m4, m5 = get_six(early, units, FEW, WIDTH)
                r, close = by_series(r, scale, m0, m1, m2, m3, m4, m5, precise, SHARED)
                scale = next_scale(scale, m0, m1, r)
            moving = tl.max(tl.where(close, 0, tl.where(exists, 1, 0)), 0)
            turn = 1
        # tensors before numbers: Triton 3.6 and 3.7 fail on a loop that carries them in another order
        while (turn < max_iters) & (moving > 0):
            mine = own(r, place, AXIS, RUN_LENGTH)
            if SCALAR:
                q = ratio(x, reciprocal(mine))
                m0 = tl.sum(q * q, AXIS)
                m1 = m0
            else:
                # a penalty that ends at R lowers the metric: D/h = r + k (1 − r/R), and its slope in r is 1 − k/R
                inverse = reciprocal(mine + k * ((flat - mine) / flat if CONCAVE else 1.0))
                q = ratio(x, inverse)
                m0 = tl.sum(q * q, AXIS)
                y = own(scale, place, AXIS, RUN_LENGTH) * inverse
                m1 = tl.sum(q * q * (y * (1 - k / flat) if CONCAVE else y), AXIS)
            if SHARED:
                put_later(later, 0, m0, place, inside, WIDTH)
                if not SCALAR:
                    put_later(later, 1, m1, place, inside, WIDTH)
                if arrive(counter) == tiles * (turn + 1):
                    conclude(
                        radius_at, scale_at, exists, r, scale, later, counter + 1, turn, flat, SCALAR, CONCAVE, WIDTH
                    )  # fmt: skip
                moving = wait(counter + 1, 2 * (turn + 1)) % 2
                r = tl.load(radius_at, mask=exists, other=0.0, cache_modifier=".cg")
                scale = tl.load(scale_at, mask=exists, other=1.0, cache_modifier=".cg")
            else:
                if SCALAR:
                    new, close = next_norm(r, m0)
                elif CONCAVE:
                    new, close = newton_to_end(r, scale, m0, m1, flat)
                    scale = next_scale(scale, m0, m1, new)
                else:
                    new, close = newton(r, scale, m0, m1)
                    scale = next_scale(scale, m0, m1, new)
                moving = tl.max(tl.where(close, 0, tl.where(exists, 1, 0)), 0)
                r = new
            turn += 1
        if SCALAR:
            z = x * own(scalar_factor(r / k0, flat / k0, CONCAVE), place, AXIS, RUN_LENGTH)
        else:
            mine = own(r, place, AXIS, RUN_LENGTH)
            z = x * (mine * reciprocal(mine + k * ((flat - mine) / flat if CONCAVE else 1.0)))
            if CONCAVE:
                outer = tl.sum((x / flat) * (x / flat), AXIS)
                gain = tl.sum(((x - z) / flat) * ((x - z) * reciprocal(k)), AXIS)
                if SHARED:
                    put_later(later, 0, outer, place, inside, WIDTH)
                    put_later(later, 1, gain, place, inside, WIDTH)
                    if arrive(counter) == tiles * (turn + 1):
                        choose(radius_at, exists, r, later, counter + 1, turn, flat, WIDTH)
                    wait(counter + 1, 2 * (turn + 1))
                    r = tl.load(radius_at, mask=exists, other=0.0, cache_modifier=".cg")
                else:
                    r = tl.where(is_better(r, outer, gain, flat), -1.0, r)
                z = tl.where(own(r, place, AXIS, RUN_LENGTH) < 0, x, z)
        if UPDATE:
            # where the next step begins; all programs of the panel have read where this one did
            if (share == 0) & (tile % RUN_LENGTH == 0):
                tl.store(radius_at, r, mask=exists)
                tl.store(scale_at, scale, mask=exists)
                if METHOD == "prox_gen" and not CONCAVE:
                    tl.store(trend_at, 0.5 * (trend + r - last), mask=exists)
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)
