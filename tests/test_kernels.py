"""The kernels do what the torch code does: against a float64 truth, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.groupings import as_grouping, partition_of
from espalier.optim.base import StructuredOptimizer
from espalier.penalties.base import RadialPenalty
from tables import OPTIMIZERS, ElasticNet, OptimizerCase, names

pytest.importorskip("triton")

from espalier import kernels
from espalier.kernels import columns, launch
from espalier.kernels.branches import Branches
from espalier.kernels.geometry import Geometry, geometry, tile_of
from espalier.kernels.work import BLOCK, Slab, programs

# the interpreter computes masked lanes too, and there it divides by zero
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = {c.name: c for c in OPTIMIZERS}
RAMDA = BY_NAME["RAMDA"]
every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
DUAL_AVERAGING = tuple(c for c in OPTIMIZERS if c.build.anchored)
dual_averaging = pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(DUAL_AVERAGING))
# one method with a scalar metric, one with a diagonal one, anchored or not
BOTH_METRICS = tuple(BY_NAME[n] for n in ("RAMDA", "RMDA", "ProxGen-amsgrad"))
both_metrics = pytest.mark.parametrize("case", BOTH_METRICS, ids=names(BOTH_METRICS))
PENALTIES: tuple[espalier.Penalty | None, ...] = (
    espalier.GroupLasso(3e-2),
    espalier.SparseGroupLasso(3e-2),
    espalier.GroupMCP(3e-2),
    espalier.L1(3e-2),
    None,
)
LSTM = espalier.Output(layout=espalier.Layout(stacked=4))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Iterable[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(DEVICE, dtype)


def over_ten_decades(shape: Iterable[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient whose entries, and so the metric's, spread that far."""
    shape = tuple(shape)
    decades = torch.rand(shape, generator=generator) * 10 - 5
    return (torch.randn(shape, generator=generator) * 10**decades).to(DEVICE, dtype)


def group_of(p: Tensor | list[Tensor], penalty: espalier.Penalty | None, grouping: Any = None) -> dict[str, Any]:
    return {"params": p if isinstance(p, list) else [p], "penalty": penalty, "grouping": grouping if penalty else None}


def twins(
    case: OptimizerCase, shapes: Iterable[Iterable[int]], penalty: Any, grouping: Any = None, **settings: Any
) -> list[tuple[StructuredOptimizer, list[nn.Parameter]]]:
    """The same optimizer on the same parameters, fused and not."""
    dtype = settings.pop("dtype", torch.float32)
    pair = []
    for fused in (True, False):
        generator = rng()
        ps = [nn.Parameter(normal(s, generator, dtype)) for s in shapes]
        pair.append((case([group_of(list(ps), penalty, grouping)], fused=fused, **settings), ps))
    return pair


def everything(optimizer: StructuredOptimizer) -> list[Tensor]:
    """Weights and state, copied."""
    ps = [p for g in optimizer.param_groups for p in g["params"]]
    return [x.detach().clone() for p in ps for x in (p, *optimizer.state[p].values())]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    """To the bit."""
    return len(xs) == len(ys) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(xs, ys, strict=True))


def structured_point(optimizer: StructuredOptimizer, p: Tensor) -> Tensor:
    with optimizer.structured():
        return p.detach().clone()


def in_double(optimizer: StructuredOptimizer) -> StructuredOptimizer:
    """The unfused optimizer in float64 on the CPU, in the state where this one is."""
    groups = []
    for group in optimizer.param_groups:
        ps = [optimizer.state[p].get("master", p) for p in group["params"]]
        copies = [nn.Parameter(p.detach().double().cpu()) for p in ps]
        groups.append({**group, "params": copies, "fused": False})
    truth = type(optimizer)(groups)
    for group, copy in zip(optimizer.param_groups, groups, strict=True):
        for p, q in zip(group["params"], copy["params"], strict=True):
            keys = (*optimizer.clock, *optimizer._buffers(group))
            truth.state[q] = {k: optimizer.state[p][k].detach().double().cpu().clone() for k in keys}
    return truth


def error(optimizer: StructuredOptimizer, p: Tensor, truth: StructuredOptimizer, q: Tensor, before: Tensor) -> float:
    """‖w − w₆₄‖ relative to the larger of ‖w‖ and ‖W⁰‖, or the weights before the step where there is no W⁰."""
    w = optimizer.state[p].get("master", p).detach().double().cpu()
    largest = max(float(x.norm()) for x in (q.detach(), truth.state[q].get("anchor", before)))
    wrong = float((w - q.detach()).norm())
    return wrong / largest if wrong else 0.0


def step_both(optimizer: StructuredOptimizer, p: Tensor, grad: Tensor) -> tuple[StructuredOptimizer, Tensor, Tensor]:
    """One step here and one in float64 from the same state: the float64 optimizer, its weights, those before."""
    truth = in_double(optimizer)
    (q,) = truth.param_groups[0]["params"]
    before = q.detach().clone()
    p.grad, q.grad = grad, grad.double().cpu()
    optimizer.step()
    truth.step()
    assert error(optimizer, p, truth, q, before) <= 5e-6
    return truth, q, before


def zero_groups(penalty: espalier.Penalty, grouping: Any, z: Tensor) -> Tensor:
    if isinstance(penalty, espalier.L1):
        return z.cpu() == 0
    groups = partition_of(as_grouping(grouping or penalty.default_grouping), z.shape)
    return groups.zero(groups.split(z.cpu()))


def at_threshold(truth: StructuredOptimizer, q: Tensor, before: Tensor) -> Tensor:
    """The groups for which ‖b‖ = κ but for rounding, in the step that has just been made."""
    (group,) = truth.param_groups
    groups, state = truth._partition(group, q), truth.state[q]
    x = {**{k: state[k] for k in truth._buffers(group)}, "weight": before}
    problem = truth._pose(x, truth._read_clock(state), group).split(groups)
    form = group["penalty"].radial(problem, groups)
    close = (form.groups.norm(form.linear) / form.kappa - 1).abs() < 1e-5
    return close.reshape(q.shape) if isinstance(group["penalty"], espalier.L1) else close.reshape(-1)


def strength_that_zeroes_some(optimizer: StructuredOptimizer, grad: Tensor) -> float:
    """λ for which the step leaves some groups zero and some not; half the threshold where there is but one group."""
    (group,) = optimizer.param_groups
    penalty = group["penalty"]

    def share(lam: float) -> float:
        truth = in_double(optimizer)
        (q,) = truth.param_groups[0]["params"]
        truth.param_groups[0]["penalty"] = replace(penalty, lam=lam)
        q.grad = grad.double().cpu()
        truth.step()
        return float(zero_groups(penalty, group["grouping"], structured_point(truth, q)).double().mean())

    low, high = 1e-12, 1e12
    for _ in range(40):
        middle = math.sqrt(low * high)
        if (found := share(middle)) in (0, 1):
            low, high = (middle, high) if found == 0 else (low, middle)
        elif 0.2 <= found <= 0.8 or high / low < 1.1:
            return middle
        else:
            low, high = (middle, high) if found < 0.2 else (low, middle)
    return low / 2


