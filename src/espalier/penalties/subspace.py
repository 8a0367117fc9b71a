"""The soft-threshold of singular values where few exceed κ, on a CPU: subspace iteration, and proof.

Let V (n × k) have orthonormal columns, B = X V = U Σ Zᵀ, and C = X − B Vᵀ = X (1 − V Vᵀ). Of the values in Σ let those
in Σ₁ exceed κ, σᵢ be the others, uᵢ their columns of U, and

    e = ‖U₁ᵀ C‖_F,   ρᵢ = ‖uᵢᵀ C‖.

X − U₁ U₁ᵀ C, which is e away from X, is U₁ Σ₁ (V Z₁)ᵀ and a rest that is orthogonal to it on both sides, of the form
[Σ₂, U₂ᵀ C; 0, …]. So its soft-threshold is U₁ (Σ₁ − κ) (V Z₁)ᵀ exactly, if the rest has norm κ at most, as it has where

    ‖C‖² ≤ κ² − Σ σᵢ² ρᵢ² / (κ² − σᵢ²).

Soft-thresholds bring no two matrices further apart, so that of X is within e; within 2 e where columns of V were closed
before others, for these are orthogonal but for e. Both are asked for, whatever led to V: e of a few roundings of X, and
the norm. What V starts from decides how long it takes, and whether the Gram matrix's eigenvalues are taken instead.

It starts from the last solution, which has low rank, and the step since. Of 784 × 512 in training, on one core, that
takes 7 ms in place of 45 for rank 6, and 36 in place of 48 for rank 106, where many values are near κ. Where κ is small
beside X, products are in float64, but for powers of XᵀX and those with C, and it takes half of the time.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

# e, relative to ‖X‖_F, in roundings of float32: products in it leave 1 to 3 of them, by eigenvalues as well
_ROUNDINGS = 4
# ‖X‖_F / κ above which so much is not small beside κ, and e where products are in float64 for that
_PRECISE, _ROUNDINGS_PRECISE = 1e5, 0.5
# σ_max / κ up to which it serves, as the eigenvalues do; ‖X‖_F between which products are neither subnormal nor inf
_RATIO_BELOW, _LEAST, _LARGEST = 3e6, 1e-25, 1e25
# rows and columns from which it gains: 384 × 192 takes 2.2 ms in place of 3.8, 256 × 128 1.6 either way
_SMALLEST = 192
# columns of V: the last solution's rank, and 8 and a sixth of it more; at most a third of n
_MORE, _MORE_SHARE, _SHARE = 8, 1 / 6, 1 / 3
# columns that are multiplied by XᵀX, at most, as a multiple of n: the eigenvalues take about as long as 5 n
_COLUMNS = 2
# by how many powers of 10 powers of XᵀX may set the largest value in V off against κ
_DIGITS = 9
# columns of C whose norm is bounded at a time, and what that may be wrong by in float32, relative to κ²
_BLOCK, _MARGIN = 128, 1e-5
# ‖X − near‖_F, at most, relative to ‖X‖_F: below 0.007 in ProxSGD and ProxGen. In RAMDA it is 0.6, and singular
# values lie so densely around κ that V takes as long as the eigenvalues.
_NEAR = 0.05
# of columns that are made at a time, what is no rounding, relative to the largest
_AT_ONCE, _RANK_ABOVE = 32, 3e-6


def takes(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and min(x.shape[1:]) >= _SMALLEST


def soft_threshold(x: Tensor, kappa: float, near: Tensor) -> Tensor | None:
    """U max(Σ − κ, 0) Vᵀ of a matrix, given another that is likely near it; None where that does not pay.

    Nothing is kept from call to call: a training that goes on from a checkpoint goes on to the bit.
    """
    if x.shape[0] < x.shape[1]:
        turned = soft_threshold(x.mT, kappa, near.mT)
        return None if turned is None else turned.mT.contiguous()
    with torch.autocast("cpu", enabled=False):
        return _tall(x, kappa, near)


def _tall(x: Tensor, kappa: float, near: Tensor) -> Tensor | None:
    size = _norm(x)
    if not (_LEAST < size < _LARGEST and kappa < math.inf and _norm(x - near) <= _NEAR * size):
        return None
    u = _span(near)
    if u is None:
        return None
    precise = size > _PRECISE * kappa
    rounding = torch.finfo(x.dtype).eps * size
    found = _iterate(x, kappa, u, (_ROUNDINGS_PRECISE if precise else _ROUNDINGS) * rounding, precise)
    return None if found is None else (found[0] @ found[1].mT).to(x.dtype)


def _span(x: Tensor) -> Tensor | None:
    """Orthonormal columns whose span has that of X's columns in it, and a few more; None where they are many."""
    n = x.shape[1]
    u, rank, largest = x[:, :0], 0, 0.0
    while True:
        have = u.shape[1]
        some = x @ _directions(n)[:, have : have + max(have, _AT_ONCE)]
        for _ in range(2):  # for what is left may be roundings of what is taken away
            some = some - u @ (u.mT @ some)
        q, r = torch.linalg.qr(some)
        sizes = r.diagonal().abs()
        largest = max(largest, float(sizes.max()))
        rank += int((sizes > _RANK_ABOVE * largest).sum())
        u = torch.cat((u, q), 1)
        width = rank + _MORE + int(_MORE_SHARE * rank)
        if width > _SHARE * n:
            return None
        if width <= u.shape[1]:
            return u[:, :width]


