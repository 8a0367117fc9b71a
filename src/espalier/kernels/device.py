"""What runs on the GPU: one pass over memory for a whole step.

With x = a − d/H, the solution without a penalty, and k = κ/h, the radial subproblem of `solvers/radial.py` reads: find
r with Σ (x / (r + k))² = 1 over a group, then z = x r / (r + k); z = 0 when Σ (x / k)² ≤ 1. A block of groups keeps x
and k in registers while Newton climbs, so that every tensor is read once and written once. A group too large for one
program is spread over several, which add their sums up through global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
COUNTER = tl.constexpr(4)
PARTIAL = tl.constexpr(5)
CLOCK = tl.constexpr(6)
ROLE = tl.constexpr(7)
WORK = tl.constexpr(8)

# k and x/(r + k) are kept within these, so that no sum of their powers leaves float32's range. Both only bend the
# path of Newton's iteration, or shift a weight by less than 1e-20.
LEAST_K = tl.constexpr(1e-20)
LARGEST_Q = tl.constexpr(1e6)
# ½ √ε: a relative step δ leaves an error below 1.5 δ²
SHORT = tl.constexpr(1.7e-4)
# S = 1 but for rounding
ROUNDING = tl.constexpr(2e-6)
# Sums over programs are integers: the first two in units of 1/FINE, no part counting for more than LARGEST_PART, the
# higher moments so that no part counts for more than LARGEST_HIGHER; one below KNOWN has lost nothing to that
FINE = tl.constexpr(2.0**32)
LARGEST_PART = tl.constexpr(2.0**20)
LARGEST_HIGHER = tl.constexpr(2.0)
KNOWN = tl.constexpr(1.9)
UNITS = tl.constexpr(2.0**29)


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
    """Let the gradient into the sums; x = a − d/H and H (a scalar for RMDA and ProxSGD)."""
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
    h = metric
    if METHOD == "ramda" or METHOD == "prox_gen":
        squares_at = address(row, SQUARES, tl.float32, ALIGNED) + off
        u = tl.load(squares_at, mask=mask, other=1.0)
        if METHOD == "ramda":
            if UPDATE:
                u += gain * g * g  # U_t = U_{t−1} + s_t g_t²
                tl.store(squares_at, u, mask=mask)
            h = cube_root(u) + metric  # ∛U_t + ε
        else:
            if UPDATE:
                u = tl.load(scalar + SQUARE_KEEP) * u + tl.load(scalar + SQUARE_GAIN) * g * g
                tl.store(squares_at, u, mask=mask)
            if AMSGRAD:
                largest_at = address(row, LARGEST, tl.float32, ALIGNED) + off
                u = tl.maximum(u, tl.load(largest_at, mask=mask, other=0.0))
                if UPDATE:
                    tl.store(largest_at, u, mask=mask)
            h = tl.sqrt(u) * tl.load(scalar + METRIC_SCALE) + metric  # √v̂ + eps
            a *= tl.load(scalar + DECAY)
    return a - tl.load(scalar + PULL) * d / h, h


@triton.jit
def cube_root(u):
    """∛u: a first guess to 2e-6, and one step of Newton's to rounding."""
    y = tl.exp2(tl.log2(u) * (1 / 3))
    return tl.where(u > 0, y - (y - u / (y * y)) * (1 / 3), 0.0)


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
    mask = off < tl.load(row + RUN)
    x, h = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD)
    z = soft(x, tl.load(scalar + ENTRY_KAPPA) / h)
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)


@triton.jit
def over_groups(v, AXIS: tl.constexpr, RUN_LENGTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ over each group's part of the tile, one value a column (a row, for AXIS 1)."""
    v = tl.sum(v, AXIS)
    if RUN_LENGTH > 1:
        group = tl.arange(0, COLUMNS) // RUN_LENGTH
        v = tl.sum(tl.where(group[:, None] == group[None, :], v[None, :], 0.0), 1)
    return v


@triton.jit
def over_programs(s, t, partial, counter, share, shares, turn, WIDTH: tl.constexpr, MOST: tl.constexpr):
    """Two sums over the programs that share these groups, the same to the bit in each of them."""
    lane = tl.arange(0, WIDTH)
    # a program may be one turn ahead of another, never two: two slots
    slot = partial + (turn % 2) * shares * 2 * WIDTH
    tl.store(slot + share * 2 * WIDTH + lane, s)
    tl.store(slot + (share * 2 + 1) * WIDTH + lane, t)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1) + 1
    while arrived < shares * (turn + 1):
        arrived = tl.atomic_add(counter, 0)
    tl.debug_barrier()
    each = tl.arange(0, MOST)[:, None]
    at = slot + each * 2 * WIDTH + lane[None, :]
    s = tl.sum(tl.load(at, mask=each < shares, other=0.0, cache_modifier=".cg"), 0)
    t = tl.sum(tl.load(at + WIDTH, mask=each < shares, other=0.0, cache_modifier=".cg"), 0)
    return s, t


