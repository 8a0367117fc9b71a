"""The methods' own equations, which the torch code in `optim/` has too: clocks, sums, x = a − d/H, averaging."""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.kernels import interpreted
from espalier.kernels.columns import (
    ALPHA,
    ANCHOR,
    AVERAGING,
    CLOCKS,
    DECAY,
    ENTRY_KAPPA,
    FACTOR,
    FIRST_MOMENT,
    FLAT,
    GAIN,
    GAMMA,
    GRAD,
    KAPPA,
    LAM_ENTRY,
    LAM_GROUP,
    LARGEST,
    LOG2_FIRST,
    LOG2_SECOND,
    METRIC,
    METRIC_SCALE,
    PARAM,
    PULL,
    SCALARS,
    SECOND_MOMENT,
    SQUARE_GAIN,
    SQUARE_KEEP,
    SQUARES,
    STEP,
    SUM,
    WEIGHT,
    WEIGHT_DECAY,
)

INTERPRETED = tl.constexpr(interpreted())
LARGEST_NUMBER = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["tensors", "counted"])
def tick(
    clocks, scalars, counters, finite, lr_at, eps_at, ramp_at, floor_at, given, tensors, counted,
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
        c = tl.maximum(c, tl.load(floor_at))  # toward the end of a run of known length
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
def weight(row, off, mask, PARAM_TYPE: tl.constexpr, ALIGNED: tl.constexpr, MASTER: tl.constexpr):
    """The weights; of half precision the float32 master's, or what was written into the parameter since."""
    w = tl.load(address(row, WEIGHT, tl.float32, ALIGNED) + off, mask=mask, other=0.0)
    if MASTER:
        p = tl.load(address(row, PARAM, PARAM_TYPE, ALIGNED) + off, mask=mask, other=0.0).to(tl.float32)
        w = tl.where(w.to(PARAM_TYPE).to(tl.float32) == p, w, p)
    return w


@triton.jit
def at_most(u):
    """min(u, the largest number), as an infinite metric would make NaN of the weights; NaN stays NaN."""
    return tl.where(u > LARGEST_NUMBER, LARGEST_NUMBER, u)


@triton.jit
def pose(
    row, scalar, off, mask,
    METHOD: tl.constexpr, GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr,
    MAXIMIZE: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr,
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
        a = weight(row, off, mask, GRAD_TYPE, ALIGNED, MASTER)
    inverse = 1 / metric
    if METHOD == "ramda" or METHOD == "prox_gen":
        squares_at = address(row, SQUARES, tl.float32, ALIGNED) + off
        u = tl.load(squares_at, mask=mask, other=1.0)
        if METHOD == "ramda":
            if UPDATE:
                u = at_most(u + gain * g * g)  # U_t = U_{t−1} + s_t g_t²
                tl.store(squares_at, u, mask=mask)
            inverse = reciprocal(cube_root(u) + metric)  # of ∛U_t + ε
        else:
            if UPDATE:
                u = at_most(tl.load(scalar + SQUARE_KEEP) * u + tl.load(scalar + SQUARE_GAIN) * g * g)
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
def fetch(row, i, rows, first, width, COLUMNS: tl.constexpr):
    """Have the cache fetch the weights of a tile's rows i: a program needs them after it has waited for others."""
    if not INTERPRETED:
        j = first + 8 * tl.arange(0, COLUMNS // 8)[None, :]  # 32 bytes at a time
        off = tl.where((i < rows) & (j < width), i * width + j, 0)
        at = (address(row, WEIGHT, tl.float32, False) + off).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


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
                z = (1 - c) * weight(row, off, mask, PARAM_TYPE, ALIGNED, MASTER) + c * z
        tl.store(weight_at, z, mask=mask)
    if MASTER or not UPDATE:
        tl.store(address(row, PARAM, PARAM_TYPE, ALIGNED) + off, z.to(PARAM_TYPE), mask=mask)
