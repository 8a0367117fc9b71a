"""What every solver promises: the solution of the subproblem, whatever the penalty, the groups and the metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import espalier
from espalier import ClosedForm, DouglasRachford, Exact, NewtonRaphson, ProximalGradient, Subproblem, Tolerance
from espalier.groupings import as_grouping
from espalier.optim.diagnostics import residual
from espalier.solvers import pick
from tables import PENALTIES, ElasticNet, PenaltyCase, names

# ---------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Case:
    """A penalty on one way of cutting a tensor."""

    build: Callable[..., espalier.Penalty]
    grouping: espalier.Grouping
    shape: tuple[int, ...]

    @property
    def groups(self) -> espalier.Partition:
        return self.grouping.partition(self.shape)

    @property
    def name(self) -> str:
        block = getattr(self.grouping, "block", 1)
        cut = type(self.grouping).__name__ + (str(block) if block > 1 else "")
        cut += "" if self.grouping.layout == espalier.Layout() else "'"
        return f"{type(self.build(1.0)).__name__}-{cut}-{'x'.join(map(str, self.shape))}"


SHAPES = ((6, 8), (2, 6, 3, 1))
TABLE = (*PENALTIES, PenaltyCase(espalier.NuclearNorm, (espalier.Matrix(layout=espalier.Layout(parts=2)),)))
CASES = tuple(Case(p.build, as_grouping(g), s) for p in TABLE for g in p.groupings for s in SHAPES)
SMOOTHED = (espalier.L1, espalier.GroupLasso, espalier.SparseGroupLasso)  # convex, and radial
RADIAL = tuple(c for c in CASES if c.build in SMOOTHED)

every_case = pytest.mark.parametrize("case", CASES, ids=names(CASES))
radial_cases = pytest.mark.parametrize("case", RADIAL, ids=names(RADIAL))


def pose(
    groups: espalier.Partition, seed: int, decades: float = 1.0, tau: float = 1.3, anchored: bool = True
) -> Subproblem:
    """A problem in the partition's view: metrics spread over `decades`, groups of b on both sides of a threshold
    near 1 per entry."""
    source = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=source, dtype=torch.float64)

    metric = 10 ** (decades * (uniform(groups.shape) - 0.5))
    linear = torch.randn(groups.shape, generator=source, dtype=torch.float64)
    linear *= 0.2 + 3 * uniform(groups.max(linear).shape)
    anchor = torch.randn(groups.shape, generator=source, dtype=torch.float64) * anchored
    return Subproblem(anchor, metric * anchor - linear, metric, tau)


def columns(b: Tensor, h: Tensor | float, tau: float = 1.0) -> tuple[Subproblem, espalier.Partition]:
    """A problem whose groups are the columns of b; its linear term is b to the bit."""
    return Subproblem(torch.zeros_like(b), -b, h, tau), as_grouping("input").partition(tuple(b.shape))


def threshold(x: Tensor, kappa: float) -> Tensor:
    return x.sign() * (x.abs() - kappa).clamp(min=0)


def bisect(b: Tensor, h: Tensor, kappa: float, groups: espalier.Partition) -> Tensor:
    """Group lasso's solution by bisection of ‖b / (h r + κ)‖ = 1 in log r: slow, and hard to get wrong."""

    def norm(x: Tensor) -> Tensor:
        return groups.sum(x.square()).sqrt()

    active = norm(b) > kappa
    low = torch.where(active, (norm(b) - kappa) / groups.max(h), 1.0).log() - 1e-9
    high = torch.where(active, norm(b) / groups.min(h), 1.0).log() + 1e-9
    for _ in range(70):
        middle = (low + high) / 2
        above = norm(b / (h * middle.exp() + kappa)) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    r = ((low + high) / 2).exp()
    return torch.where(active, b * r / (h * r + kappa), 0.0)


def truth(problem: Subproblem, penalty: espalier.Penalty, groups: espalier.Partition) -> Tensor:
    """The solution of a convex radial problem, in float64, by bisection."""
    b, h = problem.linear.double(), torch.as_tensor(problem.metric).double().expand(problem.linear.shape)
    size = math.sqrt(groups.size)
    if isinstance(penalty, espalier.L1):
        return threshold(b, problem.tau * penalty.lam) / h
    if isinstance(penalty, espalier.SparseGroupLasso):
        b = threshold(b, problem.tau * penalty.lam * penalty.mix)
        return bisect(b, h, problem.tau * penalty.lam * (1 - penalty.mix) * size, groups)
    assert isinstance(penalty, espalier.GroupLasso)
    return bisect(b, h, problem.tau * penalty.lam * (size if penalty.weight is None else penalty.weight), groups)


def assert_same(z: Tensor, exact: Tensor, groups: espalier.Partition, tolerance: float) -> None:
    """Equal up to `tolerance` of each group's norm, with the same zeros."""
    assert torch.equal(z == 0, exact == 0)
    norm = groups.norm(exact)
    error = groups.norm(z.double() - exact)
    assert (error <= tolerance * norm).all(), f"error {float((error / norm).nan_to_num().max()):.1e} of a group's norm"


def some_and_not_all(z: Tensor) -> bool:
    return 0 < int(z.count_nonzero()) < z.numel()


# ---------------------------------------------------------------------------------------------------- agreement


