"""What every penalty promises: its value, its proximal map, its screening rule and the structure it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import espalier
from espalier.groupings import as_grouping
from tables import PENALTIES, ElasticNet, PenaltyCase, names

SHAPES = ((4, 6), (7, 5), (1, 1), (6, 1), (6, 4, 3), (2, 10, 3, 3))

# groupings that the shared table leaves out
MORE = (
    PenaltyCase(espalier.NuclearNorm, (espalier.Matrix(layout=espalier.Layout(parts=2)),)),
    PenaltyCase(
        espalier.GroupLasso,
        (
            espalier.Heads(2),
            espalier.Heads(2, "output"),
            espalier.Output(layout=espalier.Layout(stacked=2)),
            espalier.Input(layout=espalier.Layout(input_dim=0, output_dim=1)),
        ),
    ),
)


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
        layout = "" if self.grouping.layout == espalier.Layout() else "'"
        extra = getattr(self.grouping, "block", 1)
        cut = type(self.grouping).__name__ + (str(extra) if extra > 1 else "") + layout
        return f"{type(self.build(1.0)).__name__}-{cut}-{'x'.join(map(str, self.shape))}"

    def random(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """A point in the partition's view whose groups differ in size, so that some are cut off and others not."""
        source = torch.Generator().manual_seed(seed)
        x = self.groups.split(torch.randn(self.shape, generator=source, dtype=torch.float64))
        sizes = torch.rand(self.groups.max(x).shape, generator=source, dtype=torch.float64)
        return (x * 4 * sizes).to(dtype)

    def labels(self, x: Tensor) -> Tensor:
        """The number of the group that each entry belongs to."""
        return torch.arange(self.groups.count).reshape(self.groups.max(x).shape).expand(x.shape)


def cuts(grouping: espalier.Grouping, shape: tuple[int, ...]) -> bool:
    try:
        grouping.partition(shape)
    except ValueError:
        return False
    return True


def cases(*penalties: PenaltyCase) -> tuple[Case, ...]:
    return tuple(
        Case(p.build, as_grouping(g), s)
        for p in penalties
        for g in p.groupings
        for s in SHAPES
        if cuts(as_grouping(g), s)
    )


CASES = cases(*PENALTIES, *MORE)
# where the shape matters less: one odd and one with four axes, or what the grouping can cut
FEW = tuple(
    c for c in CASES if c.shape in ((7, 5), (2, 10, 3, 3)) or (c.shape == (4, 6) and not cuts(c.grouping, (7, 5)))
)
CONVEX = tuple(c for c in CASES if c.build(1.0).convex)
FEW_CONVEX = tuple(c for c in FEW if c.build(1.0).convex)
SEPARABLE = tuple(c for c in FEW if c.build(1.0).separable)
BUILT_IN = tuple(c for c in FEW if c.build is not ElasticNet)
MCP = tuple(c for c in CASES if c.build is espalier.GroupMCP)

every_case = pytest.mark.parametrize("case", CASES, ids=names(CASES))
few_cases = pytest.mark.parametrize("case", FEW, ids=names(FEW))
every_penalty = pytest.mark.parametrize("case", PENALTIES, ids=names(PENALTIES))


def objective(penalty: espalier.Penalty, y: Tensor, x: Tensor, step: float, groups: espalier.Partition) -> float:
    """What prox minimises."""
    return float(penalty.value(y, groups) + (y - x).square().sum() / (2 * step))


def test_every_grouping_of_the_table_meets_several_shapes() -> None:
    for p in (*PENALTIES, *MORE):
        for g in p.groupings:
            assert sum(cuts(as_grouping(g), s) for s in SHAPES) >= 3


# ---------------------------------------------------------------------------------------------------- prox