def _iterate(x: Tensor, kappa: float, u: Tensor, allowed: float, precise: bool) -> tuple[Tensor, Tensor] | None:
    """Factors U₁ (Σ₁ − κ) and V Z₁ of the soft-threshold, if these columns lead there."""
    n, width = x.shape[1], u.shape[1]
    # in columns that the last solution does not fill, XᵀU is a sketch of the step since
    v, _ = torch.linalg.qr(x.mT @ u)
    u, _ = torch.linalg.qr(x @ v)
    if precise:
        x, u = x.double(), u.double()
    v = _orthonormal(x.mT @ u)
    left, right, closed = x[:, :0], v[:, :0], 0.0  # of closed columns: the factors, and their part of e²
    rest = x  # X without its part in closed columns
    budget = _COLUMNS * n - 2 * width
    while True:
        b = rest @ v
        squares, z = _eigenvalues(b)
        sigma = squares.sqrt().tolist()  # ascending
        above = sum(s > kappa for s in sigma)
        if not sigma[-1] <= _RATIO_BELOW * kappa or above == len(sigma):
            return None
        s = squares.sqrt().to(x.dtype)
        u = (b @ z) / torch.where(s > 0, s, 1.0)
        c = torch.addmm(rest, b, v.mT, alpha=-1)  # C = X − B Vᵀ, V not yet turned, which adds roundings
        v = v @ z
        single = c.float()  # of whose products these digits suffice
        apart = single.mT @ u.float()
        coupling = torch.linalg.vector_norm(apart, dim=0, dtype=torch.float64).square()
        errors = [closed, *(closed + coupling.flip(0).cumsum(0)).tolist()]  # e² with the first of Σ₁
        met = errors[above] <= allowed**2
        closing = above if met else sum(e <= allowed**2 / 4 for e in errors[1 : above + 1])
        still, now = slice(len(sigma) - closing), slice(len(sigma) - closing, None)
        left = torch.cat((left, u[:, now] * (s[now] - kappa)), 1)
        right = torch.cat((right, v[:, now]), 1)
        closed = errors[closing]
        u, v, s, sigma = u[:, still], v[:, still], s[still], sigma[still]
        if met:
            room = _room(kappa, sigma, coupling[still].tolist())
            return (left, right) if _bounded(single, room) or _has_factor(single, u * s, v, kappa) else None
        # a power of XᵀX lessens e by (κ / σ)², σ the least value in V
        rate = 2 * math.log(kappa / sigma[0]) if sigma[0] > 0 else math.inf
        needed = math.log(4 * math.sqrt(errors[above]) / allowed) / rate if rate > 0 else math.inf
        budget -= 2 * (len(sigma) + closing)
        if not needed * len(sigma) <= budget:
            return None
        powers = max(1, min(math.ceil(needed), int(_DIGITS / (2 * math.log10(max(sigma[-1] / kappa, 2.0))))))
        budget -= (powers - 1) * len(sigma)
        rest = torch.addmm(c, u * s, v.mT) if closing else rest
        quick, v = rest.float(), ((v * s + apart[:, still]) / kappa).float()  # Xᵀ U, of one power
        for _ in range(powers - 1):
            v = quick.mT @ ((quick @ v) / kappa) / kappa
        v = v.to(x.dtype)
        v = _orthonormal((v - right @ (right.mT @ v)).flip(1))  # the largest first, which others have a part of