# ------------------------------------------------------------------------------------------------ float64 truth

# grouping and shape: 2-D to 5-D, one group, one row, primes, K = 9, 25, 27
PLACES = (
    ("input", (7, 13)),
    ("input", (1, 11)),
    ("input", (7, 1, 3, 3)),
    ("input", (5, 7, 3, 3)),
    ("input", (3, 5, 5, 5)),
    ("input", (3, 4, 3, 3, 3)),
    ("input", (2, 3, 9, 9)),  # a group's 81 neighbours are too many for columns of several groups
    ("output", (11, 6, 3)),
    ("output", (1, 17)),
    (espalier.Input(block=2), (5, 6, 3, 3)),
    (espalier.Input(layout=espalier.Layout(parts=2)), (6, 5, 3)),
    (espalier.Heads(3), (7, 12)),
    (espalier.Heads(2, side="output", layout=espalier.Layout(stacked=3)), (12, 5)),
    (LSTM, (12, 5)),
    ("element", (3, 7)),
)
# every pair of optimizer, penalty and place is in it
CASES = [
    pytest.param(case, PENALTIES[(i + j) % len(PENALTIES)], *place, id=f"{case.name}-{i + j}-{place[0]}-{place[1]}")
    for i, case in enumerate(OPTIMIZERS)
    for j, place in enumerate(PLACES)
]


def settings_of(case: OptimizerCase) -> dict[str, Any]:
    return {"eps": 1e-12} if "eps" in case([nn.Parameter(torch.ones(1))]).defaults else {}


@pytest.mark.parametrize(("case", "penalty", "grouping", "shape"), CASES)
def test_a_step_is_the_float64_one(
    case: OptimizerCase, penalty: espalier.Penalty | None, grouping: Any, shape: tuple[int, ...]
) -> None:
    generator = rng(PLACES.index((grouping, shape)))
    p = nn.Parameter(normal(shape, generator))
    start = replace(penalty, lam=1e-4) if penalty else None
    optimizer = case([group_of(p, start, grouping)], fused=True, **settings_of(case))
    p.grad = over_ten_decades(shape, generator)
    optimizer.step()
    (group,) = optimizer.param_groups
    for step in range(2):
        grad = over_ten_decades(shape, generator)
        if penalty and step == 0:
            group["penalty"] = replace(penalty, lam=strength_that_zeroes_some(optimizer, grad))
        sums = {k: optimizer.state[p][k].double().cpu() for k in optimizer._buffers(group)}
        truth, q, before = step_both(optimizer, p, grad)
        for k, old in sums.items():
            new = truth.state[q][k]
            wrong = (optimizer.state[p][k].cpu() - new).abs()
            assert (wrong <= 5e-7 * (old.abs() + (new - old).abs())).all()
        for k in optimizer.clock:
            assert float(optimizer.state[p][k]) == pytest.approx(float(truth.state[q][k]), rel=1e-14)
        if penalty:
            # at the state that the float32 step left, so that only the solution's own error counts
            z, z64 = structured_point(optimizer, p), structured_point(truth, q)
            zero, zero64 = (zero_groups(penalty, grouping, x) for x in (z, z64))
            assert step or zero64.numel() == 1 or 0 < int(zero64.sum()) < zero64.numel()
            assert ((zero == zero64) | at_threshold(truth, q, before)).all()


@pytest.mark.parametrize("gamma", [0.05, 1.5, 30.0])
@both_metrics
def test_group_mcp_on_both_sides_of_convexity(case: OptimizerCase, gamma: float) -> None:
    """Where τ/H > γ the inner problem is concave: 0 or x itself, whichever is better."""
    generator = rng(3)
    p = nn.Parameter(normal((5, 8), generator))
    optimizer = case([group_of(p, espalier.GroupMCP(1e-3, gamma))], fused=True, lr=0.3)
    for _ in range(3):
        p.grad = normal(p.shape, generator)
        if not optimizer.state[p]:
            optimizer.step()
        optimizer.param_groups[0]["penalty"] = espalier.GroupMCP(strength_that_zeroes_some(optimizer, p.grad), gamma)
        step_both(optimizer, p, p.grad)


@pytest.mark.parametrize("shape", [(64, 8), (8, 6, 3, 3)])
@pytest.mark.parametrize("margin", [1e-4, 1e-2, 0.3, 1e3, 1e6])
def test_a_zero_group_is_zero_from_wherever_newton_begins(margin: float, shape: tuple[int, ...]) -> None:
    """Its radius may have been anything in the step before; an r of 1e-8 would be no zero."""
    generator = rng(4)
    p = nn.Parameter(normal(shape, generator))
    optimizer = RAMDA([group_of(p, espalier.GroupLasso(1e-9))], fused=True)
    p.grad = normal(shape, generator)
    optimizer.step()
    state = {k: v.double() for k, v in optimizer.state[p].items()}
    b = (state["square_sum"] ** (1 / 3) + 1e-6) * state["anchor"] - state["grad_sum"]
    groups = partition_of(espalier.Input(), shape)
    lam = float(groups.norm(b).max() * (1 + margin) / state["alpha"] / math.sqrt(groups.size))
    optimizer.param_groups[0]["penalty"] = espalier.GroupLasso(lam)
    radius, scale, _ = optimizer.state[p]["radius"]
    for size in (1e-3, 1e-2, 0.1, 1.0):
        radius.copy_(size * (1 + torch.rand(groups.count, generator=generator)))
        scale.fill_(0.7)
        assert not structured_point(optimizer, p).any(), size


@pytest.mark.parametrize("size", [1e-15, 1e15])
@every_optimizer
def test_huge_and_tiny_values(case: OptimizerCase, size: float) -> None:
    generator = rng(5)
    p = nn.Parameter(normal((5, 6, 3, 3), generator) * size)
    optimizer = case([group_of(p, espalier.GroupLasso(1e-3 * size))], fused=True)
    p.grad = normal(p.shape, generator) * size
    optimizer.step()
    for _ in range(2):
        step_both(optimizer, p, normal(p.shape, generator) * size)
        assert p.isfinite().all()


# ------------------------------------------------------------------------------------------------ memory formats

FORMATS = (((5, 6, 3, 3), torch.channels_last), ((3, 4, 3, 3, 3), torch.channels_last_3d))