@every_case
def test_prox_minimises_its_objective(case: Case) -> None:
    penalty, groups = case.build(0.3), case.groups
    source = torch.Generator().manual_seed(1)
    for seed, step in enumerate((0.05, 1.0, 2.9, 7.0)):
        x = case.random(seed)
        y = penalty.prox(x, step, groups)
        rivals = [x, torch.zeros_like(x), *(t * x for t in (0.25, 0.5, 0.9)), *(t * y for t in (0.0, 0.9, 1.1))]
        # a solution off by δ along its own ray loses to the nearer of these for any δ above 1e-6
        rivals += [(1 + sign * 10.0**-k) * y for k in range(2, 7) for sign in (-1, 1)]
        noise = torch.randn(12, *x.shape, generator=source, dtype=x.dtype)
        rivals += [y + 10.0 ** -(k % 6) * noise[k] for k in range(12)]
        # one group at a time: thrown out, or left as it was
        for g in range(min(groups.count, 4)):
            here = case.labels(x) == g
            rivals += [torch.where(here, 0.0, y), torch.where(here, x, y)]
        best = objective(penalty, y, x, step, groups)
        assert best <= min(objective(penalty, z, x, step, groups) for z in rivals) + 1e-13 * (1 + abs(best))


@pytest.mark.parametrize("case", MCP, ids=names(MCP))
@pytest.mark.parametrize(
    ("gamma", "step"), [(0.4, 0.1), (0.4, 0.39), (0.4, 0.4), (0.4, 0.41), (3.0, 2.999), (3.0, 3.0), (3.0, 8.0)]
)
def test_group_mcp_prox_is_the_best_radius(case: Case, gamma: float, step: float) -> None:
    penalty, groups, x = espalier.GroupMCP(0.3, gamma), case.groups, case.random(3)
    mu = 0.3 * math.sqrt(groups.size)
    norm = groups.norm(x).reshape(-1, 1)
    after = groups.norm(penalty.prox(x, step, groups)).reshape(-1, 1)

    def p(r: Tensor) -> Tensor:
        inside = mu * r - r**2 / (2 * gamma)
        return torch.where(r <= gamma * mu, inside, gamma * mu**2 / 2) + (r - norm) ** 2 / (2 * step)

    grid = 1.2 * norm * torch.linspace(0, 1, 20001, dtype=x.dtype)
    best, best_at = p(grid).min(1, keepdim=True)
    assert (p(after) <= best + 1e-13).all()
    # the minimum is where the grid has it, unless 0 and another radius are nearly as good
    contested = (p(torch.zeros_like(norm)) - best).abs() < 1e-6
    off = (after - grid.gather(1, best_at)).abs()
    flat = 1e-2 if abs(step - gamma) < 0.02 else 2e-4  # hardly any curvature where the step is almost γ
    assert ((off <= flat * norm) | contested).all()


