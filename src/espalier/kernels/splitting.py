"""Small matrices under the nuclear norm: one program has one of them at hand, and is done with it at the end.

Otherwise such matrices cost a launch for each of a hundred tiny products, and a look after each iteration.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels import MOST_MEMORY
from espalier.kernels.singular_values import PRODUCTS_BELOW, identity, options_for, places, size_of, threshold
from espalier.solvers import anderson
from espalier.solvers import splitting as reference

# what the torch code has, too
STRAY = tl.constexpr(anderson.STRAY)
RIDGE = tl.constexpr(anderson.RIDGE)
RELAXATION = tl.constexpr(reference.RELAXATION)
LEAST_POWER = tl.constexpr(reference.LEAST_POWER)
ROUNDING = tl.constexpr(reference.ROUNDING * torch.finfo(torch.float32).eps)
# slots in which Anderson's numbers lie, a power of 2
SLOTS = tl.constexpr(MOST_MEMORY)
LONGEST_PAUSE = tl.constexpr(1 << 20)


def solve(
    linear: Tensor, metric: Tensor, start: Tensor, kappa: Tensor, tolerance: Tensor, max_iters: int, memory: int
) -> tuple[Tensor, Tensor]:
    """The splitting of `solvers/douglas_rachford.py`: the solutions, and the iterations that each took, 0 where
    products are not precise enough.

    Matrices are (L, m, n) without gaps, κ and the tolerance (L).
    """
    count = len(start)
    z, best = torch.empty_like(start), torch.empty_like(start)
    points, moves = (start.new_empty(count, memory, *start.shape[1:]) for _ in range(2))
    iterations = torch.empty(count, dtype=torch.int32, device=start.device)
    with torch.cuda.device_of(start):
        _solve[(count,)](
            linear, metric, start, kappa, tolerance, points, moves, best, z, iterations, *size_of(start), max_iters,
            MEMORY=memory, **options_for(start),
        )  # fmt: skip
    return z, iterations


def judge(
    residual: Tensor, gap: Tensor, angles: Tensor, limits: Tensor, holds: Tensor, made: Tensor, slot: Tensor,
    known: Tensor, state: Tensor, least: Tensor, taken: Tensor, weights: Tensor, choice: Tensor,
) -> None:  # fmt: skip
    """After a step of the splitting that was made for each matrix into this slot of the ring, if that `holds`: write
    `taken` where it solved one, else what Anderson's mixing knows (known, state, least) and the weights of the next.

    choice (L, 4): it is solved, the step is the best so far, V is mixed next, V goes back to the best. All are false
    where there was nothing to do.
    """
    with torch.cuda.device_of(residual):
        _judge[(len(residual),)](
            residual, gap, angles, limits, holds, made, slot, known, state, least, taken, weights, choice,
            MEMORY=weights.shape[1], num_warps=1,
        )  # fmt: skip


@triton.jit
def weights(products, usable, slot, MEMORY: tl.constexpr):
    """The c, of sum 1, for which Σ c_i f_i is shortest, over the usable slots; 1 at this slot where there are none."""
    at = tl.arange(0, SLOTS)
    diagonal = at[:, None] == at[None, :]
    square = tl.sum(tl.where(diagonal, products, 0.0), 1)
    sound = tl.sum(tl.where(usable & ~((square > 0) & (square < float("inf"))), 1, 0)) == 0
    length = tl.sqrt(tl.where(usable & sound, square, 1.0))
    pair = usable[:, None] & usable[None, :]
    a = tl.where(pair, products / (length[:, None] * length[None, :]), 0.0)
    a += tl.where(diagonal, tl.where(pair, RIDGE, 1.0), 0.0)
    right = tl.where(usable, 1 / length, 0.0)
    for k in tl.static_range(MEMORY):
        row = tl.sum(tl.where((at == k)[:, None], a, 0.0), 0)
        column = tl.sum(tl.where((at == k)[None, :], a, 0.0), 1)
        pivot = tl.sum(tl.where(at == k, row, 0.0))
        sound = sound & (pivot > 0)
        factor = tl.where(at == k, 0.0, column / tl.where(pivot > 0, pivot, 1.0))
        right -= factor * tl.sum(tl.where(at == k, right, 0.0))
        a -= factor[:, None] * row[None, :]
    pivots = tl.sum(tl.where(diagonal, a, 0.0), 1)
    c = tl.where(usable, right / tl.where(pivots > 0, pivots, 1.0) / length, 0.0)
    total = tl.sum(c)
    sound = sound & (total != 0) & (tl.abs(total) < float("inf"))
    return tl.where(sound, c / tl.where(sound, total, 1.0), tl.where(at == slot, 1.0, 0.0))


@triton.jit
def mixing(products, usable, plain, pause, new, slot, stray, MEMORY: tl.constexpr):
    """What is known after a step into this slot, whose move has these products with the others, and the next weights.

    See `solvers/anderson.py`."""
    at = tl.arange(0, SLOTS)
    none = at < 0
    products = tl.where((at == slot)[:, None], new[None, :], tl.where((at == slot)[None, :], new[:, None], products))
    plain = tl.where(stray, pause, tl.maximum(plain - 1, 0))
    pause = tl.where(stray, tl.minimum(2 * pause, LONGEST_PAUSE), pause)
    usable = tl.where(stray, none, usable | (at == slot))
    c = weights(products, tl.where(plain == 0, usable, none), slot, MEMORY).to(tl.float32)
    return products, usable, plain, pause, c


@triton.jit
def solves(residual, gap, wanted, floor):
    """The paper's condition; what is NaN solves it, too."""
    return ~(residual > tl.maximum(wanted, floor)) & ((gap >= 0) | ~(residual > floor))