@radial_cases
def test_all_solvers_agree_with_bisection(case: Case) -> None:
    groups, penalty = case.groups, case.build(0.6)
    problem = pose(groups, 0, decades=1.5)
    exact = truth(problem, penalty, groups)
    slow = [ProximalGradient(max_iters=900, rtol=None)] if case.shape == SHAPES[0] else []
    for solver in (Exact(), NewtonRaphson(), *slow):
        assert_same(solver.solve(problem, penalty, groups, problem.anchor).point, exact, groups, 1e-10)
    assert some_and_not_all(exact)


@radial_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_from_any_start(case: Case, dtype: torch.dtype) -> None:
    groups, penalty = case.groups, case.build(0.3)
    problem = pose(groups, 3, decades=4, anchored=False)
    problem = replace(problem, anchor=problem.anchor.to(dtype), direction=problem.direction.to(dtype))
    problem = replace(problem, metric=problem.metric.to(dtype))
    exact = truth(problem, penalty, groups)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for start in (0 * exact, exact, 1.001 * exact, -0.5 * exact, noise, 1e6 * noise, 1e-30 * noise):
        z = Exact().solve(problem, penalty, groups, start.to(dtype)).point
        assert_same(z, exact, groups, 5e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(("dtype", "top"), [(torch.float32, 34), (torch.float64, 290)])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_exact_from_however_far(size: int, dtype: torch.dtype, top: int) -> None:
    # Weights of size 1 are that far from a group that is about to vanish. What Newton's first step leaves of a large r
    # is rounding, on either side of the root, and from farther still S underflows. One group at a time: in company
    # the others' iterations would mend it.
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        b = torch.randn(size, 1, generator=source, dtype=torch.float64)
        b = (b / b.norm() * (1.5 + seed)).to(dtype)
        h = (10 ** (4 * torch.rand(size, 1, generator=source, dtype=torch.float64) - 2)).to(dtype)
        problem, groups = columns(b, h)
        penalty = espalier.GroupLasso(1.0, weight=1.0)
        exact = truth(problem, penalty, groups)
        for power in range(0, top, 1 + top // 40):
            z = Exact().solve(problem, penalty, groups, torch.full_like(b, 3.0 * 10.0**power)).point
            assert_same(z, exact, groups, 5e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("size", [1, 3, 7, 64, 4608])
@pytest.mark.parametrize("centre", [-6.0, 0.0, 6.0])
def test_exact_on_metrics_over_ten_decades(size: int, centre: float) -> None:
    for seed in range(4):
        source = torch.Generator().manual_seed(1000 * size + seed)
        count = 3 if size == 4608 else 60
        h = 10 ** (centre - 5 + 10 * torch.rand(size, count, generator=source, dtype=torch.float64))
        b = torch.randn(size, count, generator=source, dtype=torch.float64) * h ** (0.4 * (seed % 3))
        problem, groups = columns(b, h)
        # as many thresholds as groups: some below, some above
        for quantile in (0.1, 0.6):
            penalty = espalier.GroupLasso(1.0, weight=float(b.norm(dim=0).quantile(quantile)) * 0.9)
            exact = truth(problem, penalty, groups)
            for solver in (Exact(), NewtonRaphson()):
                assert_same(solver.solve(problem, penalty, groups, torch.zeros_like(b)).point, exact, groups, 1e-10)


@pytest.mark.parametrize("lean", [1e-6, 1e-7, 0.0, -1e-7, -1e-6])
@pytest.mark.parametrize("lead", [0.5, 1.0, 3.0])
def test_exact_where_newton_is_slowest(lead: float, lean: float) -> None:
    # Of two entries the one with the small curvature has |b| ≈ κ: 1 − f falls like r⁻² over three decades of r, and
    # there Newton only multiplies r by 1.5
    b = torch.tensor([[lead], [1.0 + lean]], dtype=torch.float64)
    problem, groups = columns(b, torch.tensor([[1.0], [1e-10]], dtype=torch.float64))
    penalty = espalier.GroupLasso(1.0, weight=1.0)
    exact = truth(problem, penalty, groups)
    for solver in (NewtonRaphson(), Exact()):
        assert_same(solver.solve(problem, penalty, groups, torch.zeros_like(b)).point, exact, groups, 1e-8)


def elasticity(b: Tensor, h: Tensor, kappa: float, x: Tensor) -> Tensor:
    """d log f / d log r at the root, in (0, 1]: a relative error in S becomes one of half its size / elasticity in r.
    Under a scalar metric it is (‖b‖ − κ)/‖b‖, so it says how far from its threshold a group is."""
    r = x.norm(dim=0)
    d = h * r + kappa
    return ((h * r / d) * (b / d).square()).sum(0)


@pytest.mark.parametrize("size", [1, 3, 7, 4608])
@pytest.mark.parametrize(
    ("magnitude", "centre"),
    [(1e-25, -1), (1e-10, -1), (1e-9, 7), (1.0, -1), (1e9, -7), (1e9, 7), (1e10, -1), (1e25, -1)],
)
def test_exact_in_float32(size: int, magnitude: float, centre: int) -> None:
    kept = 0
    for seed in range(6):
        source = torch.Generator().manual_seed(100 * size + seed)
        count = 3 if size == 4608 else 40

        def uniform(*shape: int, source: torch.Generator = source) -> Tensor:
            return torch.rand(*shape, generator=source, dtype=torch.float64)

        h = (10 ** (centre - 5 + 10 * uniform(size, count))).float()
        b = torch.randn(size, count, generator=source, dtype=torch.float64) * 10 ** (2 * uniform(1, count) - 1)
        b = (magnitude * b).float()
        penalty = espalier.GroupLasso(magnitude * 10 ** (3 * float(uniform(1)) - 3))
        kappa = penalty.lam * math.sqrt(size)
        problem, groups = columns(b, h)
        exact = bisect(b.double(), h.double(), kappa, groups)
        start = magnitude * torch.randn(size, count, generator=source)
        for begin in (torch.zeros_like(b), start, exact.float()):
            z = Exact().solve(problem, penalty, groups, begin).point
            assert torch.equal(z == 0, exact == 0)
            there = (exact != 0).any(0)
            norm = exact.norm(dim=0)[there]
            error = (z.double() - exact).norm(dim=0)[there] / norm
            e = elasticity(b.double(), h.double(), kappa, exact)[there]
            # 3 rounding units of f, as many of r as 1/e makes of them: nothing computed in float32 does better near
            # the threshold, where e → 0. Away from it that is 5e-6.
            assert (error <= 3 * torch.finfo(torch.float32).eps / e).all()
            assert (error <= 5e-6)[e > 0.1].all()
            kept += int(there.sum())
    assert kept


@pytest.mark.parametrize("solver", [Exact(), NewtonRaphson()], ids=["Exact", "NewtonRaphson"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weak_groups_among_strong_ones_are_exactly_zero(solver: espalier.Solver, dtype: torch.dtype) -> None:
    # whether few groups are left (they are then solved apart) or nearly all
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        for weak in (1, 5, 19):
            b = torch.randn(7, 20, generator=source, dtype=torch.float64)
            b = b / b.norm(dim=0) * 10
            b[:, :weak] *= 0.05 * torch.rand(weak, generator=source, dtype=torch.float64)
            h = 10 ** (4 * torch.rand(7, 20, generator=source, dtype=torch.float64) - 2)
            problem, groups = columns(b.to(dtype), h.to(dtype))
            z = solver.solve(problem, espalier.GroupLasso(1.0, weight=1.0), groups, torch.ones_like(b).to(dtype)).point
            assert z[:, :weak].count_nonzero() == 0
            assert (z[:, weak:] != 0).all()


def test_a_group_is_solved_the_same_in_any_company() -> None:
    groups = as_grouping("input").partition((5, 30))
    problem, penalty = pose(groups, 4, decades=6, anchored=False), espalier.GroupLasso(0.8)
    together = Exact().solve(problem, penalty, groups, torch.zeros(5, 30, dtype=torch.float64)).point
    for j in range(30):
        one, of_one = columns(problem.linear[:, j : j + 1], problem.metric[:, j : j + 1], problem.tau)
        alone = Exact().solve(one, penalty, of_one, torch.zeros(5, 1, dtype=torch.float64)).point
        assert_same(alone, together[:, j : j + 1], of_one, 1e-13)
    assert some_and_not_all(together)


# ---------------------------------------------------------------------------------------------------- iterations


@pytest.mark.parametrize(("dtype", "cold"), [(torch.float32, 12), (torch.float64, 13)])
@pytest.mark.parametrize("size", [2, 7, 64, 1024])
def test_exact_counts_few_iterations(size: int, dtype: torch.dtype, cold: int) -> None:
    source = torch.Generator().manual_seed(size)
    count = 300
    h = 10 ** (10 * torch.rand(size, count, generator=source, dtype=torch.float64) - 6)
    b = torch.randn(size, count, generator=source, dtype=torch.float64)
    # κ = 1, norms between 1.1 and 100: no group so near its threshold that rounding decides
    b *= 1.1 * 90 ** torch.rand(count, generator=source, dtype=torch.float64) / b.norm(dim=0)
    problem, groups = columns(b.to(dtype), h.to(dtype))
    penalty = espalier.GroupLasso(1.0, weight=1.0)
    first = Exact(max_iters=100).solve(problem, penalty, groups, torch.zeros_like(problem.anchor))
    assert 1 < first.iterations <= cold
    again = Exact(max_iters=100).solve(problem, penalty, groups, first.point)
    assert again.iterations <= 3


# ---------------------------------------------------------------------------------------------------- group MCP


def mcp_objective(x: Tensor, b: Tensor, h: Tensor, penalty: espalier.GroupMCP, tau: float) -> Tensor:
    """Of each column, the penalty written out."""
    mu = penalty.lam * math.sqrt(x.shape[-2])
    r = x.norm(dim=-2)
    inside = mu * r - r.square() / (2 * penalty.gamma)
    smooth = (0.5 * h * x.square() - b * x).sum(-2)
    return smooth + tau * torch.where(r <= penalty.gamma * mu, inside, penalty.gamma * mu**2 / 2)


def on_spheres(radii: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """argmin ½ <x, h x> − <b, x> over ‖x‖ = r for each radius and column: x = b / (h + m), m by bisection."""
    least = h.min(0, keepdim=True).values
    r = radii.unsqueeze(1)
    low, high = torch.full_like(r, -60.0), torch.full_like(r, 60.0)
    for _ in range(60):
        middle = (low + high) / 2
        long = (b / (h - least + middle.exp())).norm(dim=1, keepdim=True) > r
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    x = b / (h - least + ((low + high) / 2).exp())
    return x * (r / x.norm(dim=1, keepdim=True))


def mcp_by_search(b: Tensor, h: Tensor, penalty: espalier.GroupMCP, tau: float) -> Tensor:
    """The least objective of each column, by a dense search over the radius that is refined around its best point."""
    top = 1.5 * (b / h).norm(dim=0) + 2 * penalty.gamma * penalty.lam * math.sqrt(len(b))
    even = torch.linspace(0, 1, 120, dtype=b.dtype)[1:]
    radii = torch.cat([even, 10.0 ** (-9 * even)]).sort().values.unsqueeze(1) * top
    best = torch.zeros_like(top)  # at x = 0
    for _ in range(4):
        values = mcp_objective(on_spheres(radii, b, h), b, h, penalty, tau)
        least, at = values.min(0)
        best = best.minimum(least)
        below = radii.gather(0, (at - 1).clamp(min=0).unsqueeze(0))
        above = radii.gather(0, (at + 1).clamp(max=len(radii) - 1).unsqueeze(0))
        radii = below + (above - below) * torch.linspace(0, 1, 60, dtype=b.dtype).unsqueeze(1)
    return best


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("regime", ["below", "between", "above"])
def test_group_mcp_is_solved_globally(size: int, regime: str) -> None:
    seen = {"zero": 0, "inner": 0, "outer": 0}
    for seed in range(4):
        source = torch.Generator().manual_seed(10 * size + seed)
        h = 10 ** (2 * torch.rand(size, 12, generator=source, dtype=torch.float64) - 1)
        b = torch.randn(size, 12, generator=source, dtype=torch.float64)
        b *= 10 ** (2 * torch.rand(12, generator=source, dtype=torch.float64) - 0.5)
        if seed == 3:
            b[0] = 0  # an entry that nothing pulls
        tau, gamma = 1.3, 1.3 / {"below": 0.05, "between": 0.4, "above": 20.0}[regime]
        penalty = espalier.GroupMCP(3.0 if regime == "above" else 0.6, gamma)
        problem, groups = columns(b, h, tau)
        x = Exact().solve(problem, penalty, groups, torch.zeros_like(b)).point
        value, least = mcp_objective(x, b, h, penalty, tau), mcp_by_search(b, h, penalty, tau)
        scale = (b.square() / h).sum(0)
        assert (value <= least + 1e-12 * scale).all()
        assert (value >= least - 1e-7 * scale).all()  # the search is no worse than this, or it would prove nothing
        r, flat = x.norm(dim=0), gamma * penalty.lam * math.sqrt(size)
        seen["zero"] += int((r == 0).sum())
        seen["inner"] += int(((r > 0) & (r < flat)).sum())
        seen["outer"] += int((r >= flat).sum())
        assert residual(problem, penalty, groups, x) <= 1e-10 * b.norm()
    assert seen["zero"]
    assert seen["outer"]
    # with τ/γ above every curvature the objective is concave up to R: nothing stops in between
    assert bool(seen["inner"]) == (regime != "above")


@pytest.mark.parametrize("gamma", [0.05, 0.7, 3.0])
def test_group_mcp_of_single_entries(gamma: float) -> None:
    source = torch.Generator().manual_seed(0)
    h = 10 ** (2 * torch.rand(1, 60, generator=source, dtype=torch.float64) - 1)
    b = 4 * torch.randn(1, 60, generator=source, dtype=torch.float64)
    penalty, tau = espalier.GroupMCP(0.8, gamma), 1.3
    problem, groups = columns(b, h, tau)
    x = Exact().solve(problem, penalty, groups, torch.zeros_like(b)).point
    scan = 1.5 * (b / h) * torch.linspace(-1, 1, 40001, dtype=torch.float64).reshape(-1, 1, 1)
    least = mcp_objective(scan, b, h, penalty, tau).min(0).values
    value = mcp_objective(x, b, h, penalty, tau)
    assert (value <= least + 1e-13).all()
    assert (value >= least - 1e-6 * (b.square() / h)).all()
    assert some_and_not_all(x)


def test_group_mcp_over_ten_decades_in_both_types() -> None:
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        size = (1, 2, 7, 30)[seed % 4]

        def uniform(*shape: int, source: torch.Generator = source) -> Tensor:
            return torch.rand(*shape, generator=source, dtype=torch.float64)

        h = (10 ** (10 * uniform(size, 12) - 6)).float().double()
        b = (torch.randn(size, 12, generator=source, dtype=torch.float64) * h ** (0.5 * (seed % 2))).float().double()
        tau, gamma = float(10 ** (4 * uniform(1) - 2)), float(10 ** (4 * uniform(1) - 2))
        lam = float(b.norm(dim=0).median()) / math.sqrt(size) / tau * float(10 ** (2 * uniform(1) - 1))
        penalty = espalier.GroupMCP(lam, gamma)
        # every inner stationary point is b r / ((h − τ/γ) r + κ) for some r ≤ R = γ μ; b/h is the only one beyond
        mu = lam * math.sqrt(size)
        r = gamma * mu * torch.cat([10 ** torch.linspace(-20, 0, 1500), torch.linspace(0, 1, 1500)]).reshape(-1, 1, 1)
        inner = mcp_objective(b * r / ((h - tau / gamma) * r + tau * mu), b, h, penalty, tau).min(0).values
        least = inner.minimum(mcp_objective(b / h, b, h, penalty, tau)).clamp(max=0)
        scale = (b.square() / h).sum(0)
        for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 3e-7)):
            problem, groups = columns(b.to(dtype), h.to(dtype), tau)
            x = Exact().solve(problem, penalty, groups, torch.zeros_like(problem.anchor)).point.double()
            assert (mcp_objective(x, b, h, penalty, tau) <= least + tolerance * scale).all()


# ---------------------------------------------------------------------------------------------------- all solvers


LONG = ProximalGradient(max_iters=90, rtol=None)  # to rounding, on metrics within half a decade
SOLVERS = {
    "ClosedForm": ClosedForm(),
    "Exact": Exact(),
    "NewtonRaphson": NewtonRaphson(),
    "pg": LONG,
    "pg-backtracking": replace(LONG, step="backtracking"),
}


@every_case
@pytest.mark.parametrize("scalar", [False, True], ids=["diagonal", "scalar"])
def test_the_optimality_residual_vanishes(case: Case, scalar: bool) -> None:
    groups, penalty, served = case.groups, case.build(0.3), {}
    problem = pose(groups, 5, decades=0.5, tau=0.5)
    if scalar:
        problem = replace(problem, metric=torch.tensor(0.7, dtype=torch.float64))
    inputs = [problem.anchor.clone(), problem.direction.clone()]
    start = 0.1 * problem.anchor
    # the residual must be able to tell: far from the solution it is as large as b
    assert residual(problem, penalty, groups, start) > 1e-2 * problem.linear.norm()
    for name, solver in SOLVERS.items():
        if solver.lacks(penalty, scalar) is None:
            if name.startswith("pg") and not penalty.convex:
                solver = replace(solver, max_iters=250)  # half the step, and less curvature
            z = solver.solve(problem, penalty, groups, start).point
            assert (z.shape, z.dtype) == (start.shape, start.dtype)
            assert residual(problem, penalty, groups, z) <= 1e-10 * problem.linear.norm()
            served[name] = z
    assert torch.equal(problem.anchor, inputs[0])
    assert torch.equal(problem.direction, inputs[1])
    assert torch.equal(start, 0.1 * problem.anchor)
    assert ("ClosedForm" in served) == scalar
    if penalty.convex:  # and the solution is one
        for z in served.values():
            assert (z - served["pg"]).norm() <= 1e-10 * served["pg"].norm()


@every_case
def test_on_a_scalar_metric_all_solvers_give_the_closed_form(case: Case) -> None:
    groups, penalty, norms = case.groups, case.build(0.6), []
    for h in (0.1, 4.0):  # for GroupMCP with γ = 3 the step τ/h is above γ, and below it
        problem = replace(pose(groups, 6), metric=h)
        z = ClosedForm().solve(problem, penalty, groups, problem.anchor).point
        norms.append(float(z.norm()))
        # nonconvex: proximal gradient stays where it is put, at a solution
        start = 0.3 * problem.anchor if penalty.convex else z
        solvers = [ProximalGradient(), ProximalGradient(max_iters=45, rtol=None, step="backtracking")]
        solvers += [s for s in (Exact(), NewtonRaphson()) if s.lacks(penalty, True) is None]
        for solver in solvers:
            for metric in (h, torch.full(groups.shape, h, dtype=torch.float64)):
                other = solver.solve(replace(problem, metric=metric), penalty, groups, start).point
                assert float((other - z).norm()) <= 1e-12 * (1 + norms[-1])
                if not isinstance(penalty, espalier.NuclearNorm):
                    assert torch.equal(other == 0, z == 0)
    assert any(norms)


@every_case
def test_scalars_may_stay_on_the_device(case: Case) -> None:
    # on a GPU τ and t are tensors without axes, and the answer is the same
    groups, penalty = case.groups, case.build(0.3)
    problem = pose(groups, 8)
    tensors = replace(problem, tau=torch.tensor(1.3, dtype=torch.float64), t=torch.tensor(7.0, dtype=torch.float64))
    for solver in (Exact(), NewtonRaphson(), ProximalGradient(max_iters=5, tolerance=Tolerance(1e-9))):
        if solver.lacks(penalty, False) is None:
            z = [solver.solve(p, penalty, groups, problem.anchor).point for p in (problem, tensors)]
            torch.testing.assert_close(z[1], z[0], rtol=1e-12, atol=1e-14)


@radial_cases
def test_the_memory_layout_does_not_matter(case: Case) -> None:
    groups, penalty = case.groups, case.build(0.4)
    problem = pose(groups, 9)
    wide = [torch.stack([v, torch.full_like(v, math.nan)], -1)[..., 0] for v in (problem.anchor, problem.metric)]
    last = problem.direction.movedim(0, -1).contiguous().movedim(-1, 0)
    strided = Subproblem(wide[0], last, wide[1], problem.tau)
    assert not strided.anchor.is_contiguous()
    for solver in (Exact(), ProximalGradient(max_iters=50)):
        z = [solver.solve(p, penalty, groups, p.anchor).point for p in (problem, strided)]
        torch.testing.assert_close(z[1], z[0], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------------- edges


@every_case
def test_everything_screened(case: Case) -> None:
    groups, penalty = case.groups, case.build(1e4)
    problem = pose(groups, 10)
    for name, solver in SOLVERS.items():
        posed = replace(problem, metric=0.8) if name == "ClosedForm" else problem
        if name.startswith("pg"):
            solver = replace(solver, max_iters=5)
        if solver.lacks(penalty, name == "ClosedForm") is None:
            assert solver.solve(posed, penalty, groups, problem.anchor).point.count_nonzero() == 0


@every_case
def test_nothing_pulls(case: Case) -> None:
    groups, penalty = case.groups, case.build(0.3)
    problem = pose(groups, 11)
    still = Subproblem(0 * problem.anchor, 0 * problem.anchor, problem.metric, 1.3)
    for name, solver in SOLVERS.items():
        posed = replace(still, metric=0.8) if name == "ClosedForm" else still
        if name.startswith("pg"):
            solver = replace(solver, max_iters=40)
        if solver.lacks(penalty, name == "ClosedForm") is None:
            assert solver.solve(posed, penalty, groups, problem.anchor).point.count_nonzero() == 0


@every_case
@pytest.mark.parametrize(("lam", "tau"), [(0.0, 1.3), (0.4, 0.0), (0.0, 0.0)])
def test_without_a_penalty_the_minimum_is_the_quadratic_one(case: Case, lam: float, tau: float) -> None:
    groups, penalty = case.groups, case.build(lam)
    problem = replace(pose(groups, 12, decades=4), tau=tau)
    for solver in (Exact(), NewtonRaphson()):
        if solver.lacks(penalty, False) is None:
            z = solver.solve(problem, penalty, groups, problem.anchor).point
            torch.testing.assert_close(z, problem.unpenalised(), rtol=1e-12, atol=1e-12)
    scalar = replace(problem, metric=2.0)
    z = ClosedForm().solve(scalar, penalty, groups, problem.anchor).point
    torch.testing.assert_close(z, scalar.unpenalised(), rtol=1e-13, atol=1e-13)
    if penalty.convex and tau:
        mild = replace(pose(groups, 12, decades=0.5), tau=tau)
        z = LONG.solve(mild, penalty, groups, mild.anchor).point
        torch.testing.assert_close(z, mild.unpenalised(), rtol=1e-11, atol=1e-11)


def test_no_direction_and_no_penalty_leave_the_anchor_to_the_bit() -> None:
    anchor = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    metric = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    assert torch.equal(Subproblem(anchor, torch.zeros(5, 4), metric, 0.0).unpenalised(), anchor)


@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (1, 9), (1, 1, 3, 3), (3, 1, 2), (1, 300)])
@pytest.mark.parametrize("build", [*SMOOTHED, espalier.GroupMCP])
def test_one_group_and_groups_of_one(build: Callable[..., espalier.Penalty], shape: tuple[int, ...]) -> None:
    for grouping in ("input", "output", "element"):
        groups = as_grouping(grouping).partition(shape)
        for seed in range(3):
            problem, penalty = pose(groups, seed, decades=3), build(0.7)
            z = Exact().solve(problem, penalty, groups, problem.anchor).point
            assert residual(problem, penalty, groups, z) <= 1e-11 * problem.linear.norm()
            if penalty.convex:
                assert_same(z, truth(problem, penalty, groups), groups, 1e-11)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 3, 3), (4, 2, 0, 1)])