@pytest.mark.parametrize("case", SEPARABLE, ids=names(SEPARABLE))
def test_a_step_for_each_group_serves_each_alone(case: Case) -> None:
    penalty, groups, x = case.build(0.3), case.groups, case.random(4)
    labels = case.labels(x)
    steps = torch.linspace(0.05, 5.0, groups.count, dtype=x.dtype)
    together = penalty.prox(x, steps.reshape(groups.max(x).shape), groups)
    for g in range(0, groups.count, 1 + groups.count // 10):
        alone = penalty.prox(torch.where(labels == g, x, 0.0), float(steps[g]), groups)
        torch.testing.assert_close(together[labels == g], alone[labels == g], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CONVEX, ids=names(CONVEX))
def test_prox_of_a_convex_penalty_is_firmly_nonexpansive(case: Case) -> None:
    penalty, groups = case.build(0.3), case.groups
    for seed in range(6):
        x = case.random(seed)
        y = x + 10.0 ** (1 - seed % 5) * case.random(seed + 100)
        step = (0.1, 1.0, 6.0)[seed % 3]
        moved = penalty.prox(x, step, groups) - penalty.prox(y, step, groups)
        # ‖Px − Py‖² ≤ <Px − Py, x − y>
        square = moved.square().sum()
        assert square <= (moved * (x - y)).sum() + 1e-13 * (1 + square)


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_prox_removes_is_exactly_zero(case: Case, dtype: torch.dtype) -> None:
    penalty, groups, x = case.build(0.3), case.groups, case.random(5, dtype)
    assert penalty.prox(x, 1e4, groups).count_nonzero() == 0
    y = penalty.prox(x, 1.0, groups)
    if isinstance(penalty, espalier.NuclearNorm):
        y, x = torch.linalg.svdvals(y), torch.linalg.svdvals(x)
        assert ((y < 1e-5 * x.amax()) == (x <= 0.3)).all()
    else:
        # either gone, or there with a sizeable part: nothing hovers near zero
        assert ((y == 0) | (y.abs() > 1e-4 * x.abs())).all()


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_step_and_no_strength_leave_the_point_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    groups, x = case.groups, case.random(6, dtype)
    if groups.count > 1:
        x = torch.where(case.labels(x) == 0, 0.0, x)  # a group that is zero already must not become NaN
    penalty = case.build(0.3)
    assert torch.equal(penalty.prox(x, 0.0, groups), x)
    assert torch.equal(penalty.prox(x, torch.zeros((), dtype=dtype), groups), x)
    if penalty.separable:
        assert torch.equal(penalty.prox(x, torch.zeros_like(groups.max(x)), groups), x)
    off = case.build(0.0)
    assert float(off.value(x, groups)) == 0
    assert torch.equal(off.prox(x, 2.0, groups), x)


@few_cases
def test_a_step_may_be_a_number_or_a_tensor_without_axes(case: Case) -> None:
    penalty, groups, x = case.build(0.3), case.groups, case.random(7)
    step = torch.tensor(0.7, dtype=x.dtype)
    torch.testing.assert_close(penalty.prox(x, step, groups), penalty.prox(x, 0.7, groups), rtol=1e-12, atol=1e-14)


@few_cases
def test_prox_and_value_leave_their_argument_alone(case: Case) -> None:
    penalty, groups, x = case.build(0.3), case.groups, case.random(8)
    before = x.clone()
    penalty.prox(x, 1.0, groups)
    penalty.value(x, groups)
    penalty.structure(x, groups)
    assert torch.equal(x, before)


# ---------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("case", BUILT_IN, ids=names(BUILT_IN))
@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_float32_of_any_size_agrees_with_float64(case: Case, size: float) -> None:
    # squares of such entries are infinite or zero in float32
    penalty, groups = case.build(0.3 * size), case.groups
    x = case.random(9, torch.float64).mul(size).float()
    mild = case.build(0.3)
    assert float(mild.value(x, groups)) == pytest.approx(float(mild.value(x.double(), groups)), rel=1e-5, abs=1e-40)
    for step in (0.3, 1.0):
        y, exact = penalty.prox(x, step, groups), penalty.prox(x.double(), step, groups)
        assert y.isfinite().all()
        error = groups.norm(y.double() - exact) / groups.norm(x.double())
        assert error.max() < 2e-6
    assert groups.norm(x).isfinite().all()
    torch.testing.assert_close(groups.norm(x).double(), groups.norm(x.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", BUILT_IN, ids=names(BUILT_IN))
def test_entries_below_the_normal_range(case: Case) -> None:
    groups, x = case.groups, case.random(10, torch.float64).mul(1e-41).float()
    assert x.abs().max() < torch.finfo(torch.float32).tiny
    for weak in (case.build(0.0), case.build(1e-44)):
        assert weak.value(x, groups).isfinite()
        assert (weak.prox(x, 1.0, groups).abs() <= 2 * x.abs().max()).all()
    assert case.build(1.0).prox(x, 1.0, groups).count_nonzero() == 0
    assert (case.build(1.0).prox(x, 0.0, groups).abs() <= 2 * x.abs().max()).all()
    if not isinstance(weak, espalier.NuclearNorm):
        # numbers this small have a spacing of 1.4e-45
        torch.testing.assert_close(groups.norm(x).double(), groups.norm(x.double()), rtol=1e-3, atol=1.5e-45)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 4, 3, 3), (4, 2, 0, 1)])
