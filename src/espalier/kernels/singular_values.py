"""The soft-threshold of small matrices' singular values: one program has one of them at hand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.penalties import singular_values

# what the torch code has, too
RESOLUTION = tl.constexpr(singular_values.RESOLUTION)
CLOSE = tl.constexpr(singular_values.CLOSE)
SURE = tl.constexpr(singular_values.SURE)
HALF_WAY = tl.constexpr(singular_values.HALF_WAY)
APART = tl.constexpr(singular_values.APART)
PRODUCTS_BELOW = tl.constexpr(singular_values.PRODUCTS_BELOW)

_LEAST = 16  # rows and columns of a product


def soft_threshold(x: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """U max(Σ − κ, 0) Vᵀ of each matrix, κ (L); and bounds: it is precise where these are below PRODUCTS_BELOW."""
    y, bounds = torch.empty_like(x), torch.empty(len(x), dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        _soft_threshold[(len(x),)](x, kappa, y, bounds, *size_of(x), **options_for(x))
    return y, bounds


def size_of(x: Tensor) -> tuple[int, int]:
    """Rows and columns, no more of these: wide matrices are turned."""
    return max(x.shape[1:]), min(x.shape[1:])


def options_for(x: Tensor) -> dict[str, int]:
    """What the programs are compiled for. Each warp has 16 rows of a product; more of them would repeat it."""
    height, width = (max(_LEAST, triton.next_power_of_2(size)) for size in size_of(x))
    return {"TURNED": x.shape[1] < x.shape[2], "M": height, "N": width, "num_warps": max(4, height // 16)}


@triton.jit
def growth(low, apart):
    """α and α³ of the step ½ y (3 − y²), y = α x, that ends at 1 `apart` times as high as it begins at `low`."""
    square = 3 * (1 - apart * low) / (1 - apart * low * low * low)
    alpha = tl.sqrt(square)
    return alpha, alpha * square


@triton.jit
def grown(x, alpha, cube):
    return 1.5 * alpha * x - 0.5 * cube * x * x * x


@triton.jit
def towards_one(x, square, alpha, cube):
    return 1.5 * alpha * x - 0.5 * cube * tl.dot(x, square, out_dtype=tl.float64)


@triton.jit
def threshold(y, kappa, eye):
    """U max(Σ − κ, 0) Vᵀ of y as `penalties/singular_values.py` has it; a bound of the norm of yᵀy/κ², at least 4."""
    wide = y.to(tl.float64) / kappa
    square = tl.dot(tl.trans(wide), wide, out_dtype=tl.float64)
    power = tl.dot(square, square, out_dtype=tl.float64)
    power = tl.dot(power, power, out_dtype=tl.float64)
    bound = tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(power * power))))
    bound = tl.where(bound < 4, 4.0, bound)
    size = tl.sqrt(tl.where(bound < PRODUCTS_BELOW, bound, PRODUCTS_BELOW))  # infinite, it would never come to its end
    wide = wide / size
    square = square / (size * size)
    low = 1 / size
    polar, beyond = wide, low * (1 + RESOLUTION)
    while low < HALF_WAY:
        alpha, cube = growth(low, APART)
        polar = towards_one(polar, square, alpha, cube)
        square = tl.dot(tl.trans(polar), polar, out_dtype=tl.float64)
        low, beyond = grown(low, alpha, cube), grown(beyond, alpha, cube)
    edge = low * low
    sign = (square - edge * eye) / (1 - edge)
    short = (beyond * beyond - edge) / (1 - edge)
    while 1 - short > SURE:
        alpha, cube = growth(short, 1.0)
        sign = towards_one(sign, tl.dot(sign, sign, out_dtype=tl.float64), alpha, cube)
        short = grown(short, alpha, cube)
    above = (sign + eye) * 0.5
    while 1 - low > CLOSE:
        alpha, cube = growth(low, 1.0)
        polar = towards_one(polar, square, alpha, cube)
        square = tl.dot(tl.trans(polar), polar, out_dtype=tl.float64)
        low = grown(low, alpha, cube)
    excess = tl.dot(tl.trans(polar), wide, out_dtype=tl.float64) - eye / size
    share = tl.dot(above, excess, out_dtype=tl.float64) * (size * kappa)
    share = tl.where(tl.sum(above * eye) < 0.5, 0.0, share)  # exactly zero
    return tl.dot(polar, share, out_dtype=tl.float64).to(tl.float32), bound


@triton.jit
def places(rows, columns, TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Where the entries of a matrix lie, and which of them there are."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    entry = j * rows + i if TURNED else i * columns + j
    return entry, (i < rows) & (j < columns)


@triton.jit
def identity(N: tl.constexpr):
    return tl.where(tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :], 1.0, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["rows", "columns"])
def _soft_threshold(
    x, kappa, y, bounds, rows, columns,
    TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    entry, inside = places(rows, columns, TURNED, M, N)
    here = matrix * rows * columns + entry
    k = tl.load(kappa + matrix).to(tl.float64)
    found, bound = threshold(tl.load(x + here, inside, 0.0), k, identity(N))
    tl.store(y + here, found, inside)
    tl.store(bounds + matrix, bound)
