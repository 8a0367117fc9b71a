"""The soft-threshold of singular values, U max(Σ − κ, 0) Vᵀ, by whatever is cheapest where it runs.

In float32, on a GPU, it is made of matrix products in float64 alone: where these take 0.7 ms (512×512, H200), the
eigenvalues of the Gram matrix XᵀX take 4.7 ms, one matrix of a batch after another, and torch.linalg.svd 18. They serve
where κ is above 5e-8 σ_max, the rounding of X. On a CPU it is the eigenvalues, down to 3e-7 σ_max, where what
squaring loses, 2e-9 σ_max near κ, is still far below that rounding; or, for low rank, an iteration that goes on from
the last solution (`subspace`). Else, and in float64, it is a singular value decomposition in float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from espalier.penalties import subspace
from espalier.reading import Reading, finish
from espalier.recording import Recording

# A singular value so near κ, relative to κ, may count as above or below it, or in part.
RESOLUTION = 1e-5
# What an iteration that leads to 1 may end short of it, the rounding of float32 being 6e-8; and one that tells singular
# values from κ, as nothing may be left of those below it where all are near.
CLOSE, SURE = 1e-8, 1e-12
# Where singular values are told from κ, and how many times as far those must stay that it folds down.
HALF_WAY, APART = 0.25, 2.0
# (σ_max / κ)² up to which products are precise enough, and the eigenvalues of the Gram matrix
PRODUCTS_BELOW = 1e15
_EIGENVALUES_BELOW = 1e13
# rows a column from which products of the Gram matrix alone cost less, and the exponent of 2 up to which they serve
_LONG, _LONG_UP_TO = 3, 30
# n³ times matrices up to which launching the products takes longer than making them
_RECORD_BELOW = 2**30
# recordings that are kept, for each thread; more matrices have their products made one by one
_RECORDS = 128
# (σ/κ)² is bounded by powers of 2 whose exponents are so far apart, the lower ones and the others: products are
# recorded anew for each. There are 48 of them at 2², 54 at 2⁶, 58 at 2¹² and 90 at 2⁵⁴.
_FINE, _COARSE = 2, 6
# times in a row that a lower power would have done before it is taken
_PATIENCE = 16


def threshold_singular_values(x: Tensor, kappa: Tensor) -> Tensor:
    """U max(Σ − κ, 0) Vᵀ of each matrix of x (L, m, n), κ (L, 1, 1) above 0; NaN where one is not finite."""
    return finish(thresholding(x, kappa))


def thresholding(x: Tensor, kappa: Tensor, fused: bool = False, near: Tensor | None = None) -> Reading[Tensor]:
    """The same, by a work that others may go on beside; small matrices by a kernel, if `fused`. `near`, matrices with
    which x is likely to share its large directions, changes how long it takes, on a CPU, and roundings."""
    from espalier import kernels

    if x.requires_grad and torch.is_grad_enabled():  # no step, but somebody's own use of it
        return by_svd(x, kappa)
    if fused and kernels.takes(x):
        from espalier.kernels.singular_values import soft_threshold

        y, bounds = soft_threshold(x.contiguous(), kappa.contiguous())
        if all(bound < PRODUCTS_BELOW for bound in (yield bounds)):
            return y
    elif x.is_cuda and x.dtype == torch.float32 and x.numel():
        found = yield from _by_products(x, kappa)
        if found is not None:
            return found
    if x.is_cuda:
        return by_svd(x, kappa)
    if near is not None and x.numel() and subspace.takes(x):
        found = _by_subspace(x, kappa, near)
        if found is not None:
            return found
    if x.dtype == torch.float32 and x.numel():
        found = _by_eigenvalues(x, kappa)
        if found is not None:
            return found
    return by_svd(x, kappa)


def by_svd(x: Tensor, kappa: Tensor) -> Tensor:
    """The same, whatever κ is."""
    finite = x.isfinite().flatten(1).all(1).reshape(-1, 1, 1) & kappa.isfinite()  # LAPACK raises on others
    # in float64 always: on a GPU the one in float32 is off by 1e-4
    u, s, vt = torch.linalg.svd(torch.where(finite, x, 0.0).double(), full_matrices=False)
    s = (s - kappa.squeeze(-1)).clamp_(min=0)
    return torch.where(finite, (u * s.unsqueeze(-2)) @ vt, torch.nan).to(x.dtype)


def _by_subspace(x: Tensor, kappa: Tensor, near: Tensor) -> Tensor | None:
    """Of each matrix by iteration from another, where that serves; None where it serves none."""
    each = [subspace.soft_threshold(*one) for one in zip(x, kappa.flatten().tolist(), near, strict=True)]
    if len(each) == 1:
        return None if each[0] is None else each[0].unsqueeze(0)
    if all(y is None for y in each):
        return None
    for i, y in enumerate(each):
        each[i] = threshold_singular_values(x[i : i + 1], kappa[i : i + 1])[0] if y is None else y
    return torch.stack(cast(list[Tensor], each))


def _by_eigenvalues(x: Tensor, kappa: Tensor) -> Tensor | None:
    """X V (1 − κ/σ)₊ Vᵀ, a product of thin factors, from the eigenvalues σ² of the Gram matrix."""
    if x.shape[-2] < x.shape[-1]:
        turned = _by_eigenvalues(x.mT, kappa)
        return None if turned is None else turned.mT.contiguous()
    wide, kappa = x.double(), kappa.double().squeeze(-1)
    gram = subspace.gram_lower(wide)
    if not bool(gram.isfinite().all()):
        return None
    squares, v = torch.linalg.eigh(gram)  # which reads what is below the diagonal
    ratio = float((squares[:, -1:] / kappa.square()).amax())
    if not ratio <= _EIGENVALUES_BELOW:
        return None
    # so small a κ takes away little more than the rounding of products in float32 adds; under autocast they may be in
    # bfloat16
    precise = ratio > 1e10 or torch.is_autocast_enabled(x.device.type)
    factor = wide if precise else x
    s = squares.clamp_(min=0).sqrt_()
    left = (s - kappa).clamp_(min=0)
    first = s.shape[-1] - int((left > 0).sum(-1).max())  # eigenvalues ascend
    share = (left / torch.where(left > 0, s, 1.0)).unsqueeze(-2)[..., first:]
    v = v[..., first:]
    y: Tensor = (factor @ (v * share).to(factor.dtype)) @ v.mT.to(factor.dtype)
    return y.to(x.dtype)


def _by_products(x: Tensor, kappa: Tensor) -> Reading[Tensor | None]:
    """The same from matrix products alone, which need to know how large (σ/κ)² may be: guessed from the last time."""
    while True:
        exponent = guess(x)
        y, bound = _recorded(x, kappa, exponent)(x, kappa)
        size = yield bound
        if not size < PRODUCTS_BELOW:
            return None
        if sufficed(x, exponent, size):
            return y


def guess(x: Tensor) -> int:
    """The exponent of a power of 2 that (σ/κ)² of matrices of this shape is likely to be below."""
    return _guesses.get((x.device, x.shape), 2 * _COARSE)


def sufficed(x: Tensor, exponent: int, bound: float) -> bool:
    """Whether that power of 2 was above the bound that was found. The next guess is made of it."""
    key = (x.device, x.shape)
    needed = math.frexp(bound)[1]
    apart = _FINE if needed < _COARSE else _COARSE
    enough = apart * math.ceil(max(needed + 1, 1) / apart)  # with room to grow
    # lest it go up and down, as where matrices of one shape have several thresholds
    _spare[key] = _spare.get(key, 0) + 1 if enough < exponent else 0
    if needed > exponent or _spare[key] >= _PATIENCE:
        _guesses[key], _spare[key] = enough, 0
    else:
        _guesses[key] = exponent
    return needed <= exponent


def worth_recording(x: Tensor) -> bool:
    """Whether launching the products takes longer than making them."""
    return x.is_cuda and len(x) * min(x.shape[1:]) ** 3 <= _RECORD_BELOW


def products(x: Tensor, kappa: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """P E (H − κ), X = P H, E the projector on the eigenvectors of H whose eigenvalues exceed κ; and a bound of the
    norms of XᵀX/κ² that must not exceed 2^exponent.

    All is made of the iteration of Newton and Schulz, x ← ½ y (3 − y²), y = α x: it takes singular values to 1, and X
    to P. On the way there what is above κ grows as fast as what is at κ, or stays above it: E is found half way, where
    it takes no longer for a small κ than for a large one.
    """
    if x.shape[-2] < x.shape[-1]:
        y, bound = products(x.mT, kappa, exponent)
        return y.mT, bound
    kappa, one = kappa.double(), torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
    largest = 2.0 ** (exponent / 2)
    wide = x.double() / (kappa * largest)  # κ is at 1/largest
    gram = square = torch.bmm(wide.mT, wide)
    power = torch.bmm(square, square)
    bound = torch.bmm(power, power).square().sum((1, 2)).pow(1 / 8).amax() * 2.0**exponent  # at most n^⅛ too large
    # a long X is left alone where its Gram matrix has digits enough: P = X F
    long = x.shape[-2] >= _LONG * x.shape[-1] and exponent <= _LONG_UP_TO
    p, step = (one.expand_as(gram), _with_square) if long else (wide, _with_product)
    low, beyond = 1 / largest, (1 + RESOLUTION) / largest
    while low < HALF_WAY:
        alpha = _scaling(low, APART)
        p, square = step(p, square, alpha)
        low, beyond = _grown(low, alpha), _grown(beyond, alpha)
    edge = low**2
    sign = (square - edge * one) / (1 - edge)
    for alpha in _scalings((beyond**2 - edge) / (1 - edge), SURE):
        sign = _towards_one(sign, torch.bmm(sign, sign), alpha)
    above = (sign + one) / 2  # E
    for alpha in _scalings(low):
        p, square = step(p, square, alpha)
    h = torch.bmm(p, gram) if long else torch.bmm(p.mT, wide)
    share = torch.bmm(above, h - one / largest) * (kappa * largest)
    rank = above.diagonal(dim1=-2, dim2=-1).sum(-1).reshape(-1, 1, 1)
    share = torch.where(rank < 0.5, 0.0, share)  # exactly zero
    y = torch.bmm(wide, torch.bmm(p, share)) if long else torch.bmm(p, share)
    return y.to(x.dtype), bound  # in float32 it might be done with the digits of TF32


def _towards_one(x: Tensor, square: Tensor, alpha: float) -> Tensor:
    """½ y (3 − y²), y = α x."""
    return torch.baddbmm(x, x, square, beta=1.5 * alpha, alpha=-0.5 * alpha**3)


def _with_product(x: Tensor, square: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The next x, and xᵀx."""
    x = _towards_one(x, square, alpha)
    return x, torch.bmm(x.mT, x)