@pytest.mark.parametrize("case", PENALTIES, ids=names(PENALTIES))
def test_an_empty_tensor_has_a_structure(case: PenaltyCase, shape: tuple[int, ...]) -> None:
    # espalier.structure() asks for it whenever an empty parameter is penalised
    for grouping in map(as_grouping, case.groupings):
        if not cuts(grouping, shape):
            continue
        groups = grouping.partition(shape)
        found = case.build(0.1).structure(groups.split(torch.zeros(shape)), groups)
        assert found.zero.shape == (groups.count,)


# ---------------------------------------------------------------------------------------------------- screening


def pose(case: Case, seed: int, tau: float = 1.0) -> espalier.Subproblem:
    """A subproblem whose groups lie on either side of their thresholds, the metric within a factor of four."""
    source = torch.Generator().manual_seed(seed)
    linear = case.random(seed)
    metric = 0.5 * 4 ** torch.rand(linear.shape, generator=source, dtype=linear.dtype)
    anchor = torch.randn(linear.shape, generator=source, dtype=linear.dtype)
    return espalier.Subproblem(anchor, metric * anchor - linear, metric, tau)


@pytest.mark.parametrize("case", FEW_CONVEX, ids=names(FEW_CONVEX))
def test_screening_of_a_convex_penalty_is_exact(case: Case) -> None:
    groups, converge = case.groups, espalier.ProximalGradient(max_iters=60, rtol=None)
    screened = kept = 0
    for seed, lam in ((0, 0.5), (1, 1e-3), (2, 1e3)):
        problem, penalty = pose(case, seed, tau=1.3), case.build(lam)
        # from a point without zeros: a group wrongly screened would come back, since each step looks at it again
        z = converge.solve(problem, penalty, groups, problem.anchor).point
        zero = groups.max(z.abs()) == 0
        if not penalty.separable:  # its groups may hang together: all of them or none
            zero = zero & zero.all()
        assert torch.equal(penalty.screen(problem, groups), zero)
        screened, kept = screened + int(zero.sum()), kept + int((~zero).sum())
    assert screened
    assert kept


@pytest.mark.parametrize("case", MCP, ids=names(MCP))
@pytest.mark.parametrize("gamma", [0.3, 3.0])
def test_screening_of_group_mcp_is_safe(case: Case, gamma: float) -> None:
    groups, screened = case.groups, 0
    for seed in range(6):
        problem = pose(case, seed, tau=(0.5, 2.0)[seed % 2])
        penalty = espalier.GroupMCP(2.0, gamma)
        zero = penalty.screen(problem, groups)
        z = espalier.Exact().solve(problem, penalty, groups, problem.anchor).point
        assert torch.where(zero, z, 0.0).count_nonzero() == 0
        screened += int(zero.sum())
    assert screened


class Balance(espalier.Penalty):
    """λ |Σ x_i|: convex, and it couples all entries."""

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def value(self, x: Tensor, groups: espalier.Partition) -> Tensor:
        return self.lam * x.sum().abs()

    def prox(self, x: Tensor, step: float | Tensor, groups: espalier.Partition) -> Tensor:
        # x − s with s = mean(x), as far as step λ allows
        limit = torch.as_tensor(step * self.lam, dtype=x.dtype)
        return x - x.mean().clamp(-limit, limit)


