"""Small matrices under the nuclear norm: one program has one of them at hand, and is done with it at the end.

Otherwise such matrices cost a launch for each of a hundred tiny products, and a look after each iteration.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels import MOST_MEMORY

# see `penalties/singular_values.py`, `solvers/douglas_rachford.py` and `solvers/anderson.py`
RESOLUTION = tl.constexpr(1e-5)
GRAM_BELOW = tl.constexpr(1e10)
STRAY = tl.constexpr(2.0)
RIDGE = tl.constexpr(1e-7)
RELAXATION = tl.constexpr(1.3)
LEAST_POWER = tl.constexpr(0.01)
ROUNDING = tl.constexpr(8 * 2.0**-23)
# slots in which Anderson's numbers lie, a power of 2
SLOTS = tl.constexpr(MOST_MEMORY)
LONGEST_PAUSE = tl.constexpr(1 << 20)

_LEAST = 16  # rows and columns of a product


def soft_threshold(x: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """U max(Σ − κ, 0) Vᵀ of each matrix, κ (L); and bounds: where these are not below GRAM_BELOW it is not precise."""
    y, bounds = torch.empty_like(x), torch.empty(len(x), dtype=torch.float64, device=x.device)
    layout, options = _layout(x)
    _soft_threshold[(len(x),)](x, kappa, y, bounds, *layout, **options)
    return y, bounds


def _layout(x: Tensor) -> tuple[tuple[int, int, int, int], dict[str, int]]:
    """Rows and columns, no more of these, with their strides; and what the programs are compiled for."""
    m, n = x.shape[1:]
    rows, columns, row, column = (m, n, n, 1) if m >= n else (n, m, 1, n)
    height, width = (max(_LEAST, triton.next_power_of_2(size)) for size in (rows, columns))
    return (rows, columns, row, column), {"M": height, "N": width, "num_warps": max(4, width // 4)}


def solve(
    linear: Tensor, metric: Tensor, start: Tensor, kappa: Tensor, tolerance: Tensor, max_iters: int, memory: int
) -> tuple[Tensor, Tensor]:
    """The splitting of `solvers/douglas_rachford.py`: the solutions, and the iterations that each took, 0 where
    products of the Gram matrix are not precise enough.

    Matrices are (L, m, n) without gaps, κ and the tolerance (L).
    """
    count = len(start)
    z, best = torch.empty_like(start), torch.empty_like(start)
    points, moves = start.new_empty(2, count, memory, *start.shape[1:])
    iterations = torch.empty(count, dtype=torch.int32, device=start.device)
    layout, options = _layout(start)
    _solve[(count,)](
        linear, metric, start, kappa, tolerance, points, moves, best, z, iterations, *layout, max_iters,
        MEMORY=memory, **options,
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
    _judge[(len(residual),)](
        residual, gap, angles, limits, holds, made, slot, known, state, least, taken, weights, choice,
        MEMORY=weights.shape[1], num_warps=1,
    )  # fmt: skip


@triton.jit
def growth(low):
    """α and α³ of the step ½ y (3 − y²), y = α x, that takes [low, 1] nearest to 1, and the new low."""
    square = 3 / (1 + low + low * low)
    alpha = tl.sqrt(square)
    return alpha, alpha * square, 0.5 * alpha * low * (3 - square * low * low)


@triton.jit
def threshold(y, kappa, eye):
    """U max(Σ − κ, 0) Vᵀ of y, and a bound of the norm of yᵀy/κ² − 1."""
    wide = y.to(tl.float64) / kappa
    ratio = tl.dot(tl.trans(wide), wide, out_dtype=tl.float64)
    sign = ratio - eye
    square = tl.dot(sign, sign, out_dtype=tl.float64)
    square = tl.dot(square, square, out_dtype=tl.float64)
    bound = tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(square * square))))
    sign = sign / bound
    low = tl.maximum(2 / bound * RESOLUTION, 1e-12)
    while 1 - low > 1e-6:
        alpha, cube, low = growth(low)
        square = tl.dot(sign, sign, out_dtype=tl.float64)
        sign = 1.5 * alpha * sign - 0.5 * cube * tl.dot(sign, square, out_dtype=tl.float64)
    above = (sign + eye) * 0.5
    scale = bound + 1
    root = (tl.dot(above, ratio, out_dtype=tl.float64) + eye - above) / scale
    inverse = eye
    low = 1 / tl.sqrt(scale)
    while 1 - low > 1e-6:
        alpha, cube, low = growth(low)
        step = 1.5 * alpha * eye - 0.5 * cube * tl.dot(inverse, root, out_dtype=tl.float64)
        root = tl.dot(root, step, out_dtype=tl.float64)
        inverse = tl.dot(step, inverse, out_dtype=tl.float64)
    share = above - tl.dot(above, inverse, out_dtype=tl.float64) / tl.sqrt(scale)
    share = tl.where(tl.sum(above * eye) < 0.5, 0.0, share)  # exactly zero
    wide = y.to(tl.float64)
    return tl.dot(wide, share, out_dtype=tl.float64).to(tl.float32), bound


@triton.jit
def places(rows, columns, row, column, M: tl.constexpr, N: tl.constexpr):
    """Where the entries of a matrix lie, and which of them there are."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return i * row + j * column, (i < rows) & (j < columns)


