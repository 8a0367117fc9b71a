"""The soft-threshold of singular values, and the nuclear norm under a full metric by splitting and mixing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import DouglasRachford, NuclearNorm, Partition, ProximalGradient, Subproblem, Tolerance
from espalier.penalties import singular_values
from espalier.penalties.singular_values import threshold_singular_values
from espalier.reading import finish
from espalier.solvers import proximal_gradient
from espalier.solvers.anderson import Anderson, _shortest
from espalier.solvers.splitting import shares

SHAPES = ((3, 40, 24), (2, 17, 30), (2, 16, 16), (1, 1, 9), (2, 9, 1))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(shape: tuple[int, ...]) -> Partition:
    return Partition(shape, (0,))


# ------------------------------------------------------------------------------------------- the soft-threshold


def gaussian(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=source(0))


def decaying(shape: tuple[int, ...]) -> Tensor:
    return gaussian(shape) * 10 ** torch.linspace(0, -3, shape[-1])


def low_rank(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape[:2], 2, generator=source(1)) @ torch.randn(shape[0], 2, shape[2], generator=source(2))


def thresholded(x: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, and by its definition."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = (s - kappa.double().squeeze(-1)).clamp(min=0)
    return (u * s.unsqueeze(-2)) @ vt, s


def by_products(x: Tensor, kappa: Tensor) -> Tensor:
    """What runs on a GPU."""
    singular_values._guesses.clear()
    found = finish(singular_values._by_products(x, kappa))
    assert found is not None
    # a guess far too large, as a shape's other matrices may leave it, costs time only
    singular_values._guesses[x.device, x.shape] = 54
    again = finish(singular_values._by_products(x, kappa))
    torch.testing.assert_close(again, found, rtol=0, atol=1e-6 * float(x.abs().max()))
    return found


@pytest.mark.parametrize("shape", [*SHAPES, (2, 50, 12)], ids=str)
@pytest.mark.parametrize("matrix", [gaussian, decaying, low_rank])
@pytest.mark.parametrize("share", [1e-7, 3e-5, 1e-3, 0.1, 0.5, 0.93, 1.1])
@pytest.mark.parametrize("threshold", [threshold_singular_values, by_products])
def test_threshold_against_float64(
    shape: tuple[int, ...], matrix: Callable[..., Tensor], share: float, threshold: Callable[..., Tensor]
) -> None:
    x = matrix(shape)
    kappa = share * torch.linalg.matrix_norm(x, 2).reshape(-1, 1, 1)
    exact, singular = thresholded(x, kappa)
    y = threshold(x, kappa)
    size = torch.linalg.matrix_norm(x)
    assert y.dtype == x.dtype
    assert (torch.linalg.matrix_norm(y - exact) <= (1e-7 if threshold is by_products else 1e-6) * size).all()
    # a product of low rank, in the sense in which rank is reported
    rank = NuclearNorm(1.0).structure(y, whole(shape)).rank
    assert rank is not None
    assert torch.equal(rank, (singular > max(shape[1:]) * 1.2e-7 * singular[:, :1]).sum(-1))
    if share > 1:
        assert not y.any()


@pytest.mark.parametrize("share", [1e-7, 1e-5, 1.0])
def test_a_threshold_far_below_the_largest_singular_value(share: float) -> None:
    u, _ = torch.linalg.qr(torch.randn(12, 5, generator=source(3), dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(8, 5, generator=source(4), dtype=torch.float64))
    sizes = torch.tensor([1.0, 1e-2, 3e-5, 1e-6, 1e-9], dtype=torch.float64)
    x = ((u * sizes) @ v.mT).unsqueeze(0)
    kappa = torch.full((1, 1, 1), share, dtype=torch.float64)
    torch.testing.assert_close(threshold_singular_values(x, kappa), thresholded(x, kappa)[0], rtol=0, atol=1e-14)
    narrow = threshold_singular_values(x.float(), kappa.float())
    torch.testing.assert_close(narrow.double(), thresholded(x.float(), kappa)[0], rtol=0, atol=3e-7)


def test_a_method_is_left_where_it_loses_digits() -> None:
    x = torch.diag(torch.tensor([1.0, 1e-3])).unsqueeze(0)
    least = {singular_values._by_eigenvalues: 3e-7, lambda *a: finish(singular_values._by_products(*a)): 3.2e-8}
    for method, kappa in least.items():
        assert method(x, torch.full((1, 1, 1), 0.9 * kappa)) is None
        assert method(x, torch.full((1, 1, 1), 1.2 * kappa)) is not None


def of_singular_values(sizes: list[float], rows: int) -> Tensor:
    """A matrix (1, rows, columns) in float64."""
    u, _ = torch.linalg.qr(torch.randn(rows, len(sizes), generator=source(5), dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(len(sizes), len(sizes), generator=source(6), dtype=torch.float64))
    return ((u * torch.tensor(sizes, dtype=torch.float64)) @ v.mT).unsqueeze(0)


def just_above(excess: float, rows: int = 20) -> Tensor:
    """One singular value above 1, and fifteen below it: what is left of these would count beside so small a one."""
    return of_singular_values([1 + excess, *torch.linspace(0.05, 0.99, 15).tolist()], rows).float()


@pytest.mark.parametrize("rows", [20, 60])
@pytest.mark.parametrize("exponent", [2, 6, 24])
@pytest.mark.parametrize("excess", [2e-5, 1e-4])
def test_nothing_is_left_of_what_lies_below(exponent: int, excess: float, rows: int) -> None:
    y, _ = singular_values.products(just_above(excess, rows), torch.ones(1, 1, 1), exponent)
    assert NuclearNorm(1.0).structure(y, whole((1, rows, 16))).rank == 1


@pytest.mark.parametrize("rows", [12, 40])
@pytest.mark.parametrize("exponent", [2, 6, 12, 24])
def test_the_largest_fold_down_and_stay_above_the_threshold(exponent: int, rows: int) -> None:
    """Singular values at the bound, and just above and below κ."""
    most = 2.0 ** (exponent / 2)
    x = of_singular_values([most, 0.999 * most, 0.9 * most, 1.0001, 0.9999, 0.9, 1e-3], rows)
    kappa = torch.ones(1, 1, 1, dtype=torch.float64)
    y, bound = singular_values.products(x, kappa, exponent)
    assert (y - thresholded(x, kappa)[0]).abs().max() <= 1e-8 * most
    assert (torch.linalg.svdvals(y) > 1e-5).sum() == 4
    assert (1 - 1e-9) * most**2 <= bound <= 7**0.125 * most**2


@every_shape
@pytest.mark.parametrize("matrix", [gaussian, decaying, low_rank])
@pytest.mark.parametrize("share", [4e-7, 3e-6])
def test_a_small_threshold_needs_no_decomposition_of_the_matrix(
    shape: tuple[int, ...], matrix: Callable[..., Tensor], share: float
) -> None:
    """As ProxSGD's is in its last stage, where a decomposition of X itself takes twice as long."""
    x = matrix(shape)
    kappa = share * torch.linalg.matrix_norm(x, 2).reshape(-1, 1, 1)
    y = singular_values._by_eigenvalues(x, kappa)
    assert y is not None
    exact = thresholded(x, kappa)[0]
    # nothing but the rounding of the result
    assert ((y - exact).abs() <= 2**-24 * exact.abs() + 5e-9 * exact.abs().amax((1, 2), keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_one_broken_matrix_gives_nan_and_leaves_the_others(dtype: torch.dtype, broken: float) -> None:
    x = gaussian((3, 6, 4)).to(dtype)
    kappa = torch.ones(3, 1, 1, dtype=dtype)
    expected = threshold_singular_values(x, kappa)
    x[1, 2, 3] = broken
    y = threshold_singular_values(x, kappa)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("low", [1e-12, 1e-6, 0.01, 0.5, 1.0])
def test_scalings_take_the_whole_interval_to_one(low: float) -> None:
    x = torch.logspace(math.log10(low), 0, 1001, dtype=torch.float64)
    for alpha in singular_values._scalings(low):
        y = alpha * x
        x = 0.5 * y * (3 - y * y)
    torch.testing.assert_close(x, torch.ones_like(x), rtol=0, atol=1e-8)


# ------------------------------------------------------------------------------------------------- the subproblem


def pose(shape: tuple[int, ...], seed: int, decades: float = 1.0, dtype: torch.dtype = torch.float64) -> Subproblem:
    """Metrics spread over `decades`; singular values of b between 0 and about √m + √n."""
    rand = source(seed)
    metric = 10 ** (decades * (torch.rand(shape, generator=rand, dtype=torch.float64) - 0.5))
    linear, anchor = torch.randn(2, *shape, generator=rand, dtype=torch.float64).unbind()
    direction = metric * anchor - linear
    return Subproblem(anchor.to(dtype), direction.to(dtype), metric.to(dtype), tau=1.3)


def penalty_for(problem: Subproblem, share: float) -> NuclearNorm:
    """κ that share of the largest singular value of b: the solution is 0 from 1 on."""
    return NuclearNorm(share * float(torch.linalg.matrix_norm(problem.linear, 2).mean()) / 1.3)


def values(problem: Subproblem, penalty: NuclearNorm, x: Tensor) -> Tensor:
    """Q of each matrix."""
    step = x.double() - problem.anchor.double()
    smooth = (step * (0.5 * problem.metric * step + problem.pull * problem.direction)).sum((1, 2))
    kappa = torch.as_tensor(problem.tau * penalty.lam, dtype=torch.float64, device=x.device).flatten()
    return smooth + kappa * torch.linalg.svdvals(x.double()).sum(-1)


def least_subgradient(problem: Subproblem, penalty: NuclearNorm, x: Tensor) -> Tensor:
    """The norm of the shortest element of ∂Q(x), for each matrix, from the singular value decomposition of x alone."""
    wide = replace(problem, anchor=problem.anchor.double(), direction=problem.direction.double())
    gradient, shortest = wide.gradient(x.double()), []
    for g, point, kappa in zip(
        gradient, x.double(), torch.as_tensor(problem.tau, dtype=torch.float64).expand(len(x), 1, 1), strict=True
    ):
        bound = float(kappa) * penalty.lam
        u, s, vt = torch.linalg.svd(point, full_matrices=False)
        rank = int((s > max(x.shape[1:]) * torch.finfo(x.dtype).eps * s[0]).sum())
        u, v = u[:, :rank], vt[:rank].mT
        normal = g - u @ (u.mT @ g)
        normal = normal - (normal @ v) @ v.mT
        over = (torch.linalg.svdvals(normal) - bound).clamp(min=0)
        shortest.append((over.square().sum() + (g - normal + bound * u @ v.mT).square().sum()).sqrt())
    return torch.stack(shortest)


def truth(problem: Subproblem, penalty: NuclearNorm) -> Tensor:
    """By many steps of accelerated proximal gradient with singular value decompositions, in float64."""
    b, h = problem.linear.double(), problem.metric.double()
    theta = 1 / h.amax((1, 2), keepdim=True)
    ratio = (h.amin((1, 2), keepdim=True) * theta).sqrt()
    kappa = theta * problem.tau * penalty.lam
    x = y = b / h
    for _ in range(700):
        new = thresholded(y - theta * (h * y - b), kappa)[0]
        x, y = new, new + (1 - ratio) / (1 + ratio) * (new - x)
    return x


def ask(shape: tuple[int, ...], solver: DouglasRachford, t: float, penalty: NuclearNorm) -> float:
    return float(solver.tolerance.at(t)) * 1.3 * penalty.lam * math.sqrt(min(shape[1:]))


@every_shape
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 1.01])
@pytest.mark.parametrize("decades", [0.0, 1.0, 3.0])
def test_dr_finds_the_solution(shape: tuple[int, ...], share: float, decades: float) -> None:
    problem = pose(shape, 5, decades)
    penalty = penalty_for(problem, share)
    solver = DouglasRachford(Tolerance(1e-9), max_iters=2000)
    z = solver.solve(problem, penalty, whole(shape), problem.anchor)
    exact = truth(problem, penalty)
    torch.testing.assert_close(z.point, exact, rtol=0, atol=1e-7 * float(exact.abs().max() + 1))
    assert (least_subgradient(problem, penalty, z.point) <= ask(shape, solver, 1, penalty) + 1e-12).all()
    if decades == 0:
        assert z.iterations == 1


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_the_papers_condition(shape: tuple[int, ...], dtype: torch.dtype, share: float) -> None:
    problem, groups = pose(shape, 6, decades=1.5, dtype=dtype), whole(shape)
    penalty, solver = penalty_for(problem, share), DouglasRachford()
    start = 3 * problem.anchor
    for t in (1, 30, 1000):
        z = solver.solve(replace(problem, t=t), penalty, groups, start)
        assert z.iterations < solver.max_iters
        slack = 2e-5 * float(torch.linalg.matrix_norm(problem.linear).max()) if dtype == torch.float32 else 0
        assert (least_subgradient(problem, penalty, z.point) <= ask(shape, solver, t, penalty) + slack).all()
        assert (values(problem, penalty, z.point) <= values(problem, penalty, start)).all()