@pytest.mark.parametrize("build", [*SMOOTHED, espalier.GroupMCP, espalier.NuclearNorm])
def test_empty_tensors_have_an_empty_solution(build: Callable[..., espalier.Penalty], shape: tuple[int, ...]) -> None:
    penalty = build(0.3)
    groups = as_grouping(penalty.default_grouping).partition(shape)
    x = groups.split(torch.zeros(shape))
    for solver in (Exact(), NewtonRaphson(), ProximalGradient()):
        if solver.lacks(penalty, False) is None:
            problem = Subproblem(x, x.clone(), torch.ones_like(x), 1.0)
            assert solver.solve(problem, penalty, groups, x).point.shape == x.shape


# ---------------------------------------------------------------------------------------------------- proximal gradient


def q(problem: Subproblem, penalty: espalier.Penalty, groups: espalier.Partition, x: Tensor) -> float:
    """Q as the paper writes it."""
    away = x - problem.anchor
    smooth = (problem.direction * x).sum() + 0.5 * (away * problem.metric * away).sum()
    return float(smooth + problem.tau * penalty.value(x, groups))


def one_more(problem: Subproblem, penalty: espalier.Penalty, groups: espalier.Partition, z: Tensor) -> Tensor:
    """Z^{j+1} from Z^j: with a fixed step the iteration has no memory."""
    return ProximalGradient(max_iters=1, min_iters=1, rtol=None).solve(problem, penalty, groups, z).point