@triton.jit
def identity(N: tl.constexpr):
    return tl.where(tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :], 1.0, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["rows", "columns", "row", "column"])
def _soft_threshold(
    x, kappa, y, bounds, rows, columns, row, column,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    entry, inside = places(rows, columns, row, column, M, N)
    here = matrix * rows * columns + entry
    k = tl.load(kappa + matrix).to(tl.float64)
    found, bound = threshold(tl.load(x + here, inside, 0.0), k, identity(N))
    tl.store(y + here, found, inside)
    tl.store(bounds + matrix, bound)


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
def mean_metric(h, b, kappa, inside, rows, columns):
    """ρ."""
    size = tl.sqrt(columns.to(tl.float32))
    power = tl.minimum(tl.maximum(kappa * size / tl.sqrt(tl.sum(b * b)), LEAST_POWER), 1.0)
    mean = tl.sum(tl.where(inside, tl.exp2(power * tl.log2(h)), 0.0)) / (rows * columns)
    return tl.exp2(tl.log2(mean) / power)


@triton.jit(do_not_specialize=["rows", "columns", "row", "column", "max_iters"])
def _solve(
    linear, metric, start, kappa, tolerance, points, moves, best, z, iterations,
    rows, columns, row, column, max_iters,
    MEMORY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    entry, inside = places(rows, columns, row, column, M, N)
    size = rows * columns
    here = matrix * size + entry
    ring = matrix * MEMORY * size + entry
    eye = identity(N)
    at = tl.arange(0, SLOTS)

    # the problem divided by ρ, and V at which X is the start
    h, b = tl.load(metric + here, inside, 1.0), tl.load(linear + here, inside, 0.0)
    first = tl.load(start + here, inside, 0.0)
    k = tl.load(kappa + matrix)
    rho = mean_metric(h, b, k, inside, rows, columns)
    h, b, k = tl.where(inside, h / rho, 1.0), b / rho, k / rho
    v = first - b + h * first
    wanted = tl.load(tolerance + matrix) * k * tl.sqrt(columns.to(tl.float32))
    spread = tl.sqrt(tl.sum(tl.where(inside, (1 + h) * (1 + h), 0.0)) / size)
    floor = spread * tl.sqrt(tl.sum((2 * first - v) * (2 * first - v))) * ROUNDING

    products = tl.zeros((SLOTS, SLOTS), tl.float64)
    usable = at < 0
    least = tl.full((), float("inf"), tl.float32)
    gap = tl.full((), 0.0, tl.float32)
    done, precise = matrix < 0, matrix >= 0
    taken, plain, pause = matrix * 0, matrix * 0, matrix * 0 + 1
    tl.store(best + here, v, inside)
    while ~done & (taken < max_iters):
        slot = taken % MEMORY
        taken += 1
        if taken == max_iters:
            tl.debug_barrier()
            v = tl.load(best + here, inside, 0.0)
        y = reflected(v, b, h)
        x, bound = threshold(y, k.to(tl.float64), eye)
        tl.store(z + here, x, inside)
        precise = bound < GRAM_BELOW  # not where it is NaN
        move = x - 0.5 * (y + v)
        v += move * RELAXATION
        tl.store(points + ring + slot * size, v, inside)
        tl.store(moves + ring + slot * size, move, inside)
        subgradient = (h - 1) * move
        residual = tl.sqrt(tl.sum(subgradient * subgradient))
        delta = first - x
        gap = tl.sum((subgradient + 0.5 * (h * delta)) * delta)
        done = solves(residual, gap, wanted, floor) | ~precise
        if ~done & (taken < max_iters):
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
    if ~done & (gap < 0):
        steepest = tl.max(tl.where(inside, h, 0.0))
        x, bound = threshold(first - (h * first - b) / steepest, (k / steepest).to(tl.float64), eye)
        tl.store(z + here, x, inside)
        precise = bound < GRAM_BELOW
    tl.store(iterations + matrix, tl.where(precise, taken, 0))