def test_screening_is_safe_where_groups_are_coupled() -> None:
    penalty, groups = Balance(5.0), as_grouping("element").partition((3, 1))
    linear = torch.tensor([[3.0], [2.0], [1.0]], dtype=torch.float64)
    # under the identity the middle entry is zero; under this metric it is not
    metric = torch.tensor([[1.0], [10.0], [10.0]], dtype=torch.float64)
    problem = espalier.Subproblem(torch.zeros_like(linear), -linear, metric, 1.0)
    start = torch.ones_like(linear)
    z = espalier.ProximalGradient(max_iters=500, rtol=None).solve(problem, penalty, groups, start).point
    assert z[1].abs() > 0.05
    assert torch.where(penalty.screen(problem, groups), z, 0.0).count_nonzero() == 0


# ---------------------------------------------------------------------------------------------------- weights


WEIGHTED = (espalier.GroupLasso, espalier.SparseGroupLasso, espalier.GroupMCP)
GROUPED = tuple(c for c in FEW if c.build in WEIGHTED and c.grouping != espalier.Element())


@pytest.mark.parametrize("case", GROUPED, ids=names(GROUPED))
@pytest.mark.parametrize("weight", [None, 0.0, 0.7])
def test_the_group_weight_enters_value_prox_and_screening(case: Case, weight: float | None) -> None:
    groups, lam, step, tau = case.groups, 0.3, 0.8, 1.7
    penalty = case.build(lam, weight=weight)
    factor = math.sqrt(groups.size) if weight is None else weight
    x = case.random(11)
    norm, l1 = groups.norm(x), x.abs().sum()
    share, mixed = 1.0, 0.0  # of the group norm, and λ of the entries
    if isinstance(penalty, espalier.GroupLasso):
        expected = lam * factor * norm.sum()
    elif isinstance(penalty, espalier.SparseGroupLasso):
        share, mixed = 0.5, 0.5 * lam
        expected = 0.5 * lam * factor * norm.sum() + 0.5 * lam * l1
    else:
        mu, gamma = lam * factor, 3.0
        inside = mu * norm - norm**2 / (2 * gamma)
        expected = torch.where(norm <= gamma * mu, inside, gamma * mu**2 / 2).sum()
    assert float(penalty.value(x, groups)) == pytest.approx(float(expected), rel=1e-13)

    def beside(kappa: float, nudge: float, threshold: float) -> Tensor:
        """A point whose groups, once thresholded entry by entry, have the norm κ (1 + nudge)."""
        return x / norm * (kappa * (1 + nudge)) + x.sign() * threshold

    for nudge in (-1e-6, 1e-6):
        zero = nudge < 0 or factor == 0  # with no weight there is nothing beside zero, and zero is what is left
        point = beside(step * lam * share * factor, nudge, step * mixed)
        assert bool((groups.max(penalty.prox(point, step, groups).abs()) > 1e-9).any()) == (not zero)
        linear = beside(tau * lam * share * factor, nudge, tau * mixed)
        metric = torch.full_like(x, 1.3)
        problem = espalier.Subproblem(torch.zeros_like(x), -linear, metric, tau)
        if factor:
            assert bool(penalty.screen(problem, groups).all()) == zero
            assert bool(penalty.screen(problem, groups).any()) == zero


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_the_weight_of_the_nuclear_norm(weight: float) -> None:
    groups = as_grouping("matrix").partition((5, 4))
    x = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    penalty, top = espalier.NuclearNorm(0.3, weight), float(torch.linalg.svdvals(x).max())
    assert float(penalty.value(x, groups)) == pytest.approx(0.3 * weight * float(torch.linalg.svdvals(x).sum()))
    for nudge in (-1e-6, 1e-6):
        step = top / (0.3 * weight) * (1 + nudge)
        assert bool((penalty.prox(x, step, groups) == 0).all()) == (nudge > 0)
        problem = espalier.Subproblem(torch.zeros_like(x), -x, torch.ones_like(x), step)
        assert bool(penalty.screen(problem, groups).all()) == (nudge > 0)