@every_case
@pytest.mark.parametrize("step", ["bound", "backtracking"])
def test_q_never_rises(case: Case, step: str) -> None:
    groups, penalty = case.groups, case.build(0.3)
    problem = pose(groups, 13, decades=2)
    start = 3 * problem.anchor
    values = [q(problem, penalty, groups, start)]
    for j in range(1, 7):
        solver = ProximalGradient(max_iters=j, min_iters=1, rtol=None, step=step)
        values.append(q(problem, penalty, groups, solver.solve(problem, penalty, groups, start).point))
    assert all(b <= a + 1e-12 * (1 + abs(a)) for a, b in pairwise(values))
    assert values[-1] < values[0]


def test_min_and_max_iterations_are_kept() -> None:
    groups = as_grouping("input").partition((6, 8))
    problem, penalty = pose(groups, 14, decades=2), espalier.GroupLasso(0.3)
    for iters in (1, 2, 17):
        run = ProximalGradient(max_iters=iters, min_iters=1, rtol=None).solve(problem, penalty, groups, problem.anchor)
        assert run.iterations == iters
        # a rule that always holds stops at the first look
        run = ProximalGradient(max_iters=100, min_iters=iters, rtol=1e9).solve(problem, penalty, groups, problem.anchor)
        assert run.iterations == iters
        eager = ProximalGradient(max_iters=100, min_iters=iters, rtol=None, tolerance=Tolerance(1e9))
        assert eager.solve(problem, penalty, groups, problem.anchor).iterations == iters
    assert isinstance(run.iterations, int)