@pytest.mark.parametrize(("shape", "memory"), FORMATS)
@pytest.mark.parametrize("grouping", ["input", "output"])
@both_metrics
def test_channels_last_equals_contiguous(case: OptimizerCase, grouping: Any, shape: Any, memory: Any) -> None:
    results = []
    for p_format, g_format in ((None, None), (memory, memory), (memory, None), (None, memory)):
        generator = rng(6)
        p = nn.Parameter(normal(shape, generator))
        p.data = p.data.contiguous(memory_format=p_format or torch.contiguous_format)
        optimizer = case([group_of(p, espalier.GroupLasso(3e-2), grouping)], fused=True)
        for _ in range(2):
            p.grad = normal(shape, generator).contiguous(memory_format=g_format or torch.contiguous_format)
            optimizer.step()
        assert p_format is None or p.is_contiguous(memory_format=p_format)
        results.append(p.detach())
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=2e-6, atol=2e-6)
        assert torch.equal(results[0] == 0, other == 0)


def transposed() -> Tensor:
    return normal((6, 9), rng(7)).t()


def with_gaps() -> Tensor:
    return normal((9, 12), rng(7))[:, ::2]


@pytest.mark.parametrize("make", [transposed, with_gaps])
@pytest.mark.parametrize("penalty", [espalier.GroupLasso(3e-2), espalier.L1(3e-2), None], ids=lambda p: repr(p)[:8])
@both_metrics
def test_any_strides_are_served_right_or_refused_by_name(case: OptimizerCase, penalty: Any, make: Any) -> None:
    results, generator = [], rng(8)
    grads = [normal((9, 6), generator) for _ in range(2)]
    for fused in (False, None, True):
        p = nn.Parameter(make())
        assert not p.is_contiguous()
        group = {**group_of(p, penalty), "param_names": ["the.weight"]}
        try:
            optimizer = case([group], fused=fused)
        except ValueError as problem:
            assert fused
            assert make is with_gaps
            assert "the.weight" in str(problem)  # noqa: PT017
            assert "strides" in str(problem)  # noqa: PT017
            continue
        for g in grads:
            p.grad = g
            optimizer.step()
        results.append(p.detach())
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=2e-6, atol=2e-6)
        assert torch.equal(results[0] == 0, other == 0)


# ------------------------------------------------------------------------------------------------ half precision


@pytest.mark.parametrize(
    ("dtype", "penalty"), [(torch.bfloat16, PENALTIES[0]), (torch.float16, PENALTIES[0]), (torch.bfloat16, None)]
)
@every_optimizer
def test_half_precision_has_a_float32_master(case: OptimizerCase, penalty: Any, dtype: torch.dtype) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6, 3, 3)], penalty, dtype=dtype)
    generator = rng(9)
    for _ in range(2):
        p.grad = normal(p.shape, generator, dtype)
        q.grad = p.grad.clone()
        fused.step()
        plain.step()
        state, other = fused.state[p], plain.state[q]
        for k in ("master", *fused._buffers(fused.param_groups[0])):
            assert state[k].dtype == torch.float32
            assert torch.allclose(state[k], other[k], rtol=5e-6, atol=1e-6)
        if dtype == torch.bfloat16 and kernels.interpreted():  # which cuts off instead of rounding
            assert torch.allclose(p.float(), state["master"], rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(p.detach(), state["master"].to(dtype))
    z, z_plain = structured_point(fused, p), structured_point(plain, q)
    assert z.dtype == dtype
    assert torch.equal(z == 0, z_plain == 0)
    assert torch.allclose(z.float(), z_plain.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("penalty", [PENALTIES[0], None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_optimizer
def test_what_is_written_into_half_precision_weights_counts(
    case: OptimizerCase, dtype: torch.dtype, penalty: Any
) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6)], penalty, dtype=dtype, skip_nonfinite=True)
    generator = rng(9)
    for written, bad in ((3.0, False), (-5.0, False), (7.0, True), (3.0, False)):
        p.grad = normal(p.shape, generator, dtype)
        if bad:
            p.grad[0] = math.nan
        q.grad = p.grad.clone()
        fused.step()
        plain.step()
        if not bad:
            assert torch.allclose(fused.state[p]["master"], plain.state[q]["master"], rtol=5e-6, atol=1e-6)
        for w in (p, q):
            w.data[2:4] = written
        assert not (fused.state[p]["master"][2:4] == written).any()


# ------------------------------------------------------------------------------------------------ traps


# in the interpreter sums of inf warn
@pytest.mark.filterwarnings("ignore:overflow encountered in reduce:RuntimeWarning")
@pytest.mark.parametrize("size", [1e20, 1.7e38])
@pytest.mark.parametrize("penalty", PENALTIES)
@every_optimizer
def test_squares_that_overflow_make_no_nan(case: OptimizerCase, penalty: Any, size: float) -> None:
    p = nn.Parameter(normal((6, 5), rng()))
    optimizer = case([group_of(p, penalty)], fused=True)
    for step in range(3):
        p.grad = size * normal(p.shape, rng(step)).sign()
        optimizer.step()
        assert all(x.isfinite().all() for x in everything(optimizer))
        assert structured_point(optimizer, p).isfinite().all()


@every_optimizer
def test_lr_zero_changes_no_weight(case: OptimizerCase) -> None:
    p = nn.Parameter(normal((5, 7), rng()))
    before = p.detach().clone()
    optimizer = case([group_of(p, espalier.GroupLasso(1e-2))], lr=0.0, fused=True)
    for _ in range(2):
        p.grad = normal(p.shape, rng(1))
        optimizer.step()
    assert torch.allclose(p, before, rtol=1e-6, atol=0) if optimizer.anchored else torch.equal(p, before)
    assert torch.equal(structured_point(optimizer, p), before)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.allclose(p, before, rtol=1e-3)
    assert p.isfinite().all()


@pytest.mark.parametrize("penalty", PENALTIES[:4], ids=lambda p: type(p).__name__)
@both_metrics
def test_lambda_zero_is_no_penalty(case: OptimizerCase, penalty: Any) -> None:
    results = []
    for which in (replace(penalty, lam=0.0), None):
        p = nn.Parameter(normal((5, 7), rng()))
        optimizer = case([group_of(p, which)], fused=True)
        for seed in (1, 2):
            p.grad = normal(p.shape, rng(seed))
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("penalty", PENALTIES[:4], ids=lambda p: type(p).__name__)
@both_metrics
def test_every_group_zero_and_back(case: OptimizerCase, penalty: Any) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 7, 3)], replace(penalty, lam=1e6))
    for seed in range(4):
        for optimizer, w in ((fused, p), (plain, q)):
            w.grad = normal(w.shape, rng(seed))
            optimizer.step()
            if seed == 1:
                assert not structured_point(optimizer, w).any()
                optimizer.param_groups[0]["penalty"] = replace(penalty, lam=1e-4)
    assert structured_point(fused, p).any()
    assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("penalty", PENALTIES[:4], ids=lambda p: type(p).__name__)