def _room(kappa: float, sigma: list[float], squares: list[float]) -> float:
    """What ‖C‖² may be: κ² − Σ σᵢ² ρᵢ² / (κ² − σᵢ²), the squares ρᵢ² given, σ ascending."""
    if sigma[-1] >= kappa:
        return 0.0
    return kappa**2 - sum(s**2 * r / (kappa**2 - s**2) for r, s in zip(squares, sigma, strict=True))


def _bounded(c: Tensor, room: float) -> bool:
    """Whether ‖C‖² ≤ room by a bound: ‖C‖_F², or Σ ‖C_i‖² over blocks of columns, ‖C_i‖⁸ ≤ ‖(C_iᵀ C_i)⁴‖_F."""
    if not room > 0:
        return False
    if _norm(c) ** 2 <= room:
        return True
    total = 0.0
    for block in torch.split(c / math.sqrt(room), _BLOCK, 1):
        gram = block.mT @ block
        gram = gram @ gram
        total += _norm(gram @ gram) ** 0.25
    return total <= 1 - _MARGIN


def _has_factor(c: Tensor, u: Tensor, v: Tensor, kappa: float) -> bool:
    """Whether ‖C + U Vᵀ‖ < κ: whether 1 − CᵀC / κ² of that has a Cholesky factor."""
    c, u, v = c / kappa, (u / kappa).float(), v.float()
    c = c.addmm_(u, v.mT)
    gap = gram_lower(c).neg_()
    gap.diagonal().add_(1 - _MARGIN)
    _, info = torch.linalg.cholesky_ex(gap)  # which reads what is below the diagonal
    return not bool(info)


def gram_lower(x: Tensor) -> Tensor:
    """XᵀX of each matrix, on and below the diagonal: two thirds of the work."""
    n = x.shape[-1]
    gram = x.new_zeros(*x.shape[:-2], n, n)
    step = max(_BLOCK, -(-n // 8))
    for i in range(0, n, step):
        torch.matmul(x[..., i : i + step].mT, x[..., : i + step], out=gram[..., i : i + step, : i + step])
    return gram


def _eigenvalues(b: Tensor) -> tuple[Tensor, Tensor]:
    """Σ² and Z of BᵀB = Z Σ² Zᵀ; NaN where it is not finite, for which LAPACK raises."""
    wide = b.double()
    gram = wide.mT @ wide
    if not bool(gram.isfinite().all()):
        return torch.full_like(gram[0], torch.nan), b[: len(gram)]
    squares, z = torch.linalg.eigh(gram)
    return squares.clamp_(min=0), z.to(b.dtype)


def _orthonormal(v: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(v.double())[0]  # in float32 3 roundings of X are left in e, with this 0.7
    return q.to(v.dtype)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))  # squares of small numbers vanish in float32


@lru_cache(maxsize=32)
def _directions(n: int) -> Tensor:
    """Columns to multiply the last solution by, always the same."""
    with torch.inference_mode(False):
        columns: Tensor = torch.randn(
            n, int(_SHARE * n) + 1, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
        )
    return columns