@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("build", [espalier.GroupLasso, espalier.L1, ElasticNet])
def test_rtol_stops_where_it_says(build: Callable[..., espalier.Penalty], anchored: bool, rtol: float) -> None:
    penalty, groups = build(0.3), as_grouping("input").partition((6, 8))
    problem = pose(groups, 15, decades=2, anchored=anchored)
    # <d, a> is not small beside the rest of Q
    problem = replace(problem, direction=problem.direction + 5 * problem.anchor)
    start = torch.ones_like(problem.anchor)
    run = ProximalGradient(max_iters=3000, min_iters=2, rtol=rtol).solve(problem, penalty, groups, start)
    z, values = start, []
    for _ in range(run.iterations):
        z = one_more(problem, penalty, groups, z)
        values.append(q(problem, penalty, groups, z))
    falls = [(a - b) / (abs(b) + 1) for a, b in pairwise(values)]
    assert 2 < run.iterations < 3000
    assert torch.equal(run.point, z)
    assert falls[-1] < rtol
    assert all(f >= rtol for f in falls[:-1])


def least_subgradient(problem: Subproblem, kappa: float, z: Tensor) -> float:
    """min ‖s‖ over ∂Q(z) for group lasso on columns, written out."""
    gradient = problem.direction + problem.metric * (z - problem.anchor)
    norm = z.norm(dim=0)
    inside = gradient + kappa * z / norm.clamp(min=1e-300)
    each = torch.where(norm > 0, inside.norm(dim=0), (gradient.norm(dim=0) - kappa).clamp(min=0))
    return float(each.norm())