@dual_averaging
def test_at_the_end_of_the_ramp_the_weights_are_z(case: OptimizerCase, penalty: Any) -> None:
    """c √4 = 1, though 1 − 0.5 need not be the float it is here."""
    p = nn.Parameter(normal((5, 7), rng()))
    optimizer = case([group_of(p, replace(penalty, lam=0.2))], momentum=0.5, fused=True)
    optimizer.param_groups[0]["ramp"] = True
    for seed in range(4):
        p.grad = normal(p.shape, rng(seed))
        if seed == 3:
            lam = strength_that_zeroes_some(optimizer, p.grad)
            optimizer.param_groups[0]["penalty"] = replace(penalty, lam=lam)
        optimizer.step()
        z = structured_point(optimizer, p)
        assert torch.allclose(z, p, rtol=1e-6, atol=1e-7) == (seed == 3)
    assert torch.equal(z == 0, p == 0)
    assert (p == 0).any()


@pytest.mark.parametrize("penalty", PENALTIES[:4], ids=lambda p: type(p).__name__)
@dual_averaging
def test_without_momentum_the_weights_have_the_zeros(case: OptimizerCase, penalty: Any) -> None:
    p = nn.Parameter(normal((5, 7), rng()))
    optimizer = case([group_of(p, replace(penalty, lam=0.5))], momentum=0.0, fused=True)
    for seed in range(2):
        p.grad = normal(p.shape, rng(seed))
        if seed:
            lam = strength_that_zeroes_some(optimizer, p.grad)
            optimizer.param_groups[0]["penalty"] = replace(penalty, lam=lam)
        optimizer.step()
    assert 0 < int((p == 0).sum()) < p.numel()
    assert torch.equal(structured_point(optimizer, p) == 0, p == 0)


@every_optimizer
def test_restart_and_maximize_are_the_unfused_ones(case: OptimizerCase) -> None:
    pair = twins(case, [(5, 7, 3)], espalier.GroupLasso(1e-2), maximize=True)
    for seed in range(4):
        for optimizer, (p,) in pair:
            p.grad = normal(p.shape, rng(seed))
            optimizer.step()
            if seed == 1:
                optimizer.restart()
    (fused, (p,)), (plain, (q,)) = pair
    assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)
    assert float(fused.state[p]["step"]) == float(plain.state[q]["step"]) == (2 if fused.anchored else 4)


@every_optimizer
def test_mixed_parameters(case: OptimizerCase) -> None:
    """Penalised and not, 1-D, scalar, empty, without a gradient: each as without the kernels."""
    shapes = ((5, 7), (4, 3, 3, 3), (6,), (), (0, 4), (3, 2), (9,))
    results = []
    for fused in (True, False):
        generator = rng()
        ps = [nn.Parameter(normal(s, generator)) for s in shapes]
        optimizer = case(
            [
                group_of([ps[0], ps[1], ps[4]], espalier.GroupLasso(1e-2)),
                group_of([ps[2], ps[3], ps[5]], None),
                group_of([ps[6]], espalier.GroupLasso(1e-2), "element"),
            ],
            fused=fused,
        )
        for step in range(3):
            for i, p in enumerate(ps):
                p.grad = None if i == 5 or (i == 1 and step == 1) else normal(p.shape, generator)
            optimizer.step()
        assert not optimizer.state[ps[4]]
        assert not optimizer.state[ps[5]]
        assert float(optimizer.state[ps[1]]["step"]) == 2
        with optimizer.structured():
            results.append([p.detach().clone() for p in ps])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=5e-6, atol=2e-6)
        assert torch.equal(a == 0, b == 0)


NOT_FINITE = [(p, bad) for p in PENALTIES for bad in (math.nan, math.inf) if bad != math.inf or p is PENALTIES[0]]


@pytest.mark.parametrize(("penalty", "bad"), NOT_FINITE)
@both_metrics
def test_what_is_not_finite_stays_visible(case: OptimizerCase, penalty: Any, bad: float) -> None:
    p = nn.Parameter(normal((5, 6, 3), rng()))
    optimizer = case([group_of(p, penalty)], fused=True)
    for step in range(2):
        p.grad = normal(p.shape, rng(step))
        if step == 1:
            p.grad[2, 3, 1] = bad
        optimizer.step()
        assert bool(p[2, 3, 1].isfinite()) == (step == 0)
        # other groups train on
        assert p[:, :3].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@dual_averaging
def test_weights_put_back_and_a_restart_recover_from_it(case: OptimizerCase, bad: float) -> None:
    """Where Newton begins must not remember the accident: r = ∞ would be no penalty at all."""
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6)], espalier.GroupLasso(1.0))
    for optimizer, w in ((fused, p), (plain, q)):
        good = w.detach().clone()
        w.grad = normal(w.shape, rng(1))
        w.grad[2, 3] = bad
        optimizer.step()
        w.data.copy_(good)
        optimizer.restart()
        w.grad = normal(w.shape, rng(2))
        optimizer.step()
    assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("case", [BY_NAME["RMDA"], BY_NAME["ProxSGD"]], ids=["RMDA", "ProxSGD"])