def test_later_steps_ask_for_more_and_no_step_for_nothing() -> None:
    shape = (1, 24, 20)
    problem, groups = pose(shape, 7, decades=1.5), whole(shape)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford()
    runs = [solver.solve(replace(problem, t=t), penalty, groups, problem.anchor) for t in (1, 100, 10000)]
    counts = [run.iterations for run in runs]
    assert counts == sorted(set(counts))
    for run, t in zip(runs, (1, 100, 10000), strict=True):
        short = replace(solver, max_iters=run.iterations - 1).solve(problem, penalty, groups, problem.anchor).point
        assert least_subgradient(problem, penalty, short) > 0.3 * ask(shape, solver, t, penalty)
    # from the solution it stops at once
    solution = solver.solve(replace(problem, t=10**8), penalty, groups, problem.anchor).point
    assert solver.solve(replace(problem, t=10000), penalty, groups, solution).iterations == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_metric_counts_where_the_matrix_lies(seed: int) -> None:
    """Inputs that are hardly active have a small metric, and small weights. A plain mean takes 19 to 25 iterations."""
    shape, rand, wide = (1, 48, 32), source(seed), torch.float64
    active = 10 ** (-6 * torch.rand(32, generator=rand, dtype=wide))
    metric = active * (0.5 + torch.rand(shape, generator=rand, dtype=wide))
    left, right = torch.randn(1, 48, 3, generator=rand, dtype=wide), torch.randn(1, 3, 32, generator=rand, dtype=wide)
    noise = 0.1 * metric * torch.randn(shape, generator=rand, dtype=wide)
    problem = Subproblem(left @ (right * active.sqrt()), noise, metric, tau=1.3, t=1000)
    penalty, groups, solver = penalty_for(problem, 0.05), whole(shape), DouglasRachford()
    start = solver.solve(problem, penalty, groups, problem.anchor).point
    next_one = replace(problem, direction=1.3 * noise)
    found = solver.solve(next_one, penalty, groups, start)
    assert found.iterations <= 6
    assert least_subgradient(next_one, penalty, found.point) <= ask(shape, solver, 1000, penalty)


