"""What runs on the GPU: one pass over memory for a whole step.

With x = a − d/H, the solution without a penalty, and k = κ/h, the radial subproblem of `solvers/radial.py` reads: find
r with Σ (x / (r + k))² = 1 over a group, then z = x r / (r + k); z = 0 when Σ (x / k)² ≤ 1. A block of groups keeps x
and k in registers while Newton climbs, so that every tensor is read once and written once. A group too large for one
program is spread over several, which add their sums up through global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.kernels import interpreted

INTERPRETED = tl.constexpr(interpreted())

# columns of the table of tensors: addresses, then lengths
GRAD = tl.constexpr(0)
WEIGHT = tl.constexpr(1)
PARAM = tl.constexpr(2)
ANCHOR = tl.constexpr(3)
SUM = tl.constexpr(4)
SQUARES = tl.constexpr(5)
LARGEST = tl.constexpr(6)
RADIUS = tl.constexpr(7)
ROWS = tl.constexpr(8)
GROUPS = tl.constexpr(9)
RUN = tl.constexpr(10)
SCALE = tl.constexpr(11)
TABLE = tl.constexpr(12)

# columns of the table of clocks
STEP = tl.constexpr(0)
ALPHA = tl.constexpr(1)
FACTOR = tl.constexpr(2)
CLOCKS = tl.constexpr(4)

# the options of a parameter group
FIRST_MOMENT = tl.constexpr(0)  # momentum, or β₁
SECOND_MOMENT = tl.constexpr(1)
LOG2_FIRST = tl.constexpr(2)
LOG2_SECOND = tl.constexpr(3)
WEIGHT_DECAY = tl.constexpr(4)
LAM_GROUP = tl.constexpr(5)
LAM_ENTRY = tl.constexpr(6)
GAMMA = tl.constexpr(7)
LR = tl.constexpr(8)
EPS = tl.constexpr(9)
RAMP = tl.constexpr(10)
OPTIONS = tl.constexpr(11)

# columns of the scalars
GAIN = tl.constexpr(0)
SQUARE_GAIN = tl.constexpr(1)
SQUARE_KEEP = tl.constexpr(2)
PULL = tl.constexpr(3)
DECAY = tl.constexpr(4)
METRIC_SCALE = tl.constexpr(5)
METRIC = tl.constexpr(6)
KAPPA = tl.constexpr(7)
ENTRY_KAPPA = tl.constexpr(8)
FLAT = tl.constexpr(9)
AVERAGING = tl.constexpr(10)
SCALARS = tl.constexpr(16)

# columns of the work list
TENSOR = tl.constexpr(0)
FIRST = tl.constexpr(1)
SHARE = tl.constexpr(2)
SHARES = tl.constexpr(3)
PANEL = tl.constexpr(4)
CLOCK = tl.constexpr(5)
WORK = tl.constexpr(8)

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


@triton.jit(do_not_specialize=["tensors", "counted"])
def tick(
    clocks, scalars, counters, finite, lr_at, eps_at, ramp_at, given, tensors, counted,
    METHOD: tl.constexpr, UPDATE: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every parameter's clock one step later, and what the step's equations need of it; the counters at zero."""
    i = tl.program_id(0)
    j = i * BLOCK
    while j < counted:
        at = j + tl.arange(0, BLOCK)
        tl.store(counters + at, tl.zeros([BLOCK], tl.int32), mask=at < counted)
        j += tensors * BLOCK
    row = clocks + i * CLOCKS
    out = scalars + i * SCALARS
    lr = tl.load(lr_at).to(tl.float64)
    first = tl.load(given + FIRST_MOMENT)
    lam_group = tl.load(given + LAM_GROUP) * tl.load(row + FACTOR).to(tl.float64, bitcast=True)
    step_at = tl.load(row + STEP).to(tl.pointer_type(tl.float64))
    before = tl.load(step_at)
    t = before
    if UPDATE:
        t = before + 1
        if SKIP:
            t = tl.where(tl.load(finite) != 0, t, before)
        tl.store(step_at, t)
    tau = lr
    c = t * 0 + 1
    if METHOD == "ramda" or METHOD == "rmda":
        s = lr * tl.sqrt(t)  # s_t = η √t
        alpha_at = tl.load(row + ALPHA).to(tl.pointer_type(tl.float64))
        tau = tl.load(alpha_at)
        if UPDATE:
            tau = tl.where(t > before, tau + s, tau)  # α_t = α_{t−1} + s_t
            tl.store(alpha_at, tau)
        tl.store(out + GAIN, s.to(tl.float32))
        tl.store(out + PULL, 1.0)
        if METHOD == "rmda":
            tl.store(out + METRIC, tl.sqrt(tl.maximum(t, 1.0)).to(tl.float32))  # √t
        else:
            tl.store(out + METRIC, tl.load(eps_at).to(tl.float32))
        c = 1 - first
        # c_t = min(c √i, 1) in the last stage, with the slack of `ramped`
        grown = tl.minimum(c * tl.sqrt(t) * (1 + 1e-9), 1.0)
        c = tl.where(tl.load(ramp_at) != 0, grown, c)
    elif METHOD == "prox_sgd":
        tl.store(out + GAIN, (1 - first).to(tl.float32))
        tl.store(out + PULL, lr.to(tl.float32))
        tl.store(out + METRIC, 1.0)
    else:
        second = tl.load(given + SECOND_MOMENT)
        # 1 − βᵗ
        bias = 1 - tl.exp2(t * tl.load(given + LOG2_FIRST))
        square_bias = 1 - tl.exp2(t * tl.load(given + LOG2_SECOND))
        tl.store(out + GAIN, (1 - first).to(tl.float32))
        tl.store(out + SQUARE_GAIN, (1 - second).to(tl.float32))
        tl.store(out + SQUARE_KEEP, second.to(tl.float32))
        tl.store(out + PULL, (lr / bias).to(tl.float32))
        tl.store(out + METRIC_SCALE, (1 / tl.sqrt(square_bias)).to(tl.float32))
        tl.store(out + DECAY, (1 - lr * tl.load(given + WEIGHT_DECAY)).to(tl.float32))
        tl.store(out + METRIC, tl.load(eps_at).to(tl.float32))
    tl.store(out + KAPPA, (tau * lam_group).to(tl.float32))
    tl.store(out + ENTRY_KAPPA, (tau * tl.load(given + LAM_ENTRY)).to(tl.float32))
    tl.store(out + FLAT, (tl.load(given + GAMMA) * lam_group).to(tl.float32))
    tl.store(out + AVERAGING, c.to(tl.float32))