def test_a_group_long_zero_stays_zero_while_another_becomes_so(case: OptimizerCase) -> None:
    """x of both is all zero; the norms of long dead groups must not shrink to 0/0."""
    (fused, (p,)), (plain, (q,)) = twins(case, [(4, 3)], espalier.SparseGroupLasso(0.5), momentum=0.0, lr=0.1)
    for step in range(4):
        for optimizer, w in ((fused, p), (plain, q)):
            if step == 0:
                w.data[:, 0] = 0
            w.grad = torch.zeros_like(w)
            if step == 2:
                optimizer.param_groups[0]["penalty"] = espalier.SparseGroupLasso(500.0)
            optimizer.step()
        assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)
        assert torch.equal(p == 0, q == 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_optimizer
def test_skip_nonfinite_changes_nothing(case: OptimizerCase, bad: float) -> None:
    ps = [nn.Parameter(normal(s, rng())) for s in ((5, 6), (7,))]
    groups = [group_of(ps[0], espalier.GroupLasso(1e-2)), group_of(ps[1], None)]
    optimizer = case(groups, fused=True, skip_nonfinite=True)
    for step in range(4):
        for p in ps:
            p.grad = normal(p.shape, rng(step))
        if step % 2:
            ps[step // 2].grad[0] = bad
        before = everything(optimizer)
        optimizer.step()
        assert same(before, everything(optimizer)) == bool(step % 2)
    assert float(optimizer.state[ps[0]]["step"]) == 2


# ------------------------------------------------------------------------------------------------ structured()


@pytest.mark.parametrize(
    ("penalty", "dtype"), [(p, torch.float32) for p in PENALTIES] + [(PENALTIES[0], torch.bfloat16)]
)
@dual_averaging
def test_structured_only_looks(case: OptimizerCase, penalty: Any, dtype: torch.dtype) -> None:
    """It is the unfused point, again and again, and neither weights, state nor training know of it."""
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6, 3)], penalty, dtype=dtype)
    (quiet, (r,)), _ = twins(case, [(5, 6, 3)], penalty, dtype=dtype)
    for seed in range(2):
        grad = normal(p.shape, rng(seed), dtype)
        lam = strength_that_zeroes_some(fused, grad) if penalty and seed else 1e-2
        for optimizer, w in ((fused, p), (plain, q), (quiet, r)):
            optimizer.param_groups[0]["penalty"] = replace(penalty, lam=lam) if penalty else None
            w.grad = grad.clone()
            optimizer.step()
        before = everything(fused)
        points = [structured_point(fused, p) for _ in range(2)]
        assert torch.equal(*points)
        assert same(before, everything(fused))
        z = structured_point(plain, q)
        assert torch.allclose(points[0].float(), z.float(), rtol=3 * torch.finfo(dtype).eps, atol=2e-6)
        assert torch.equal(points[0] == 0, z == 0)
        assert penalty is None or not seed or (z == 0).any()
    assert same(everything(fused), everything(quiet))


@pytest.mark.parametrize("penalty", PENALTIES[:3], ids=lambda p: type(p).__name__)
@dual_averaging
def test_structured_keeps_where_the_next_step_begins(case: OptimizerCase, penalty: Any) -> None:
    """Also where it has far to go, and programs that share a group note how far they are."""
    p = nn.Parameter(normal((5, 6, 3), rng()))
    optimizer = case([group_of(p, penalty)], fused=True)
    p.grad = normal(p.shape, rng(1))
    optimizer.step()
    for start in (1e-4, 1e4):
        optimizer.state[p]["radius"].fill_(start)
        before = everything(optimizer)
        structured_point(optimizer, p)
        assert same(before, everything(optimizer))


@dual_averaging
def test_structured_before_a_step_and_after_a_restart(case: OptimizerCase) -> None:
    p = nn.Parameter(normal((5, 6), rng()))
    optimizer = case([group_of(p, espalier.GroupLasso(0.1))], fused=True)
    assert torch.equal(structured_point(optimizer, p), p)
    p.grad = normal(p.shape, rng(1))
    optimizer.step()
    z = structured_point(optimizer, p)
    optimizer.restart()
    assert torch.equal(structured_point(optimizer, p), z)


# ------------------------------------------------------------------------------------------------ checkpoints


def through_a_file(optimizer: StructuredOptimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_optimizer
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(case: OptimizerCase, dtype: torch.dtype) -> None:
    (optimizer, (p,)), _ = twins(case, [(5, 6, 3)], espalier.GroupLasso(3e-2), dtype=dtype)
    for seed in range(2):
        p.grad = normal(p.shape, rng(seed), dtype)
        optimizer.step()
    q = nn.Parameter(p.detach().clone())
    resumed = case([group_of(q, espalier.GroupLasso(3e-2))], fused=True)
    resumed.load_state_dict(through_a_file(optimizer))
    for seed in range(2, 4):
        for o, w in ((optimizer, p), (resumed, q)):
            w.grad = normal(w.shape, rng(seed), dtype)
            o.step()
    assert same(everything(optimizer), everything(resumed))


@every_optimizer
def test_checkpoints_go_between_fused_and_unfused(case: OptimizerCase) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6, 3)], espalier.GroupLasso(3e-2))
    (whole, (r,)), _ = twins(case, [(5, 6, 3)], espalier.GroupLasso(3e-2))
    turns = ((fused, p), (plain, q), (fused, p), (plain, q))
    previous = None
    for seed, (optimizer, w) in enumerate(turns):
        if previous:
            w.data.copy_(previous[1].data)
            optimizer.load_state_dict(through_a_file(previous[0]))
        for o, x in ((optimizer, w), (whole, r)):
            x.grad = normal(x.shape, rng(seed))
            o.step()
        assert optimizer.param_groups[0]["fused"] is (optimizer is fused)
        previous = (optimizer, w)
    assert torch.allclose(q, r, rtol=5e-6, atol=2e-6)
    assert float(plain.state[q]["step"]) == 4


@both_metrics
def test_loading_into_a_running_optimizer_starts_from_what_was_loaded(case: OptimizerCase) -> None:
    (optimizer, (p,)), _ = twins(case, [(5, 6)], espalier.GroupLasso(3e-2))
    results = []
    p.grad = normal(p.shape, rng(1))
    optimizer.step()
    saved, weights = through_a_file(optimizer), p.detach().clone()
    for _ in range(2):
        p.grad = normal(p.shape, rng(2))
        optimizer.step()
        results.append(everything(optimizer))
        p.data.copy_(weights)
        optimizer.load_state_dict(saved)
    assert same(*results)
    # options of the checkpoint count as well
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    p.data.copy_(weights)
    optimizer.step()
    assert float(optimizer.state[p].get("alpha", 0.0)) == float(saved["state"][0].get("alpha", 0.0))
    assert optimizer.anchored or torch.equal(p, weights)


# ------------------------------------------------------------------------------------------------ who is served


class OwnPose(espalier.RAMDA):
    """Another problem, for which there is no kernel."""

    def _pose(self, x: Any, clock: Any, group: Any) -> espalier.Subproblem:
        return replace(super()._pose(x, clock, group), tau=0.0)


REFUSED = {
    "nuclear norm": (espalier.RAMDA, torch.float32, espalier.NuclearNorm(1e-2), {}, "NuclearNorm"),
    "float64": (espalier.RAMDA, torch.float64, espalier.GroupLasso(1e-2), {}, "float64"),
    "float64, no penalty": (espalier.RAMDA, torch.float64, None, {}, "float64"),
    "own penalty": (espalier.RAMDA, torch.float32, ElasticNet(1e-2), {}, "ElasticNet"),
    "proximal gradient": (espalier.ProxGen, torch.float32, espalier.L1(1e-2), {"solver": "pg"}, "ProximalGradient"),
    "own method": (OwnPose, torch.float32, espalier.GroupLasso(1e-2), {}, "OwnPose"),
}