@pytest.mark.parametrize("settings", [{"rtol": None}, {}, {"rtol": None, "step": "backtracking"}])
def test_tolerance_is_met(settings: dict[str, object]) -> None:
    groups, penalty = as_grouping("input").partition((6, 8)), espalier.GroupLasso(0.3)
    for seed in range(2):
        problem, counts = pose(groups, 20 + seed, decades=1.5), []
        start = 2 * problem.anchor
        for t in (1, 10, 1000):
            tolerance = Tolerance(1e-2, power=1.0)
            solver = ProximalGradient(max_iters=5000, tolerance=tolerance, **settings)
            run = solver.solve(replace(problem, t=t), penalty, groups, start)
            assert run.iterations < 5000
            assert tolerance.at(t) == pytest.approx(1e-2 / t)
            assert least_subgradient(problem, problem.tau * 0.3 * math.sqrt(6), run.point) <= 1e-2 / t
            assert q(problem, penalty, groups, run.point) <= q(problem, penalty, groups, start)
            counts.append(run.iterations)
        # later steps ask for more
        assert counts == sorted(set(counts))


def test_tolerance_does_not_iterate_for_nothing() -> None:
    groups, penalty = as_grouping("input").partition((6, 8)), espalier.GroupLasso(0.3)
    problem = pose(groups, 24, decades=2)
    solver = ProximalGradient(max_iters=5000, min_iters=1, rtol=None, tolerance=Tolerance(1e-6))
    run = solver.solve(problem, penalty, groups, problem.anchor)
    one_less = replace(solver, max_iters=run.iterations - 1, tolerance=None)
    before = one_less.solve(problem, penalty, groups, problem.anchor).point
    assert least_subgradient(problem, problem.tau * 0.3 * math.sqrt(6), before) > 0.5e-6
    # from the solution it stops at once
    assert solver.solve(problem, penalty, groups, run.point).iterations == 1


