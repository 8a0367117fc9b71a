"""The next r of each group, from sums over its entries; see `solvers/radial.py` for the mathematics."""

from __future__ import annotations

import triton
import triton.language as tl

# k and x/(r + k) are kept within these, so that no sum of their powers leaves float32's range. Both only bend the
# path of Newton's iteration, or shift a weight by less than 1e-20.
LEAST_K = tl.constexpr(1e-20)
LARGEST_Q = tl.constexpr(1e6)
# ½ √ε: a relative step δ leaves an error below 1.5 δ²
SHORT = tl.constexpr(1.7e-4)
SHORTEST = tl.constexpr(5e-7)
# S = 1 but for rounding
ROUNDING = tl.constexpr(2e-6)
# Sums over programs are integers, whose order does not matter. The first turn's have units for which no part above
# LARGEST_PART counts; a sum below KNOWN has lost nothing to that. Later turns have room for more.
UNITS = tl.constexpr(2.0**29)
LARGEST_PART = tl.constexpr(2.0)
KNOWN = tl.constexpr(1.9)
SMALLEST = tl.constexpr(1e-6)
MOST_PARTS = tl.constexpr(128)
FINE = tl.constexpr(2.0**32)
LARGEST_LATER = tl.constexpr(2.0**20)


@triton.jit
def ratio(x, inverse):
    """|x| / (r + k), within bounds."""
    return tl.minimum(tl.abs(x) * inverse, LARGEST_Q)


@triton.jit
def scalar_factor(norm, end, CONCAVE: tl.constexpr):
    """z/x under a scalar metric, for ‖x‖ and the penalty's end in units of k."""
    factor = tl.where(norm > 1, 1 - 1 / norm, 0.0)
    if CONCAVE:
        firm = tl.where(norm < end, factor / (1 - 1 / end), 1.0)
        hard = tl.where(norm > tl.sqrt(end), 1.0, 0.0)  # concave up to the end: 0 or x
        factor = tl.where(end > 1, tl.where(norm > 1, firm, 0.0), hard)
    return tl.where(norm == norm, factor, norm)  # NaN stays NaN


@triton.jit
def newton(r, scale, m0, m1):
    """Newton's step on f = S^(−1/2) from S = M_0 and T = M_1/scale; whether r is the root, or zero and staying so.

    Where S or T is beyond what sums hold, r √S, which never passes the root from the left; from r = 0 some r.
    """
    held = tl.maximum(m0, m1) < LARGEST_LATER
    new = tl.where(r > 0, r * tl.sqrt(m0), 1e-4 * scale)
    new = tl.where(held, tl.maximum(r + (m0 / m1) * (tl.sqrt(m0) - 1) * scale, 0.0), new)
    stays = (r == 0) & (m0 <= 1)
    # sums too small to be seen: r is far to the right, and 0 the next to look at; or the scale is far too small
    lost = (r > 0) & (m0 <= 1) & (tl.minimum(m0, m1) < SMALLEST)
    blind = (m0 > 1) & (m1 <= 0)
    new = tl.where(stays | lost, 0.0, tl.where(blind, r, new))
    close = (tl.abs(new - r) <= new * SHORT) | (tl.abs(m0 - 1) <= ROUNDING)
    return new, stays | (m0 != m0) | (close & ~(lost | blind))