@pytest.mark.parametrize(("build", "dtype", "penalty", "settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_lack_is_named(build: Any, dtype: Any, penalty: Any, settings: Any, reason: str) -> None:
    p = nn.Parameter(normal((5, 6), rng(), dtype))
    group = {**group_of(p, penalty), "param_names": ["the.weight"]}
    with pytest.raises(ValueError, match=rf"the\.weight.*{reason}"):
        build([group], fused=True, **settings)
    results = []
    for fused in (None, False):  # None fuses where it can, and here cannot
        w = nn.Parameter(p.detach().clone())
        optimizer = build([group_of(w, penalty)], fused=fused, **settings)
        w.grad = normal(w.shape, rng(1), dtype)
        optimizer.step()
        results.append(w.detach())
    assert torch.equal(*results)


def test_fused_is_none_true_or_false() -> None:
    with pytest.raises(ValueError, match="fused must be"):
        espalier.RAMDA([nn.Parameter(torch.ones(2))], fused="yes")


@pytest.mark.parametrize("fused", [False, None])
@every_optimizer
def test_nothing_is_launched_unasked(case: OptimizerCase, fused: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(launch, "Plan", refuse)
    p = nn.Parameter(torch.ones(3, 4, device="cpu" if fused is None else DEVICE))
    optimizer = case([group_of(p, espalier.GroupLasso(1e-2))], fused=fused)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with optimizer.structured():
        pass
    asked = case([group_of(nn.Parameter(torch.ones(3, 4, device=DEVICE)), espalier.GroupLasso(1e-2))], fused=True)
    asked.param_groups[0]["params"][0].grad = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(AssertionError, match="a plan was made"):
        asked.step()


@both_metrics
def test_diagnostics_report_and_steps_go_on(case: OptimizerCase) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(5, 6)], espalier.GroupLasso(3e-2))
    for seed in range(3):
        for optimizer, w in ((fused, p), (plain, q)):
            w.grad = normal(w.shape, rng(seed))
            if seed == 1:
                with optimizer.diagnostics() as report:
                    optimizer.step()
                assert [s.groups for s in report.solves] == [6]
                assert report.solves[0].residual < 1e-4
            else:
                optimizer.step()
    assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)
    assert float(fused.state[p]["step"]) == 3


# ------------------------------------------------------------------------------------------------ plans

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "lambda": ("RAMDA", {"penalty": espalier.GroupLasso(0.3)}),
    "weight": ("RAMDA", {"penalty": espalier.GroupLasso(3e-2, weight=9.0)}),
    "lr": ("RAMDA", {"lr": 0.3}),
    "eps": ("RAMDA", {"eps": 0.3}),
    "momentum": ("RAMDA", {"momentum": 0.2}),
    "ramp": ("RAMDA", {"ramp": True}),
    "maximize": ("RAMDA", {"maximize": True}),
    "betas": ("ProxGen", {"betas": (0.3, 0.5)}),
    "weight decay": ("ProxGen", {"weight_decay": 0.5}),
    "momentum of ProxSGD": ("ProxSGD", {"momentum": 0.2}),
    "gamma": ("RAMDA", {"penalty": espalier.GroupMCP(3e-2, gamma=1.1)}),
    "mix": ("RAMDA", {"penalty": espalier.SparseGroupLasso(3e-2, mix=0.9)}),
    "class": ("RAMDA", {"penalty": espalier.L1(0.1)}),
    "no penalty": ("RMDA", {"penalty": None, "grouping": None}),
    "grouping": ("RAMDA", {"grouping": espalier.Output()}),
    "size of groups": ("RMDA", {"grouping": espalier.Input(block=3)}),
    "fused": ("RAMDA", {"fused": False}),
    "solver": ("RAMDA", {"solver": "newton"}),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_between_steps_takes_effect(name: str, change: dict[str, Any]) -> None:
    """There and back again, on a square matrix, where plans of either kind fit."""
    (fused, (p,)), (plain, (q,)) = twins(BY_NAME[name], [(6, 6)], espalier.GroupLasso(3e-2), "input")
    before = {k: fused.param_groups[0][k] for k in change}
    for seed in range(3):
        for optimizer, w in ((fused, p), (plain, q)):
            (group,) = optimizer.param_groups
            group.update(change if seed == 1 else before)
            group["fused"] = group["fused"] and optimizer is fused
            w.grad = normal(w.shape, rng(seed))
            optimizer.step()
        assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)
        if seed == 1:
            assert torch.allclose(structured_point(fused, p), structured_point(plain, q), rtol=5e-6, atol=2e-6)


def swap_gradient(p: nn.Parameter, spare: list[Any]) -> None:
    spare.append(p.grad)  # so that the next one cannot lie where it did
    p.grad = p.grad.clone()


def swap_data(p: nn.Parameter, spare: list[Any]) -> None:
    spare.append(p.data)
    p.data = p.data.clone()


def swap_format(p: nn.Parameter, spare: list[Any]) -> None:
    spare.append(p.data)
    p.data = p.data.contiguous(memory_format=torch.channels_last)


def keep_address(p: nn.Parameter, spare: list[Any]) -> None:
    """The same memory with other strides: square, so that the shape stays."""
    p.data.copy_(p.data.permute(1, 0, 2, 3).clone())
    p.data = p.data.permute(1, 0, 2, 3)


@pytest.mark.parametrize("swap", [swap_gradient, swap_data, swap_format, keep_address])
@both_metrics
def test_tensors_that_move_are_followed(case: OptimizerCase, swap: Any) -> None:
    (fused, (p,)), (plain, (q,)) = twins(case, [(4, 4, 3, 3)], espalier.GroupLasso(3e-2))
    spare: list[Any] = []
    for seed in range(3):
        for optimizer, w in ((fused, p), (plain, q)):
            w.grad = normal(w.shape, rng(seed))
            if seed and optimizer is fused:
                swap(w, spare)
            optimizer.step()
        assert torch.allclose(p, q, rtol=5e-6, atol=2e-6)
        assert torch.allclose(structured_point(fused, p), structured_point(plain, q), rtol=5e-6, atol=2e-6)