class Whole(espalier.Penalty):
    """Another penalty that does not say it separates."""

    def __init__(self, inner: espalier.Penalty) -> None:
        self.inner = inner

    def value(self, x: Tensor, groups: espalier.Partition) -> Tensor:
        return self.inner.value(x, groups)

    def prox(self, x: Tensor, step: float | Tensor, groups: espalier.Partition) -> Tensor:
        assert not isinstance(step, Tensor) or step.dim() == 0
        return self.inner.prox(x, step, groups)


class WholeNonconvex(Whole):
    convex = False


@pytest.mark.parametrize(
    ("penalty", "each", "share"),
    [
        (espalier.GroupLasso(1e-3), True, 1.0),
        (espalier.GroupMCP(1e-3), True, 0.5),
        (Whole(espalier.GroupLasso(1e-3)), False, 1.0),
        (WholeNonconvex(espalier.GroupLasso(1e-3)), False, 0.5),
    ],
    ids=["separable", "separable-nonconvex", "whole", "whole-nonconvex"],
)
def test_the_step_is_the_bound(penalty: espalier.Penalty, each: bool, share: float) -> None:
    groups = as_grouping("input").partition((6, 8))
    problem = pose(groups, 25, decades=3)
    start = problem.anchor
    top = problem.metric.amax(0, keepdim=True)
    theta = share / (top if each else top.max())
    gradient = problem.direction + problem.metric * (start - problem.anchor)
    step = theta * problem.tau
    expected = penalty.prox(start - theta * gradient, step, groups)
    z = ProximalGradient(max_iters=1, min_iters=1).solve(problem, penalty, groups, start).point
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(z, start - theta * gradient * 0.9, rtol=1e-3, atol=1e-3)