@triton.jit
def address(row, column: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A tensor's address from the table."""
    at = tl.load(row + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def pose(
    row, scalar, off, mask,
    METHOD: tl.constexpr, GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr,
    MAXIMIZE: tl.constexpr, AMSGRAD: tl.constexpr,
):  # fmt: skip
    """Let the gradient into the sums; x = a − d/H and 1/H (a scalar for RMDA and ProxSGD)."""
    metric = tl.load(scalar + METRIC)
    sum_at = address(row, SUM, tl.float32, ALIGNED) + off
    d = tl.load(sum_at, mask=mask, other=0.0)
    g = d
    if UPDATE:
        gain = tl.load(scalar + GAIN)
        g = tl.load(address(row, GRAD, GRAD_TYPE, ALIGNED) + off, mask=mask, other=0.0).to(tl.float32)
        if MAXIMIZE:
            g = -g
        if METHOD == "ramda" or METHOD == "rmda":
            d += gain * g  # V_t = V_{t−1} + s_t g_t
        else:
            d += gain * (g - d)  # m = μ m + (1 − μ) g
        tl.store(sum_at, d, mask=mask)
    if METHOD == "ramda" or METHOD == "rmda":
        a = tl.load(address(row, ANCHOR, tl.float32, ALIGNED) + off, mask=mask, other=0.0)  # W⁰
    else:
        a = tl.load(address(row, WEIGHT, tl.float32, ALIGNED) + off, mask=mask, other=0.0)
    inverse = 1 / metric
    if METHOD == "ramda" or METHOD == "prox_gen":
        squares_at = address(row, SQUARES, tl.float32, ALIGNED) + off
        u = tl.load(squares_at, mask=mask, other=1.0)
        if METHOD == "ramda":
            if UPDATE:
                u += gain * g * g  # U_t = U_{t−1} + s_t g_t²
                tl.store(squares_at, u, mask=mask)
            inverse = reciprocal(cube_root(u) + metric)  # of ∛U_t + ε
        else:
            if UPDATE:
                u = tl.load(scalar + SQUARE_KEEP) * u + tl.load(scalar + SQUARE_GAIN) * g * g
                tl.store(squares_at, u, mask=mask)
            if AMSGRAD:
                largest_at = address(row, LARGEST, tl.float32, ALIGNED) + off
                u = tl.maximum(u, tl.load(largest_at, mask=mask, other=0.0))
                if UPDATE:
                    tl.store(largest_at, u, mask=mask)
            inverse = reciprocal(tl.sqrt(u) * tl.load(scalar + METRIC_SCALE) + metric)  # of √v̂ + eps
            a *= tl.load(scalar + DECAY)
    return a - tl.load(scalar + PULL) * d * inverse, inverse


@triton.jit
def reciprocal(x):
    """1/x in one instruction, to its last bit or two."""
    if INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def cube_root(u):
    """∛u: a first guess to 2e-6, and one step of Newton's to rounding."""
    y = tl.exp2(tl.log2(u) * (1 / 3))
    return tl.where(u > 0, y - (y - u * reciprocal(y * y)) * (1 / 3), 0.0)


@triton.jit
def soft(x, threshold):
    """sign(x) max(|x| − threshold, 0)."""
    return x - tl.minimum(tl.maximum(x, -threshold), threshold)


@triton.jit
def deliver(
    row, scalar, z, off, mask,
    PARAM_TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MASTER: tl.constexpr,
    AVERAGED: tl.constexpr,
):  # fmt: skip
    """w ← (1 − c) w + c z, to the bit z at c = 1; without UPDATE the parameter is z."""
    if UPDATE:
        weight_at = address(row, WEIGHT, tl.float32, ALIGNED) + off
        if AVERAGED:
            c = tl.load(scalar + AVERAGING)
            if c < 1:
                z = (1 - c) * tl.load(weight_at, mask=mask, other=0.0) + c * z
        tl.store(weight_at, z, mask=mask)
    if MASTER or not UPDATE:
        tl.store(address(row, PARAM, PARAM_TYPE, ALIGNED) + off, z.to(PARAM_TYPE), mask=mask)


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
    x, inverse = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD)
    z = soft(x, tl.load(scalar + ENTRY_KAPPA) * inverse)
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)


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