def test_shares_of_a_matrix() -> None:
    x = gaussian((3, 5, 4))
    expected = x.square() / x.square().sum((1, 2), keepdim=True)
    for scale in (1e-30, 1.0, 1e30):  # whose squares float32 does not have
        torch.testing.assert_close(shares(scale * x), expected)
    x[1] = 0
    assert (shares(x)[1] == 1 / 20).all()


def test_far_fewer_steps_than_proximal_gradient() -> None:
    shape = (1, 48, 32)
    problem, groups = pose(shape, 8, decades=1.5), whole(shape)
    penalty, solver = penalty_for(problem, 0.2), DouglasRachford()
    mixed = solver.solve(problem, penalty, groups, problem.anchor)
    plain = ProximalGradient(max_iters=2000).solve(problem, penalty, groups, problem.anchor)
    assert 3 * mixed.iterations < plain.iterations
    # and no less precise
    allowed = max(ask(shape, solver, 1, penalty), float(least_subgradient(problem, penalty, plain.point)))
    assert least_subgradient(problem, penalty, mixed.point) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rank_is_that_of_the_solution(dtype: torch.dtype) -> None:
    shape = (4, 30, 20)
    problem, groups = pose(shape, 9, decades=1.0, dtype=dtype), whole(shape)
    penalty = penalty_for(problem, 0.5)
    exact = torch.linalg.svdvals(truth(problem, penalty))
    z = DouglasRachford(Tolerance(1e-3)).solve(problem, penalty, groups, problem.anchor).point
    rank = penalty.structure(z, groups).rank
    assert rank is not None
    assert rank.tolist() == (exact > 1e-6 * exact[:, :1]).sum(-1).tolist()
    assert ((rank > 2) & (rank < 18)).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_batch_is_its_matrices_one_by_one(shape: tuple[int, ...]) -> None:
    problem = pose(shape, 10, decades=1.5)
    count = shape[0]
    # some near their solution, some not, and numbers of their own
    scale = torch.logspace(-3, 3, count, dtype=torch.float64).reshape(-1, 1, 1)
    numbers = {
        "tau": torch.linspace(0.5, 2, count).double().reshape(-1, 1, 1),
        "pull": torch.linspace(1, 2, count).double().reshape(-1, 1, 1),
        "t": torch.linspace(1, 900, count).double().reshape(-1, 1, 1),
    }
    problem = replace(problem, metric=problem.metric * scale, direction=problem.direction * scale, **numbers)
    problem = replace(problem, tau=problem.tau * scale)
    penalty, solver = NuclearNorm(1.5), DouglasRachford()
    start = problem.anchor.clone()
    start[-1] = 0
    together = solver.solve(problem, penalty, whole(shape), start)
    counts = []
    for i in range(count):
        parts = {k: getattr(problem, k)[i : i + 1] for k in ("anchor", "direction", "metric", "tau", "pull", "t")}
        alone = solver.solve(Subproblem(**parts), penalty, whole((1, *shape[1:])), start[i : i + 1])
        torch.testing.assert_close(alone.point, together.point[i : i + 1], rtol=1e-9, atol=1e-10)
        counts.append(alone.iterations)
    assert together.iterations == max(counts)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_threshold_the_solution_is_the_unpenalised_one(dtype: torch.dtype) -> None:
    shape = (3, 5, 4)
    problem, groups = pose(shape, 11, dtype=dtype), whole(shape)
    free = problem.unpenalised()
    assert torch.equal(DouglasRachford().solve(problem, NuclearNorm(0.0), groups, problem.anchor).point, free)
    mixed = replace(problem, tau=torch.tensor([0.0, 1.0, 0.0], dtype=dtype).reshape(-1, 1, 1))
    z = DouglasRachford().solve(mixed, NuclearNorm(1.0), groups, problem.anchor).point
    assert torch.equal(z[[0, 2]], free[[0, 2]])
    one = DouglasRachford().solve(replace(problem, tau=1.0), NuclearNorm(1.0), groups, problem.anchor).point
    torch.testing.assert_close(z[1], one[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero(dtype: torch.dtype) -> None:
    shape = (2, 6, 5)
    problem, groups = pose(shape, 12, dtype=dtype), whole(shape)
    z = DouglasRachford().solve(problem, NuclearNorm(1e6), groups, problem.anchor)
    assert not z.point.any()
    nothing = Subproblem(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), problem.metric, 1.0)
    assert not DouglasRachford().solve(nothing, NuclearNorm(1.0), groups, nothing.anchor).point.any()


@pytest.mark.parametrize("where", ["anchor", "direction", "metric", "start"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_neither_hangs_nor_spreads(where: str, broken: float, dtype: torch.dtype) -> None:
    shape = (3, 6, 5)
    problem, groups = pose(shape, 13, dtype=dtype), whole(shape)
    expected = DouglasRachford().solve(problem, NuclearNorm(1.0), groups, problem.anchor).point
    start = problem.anchor.clone()
    parts = {k: getattr(problem, k).clone() for k in ("anchor", "direction", "metric")}
    (start if where == "start" else parts[where])[1, 2, 3] = broken
    z = DouglasRachford().solve(replace(problem, **parts), NuclearNorm(1.0), groups, start)
    assert z.point[1].isnan().all()
    torch.testing.assert_close(z.point[[0, 2]], expected[[0, 2]])
    assert z.iterations < 50


@pytest.mark.parametrize("settings", [{"max_iters": 0}, {"memory": 0}], ids=str)
def test_dr_refuses(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        DouglasRachford(**settings)


def test_it_survives_metrics_over_many_decades() -> None:
    shape = (2, 16, 12)
    for decades in (5.0, 8.0):
        problem, groups = pose(shape, 14, decades=decades, dtype=torch.float32), whole(shape)
        penalty = penalty_for(problem, 0.3)
        z = DouglasRachford().solve(problem, penalty, groups, problem.anchor)
        assert z.point.isfinite().all()
        assert (values(problem, penalty, z.point) <= values(problem, penalty, problem.anchor)).all()


def test_training_keeps_the_promise_and_stays_cheap() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:500] / 16, dtype=torch.float32), torch.tensor(labels[:500])
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = espalier.RAMDA(espalier.regularize(model, NuclearNorm(3e-3)), lr=1e-2)
    for step in range(60):
        chosen = torch.randperm(500)[:64]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        if step < 59:
            optimizer.step()
    with optimizer.diagnostics() as report:
        optimizer.step()
    for solve in report.solves:
        assert solve.iterations <= 25
        assert solve.decrease >= 0
    with optimizer.structured():
        assert 0 < espalier.structure(optimizer).layers[0].rank < 48


METHODS = (espalier.RAMDA, espalier.RMDA, espalier.ProxSGD, espalier.ProxGen, espalier.ProxSSI)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_parameters_of_one_shape_step_together_as_alone(method: type[espalier.RAMDA]) -> None:
    torch.manual_seed(0)
    start = [torch.randn(s) for s in ((12, 8), (8, 12), (12, 8), (12, 8, 1), (5, 5))]
    together, alone = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    penalty = NuclearNorm(0.05)
    optimizers = [method([{"params": ps, "penalty": penalty}], lr=0.1) for ps in (together, *([p] for p in alone))]
    for _ in range(8):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, x in zip(together, alone, start, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=3e-5)
        assert not torch.equal(p, x)


# ------------------------------------------------------------------------------------------------- mixing


def test_mixing_finds_the_shortest_combination() -> None:
    moves = torch.randn(4, 30, generator=source(20), dtype=torch.float64) * torch.logspace(0, -3, 4).double()[:, None]
    c = torch.tensor(_shortest((moves @ moves.mT).tolist()), dtype=torch.float64)
    torch.testing.assert_close(c.sum(), torch.ones_like(c.sum()))
    # shortest: orthogonal to every direction of sum 0
    left = (moves[1:] - moves[:1]) @ (c @ moves)
    assert (left.abs() <= 1e-4 * moves.norm(dim=1)[1:] * (c @ moves).norm()).all()


@pytest.mark.parametrize("products", [[[0.0, 0.0], [0.0, 1.0]], [[math.nan] * 2] * 2, [[math.inf, 1.0], [1.0, 1.0]]])
def test_mixing_gives_up_on_what_it_cannot_mix(products: list[list[float]]) -> None:
    assert _shortest(products) is None
    mixing = Anderson({(i, j): products[i][j] for i in (0, 1) for j in (0, 1)}, usable=[0, 1])
    assert mixing.weights(1, memory=3) == [0.0, 1.0, 0.0]


def test_mixing_pauses_longer_after_each_failure() -> None:
    mixing = Anderson()
    assert mixing.add(0, 1.0, [1.0, 0.0]) == (True, False)
    for pause in (1, 2, 4):
        assert mixing.add(1, 2.1, [0.1, 1.0]) == (False, True)
        for _ in range(pause):
            assert mixing.plain
            assert mixing.add(0, 1.5, [1.0, 0.1]) == (False, False)
        assert not mixing.plain
    assert mixing.add(1, 0.9, [0.1, 1.0]) == (True, False)
    assert mixing.weights(1, memory=2) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_proximal_gradient_without_a_rule_steps_together_as_alone(share: float) -> None:
    problem = pose((3, 8, 5), 24, decades=2.0)
    problem = replace(problem, tau=torch.tensor([1.3, 20.0, 0.0], dtype=torch.float64)[:, None, None])
    penalty, solver = penalty_for(problem, share), ProximalGradient(max_iters=5, rtol=None)
    assert solver.batches(penalty)
    for other in (
        ProximalGradient(max_iters=5),
        ProximalGradient(rtol=1e-3, min_iters=1),
        replace(solver, tolerance=Tolerance(1e-3)),
        replace(solver, step="backtracking"),
    ):
        assert not other.batches(penalty)
    found = finish(solver.solving(problem, penalty, problem.anchor))
    assert found.iterations == 5
    assert not found.point[1].any()
    for i in range(3):
        one = {k: getattr(problem, k)[i : i + 1] for k in ("anchor", "direction", "metric", "tau")}
        alone = solver.solve(replace(problem, **one), penalty, whole((1, 8, 5)), problem.anchor[i : i + 1])
        torch.testing.assert_close(found.point[i : i + 1], alone.point)


@pytest.mark.parametrize("few", [0, 64], ids=["by the product", "by singular values"])
@pytest.mark.parametrize("min_iters", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize(("rtol", "dtype"), [(2e-3, torch.float64), (1e-3, torch.float64), (1e-3, torch.float32)])
def test_each_matrix_of_a_stack_stops_where_it_does_alone(
    rtol: float, dtype: torch.dtype, scale: float, min_iters: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proximal_gradient, "_FEW", few)
    problem = replace(pose((4, 20, 12), 5, dtype=dtype), scale=scale, pull=1.5)
    penalty = penalty_for(problem, 0.3)
    # of the second next to nothing is asked, the third ends at 0, the last has no penalty
    share = torch.tensor([1.0, 1e-3, 1.0, 1.0], dtype=dtype)[:, None, None]
    tau = torch.tensor([1.3, 1.3, 30.0, 0.0], dtype=dtype)[:, None, None]
    problem = replace(problem, anchor=problem.anchor * share, direction=problem.direction * share, tau=tau)
    solver = ProximalGradient(max_iters=50, min_iters=min_iters, rtol=rtol)
    assert solver.batches(penalty)
    found = finish(solver.solving(problem, penalty, problem.anchor))
    iterations = []
    for i in range(4):
        one = {k: getattr(problem, k)[i : i + 1] for k in ("anchor", "direction", "metric")}
        single = replace(problem, **one, tau=tau[i].item())
        alone = solver.solve(single, penalty, whole((1, 20, 12)), single.anchor)
        torch.testing.assert_close(found.point[i : i + 1], alone.point)
        iterations.append(int(alone.iterations))
    # another number of iterations would be seen in the point
    assert min_iters == iterations[1] < iterations[0] < iterations[3] == found.iterations < 50
    one_less = replace(solver, max_iters=iterations[0] - 1)
    cut = finish(one_less.solving(problem, penalty, problem.anchor))
    assert cut.iterations == iterations[0] - 1
    assert not torch.allclose(cut.point[0], found.point[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cut.point[1:3], found.point[1:3])


@pytest.mark.parametrize("shape", [(3, 10, 16), (3, 100, 80)], ids=str)
def test_a_rule_bears_a_matrix_that_is_not_finite(shape: tuple[int, ...]) -> None:
    problem = pose(shape, 5, dtype=torch.float32)
    problem.direction[1, 2, 3] = math.nan
    solver = ProximalGradient(max_iters=5, rtol=1e-3)
    found = finish(solver.solving(problem, NuclearNorm(1.0), problem.anchor)).point
    assert found[1].isnan().any()
    assert found[::2].isfinite().all()


def test_a_prox_can_be_differentiated() -> None:
    x, along = torch.randn(2, 1, 40, 24, generator=source(3), dtype=torch.float64).unbind()

    def value(x: Tensor) -> Tensor:
        return NuclearNorm(4.0).prox(x, 1.0, whole((1, 40, 24))).square().sum()

    slope = float(value(x + 1e-5 * along) - value(x - 1e-5 * along)) / 2e-5
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        value(leaf).backward()
        assert float((leaf.grad * along).sum()) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("memory", [1, 2, 20])
def test_any_memory_leads_to_the_solution(memory: int) -> None:
    shape = (2, 12, 10)
    problem = pose(shape, 21)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford(Tolerance(1e-8), max_iters=2000, memory=memory)
    z = solver.solve(problem, penalty, whole(shape), problem.anchor)
    torch.testing.assert_close(z.point, truth(problem, penalty), rtol=0, atol=1e-6)
    assert z.iterations < 2000


# ------------------------------------------------------------------------------------------------- on a GPU


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["highest", "high"])
def digits(request: pytest.FixtureRequest) -> Iterator[None]:
    """TF32, which the command trains with, must not reach what is solved."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("digits")
@every_shape
@pytest.mark.parametrize("share", [1e-8, 1e-6, 1.2e-5, 1e-3, 0.5, 1.1])  # svd, products
def test_threshold_on_a_gpu(shape: tuple[int, ...], share: float) -> None:
    for scale in (1.0, 1e-6, 1e8, 1.0):  # what is recorded serves other numbers
        x = (scale * gaussian(shape)).cuda()
        kappa = share * torch.linalg.matrix_norm(x, 2).reshape(-1, 1, 1)
        exact, singular = thresholded(x, kappa)
        y = threshold_singular_values(x, kappa)
        assert (torch.linalg.matrix_norm(y - exact) <= 1e-6 * torch.linalg.matrix_norm(x)).all()
        assert share < 1 or not y.any()
        rank = NuclearNorm(1.0).structure(y, whole(shape)).rank
        assert rank is not None
        assert torch.equal(rank, (singular > max(shape[1:]) * 1.2e-7 * singular[:, :1]).sum(-1))


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_solution_on_a_gpu(dtype: torch.dtype) -> None:
    shape = (4, 30, 20)
    problem, groups = pose(shape, 22, dtype=dtype), whole(shape)
    penalty, solver = penalty_for(problem, 0.4), DouglasRachford(Tolerance(1e-4))
    problem.direction[2, 0, 0] = math.nan
    problem = replace(problem)  # b was computed before
    moved = {k: getattr(problem, k).cuda() for k in ("anchor", "direction", "metric")}
    here = solver.solve(problem, penalty, groups, problem.anchor).point
    there = solver.solve(replace(problem, **moved), penalty, groups, moved["anchor"]).point.cpu()
    torch.testing.assert_close(there, here, rtol=0, atol=1e-3, equal_nan=True)
    assert there[2].isnan().all()


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_many_shapes_on_a_gpu_step_as_on_the_cpu(method: type[espalier.RAMDA]) -> None:
    """More of them than there are streams, through many steps, with the structured point looked at in between."""
    torch.manual_seed(0)
    start = [torch.randn(4 + 3 * (i % 13), 5 + 2 * (i % 11)) for i in range(24)]
    start += [torch.randn(s) for s in ((70, 66), (130, 20), (96, 96), (96, 96))]  # that no single program holds
    here, there = ([nn.Parameter(x.clone().to(d)) for x in start] for d in ("cpu", "cuda"))
    penalty = NuclearNorm(0.02)
    options: dict[str, Any] = {}
    if method not in (espalier.RMDA, espalier.ProxSGD):
        # at the default tolerance one iteration more or less moves weights by 2 %; at the default eps rounding does,
        # where a gradient happens to be small: so far is float32 from float64 on one device, too
        options = {"solver": DouglasRachford(Tolerance(1e-3)), "eps": 0.1}
    optimizers = [method([{"params": ps, "penalty": penalty}], lr=0.05, **options) for ps in (here, there)]
    minimum = [torch.randn_like(x[:, :2]) @ torch.randn_like(x[:2]) for x in start]
    for step in range(16):
        for p, q, m in zip(here, there, minimum, strict=True):
            # the same gradient for both: what rounding adds is not to grow
            p.grad = p.detach() - m + 0.1 * torch.randn_like(m)
            q.grad = p.grad.to("cuda")
        for optimizer in optimizers:
            optimizer.step()
        if step % 10 == 5:
            ranks = []
            for optimizer in optimizers:
                with optimizer.structured():
                    ranks.append([layer.rank for layer in espalier.structure(optimizer).layers])
            assert sum(a != b for a, b in zip(*ranks, strict=True)) <= 2  # a singular value at the threshold
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=0, atol=2e-3 * float(p.detach().abs().max()))
