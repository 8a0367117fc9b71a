"""Sums over the programs that share a panel of groups, through global memory.

Every program adds its part and says that it has come; in the first turn each waits for all and works r out for itself,
in later ones the last to come does so for the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.kernels.newton import (
    FINE,
    LARGEST_LATER,
    LARGEST_PART,
    is_better,
    newton,
    newton_to_end,
    next_norm,
    next_scale,
)


@triton.jit
def counted(v, units):
    """A sum's part in whole units, so that the order in which parts come together does not matter."""
    return (tl.minimum(v, LARGEST_PART) * units + 0.5).to(tl.int32)


@triton.jit
def put(sums, v, place, inside, units, first, FEW: tl.constexpr, WIDTH: tl.constexpr):
    """This program's part of the first turn's only sum.

    Neighbouring columns of one group are added up before: their groups are FEW at most, from `first` on (FEW = 0: each
    column or row is a group of its own, or nearly so).
    """
    part = counted(v, units)
    if FEW > 0:
        own, place, inside = _few(place, inside, first, FEW, WIDTH)
        part = tl.sum(tl.where(own, part[:, None], 0), 0)
    tl.atomic_add(sums + place, part, mask=inside, sem="relaxed")


@triton.jit
def get(sums, units, WIDTH: tl.constexpr):
    """The first turn's only sum."""
    return tl.load(sums + tl.arange(0, WIDTH), cache_modifier=".cg").to(tl.float32) / units


@triton.jit
def put_six(
    sums, m0, m1, m2, m3, m4, m5, place, inside, units, first, FEW: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """This program's part of the first turn's six sums; two are one number where columns are added up before."""
    if FEW > 0:
        own, place, inside = _few(place, inside, first, FEW, WIDTH)
        p0, p1, p2 = tl.reduce(
            (
                tl.where(own, _both(m0, m1, units)[:, None], 0),
                tl.where(own, _both(m2, m3, units)[:, None], 0),
                tl.where(own, _both(m4, m5, units)[:, None], 0),
            ),
            0,
            _add_three,
        )
        at = sums.to(tl.pointer_type(tl.int64), bitcast=True) + place
        tl.atomic_add(at, p0, mask=inside, sem="relaxed")
        tl.atomic_add(at + WIDTH, p1, mask=inside, sem="relaxed")
        tl.atomic_add(at + 2 * WIDTH, p2, mask=inside, sem="relaxed")
    else:
        at = sums + place
        tl.atomic_add(at, counted(m0, units), mask=inside, sem="relaxed")
        tl.atomic_add(at + WIDTH, counted(m1, units), mask=inside, sem="relaxed")
        tl.atomic_add(at + 2 * WIDTH, counted(m2, units), mask=inside, sem="relaxed")
        tl.atomic_add(at + 3 * WIDTH, counted(m3, units), mask=inside, sem="relaxed")
        tl.atomic_add(at + 4 * WIDTH, counted(m4, units), mask=inside, sem="relaxed")
        tl.atomic_add(at + 5 * WIDTH, counted(m5, units), mask=inside, sem="relaxed")


@triton.jit
def get_six(sums, units, FEW: tl.constexpr, WIDTH: tl.constexpr):
    """The first turn's six sums."""
    if FEW > 0:
        at = sums.to(tl.pointer_type(tl.int64), bitcast=True)
        m0, m1 = _apart(at, units, WIDTH)
        m2, m3 = _apart(at + WIDTH, units, WIDTH)
        m4, m5 = _apart(at + 2 * WIDTH, units, WIDTH)
    else:
        m0 = get(sums, units, WIDTH)
        m1 = get(sums + WIDTH, units, WIDTH)
        m2 = get(sums + 2 * WIDTH, units, WIDTH)
        m3 = get(sums + 3 * WIDTH, units, WIDTH)
        m4 = get(sums + 4 * WIDTH, units, WIDTH)
        m5 = get(sums + 5 * WIDTH, units, WIDTH)
    return m0, m1, m2, m3, m4, m5


@triton.jit
def _few(place, inside, first, FEW: tl.constexpr, WIDTH: tl.constexpr):
    """Which columns belong to which of the few groups; these, and whether they are in the panel."""
    groups = first + tl.arange(0, FEW)
    return (place[:, None] == groups[None, :]) & inside[:, None], groups, groups < WIDTH


@triton.jit
def _both(v, w, units):
    """Two parts as the halves of one number; sums of either stay in [0, 2³¹), so that nothing is carried."""
    return counted(v, units).to(tl.int64) + (counted(w, units).to(tl.int64) << 32)


@triton.jit
def _apart(at, units, WIDTH: tl.constexpr):
    both = tl.load(at + tl.arange(0, WIDTH), cache_modifier=".cg")
    return (both & 0xFFFFFFFF).to(tl.float32) / units, (both >> 32).to(tl.float32) / units


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def put_later(sums, j: tl.constexpr, v, place, inside, WIDTH: tl.constexpr):
    """This program's part of a sum of a later turn."""
    part = (tl.maximum(tl.minimum(v, LARGEST_LATER), -LARGEST_LATER) * FINE).to(tl.int64)
    tl.atomic_add(sums + j * WIDTH + place, part, mask=inside, sem="relaxed")


@triton.jit
def take_later(sums, j: tl.constexpr, WIDTH: tl.constexpr):
    """A sum of a later turn; zero for the next one."""
    at = sums + j * WIDTH + tl.arange(0, WIDTH)
    v = tl.load(at, cache_modifier=".cg").to(tl.float32) * (1 / FINE)
    tl.debug_barrier()  # all warps read, one writes
    tl.store(at, tl.zeros([WIDTH], tl.int64))
    return v


@triton.jit
def arrive(counter):
    """Let the others know that this program's parts are there; how many have come."""
    tl.debug_barrier()
    n = tl.atomic_add(counter, 1) + 1
    tl.debug_barrier()
    return n


@triton.jit
def wait(counter, least):
    """Until the counter has come so far; its value."""
    n = tl.atomic_add(counter, 0)
    while n < least:
        n = tl.atomic_add(counter, 0)
    tl.debug_barrier()
    return n


@triton.jit
def conclude(
    radius_at, scale_at, exists, r, scale, sums, flag, turn, flat,
    SCALAR: tl.constexpr, CONCAVE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A later turn's r, for all programs of the panel, by the last one to arrive."""
    m0 = take_later(sums, 0, WIDTH)
    if SCALAR:
        new, close = next_norm(r, m0)
    else:
        m1 = take_later(sums, 1, WIDTH)
        if CONCAVE:
            new, close = newton_to_end(r, scale, m0, m1, flat)
        else:
            new, close = newton(r, scale, m0, m1)
        tl.store(scale_at, next_scale(scale, m0, m1, new), mask=exists)
    tl.store(radius_at, new, mask=exists)
    moving = tl.max(tl.where(close, 0, tl.where(exists, 1, 0)), 0)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 2 * (turn + 1) + moving)


@triton.jit
def choose(radius_at, inside, r, sums, flag, turn, flat, WIDTH: tl.constexpr):
    """Of a penalty's end: −1 for r where x itself is better, by the last program to arrive."""
    outer, gain = take_later(sums, 0, WIDTH), take_later(sums, 1, WIDTH)
    tl.store(radius_at, tl.where(is_better(r, outer, gain, flat), -1.0, r), mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 2 * (turn + 1))