@triton.jit
def by_series(r, scale, m0, m1, m2, m3, m4, m5, precise, CLIPPED: tl.constexpr):
    """The root by the moments M_j at r, where that is near enough; elsewhere Newton's step.

    With δ = ρ scale, S(r + δ) = Σ_j (−1)^j (j + 1) ρ^j M_j; the rest after six terms is about 7 ρ⁶ M_5² / M_4.
    """
    new, close = newton(r, scale, m0, m1)
    least = -r / scale  # r + δ = 0
    rho = tl.maximum(tl.where(m1 > 0, (m0 / m1) * (tl.sqrt(m0) - 1), 0.0), least)
    for _ in tl.static_range(3):
        s = m0 + rho * (-2 * m1 + rho * (3 * m2 + rho * (-4 * m3 + rho * (5 * m4 - 6 * rho * m5))))
        t = m1 + rho * (-3 * m2 + rho * (6 * m3 + rho * (-10 * m4 + 15 * rho * m5)))
        rho = tl.where((s > 0) & (t > 0), tl.maximum(rho + (s / t) * (tl.sqrt(s) - 1), least), 1e3)
    square = rho * rho
    rest = 7 * square * square * square * m5 * (m5 / tl.maximum(m4, 1e-30))
    # and where the sums have enough digits
    near = (m1 > 0.01) & (rest <= m1 * ROUNDING) & ((r > 0) | (m0 > 1))
    near = near & (tl.maximum(tl.maximum(m0, m1), tl.maximum(tl.maximum(m2, m3), tl.maximum(m4, m5))) < KNOWN)
    root = tl.where(rho > least, tl.maximum(r + rho * scale, 0.0), 0.0)
    new = tl.where(near, root, new)
    close = close | near
    if CLIPPED:
        # sums that may have lost something say nothing: the next turn's will
        kept = tl.maximum(m0, m1) < KNOWN
        new = tl.where(kept, new, r)
        close = close & kept & precise
    return new, close


@triton.jit
def next_scale(scale, m0, m1, r):
    """A quarter of the mean of r + k that S/T is."""
    mean = tl.where(m1 > 0, tl.minimum(tl.maximum(m0 / m1, 0.1), 40.0), tl.where(m0 > 1, 4e3, 4.0))
    return tl.minimum(tl.maximum(0.25 * scale * mean, 0.25 * r), 1e30)


@triton.jit
def newton_to_end(r, scale, m0, m1, flat):
    """Newton's step for a penalty that ends at R, from the left.

    Where S or T is beyond what sums hold, r √S, which never passes the root either; from r = 0 a first r far below.
    """
    held = tl.maximum(m0, tl.abs(m1)) < LARGEST_LATER
    new = tl.where(r > 0, r * tl.sqrt(m0), 1e-20 * flat)
    new = tl.where(held, r + (m0 / m1) * (tl.sqrt(m0) - 1) * scale, new)
    # f has stopped rising, or r has left the region: no inner minimum but 0
    new = tl.where(held & (m1 < 0), flat, tl.minimum(tl.maximum(tl.where(m1 == 0, r * tl.sqrt(m0), new), r), flat))
    new = tl.where(m0 > 1, new, r)
    # with the metric lowered a short step says less about the distance that is left
    return new, (tl.abs(new - r) <= new * SHORTEST) | (tl.abs(m0 - 1) <= ROUNDING) | (m0 != m0)


@triton.jit
def next_norm(norm, m0):
    """‖x‖ = norm √M_0 under a scalar metric, M_0 = Σ (x/norm)²; whether it is known well."""
    known = (m0 > 0.25) & (m0 < KNOWN) | (norm < 1e-25) & (m0 == 0)
    return tl.maximum(norm * tl.maximum(tl.sqrt(m0), 1e-3), 1e-30), known | (m0 != m0)


@triton.jit
def own(v, place, AXIS: tl.constexpr, RUN_LENGTH: tl.constexpr):
    """Values of a panel's groups for the columns (or rows) of a tile, broadcastable to it."""
    if AXIS == 0 and RUN_LENGTH > 1:
        v = tl.gather(v, place, 0)
    return v[None, :] if AXIS == 0 else v[:, None]


@triton.jit
def is_better(r, outer, gain, flat):
    """Whether x = b/h lies where the penalty is constant and has a lower objective there than z at r:

    Q(z) − Q(x) = ½ Σ h (x − z)² + κ r (1 − r/2R) − ½ κ R, here in units of ½ κ R.
    """
    return (outer >= 1) & (gain + r / flat * (2 - r / flat) > 1)