@triton.jit
def along(v, AXIS: tl.constexpr):
    """Values per group, broadcastable to the tile."""
    return v[None, :] if AXIS == 0 else v[:, None]


@triton.jit(do_not_specialize=["max_iters"])
def step_groups(
    work, table, scalars, finite, counters, partials, max_iters,
    METHOD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, AVERAGED: tl.constexpr, SKIP: tl.constexpr,
    SCALAR: tl.constexpr, CONCAVE: tl.constexpr, ENTRIES: tl.constexpr,
    AXIS: tl.constexpr, RUN_LENGTH: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED: tl.constexpr, MOST: tl.constexpr, SINGLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A step on a block of groups.

    AXIS 0: the tensor as rows of G · RUN_LENGTH columns; a group is RUN_LENGTH neighbouring columns, and the tile is
    HEIGHT rows of as many whole groups as COLUMNS hold. AXIS 1: a group is the row of a tile, its entries in runs.
    """
    if SKIP:
        if tl.load(finite) == 0:
            return
    ticket = tl.program_id(0)
    if SHARED:
        # in the order in which programs begin, so that those waited for have begun or will once others end
        ticket = tl.atomic_add(counters, 1)
    at = work + ticket * WORK
    tensor = tl.load(at + TENSOR)
    first = tl.load(at + FIRST)
    share = tl.load(at + SHARE)
    row = table + tensor * TABLE
    scalar = scalars + tl.load(at + CLOCK) * SCALARS
    groups = tl.load(row + GROUPS).to(tl.int32)
    if AXIS == 0:
        USED: tl.constexpr = COLUMNS // RUN_LENGTH * RUN_LENGTH
        i = (share * HEIGHT + tl.arange(0, HEIGHT))[:, None]
        j = tl.arange(0, COLUMNS)
        width = groups * RUN_LENGTH
        start = first * RUN_LENGTH
        if ALIGNED:
            width = tl.multiple_of(width, 4)
            start = tl.multiple_of(start, 4)
        inside = start + j < width
        if USED < COLUMNS:
            inside = inside & (j < USED)
        mask = (i < tl.load(row + ROWS).to(tl.int32)) & inside[None, :]
        if WIDE:
            i = i.to(tl.int64)
        off = i * width + (start + j)[None, :]
        group = first + j // RUN_LENGTH
        leads = inside & (j % RUN_LENGTH == 0)
        WIDTH: tl.constexpr = COLUMNS
    else:
        group = first + tl.arange(0, HEIGHT)
        n = (share * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        run = tl.load(row + RUN).to(tl.int32)
        if ALIGNED:
            run = tl.multiple_of(run, 4)
        inside = group < groups
        leads = inside
        start = group[:, None]
        if WIDE:
            start = start.to(tl.int64)
        if SINGLE:
            mask = inside[:, None] & (n < run)
            off = start * run + n
        else:
            mask = inside[:, None] & (n < tl.load(row + ROWS).to(tl.int32) * run)
            off = (start + n // run * groups) * run + n % run
        WIDTH: tl.constexpr = HEIGHT

    x, h = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD)
    if ENTRIES:
        x = soft(x, tl.load(scalar + ENTRY_KAPPA) / h)
    kappa = tl.load(scalar + KAPPA)
    flat = tl.load(scalar + FLAT)
    if SHARED:
        counter = counters + tl.load(at + COUNTER)
        shares = tl.load(at + SHARES)
        partial = partials + tl.load(at + PARTIAL)
    if kappa > 0:
        k = tl.maximum(kappa / h, LEAST_K)
        if SCALAR:
            q = tl.minimum(tl.abs(x) / k, LARGEST_Q)
            s = over_groups(q * q, AXIS, RUN_LENGTH, COLUMNS)
            if SHARED:
                s, _ = over_programs(s, s, partial, counter, share, shares, 0, WIDTH, MOST)
            z = x * along(scalar_factor(tl.sqrt(s), flat / k, CONCAVE), AXIS)
        else:
            radius_at = address(row, RADIUS, tl.float32, False) + group
            if CONCAVE:
                r = tl.zeros([WIDTH], tl.float32)  # from the left only
            else:
                r = tl.load(radius_at, mask=inside, other=0.0)
            # a penalty that ends at R lowers the metric: D/h = (1 − k/R) r + k
            e = 1 - k / flat if CONCAVE else 1.0
            # r before the numbers: Triton 3.6 and 3.7 fail on a loop that carries them in another order
            turn = 0
            moving = 1
            while (turn < max_iters) & (moving > 0):
                inverse = 1 / (e * along(r, AXIS) + k)
                q = tl.minimum(tl.abs(x) * inverse, LARGEST_Q)
                s = over_groups(q * q, AXIS, RUN_LENGTH, COLUMNS)  # S = Σ b²/D²
                t = over_groups(q * q * (e * inverse), AXIS, RUN_LENGTH, COLUMNS)  # T = Σ h b²/D³
                if SHARED:
                    s, t = over_programs(s, t, partial, counter, share, shares, turn, WIDTH, MOST)
                move = (s / t) * (tl.sqrt(s) - 1)
                new = tl.maximum(r + move, 0.0)
                if CONCAVE:
                    # f has stopped rising, or r has left the region: no inner minimum but 0
                    new = tl.where(s > 1, tl.where(t > 0, tl.minimum(new, flat), flat), r)
                new = tl.where(s > 0, new, s)  # NaN stays NaN
                near = tl.where(turn > 4, ROUNDING, 0.0)
                settled = (tl.abs(new - r) <= new * SHORT) | (tl.abs(s - 1) <= near) | (new != new)
                moving = tl.max(tl.where(settled, 0, 1), 0)
                r = new
                turn += 1
            if UPDATE:
                tl.store(radius_at, r, mask=leads)
            z = x * (along(r, AXIS) / (e * along(r, AXIS) + k))
            if CONCAVE:
                # x = b/h, where the penalty is constant, if it lies there and has the lower objective:
                # Q(inner) − Q(outer) = ½ Σ h (x − z)² + κ r (1 − r/2R) − ½ κ R, here in units of κ R
                outer = over_groups((x / flat) * (x / flat), AXIS, RUN_LENGTH, COLUMNS)
                gain = over_groups(((x - z) / flat) * ((x - z) / k), AXIS, RUN_LENGTH, COLUMNS)
                if SHARED:
                    outer, gain = over_programs(outer, gain, partial, counter, share, shares, turn, WIDTH, MOST)
                inner = r / flat
                z = tl.where(along((outer >= 1) & (gain + inner * (2 - inner) > 1), AXIS), x, z)
    else:
        z = x
    deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)


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
def add_up(sums, j: tl.constexpr, v, group, inside, units, PANEL: tl.constexpr):
    """Let a tile's part into the sum j of each group. In integers the order of the programs does not matter."""
    v = tl.sum(v, 0)
    if j < 2:
        part = (tl.minimum(v, LARGEST_PART) * FINE).to(tl.int64)
        tl.atomic_add(sums + j * PANEL + group, part, mask=inside, sem="relaxed")
    else:
        part = (tl.minimum(v, LARGEST_HIGHER) * units).to(tl.int32)
        coarse = (sums + 2 * PANEL).to(tl.pointer_type(tl.int32)) + (j - 2) * PANEL
        tl.atomic_add(coarse + group, part, mask=inside, sem="relaxed")


@triton.jit
def add_moments(x, k, r, scale, sums, group, inside, units, SCALAR: tl.constexpr, PANEL: tl.constexpr):
    """A tile's part of the moments M_j = Σ q² y^j at r, with q = x/(r + k) and y = scale/(r + k); S(r) is M_0."""
    inverse = 1 / (r[None, :] + k)
    q = tl.minimum(tl.abs(x) * inverse, LARGEST_Q)
    q = q * q
    add_up(sums, 0, q, group, inside, units, PANEL)
    if not SCALAR:
        y = scale[None, :] * inverse
        q = q * y
        add_up(sums, 1, q, group, inside, units, PANEL)
        q = q * y
        add_up(sums, 2, q, group, inside, units, PANEL)
        q = q * y
        add_up(sums, 3, q, group, inside, units, PANEL)
        q = q * y
        add_up(sums, 4, q, group, inside, units, PANEL)
        q = q * y
        add_up(sums, 5, q, group, inside, units, PANEL)


@triton.jit
def take(sums, j: tl.constexpr, units, PANEL: tl.constexpr):
    """The sum j of each group of a panel; zero for the next turn."""
    if j < 2:
        at = sums + j * PANEL + tl.arange(0, PANEL)
        v = tl.load(at, cache_modifier=".cg").to(tl.float32) * (1 / FINE)
        tl.store(at, tl.zeros([PANEL], tl.int64))
    else:
        at = (sums + 2 * PANEL).to(tl.pointer_type(tl.int32)) + (j - 2) * PANEL + tl.arange(0, PANEL)
        v = tl.load(at, cache_modifier=".cg").to(tl.float32) / units
        tl.store(at, tl.zeros([PANEL], tl.int32))
    return v


@triton.jit
def conclude(
    radius_at, scale_at, inside, sums, counter, turn, units, k, SCALAR: tl.constexpr, PANEL: tl.constexpr
):  # fmt: skip
    """The next r of each group of a panel, for its other programs.

    With δ = ρ scale, S(r + δ) = Σ_j (−1)^j (j + 1) ρ^j M_j. Where the rest of this series after six terms, about
    7 ρ⁶ M_5² / M_4, is below rounding, its root is the solution; elsewhere Newton's step leads to the next turn.
    """
    r = tl.load(radius_at, mask=inside, other=0.0, cache_modifier=".cg")
    m0 = take(sums, 0, units, PANEL)
    if SCALAR:
        new = tl.maximum((r + k) * tl.sqrt(m0) - k, 0.0)
        # known well, or zero for certain
        close = (m0 < LARGEST_PART) & ((m0 > 1e-3) | (r == 0))
    else:
        scale = tl.load(scale_at, mask=inside, other=1.0, cache_modifier=".cg")
        m1 = take(sums, 1, units, PANEL)
        m2 = take(sums, 2, units, PANEL)
        m3 = take(sums, 3, units, PANEL)
        m4 = take(sums, 4, units, PANEL)
        m5 = take(sums, 5, units, PANEL)
        known = (m1 > 0) & (tl.maximum(tl.maximum(m2, m3), tl.maximum(m4, m5)) < KNOWN)
        least = -r / scale  # r + δ = 0
        newton = tl.where(m1 > 0, (m0 / m1) * (tl.sqrt(m0) - 1), 0.0)
        rho = tl.maximum(newton, least)
        for _ in tl.static_range(3):
            s = m0 + rho * (-2 * m1 + rho * (3 * m2 + rho * (-4 * m3 + rho * (5 * m4 - 6 * rho * m5))))
            t = m1 + rho * (-3 * m2 + rho * (6 * m3 + rho * (-10 * m4 + 15 * rho * m5)))
            rho = tl.where((s > 0) & (t > 0), tl.maximum(rho + (s / t) * (tl.sqrt(s) - 1), least), newton)
        rest = 7 * rho * rho * rho * rho * rho * rho * m5 * (m5 / tl.maximum(m4, 1e-30))
        close = known & (rest <= m1 * ROUNDING)
        rho = tl.where(close, rho, tl.minimum(newton, 30.0))
        stays = (r == 0) & (m0 <= 1)
        new = tl.where(stays, 0.0, tl.maximum(r + rho * scale, 0.0))
        close = close | stays | (tl.abs(m0 - 1) <= ROUNDING)
        # the next scale is a quarter of the mean of r + k that S/T is
        mean = tl.where(m1 > 0, m0 / m1, 4.0)
        tl.store(scale_at, 0.25 * scale * tl.minimum(tl.maximum(mean, 0.1), 40.0), mask=inside)
    tl.store(radius_at, new, mask=inside)
    moving = tl.max(tl.where(close, 0, tl.where(inside, 1, 0)), 0)
    tl.debug_barrier()
    tl.atomic_xchg(counter + 1, 2 * (turn + 1) + moving)


@triton.jit
def step_panels(
    work, table, scalars, finite, counters, partials, max_iters,
    METHOD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr, AVERAGED: tl.constexpr, SKIP: tl.constexpr,
    SCALAR: tl.constexpr, ENTRIES: tl.constexpr, RUN_LENGTH: tl.constexpr,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A step on tensors of rows, in two turns over each tile: the sums first, the solution once they are complete.

    A panel is COLUMNS groups: RUN_LENGTH tiles side by side, and as many below each other as the rows need. Programs
    begin in the order of the work list, in which the second turn of a panel comes when the first is long done and the
    tensors are still in the cache; those waited for have begun, or will once earlier ones end.
    """
    if SKIP:
        if tl.load(finite) == 0:
            return
    at = work + tl.program_id(0) * WORK
    tensor = tl.load(at + TENSOR)
    start = tl.load(at + FIRST)
    row = table + tensor * TABLE
    scalar = scalars + tl.load(at + CLOCK) * SCALARS
    counter = counters + tl.load(at + COUNTER)
    sums = partials + tl.load(at + PARTIAL)
    groups = tl.load(row + GROUPS).to(tl.int32)
    rows = tl.load(row + ROWS).to(tl.int32)
    ACROSS: tl.constexpr = COLUMNS * RUN_LENGTH
    shares = (rows + HEIGHT - 1) // HEIGHT
    units = 1.0 / (shares * RUN_LENGTH) * UNITS

    i = (tl.load(at + SHARE) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    j = start + tl.arange(0, COLUMNS)
    width = groups * RUN_LENGTH
    if ALIGNED:
        width = tl.multiple_of(width, 4)
    inside = j < width
    mask = (i < rows) & inside[None, :]
    if WIDE:
        i = i.to(tl.int64)
    off = i * width + j[None, :]
    radius_at = address(row, RADIUS, tl.float32, False)
    scale_at = address(row, SCALE, tl.float32, False)
    mine = j // RUN_LENGTH
    panel = start // ACROSS
    all_at = panel * COLUMNS + tl.arange(0, COLUMNS)  # the panel's groups
    place = mine - panel * COLUMNS
    tiles = tl.minimum(tl.cdiv(width - panel * ACROSS, COLUMNS), RUN_LENGTH) * shares
    kappa = tl.load(scalar + KAPPA)
    k0 = kappa / tl.load(scalar + METRIC)  # under a scalar metric

    if tl.load(at + ROLE) == 0:
        x, h = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, UPDATE, MAXIMIZE, AMSGRAD)
        if kappa > 0:
            if ENTRIES:
                x = soft(x, tl.load(scalar + ENTRY_KAPPA) / h)
            k = tl.maximum(kappa / h, LEAST_K)
            r = tl.load(radius_at + mine, mask=inside, other=1.0)
            scale = tl.load(scale_at + mine, mask=inside, other=1.0)
            add_moments(x, k, r, scale, sums, place, inside, units, SCALAR, COLUMNS)
            tl.debug_barrier()
            if tl.atomic_add(counter, 1) == tiles - 1:
                tl.debug_barrier()
                conclude(
                    radius_at + all_at, scale_at + all_at, all_at < groups, sums, counter, 0, units, k0,
                    SCALAR, COLUMNS,
                )  # fmt: skip
    else:
        x, h = pose(row, scalar, off, mask, METHOD, TYPE, ALIGNED, False, MAXIMIZE, AMSGRAD)
        if ENTRIES:
            x = soft(x, tl.load(scalar + ENTRY_KAPPA) / h)
        z = x
        if kappa > 0:
            k = tl.maximum(kappa / h, LEAST_K)
            code = tl.atomic_add(counter + 1, 0)
            while code < 2:
                code = tl.atomic_add(counter + 1, 0)
            tl.debug_barrier()
            r = tl.load(radius_at + mine, mask=inside, other=1.0, cache_modifier=".cg")
            turn = 1
            while (turn < max_iters) & (code % 2 > 0):
                scale = tl.load(scale_at + mine, mask=inside, other=1.0, cache_modifier=".cg")
                add_moments(x, k, r, scale, sums, place, inside, units, SCALAR, COLUMNS)
                tl.debug_barrier()
                if tl.atomic_add(counter, 1) == tiles * (turn + 1) - 1:
                    tl.debug_barrier()
                    conclude(
                        radius_at + all_at, scale_at + all_at, all_at < groups, sums, counter, turn, units, k0,
                        SCALAR, COLUMNS,
                    )  # fmt: skip
                code = tl.atomic_add(counter + 1, 0)
                while code < 2 * (turn + 1):
                    code = tl.atomic_add(counter + 1, 0)
                tl.debug_barrier()
                r = tl.load(radius_at + mine, mask=inside, other=1.0, cache_modifier=".cg")
                turn += 1
            z = x * (r[None, :] / (r[None, :] + k))
        deliver(row, scalar, z, off, mask, TYPE, ALIGNED, UPDATE, MASTER, AVERAGED)