@triton.jit
def _judge(
    residual, gap, angles, limits, holds, made, slot, known, state, least, taken, weights_, choice,
    MEMORY: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    at = tl.arange(0, SLOTS)
    here = matrix * SLOTS * SLOTS + at[:, None] * SLOTS + at[None, :]
    slot_ = tl.load(slot)
    r = tl.load(residual + matrix)
    live = (tl.load(holds) != 0) & (tl.load(taken + matrix) == 0)
    solved = solves(r, tl.load(gap + matrix), tl.load(limits + 2 * matrix), tl.load(limits + 2 * matrix + 1))
    goes_on = live & ~solved
    old = tl.load(least + matrix)
    better, stray = r < old, r > old * STRAY
    bits, plain, pause = tl.load(state + 3 * matrix), tl.load(state + 3 * matrix + 1), tl.load(state + 3 * matrix + 2)
    new = tl.load(angles + matrix * MEMORY + at, at < MEMORY, 0.0).to(tl.float64)
    products, usable, plain, pause, c = mixing(
        tl.load(known + here), ((bits >> at) & 1) != 0, plain, pause, new, slot_, stray, MEMORY
    )
    tl.store(known + here, products, goes_on)
    tl.store(state + 3 * matrix, tl.sum(tl.where(usable, 1 << at, 0)), goes_on)
    tl.store(state + 3 * matrix + 1, plain, goes_on)
    tl.store(state + 3 * matrix + 2, pause, goes_on)
    tl.store(least + matrix, r, goes_on & better)
    tl.store(weights_ + matrix * MEMORY + at, c, goes_on & (at < MEMORY))
    tl.store(taken + matrix, tl.load(made) + 1, live & solved)
    tl.store(choice + 4 * matrix, live & solved)
    tl.store(choice + 4 * matrix + 1, goes_on & better)
    tl.store(choice + 4 * matrix + 2, goes_on & ~stray)
    tl.store(choice + 4 * matrix + 3, goes_on & stray)


@triton.jit
def reflected(v, b, h):
    """2 X − V, X = (b + V) / (H + 1)."""
    inverse = 1 / (1 + h)
    return 2 * b * inverse + (2 * inverse - 1) * v


@triton.jit
def mean_metric(h, b, first, kappa, inside, columns):
    """ρ."""
    size = tl.sqrt(columns.to(tl.float32))
    power = tl.minimum(tl.maximum(kappa * size / tl.sqrt(tl.sum(b * b)), LEAST_POWER), 1.0)
    top = tl.max(tl.abs(first))  # lest a square be too small or too large
    share = tl.where(top > 0, first / top, 1.0)
    share = tl.where(inside, share * share, 0.0)
    mean = tl.sum(share * tl.exp2(power * tl.log2(h))) / tl.sum(share)
    return tl.exp2(tl.log2(mean) / power)


@triton.jit(do_not_specialize=["rows", "columns", "max_iters"])
def _solve(
    linear, metric, start, kappa, tolerance, points, moves, best, z, iterations,
    rows, columns, max_iters,
    MEMORY: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    entry, inside = places(rows, columns, TURNED, M, N)
    size = rows * columns
    here = matrix * size + entry
    ring = matrix * MEMORY * size + entry
    eye = identity(N)
    at = tl.arange(0, SLOTS)

    # the problem divided by ρ, and V at which X is the start
    h, b = tl.load(metric + here, inside, 1.0), tl.load(linear + here, inside, 0.0)
    first = tl.load(start + here, inside, 0.0)
    k = tl.load(kappa + matrix)
    rho = mean_metric(h, b, first, k, inside, columns)
    h, b, k = tl.where(inside, h / rho, 1.0), b / rho, k / rho
    v = first - b + h * first
    wanted = tl.load(tolerance + matrix) * k * tl.sqrt(columns.to(tl.float32))
    spread = tl.sqrt(tl.sum(tl.where(inside, (1 + h) * (1 + h), 0.0)) / size)
    floor = spread * tl.sqrt(tl.sum((2 * first - v) * (2 * first - v))) * ROUNDING

    products = tl.zeros((SLOTS, SLOTS), tl.float64)
    usable = at < 0
    least = tl.full((), float("inf"), tl.float32)
    done, precise, descending = matrix < 0, matrix >= 0, matrix < 0
    taken, plain, pause = tl.program_id(0) * 0, tl.program_id(0) * 0, tl.program_id(0) * 0 + 1
    steepest = tl.max(tl.where(inside, h, 0.0))
    tl.store(best + here, v, inside)
    while ~done:
        if taken == max_iters - 1:
            tl.debug_barrier()
            v = tl.load(best + here, inside, 0.0)
        y = tl.where(descending, first - (h * first - b) / steepest, reflected(v, b, h))
        x, bound = threshold(y, tl.where(descending, k / steepest, k).to(tl.float64), eye)
        tl.store(z + here, x, inside)
        precise = bound < PRODUCTS_BELOW  # not where it is NaN
        slot = taken % MEMORY
        taken += tl.where(descending, 0, 1)
        move = x - 0.5 * (y + v)
        v += move * RELAXATION
        subgradient = (h - 1) * move
        residual = tl.sqrt(tl.sum(subgradient * subgradient))
        delta = first - x
        gap = tl.sum((subgradient + 0.5 * (h * delta)) * delta)
        done = descending | solves(residual, gap, wanted, floor) | ~precise
        # after the last, where it may lie above the start, a step of proximal gradient from there
        done = done | ((taken == max_iters) & (gap >= 0))
        descending = ~done & (taken == max_iters)
        if ~done & ~descending:
            tl.store(points + ring + slot * size, v, inside)
            tl.store(moves + ring + slot * size, move, inside)
            stray = residual > least * STRAY
            if residual < least:
                least = residual
                tl.store(best + here, v, inside)
            tl.debug_barrier()
            new = tl.zeros((SLOTS,), tl.float64)
            for n in tl.static_range(MEMORY):
                other = tl.load(moves + ring + n * size, inside & (n < taken), 0.0)
                new = tl.where(at == n, tl.sum(move * other).to(tl.float64), new)
            products, usable, plain, pause, c = mixing(products, usable, plain, pause, new, slot, stray, MEMORY)
            if stray:
                v = tl.load(best + here, inside, 0.0)
            else:
                v = tl.zeros((M, N), tl.float32)
                for n in tl.static_range(MEMORY):
                    share = tl.sum(tl.where(at == n, c, 0.0))
                    v += share * tl.load(points + ring + n * size, inside & (n < taken), 0.0)
    tl.store(iterations + matrix, tl.where(precise, taken, 0))
