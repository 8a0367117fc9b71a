"""The soft-threshold of small matrices' singular values: one program has one of them at hand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.penalties import singular_values

# what the torch code has, too
RESOLUTION = tl.constexpr(singular_values.RESOLUTION)
GRAM_BELOW = tl.constexpr(singular_values.GRAM_BELOW)

_LEAST = 16  # rows and columns of a product


def soft_threshold(x: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """U max(Σ − κ, 0) Vᵀ of each matrix, κ (L); and bounds: where these are not below GRAM_BELOW it is not precise."""
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
    bound = tl.where(bound == 0, 1.0, bound)
    sign = sign / bound
    low = tl.maximum(2 / bound * RESOLUTION, 1e-12)
    while 1 - low > 1e-6:
        alpha, cube, low = growth(low)
        square = tl.dot(sign, sign, out_dtype=tl.float64)
        sign = 1.5 * alpha * sign - 0.5 * cube * tl.dot(sign, square, out_dtype=tl.float64)
    above = (sign + eye) * 0.5
    scale = tl.where(bound < GRAM_BELOW, bound, GRAM_BELOW) + 1  # what is infinite would never come to its end
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