def test_groups_of_different_scale_take_steps_of_their_own() -> None:
    groups = as_grouping("input").partition((6, 8))
    problem = pose(groups, 26)
    problem = replace(problem, metric=problem.metric * 10 ** torch.linspace(0, 2, 8, dtype=torch.float64))
    solver = ProximalGradient(max_iters=10000, rtol=None, tolerance=Tolerance(1e-2))
    own = solver.solve(problem, espalier.GroupLasso(0.01), groups, problem.anchor)
    shared = solver.solve(problem, Whole(espalier.GroupLasso(0.01)), groups, problem.anchor)
    assert 10 * own.iterations < shared.iterations
    torch.testing.assert_close(own.point, shared.point, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_iters": 0},
        {"min_iters": 3, "max_iters": 2},
        {"max_iters": 0},
        {"rtol": -1e-9},
        {"rtol": math.nan},
        {"step": "armijo"},
    ],
    ids=str,
)
def test_proximal_gradient_refuses(settings: dict[str, object]) -> None:
    name = next(reversed(settings))
    with pytest.raises(ValueError, match=f"{name}.* must |must hold"):
        ProximalGradient(**settings)


@pytest.mark.parametrize(
    ("scale", "power", "message"),
    [
        (0.0, 0.6, "scale must"),
        (-1.0, 0.6, "scale must"),
        (math.nan, 0.6, "scale must"),
        (math.inf, 0.6, "scale must"),
        (1.0, 0.5, "power must exceed"),
        (1.0, math.nan, "power must exceed"),
    ],
)
def test_tolerance_refuses(scale: float, power: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tolerance(scale, power)


# ---------------------------------------------------------------------------------------------------- pick


every_penalty = pytest.mark.parametrize("case", PENALTIES, ids=names(PENALTIES))


@every_penalty
def test_auto_picks_by_what_is_declared(case: PenaltyCase) -> None:
    penalty = case.build(0.1)
    assert isinstance(pick("auto", penalty, scalar_metric=True), ClosedForm)
    radial = case.build not in (espalier.NuclearNorm, ElasticNet)
    other = DouglasRachford if case.build is espalier.NuclearNorm else ProximalGradient
    assert isinstance(pick("auto", penalty, scalar_metric=False), Exact if radial else other)
    mine = NewtonRaphson(max_iters=7)
    chosen = pick("auto", penalty, scalar_metric=False, preferred=mine)
    assert chosen is mine if radial and penalty.convex else isinstance(chosen, Exact if radial else other)
    # what is picked serves
    assert chosen.lacks(penalty, False) is None


@every_penalty
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("asked", ["exact", "newton", "dr", "pg", ClosedForm(), Exact(3), ProximalGradient(7)], ids=str)
def test_a_solver_asked_for_serves_or_says_what_is_missing(
    case: PenaltyCase, asked: str | espalier.Solver, scalar: bool
) -> None:
    penalty = case.build(0.1)
    kinds = {"exact": Exact, "newton": NewtonRaphson, "dr": DouglasRachford, "pg": ProximalGradient}
    kind = kinds[asked] if isinstance(asked, str) else type(asked)
    radial = case.build not in (espalier.NuclearNorm, ElasticNet)
    serves = {
        ClosedForm: scalar,
        Exact: radial,
        NewtonRaphson: radial and penalty.convex,
        DouglasRachford: case.build is espalier.NuclearNorm,
        ProximalGradient: True,
    }[kind]
    if serves:
        chosen = pick(asked, penalty, scalar)
        assert type(chosen) is kind
        assert isinstance(asked, str) or chosen is asked
        return
    with pytest.raises(ValueError, match="cannot serve") as error:
        pick(asked, penalty, scalar)
    for part in (kind.__name__, case.name, "it needs", 'solver="auto"', 'solver="pg"'):
        assert part in str(error.value)


@pytest.mark.parametrize("asked", ["Exact", "closed_form", "", None, 3, Exact])
def test_an_unknown_solver_is_answered_with_the_known_ones(asked: object) -> None:
    with pytest.raises(ValueError, match="no solver is called") as error:
        pick(asked, espalier.L1(0.1), False)
    for part in (repr(asked), '"auto"', '"exact"', '"pg"', '"newton"', '"dr"', "espalier.ProximalGradient("):
        assert part in str(error.value)