# ------------------------------------------------------------------------------------------------ the next r


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


# ------------------------------------------------------------------------------------------------ sums over programs


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


@triton.jit
def is_better(r, outer, gain, flat):
    """Whether x = b/h lies where the penalty is constant and has a lower objective there than z at r:

    Q(z) − Q(x) = ½ Σ h (x − z)² + κ r (1 − r/2R) − ½ κ R, here in units of ½ κ R.
    """
    return (outer >= 1) & (gain + r / flat * (2 - r / flat) > 1)


# ------------------------------------------------------------------------------------------------ the step


@triton.jit(do_not_specialize=["max_iters"])
def step_groups(
    work, table, scalars, finite, counters, early, later, max_iters,
    METHOD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, AVERAGED: tl.constexpr, SKIP: tl.constexpr,
    SCALAR: tl.constexpr, CONCAVE: tl.constexpr, ENTRIES: tl.constexpr,
    AXIS: tl.constexpr, RUN_LENGTH: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED: tl.constexpr, SINGLE: tl.constexpr, WIDE: tl.constexpr,
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
    kappa = tl.load(scalar + KAPPA)
    flat = tl.load(scalar + FLAT)
    k0 = kappa / tl.load(scalar + METRIC)  # under a scalar metric
    if CONCAVE and not SCALAR:
        r = tl.zeros([WIDTH], tl.float32)  # from the left only
    else:
        r = tl.load(radius_at, mask=exists, other=0.0)
        r = tl.where((r >= 0) & (r < 1e30), r, 1.0)  # after a NaN any other start will do
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

    x, inverse = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD)
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
                    put(early, 0, m0, place, inside, units, WIDTH)
                    arrive(counter)
                    wait(counter, tiles)
                    m0 = get(early, 0, units, WIDTH)
                r, close = next_norm(r, m0)
                close = close & precise
            else:
                inverse = reciprocal(own(r, place, AXIS, RUN_LENGTH) + k)
                q = ratio(x, inverse)
                q = q * q
                y = own(scale, place, AXIS, RUN_LENGTH) * inverse
                m0 = tl.sum(q, AXIS)
                q = q * y
                m1 = tl.sum(q, AXIS)
                q = q * y
                m2 = tl.sum(q, AXIS)
                q = q * y
                m3 = tl.sum(q, AXIS)
                q = q * y
                m4 = tl.sum(q, AXIS)
                q = q * y
                m5 = tl.sum(q, AXIS)
                if SHARED:
                    put(early, 0, m0, place, inside, units, WIDTH)
                    put(early, 1, m1, place, inside, units, WIDTH)
                    put(early, 2, m2, place, inside, units, WIDTH)
                    put(early, 3, m3, place, inside, units, WIDTH)
                    put(early, 4, m4, place, inside, units, WIDTH)
                    put(early, 5, m5, place, inside, units, WIDTH)
                    arrive(counter)
                    wait(counter, tiles)
                    m0 = get(early, 0, units, WIDTH)
                    m1 = get(early, 1, units, WIDTH)
                    m2 = get(early, 2, units, WIDTH)
                    m3 = get(early, 3, units, WIDTH)
                    m4 = get(early, 4, units, WIDTH)
                    m5 = get(early, 5, units, WIDTH)
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
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)