def test_reductions_to_known_penalties() -> None:
    case = Case(espalier.GroupLasso, as_grouping("input"), (6, 4, 3))
    groups, x = case.groups, case.random(12)
    pairs = [
        (espalier.SparseGroupLasso(0.4, mix=0.0), espalier.GroupLasso(0.4)),
        (espalier.SparseGroupLasso(0.4, mix=1.0), espalier.L1(0.4)),
        (espalier.GroupMCP(0.4, gamma=1e9), espalier.GroupLasso(0.4)),
    ]
    for one, other in pairs:
        assert float(one.value(x, groups)) == pytest.approx(float(other.value(x, groups)), rel=1e-6)
        torch.testing.assert_close(one.prox(x, 0.5, groups), other.prox(x, 0.5, groups), rtol=1e-7, atol=1e-12)
    # beyond γ μ nothing is shrunk
    large = x + 100 * x.sign()
    assert torch.equal(espalier.GroupMCP(0.4).prox(large, 0.5, groups), large)


# ---------------------------------------------------------------------------------------------------- structure


@few_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_structure_counts_zero_groups(case: Case, dtype: torch.dtype) -> None:
    groups, x = case.groups, case.random(13).abs().add(1).to(dtype)
    labels = case.labels(x)
    # every third group at zero, and in the others one entry: a group counts only as a whole
    x = torch.where(labels % 3 == 0, 0.0, x)
    zero = case.build(0.1).structure(x, groups).zero
    assert zero.tolist() == [g % 3 == 0 for g in range(groups.count)]
    tiny = torch.where(labels % 3 == 0, torch.finfo(torch.float32).tiny, x)
    assert not case.build(0.1).structure(tiny, groups).zero.any()