@both_metrics
def test_alternating_subsets_of_parameters(case: OptimizerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twins(case, [(3, 4), (5, 2), (2, 6)], espalier.GroupLasso(3e-2))
    subsets = ((0, 1), (1, 2), (0, 2), (0,), (1,), (2,), (0, 1, 2), (0, 1))
    monkeypatch.setattr(kernels, "_KEPT", 4)
    for seed, subset in enumerate(subsets):
        for optimizer, ps in pair:
            for i, p in enumerate(ps):
                p.grad = normal(p.shape, rng(seed + i)) if i in subset else None
            optimizer.step()
    (fused, ps), (_, qs) = pair
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        assert torch.allclose(p, q, rtol=1e-5, atol=5e-6)
        assert float(fused.state[p]["step"]) == sum(i in s for s in subsets)
    assert fused._fused is not None
    assert len(fused._fused._plans) <= 4  # old ones are let go


# ------------------------------------------------------------------------------------------------ geometry and tiles

LAYOUTS = (
    *((as_grouping(g), s, None) for g, s in PLACES),
    (espalier.Input(), (4, 6, 3, 3), torch.channels_last),
    (espalier.Output(), (4, 6, 3, 3), torch.channels_last),
    (espalier.Input(block=2), (4, 6, 3, 3), torch.channels_last),
    (espalier.Input(), (2, 3, 3, 3, 3), torch.channels_last_3d),
    (espalier.Input(layout=espalier.Layout(input_dim=0, output_dim=1)), (4, 5, 3), None),
    (espalier.Output(layout=espalier.Layout(input_dim=0, output_dim=1, parts=2)), (4, 5, 3), None),
    (espalier.Input(layout=espalier.Layout(parts=4)), (4, 1, 3), None),
    (espalier.Output(), (6,), None),
    (espalier.Element(), (), None),
)


@pytest.mark.parametrize(("grouping", "shape", "memory"), LAYOUTS)
def test_geometry_finds_the_groups_in_memory(grouping: Any, shape: Any, memory: Any) -> None:
    x = torch.empty(shape)
    x = x if memory is None else x.contiguous(memory_format=memory)
    groups = partition_of(grouping, shape)
    at = geometry(groups, shape, x.stride())
    assert at is not None
    assert at.batch * at.groups == groups.count
    assert at.rows * at.run == groups.size
    # each entry's place in memory, by its group
    place = torch.arange(x.numel()).as_strided(shape, x.stride())
    split = groups.split(place)
    axes = [a for a in range(split.dim()) if a in groups.group_axes]
    rest = [a for a in range(split.dim()) if a not in groups.group_axes]
    expected = split.permute((*axes, *rest)).reshape(groups.count, groups.size)
    grid = torch.arange(x.numel()).view(at.batch, at.rows, at.groups, at.run)
    found = grid.transpose(1, 2).reshape(groups.count, groups.size)
    assert {frozenset(g.tolist()) for g in expected} == {frozenset(g.tolist()) for g in found}


@pytest.mark.parametrize(
    ("grouping", "shape", "stride"),
    [
        (espalier.Input(), (4, 6), (12, 2)),  # gaps
        (espalier.Input(), (4, 6), (0, 1)),  # overlaps
        (espalier.Input(block=2), (4, 6, 3), (3, 12, 1)),  # rows within a group's runs
        (espalier.Matrix(layout=espalier.Layout(input_dim=0, output_dim=1)), (4, 6), (6, 1)),
    ],
)
def test_geometry_refuses_what_it_cannot_say(grouping: Any, shape: Any, stride: Any) -> None:
    groups = partition_of(grouping, shape)
    at = geometry(groups, shape, stride)
    if at is not None:  # or says it right
        assert isinstance(grouping, espalier.Input)
        assert stride == (3, 12, 1)
        assert (at.batch * at.groups, at.rows * at.run) == (groups.count, groups.size)


GEOMETRIES = [Geometry(1, r, g, n) for r in (1, 2, 64, 65) for g in (1, 31, 32, 67) for n in (1, 2, 9, 27, 64, 81)]
GEOMETRIES += [Geometry(1, 1, 1, 5000), Geometry(1, 1, 3, 4097), Geometry(1, 700, 1, 9), Geometry(1, 3, 2, 3000)]


@pytest.mark.parametrize("processors", [132, None])
def test_programs_cover_every_entry_once_and_panels_lie_together(processors: int | None) -> None:
    """The index arithmetic of step_groups on the work list of _programs."""
    for at in GEOMETRIES:
        tile = tile_of(at, processors)
        assert tile is not None
        slab = Slab(parameter=3, start=0, row=(), geometry=at)
        work, panels = programs(tile, slab, row=5, panels=7)
        column = {k: work[:, getattr(columns, k).value].tolist() for k in ("TENSOR", "CLOCK", "PANEL", "SHARES")}
        assert set(column["TENSOR"]) == {5}
        assert set(column["CLOCK"]) == {3}
        first, share = work[:, columns.FIRST.value, None, None], work[:, columns.SHARE.value, None, None]
        rows, cols = torch.arange(tile.height)[:, None], torch.arange(tile.columns)[None, :]
        if tile.axis == 0:
            i, j = share * tile.height + rows, first * tile.columns + cols
            group = j // tile.run + 0 * i
            mask = (i < at.rows) & (j < at.groups * at.run)
            off = i * at.groups * at.run + j
            panel = first // tile.run
            place = group - panel * tile.columns
        else:
            i, j = first * tile.height + rows, share * tile.columns + cols
            group = i + 0 * j
            mask = (i < at.groups) & (j < at.rows * at.run)
            off = i * at.run + j if tile.single else (i + j // at.run * at.groups) * at.run + j % at.run
            panel = first
            place = group - panel * tile.height
        seen = off[mask].sort().values
        assert torch.equal(seen, torch.arange(at.rows * at.groups * at.run)), (at, tile)
        # the entry's group is the group that it is said to be in, at a place that its panel has
        assert torch.equal(off[mask] // at.run % at.groups, group[mask]), (at, tile)
        assert ((place >= 0) & (place < tile.width))[mask].all(), (at, tile)
        # programs of a panel share its groups: consecutive, as many as they say, and so many fit on the processors
        assert (panel.flatten() + 7).tolist() == column["PANEL"]
        assert column["PANEL"] == sorted(column["PANEL"])
        for one in set(column["PANEL"]):
            assert {n for n, q in zip(column["SHARES"], column["PANEL"], strict=True) if q == one} == {
                column["PANEL"].count(one)
            }, (at, tile)
        if tile.shared:
            assert panels == len(set(column["PANEL"]))
            assert processors is None or max(column["SHARES"]) <= 4 * processors
        else:
            assert set(column["SHARES"]) == {1}


@pytest.mark.parametrize("entries", [1, 2047, 2048, 2049, 10_000])
def test_programs_entry_by_entry_cover_all(entries: int) -> None:
    slab = Slab(0, 0, (), Geometry(1, 1, 1, entries))
    work, panels = programs(None, slab, 0, 0)
    assert panels == 0
    assert work[:, columns.FIRST.value].tolist() == list(range(math.ceil(entries / BLOCK)))


def test_a_group_too_large_for_all_processors_has_no_tile() -> None:
    assert tile_of(Geometry(1, 10**6, 8, 9), 132) is None
    assert tile_of(Geometry(1, 1, 8, 10**8), 132) is None
    assert tile_of(Geometry(1, 4096, 4096, 1), 132) is not None


# ------------------------------------------------------------------------------------------------ training


@both_metrics
def test_training_ends_with_the_same_structure(case: OptimizerCase) -> None:
    inputs, targets = normal((32, 12), rng(1)), normal((32, 3), rng(2))
    losses, patterns = [], []
    lam = {"RAMDA": 0.03, "RMDA": 0.3, "ProxGen-amsgrad": 0.01}[case.name]
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).to(DEVICE)
        penalised = [model[0].weight, model[2].weight]
        groups = [group_of(list(penalised), espalier.GroupLasso(lam)), group_of([model[0].bias, model[2].bias], None)]
        optimizer = case(groups, lr=5e-2, fused=fused)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        with optimizer.structured():
            patterns.append([zero_groups(espalier.GroupLasso(1.0), "input", w.detach()) for w in penalised])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert same(*patterns)
    assert 0 < sum(int(z.sum()) for z in patterns[0]) < sum(z.numel() for z in patterns[0])


def test_every_pair_is_in_the_table() -> None:
    seen = [(p.values[0].name, type(p.values[1]), p.values[2:]) for p in CASES]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        pairs = {(row[a], row[b]) for row in seen}
        assert len(pairs) == len({row[a] for row in seen}) * len({row[b] for row in seen})
    assert all(p is None or isinstance(p, RadialPenalty) for p in PENALTIES)


# ------------------------------------------------------------------------------------------------ what reviews found


@both_metrics
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_a_layer_that_begins_at_zero(case: OptimizerCase, size: float) -> None:
    """No group has a norm, nor a scale, to begin from; sums over programs hold few digits."""
    p, q = (
        nn.Parameter(torch.zeros(64, 6, 3, 3, dtype=t, device=d))
        for t, d in ((torch.float32, DEVICE), (torch.float64, "cpu"))
    )
    fused = case([group_of([p], espalier.GroupLasso(1e-4))], fused=True)
    plain = case([group_of([q], espalier.GroupLasso(1e-4))], fused=False)
    for seed in range(3):
        p.grad = size * normal(p.shape, rng(seed))
        q.grad = p.grad.double().cpu()
        fused.step()
        plain.step()
    assert (p.cpu() - q).norm() <= 1e-5 * q.norm()


@dual_averaging
def test_a_restart_after_the_penalty_is_gone(case: OptimizerCase) -> None:
    p = nn.Parameter(normal((5, 7), rng()))
    optimizer = case([group_of([p], espalier.GroupLasso(1e-2))], fused=True)
    for penalty in (espalier.GroupLasso(1e-2), None):
        optimizer.param_groups[0].update(penalty=penalty, grouping=as_grouping("input") if penalty else None)
        p.grad = normal(p.shape, rng(1))
        optimizer.step()
    optimizer.restart()
    assert torch.equal(optimizer.state[p]["anchor"], p)


def test_a_learning_rate_on_the_host_moves_where_a_graph_reads_it() -> None:
    p = nn.Parameter(normal((5, 7), rng()))
    optimizer = espalier.RAMDA([p], lr=torch.tensor(0.02), capturable=True)
    (group,) = optimizer.param_groups
    assert all(group[k].device == p.device for k in ("lr", "eps", "ramp"))
    assert float(group["lr"]) == pytest.approx(0.02)
    lr = group["lr"]
    optimizer.load_state_dict(espalier.RAMDA([p], lr=0.5, capturable=True).state_dict())
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


def test_the_nuclear_norm_cannot_be_captured() -> None:
    group = group_of([nn.Parameter(normal((5, 7), rng()))], espalier.NuclearNorm(1e-2))
    with pytest.raises(ValueError, match="waits for the device"):
        espalier.RAMDA([group], capturable=True)


# ------------------------------------------------------------------------------------------------ for a GPU

COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from espalier.kernels import device
from espalier.kernels.geometry import Tile
pointers = dict(work="*i32", table="*i64", scalars="*fp32", finite="*i32", counters="*i32", early="*i32", later="*i64")
for method, scalar, concave, axis, run, shared, kind in (
    ("ramda", False, False, 0, 1, True, tl.float32),
    ("ramda", False, False, 0, 9, True, tl.bfloat16),
    ("ramda", False, True, 0, 1, True, tl.float32),
    ("prox_gen", False, False, 1, 1, False, tl.float32),
    ("prox_gen", False, True, 0, 1, False, tl.float32),
    ("rmda", True, False, 0, 9, True, tl.float32),
    ("prox_sgd", True, True, 1, 1, True, tl.float16),
):
    options = dict(
        METHOD=method, TYPE=kind, ALIGNED=True, UPDATE=True, MAXIMIZE=False, AMSGRAD=False, MASTER=kind != tl.float32,
        AVERAGED=method in ("ramda", "rmda"), SKIP=False, SCALAR=scalar, CONCAVE=concave, ENTRIES=True, AXIS=axis,
        RUN_LENGTH=run, HEIGHT=64, COLUMNS=32, SHARED=shared, SINGLE=True, WIDE=False,
        FEW=Tile(axis, run, 64, 32, 4).few,
    )
    signature = {**pointers, "max_iters": "i32", **dict.fromkeys(options, "constexpr")}
    source = ASTSource(fn=device.step_groups, signature=signature, constexprs=options)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 96})
    # 16-byte loads, which Triton drops without a word where it cannot prove that they are allowed
    assert kernel.asm["ptx"].count("ld.global.v4") >= 8, method
"""


def test_branches_begin_at_the_fork_and_are_joined_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []

    class Stream:
        def record_event(self) -> str:
            return "fork"

        def wait_event(self, event: str) -> None:
            log.append((self, "after", event))

        def wait_stream(self, other: Any) -> None:
            log.append((self, "joins", other))

    stem = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stem)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    branches = Branches()
    with branches.branch():
        assert not log  # no fork, no stream
    for fails in (False, True):
        log.clear()
        with pytest.raises(ValueError, match="no") if fails else nullcontext(), branches.fork():
            with branches.branch():
                pass
            with branches.branch():
                if fails:
                    raise ValueError("no")
        (a, *first), (b, *second), *joins = log
        assert first == second == ["after", "fork"]
        assert a is not b
        assert joins == [(stem, "joins", a), (stem, "joins", b)]


def test_the_kernels_compile_for_a_gpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment, timeout=300)
