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
def put(sums, j: tl.constexpr, v, place, inside, units, WIDTH: tl.constexpr):
    """This program's part of a sum of the first turn."""
    part = (tl.minimum(v, LARGEST_PART) * units + 0.5).to(tl.int32)
    tl.atomic_add(sums + j * WIDTH + place, part, mask=inside, sem="relaxed")


@triton.jit
def get(sums, j: tl.constexpr, units, WIDTH: tl.constexpr):
    """A sum of the first turn."""
    return tl.load(sums + j * WIDTH + tl.arange(0, WIDTH), cache_modifier=".cg").to(tl.float32) / units


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