def _with_square(factor: Tensor, square: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The same for x = X F, in F: all are polynomials of one matrix."""
    once = _towards_one(square, square, alpha)
    return _towards_one(factor, square, alpha), _towards_one(once, square, alpha)


class _Recorded:
    """`products` for one shape and one power of 2, recorded."""

    def __init__(self, x: Tensor, kappa: Tensor, exponent: int) -> None:
        with torch.inference_mode(False):
            self.x, self.kappa = x.clone(memory_format=torch.contiguous_format), kappa.clone()
        self.replay = Recording(lambda: products(self.x, self.kappa, exponent), x.device)

    def __call__(self, x: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
        self.x.copy_(x)
        self.kappa.copy_(kappa)
        y, bound = self.replay()
        return y.clone(), bound


class _Kept(threading.local):
    def __init__(self) -> None:
        self.recorded: dict[tuple[torch.device, int, torch.Size, int], _Recorded] = {}


_kept = _Kept()
_guesses: dict[tuple[torch.device, torch.Size], int] = {}
_spare: dict[tuple[torch.device, torch.Size], int] = {}  # how many times in a row less would have done


def _recorded(x: Tensor, kappa: Tensor, exponent: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`products`, recorded where that pays."""
    if worth_recording(x):
        key = (x.device, torch.cuda.current_stream(x.device).cuda_stream, x.shape, exponent)
        if key not in _kept.recorded and len(_kept.recorded) < _RECORDS:
            _kept.recorded[key] = _Recorded(x, kappa, exponent)
        if key in _kept.recorded:
            return _kept.recorded[key]
    return partial(products, exponent=exponent)


def _scalings(low: float, close: float = CLOSE) -> list[float]:
    """α of each step that takes [low, 1] to 1, in the fewest."""
    alphas = []
    while 1 - low > close:
        alphas.append(_scaling(low))
        low = _grown(low, alphas[-1])
    return alphas


def _grown(x: float, alpha: float) -> float:
    return 0.5 * alpha * x * (3 - (alpha * x) ** 2)


def _scaling(low: float, apart: float = 1.0) -> float:
    """α for which ½ y (3 − y²), 1 at most, at y = 1, ends at α `apart` times as high as it begins at α low.

    That is about 2.6 low: were low near the rounding of float64, 1 would be lost.
    """
    return math.sqrt(3 * (1 - apart * low) / (1 - apart * low**3))