MATRICES = ((6, 9), (9, 6), (40, 17), (2, 130), (128, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("layout", [espalier.Layout(), espalier.Layout(input_dim=0, output_dim=1)])
def test_structure_finds_the_rank(shape: tuple[int, int], dtype: torch.dtype, layout: espalier.Layout) -> None:
    groups = espalier.Matrix(layout=layout).partition(shape)
    source = torch.Generator().manual_seed(0)
    full = min(shape)
    for rank in {0, 1, full // 2, full}:
        left = torch.randn(shape[0], rank, dtype=dtype, generator=source)
        x = left @ torch.randn(rank, shape[1], dtype=dtype, generator=source)
        for size in (1.0, 1e-12, 1e12):  # rank does not depend on the unit
            found = espalier.NuclearNorm(0.1).structure(groups.split(x * size), groups)
            assert (found.rank.tolist(), found.full_rank) == ([rank], full)
            assert found.zero.tolist() == [rank == 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", MATRICES)
def test_prox_leaves_the_rank_that_it_should(shape: tuple[int, int], dtype: torch.dtype) -> None:
    groups, penalty = as_grouping("matrix").partition(shape), espalier.NuclearNorm(0.1)
    x = groups.split(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype))
    singular = torch.linalg.svdvals(x.double()).squeeze(0)
    for rank in range(1, min(shape), max(1, min(shape) // 5)):
        step = float(singular[rank - 1] + singular[rank]) / 2 / 0.1
        low = penalty.prox(x, step, groups)
        assert penalty.structure(low, groups).rank.tolist() == [rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_matrices_have_a_rank_each(dtype: torch.dtype) -> None:
    groups = espalier.Matrix(layout=espalier.Layout(parts=3)).partition((12, 10))
    source = torch.Generator().manual_seed(2)
    factors = [[torch.randn(s, dtype=dtype, generator=source) for s in ((4, r), (r, 10))] for r in (0, 2, 4)]
    x = groups.split(torch.cat([left @ right for left, right in factors]))
    penalty = espalier.NuclearNorm(0.1)
    found = penalty.structure(x, groups)
    assert (found.rank.tolist(), found.zero.tolist(), found.full_rank) == ([0, 2, 4], [True, False, False], 4)
    # thresholds of their own bring each down by another number of singular values
    singular = torch.linalg.svdvals(x.double())
    cut = torch.stack([torch.ones(()), singular[1, :2].mean(), singular[2, 1:3].mean()]) / 0.1
    low = penalty.prox(x, cut.to(dtype).reshape(3, 1, 1), groups)
    assert penalty.structure(low, groups).rank.tolist() == [0, 1, 2]
    assert low[0].count_nonzero() == 0


# ---------------------------------------------------------------------------------------------------- arguments


NO_STRENGTHS = (-1e-3, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("lam", NO_STRENGTHS)
@pytest.mark.parametrize("case", PENALTIES[:-1], ids=names(PENALTIES[:-1]))
def test_a_strength_is_a_finite_number_from_zero_on(case: PenaltyCase, lam: float) -> None:
    with pytest.raises(ValueError, match="lam must be a finite number"):
        case.build(lam)


@pytest.mark.parametrize("case", PENALTIES[:-1], ids=names(PENALTIES[:-1]))
def test_a_strength_is_not_text(case: PenaltyCase) -> None:
    # YAML reads 1e-4 as text: better refused here than met in the first step
    with pytest.raises((TypeError, ValueError)):
        case.build("1e-4")


@pytest.mark.parametrize("weight", NO_STRENGTHS)
@pytest.mark.parametrize("build", [*WEIGHTED, espalier.NuclearNorm])
def test_a_weight_is_a_finite_number_from_zero_on(build: Callable[..., espalier.Penalty], weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be a finite number"):
        build(0.1, weight=weight)


@pytest.mark.parametrize("mix", [-1e-9, 1 + 1e-9, math.nan, math.inf])
def test_mix_is_a_share(mix: float) -> None:
    with pytest.raises(ValueError, match=r"mix must lie in \[0, 1\]"):
        espalier.SparseGroupLasso(0.1, mix)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan, math.inf])
def test_gamma_is_positive(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma must be a finite number in \(0"):
        espalier.GroupMCP(0.1, gamma)


ALL_GROUPINGS = (espalier.Input(), espalier.Output(), espalier.Heads(2), espalier.Element(), espalier.Matrix())


@every_penalty
def test_a_grouping_that_does_not_fit_is_refused_by_name(case: PenaltyCase) -> None:
    penalty = case.build(0.1)
    for grouping in case.groupings:
        penalty.check(as_grouping(grouping))
    penalty.check(as_grouping(penalty.default_grouping))
    for grouping in ALL_GROUPINGS:
        if penalty.needs_matrices in (None, grouping.of_matrices):
            penalty.check(grouping)
            continue
        with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is looked at below
            penalty.check(grouping)
        for part in (case.name, type(grouping).__name__, f'grouping="{penalty.default_grouping}"'):
            assert part in str(error.value)


def test_norm_penalties_and_matrices_do_not_mix() -> None:
    with pytest.raises(ValueError, match="GroupLasso does not fit Matrix groups"):
        espalier.GroupLasso(0.1).check(espalier.Matrix())
    with pytest.raises(ValueError, match="NuclearNorm does not fit Input groups"):
        espalier.NuclearNorm(0.1).check(espalier.Input())


@every_penalty
def test_repr_tells_settings_and_nothing_that_changes(case: PenaltyCase) -> None:
    # a checkpoint is compared with it
    text = repr(case.build(0.25))
    assert text == repr(case.build(0.25))
    assert text != repr(case.build(0.5))
    assert text.startswith(f"{case.name}(")
    assert "lam=0.25" in text
    assert "0x" not in text


def test_repr_of_a_penalty_from_outside() -> None:
    assert repr(ElasticNet(0.1)) == "ElasticNet(lam=0.1)"


def test_penalties_cannot_be_changed_in_place() -> None:
    # groups and checkpoints share them
    penalty = espalier.GroupLasso(0.1)
    with pytest.raises(AttributeError):
        penalty.lam = 0.2
    assert replace(penalty, lam=0.2) == espalier.GroupLasso(0.2)
