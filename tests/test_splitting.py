"""Small matrices under the nuclear norm by one kernel each: as by torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import DouglasRachford, NuclearNorm, Subproblem, Tolerance
from espalier.penalties import singular_values
from espalier.penalties.singular_values import thresholding
from espalier.reading import finish
from test_nuclear import ask, gaussian, just_above, least_subgradient, penalty_for, pose, thresholded, values, whole

pytest.importorskip("triton")

from espalier import kernels
from espalier.kernels import splitting
from espalier.kernels.singular_values import soft_threshold

# the interpreter computes masked lanes too, and there it divides by zero
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((3, 40, 24), (2, 17, 30), (2, 16, 16), (1, 1, 9), (2, 9, 1), (1, 10, 16), (1, 70, 33))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The kernel serves whatever is small enough, on the CPU too. What it served."""
    served: list[tuple[int, ...]] = []

    def small(x: Tensor) -> bool:
        served.append(tuple(x.shape))
        return True

    monkeypatch.setattr(kernels, "takes", small)
    return served


def solved(problem: Subproblem, penalty: NuclearNorm, solver: DouglasRachford, fused: bool) -> tuple[Tensor, int]:
    there = {k: getattr(problem, k).to(DEVICE) for k in ("anchor", "direction", "metric")}
    found = finish(solver.solving(replace(problem, **there), penalty, there["anchor"], fused))
    return found.point.cpu(), int(found.iterations)


@every_shape
@pytest.mark.parametrize("share", [0.02, 0.4, 0.8, 1.5])
@pytest.mark.parametrize("decades", [0.0, 2.0])
def test_the_papers_condition(
    shape: tuple[int, ...], share: float, decades: float, kernel: list[tuple[int, ...]]
) -> None:
    problem = replace(pose(shape, 60, decades, torch.float32), t=20)
    penalty, solver = penalty_for(problem, share), DouglasRachford()
    z, iterations = solved(problem, penalty, solver, fused=True)
    assert kernel == [shape]
    plain, as_many = solved(problem, penalty, solver, fused=False)
    assert kernel == [shape]
    assert abs(iterations - as_many) <= 1 + 0.1 * as_many
    slack = 2e-5 * float(torch.linalg.matrix_norm(problem.linear).max())
    assert (least_subgradient(problem, penalty, z) <= ask(shape, solver, 20, penalty) + slack).all()
    assert (values(problem, penalty, z) <= values(problem, penalty, problem.anchor)).all()
    torch.testing.assert_close(z, plain, rtol=0, atol=1e-4 * float(plain.abs().max() + 1))
    if share > 1:
        assert not z.any()


def test_each_matrix_has_its_own_threshold_and_tolerance(kernel: list[tuple[int, ...]]) -> None:
    tau, t = torch.tensor([0.3, 1.0, 3.0])[:, None, None], torch.tensor([1.0, 100.0, 1e4])[:, None, None]
    problem = replace(pose((3, 20, 12), 61, 1.5, torch.float32), tau=tau.to(DEVICE), t=t.to(DEVICE))
    penalty, solver = NuclearNorm(1.0), DouglasRachford()
    z, _ = solved(problem, penalty, solver, fused=True)
    for i in range(3):
        one = {k: getattr(problem, k)[i : i + 1] for k in ("anchor", "direction", "metric")}
        alone = replace(problem, **one, tau=float(tau[i]), t=float(t[i]))
        torch.testing.assert_close(z[i : i + 1], solved(alone, penalty, solver, fused=True)[0])
        limit = float(solver.tolerance.at(float(t[i]))) * float(tau[i]) * math.sqrt(12)
        assert least_subgradient(alone, penalty, z[i : i + 1]) <= limit + 1e-4


def test_the_last_iteration_starts_from_the_best(kernel: list[tuple[int, ...]]) -> None:
    problem = pose((1, 24, 20), 62, 4.0, torch.float32)
    penalty = penalty_for(problem, 0.1)
    for most in (1, 2, 7, 23):
        solver = DouglasRachford(Tolerance(1e-9), max_iters=most)
        (z, count), (plain, _) = (solved(problem, penalty, solver, fused) for fused in (True, False))
        assert count == most
        torch.testing.assert_close(z, plain, rtol=0, atol=3e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("memory", [1, 2, 8])
def test_any_memory_that_it_has_room_for(memory: int, kernel: list[tuple[int, ...]]) -> None:
    problem = pose((1, 24, 20), 63, 1.5, torch.float32)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford(Tolerance(1e-4), memory=memory)
    (z, count), (plain, as_many) = (solved(problem, penalty, solver, fused) for fused in (True, False))
    assert abs(count - as_many) <= 2 + 0.1 * as_many
    torch.testing.assert_close(z, plain, rtol=0, atol=1e-4)


def test_more_memory_is_left_to_torch(kernel: list[tuple[int, ...]]) -> None:
    problem = pose((1, 6, 5), 63, dtype=torch.float32)
    solved(problem, penalty_for(problem, 0.3), DouglasRachford(memory=9), fused=True)
    assert not kernel


@pytest.mark.parametrize("max_iters", [1, 2, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_however_few_the_iterations_it_never_goes_up(
    max_iters: int, fused: bool, kernel: list[tuple[int, ...]]
) -> None:
    """Metrics over eight decades, from a start near the solution: splitting takes many iterations to come back."""
    problem = pose((4, 16, 12), 66, 8.0, torch.float32)
    penalty = penalty_for(problem, 0.1)
    start = DouglasRachford(Tolerance(1e-3), max_iters=2000).solve(problem, penalty, whole((4, 16, 12)), problem.anchor)
    moved = replace(problem, direction=problem.direction * 1.01)
    there = {k: getattr(moved, k).to(DEVICE) for k in ("anchor", "direction", "metric")}
    solver = DouglasRachford(Tolerance(1e-6), max_iters=max_iters)
    z = finish(solver.solving(replace(moved, **there), penalty, start.point.to(DEVICE), fused)).point.cpu()
    before = values(moved, penalty, start.point)
    assert (values(moved, penalty, z) <= before + 1e-5 * before.abs()).all()
    assert not torch.equal(z, start.point)


@every_shape
@pytest.mark.parametrize("share", [1e-7, 1e-5, 1e-3, 0.4, 0.8, 1.1])
def test_soft_threshold(shape: tuple[int, ...], share: float) -> None:
    x = gaussian(shape)
    kappa = share * torch.linalg.matrix_norm(x, 2).reshape(-1, 1, 1)
    y, bounds = soft_threshold(x.to(DEVICE), kappa.to(DEVICE))
    exact, singular = thresholded(x, kappa)
    assert (torch.linalg.matrix_norm(y.cpu() - exact) <= 1e-7 * torch.linalg.matrix_norm(x)).all()
    squares = (torch.linalg.svdvals(x)[:, 0] / kappa.flatten()).square()
    assert ((1 - 1e-6) * squares <= bounds.cpu()).all()
    assert (bounds.cpu() <= (1 + 1e-6) * (min(shape[1:]) ** 0.125 * squares).clamp(min=4)).all()
    rank = NuclearNorm(1.0).structure(y.cpu(), whole(shape)).rank
    assert rank is not None
    assert torch.equal(rank, (singular > max(shape[1:]) * 1.2e-7 * singular[:, :1]).sum(-1))
    assert share < 1 or not y.any()


@pytest.mark.parametrize("excess", [2e-5, 1e-4])
def test_nothing_is_left_of_what_lies_below(excess: float) -> None:
    y, _ = soft_threshold(just_above(excess).to(DEVICE), torch.ones(1, 1, 1, device=DEVICE))
    assert NuclearNorm(1.0).structure(y.cpu(), whole((1, 20, 16))).rank == 1


@pytest.mark.parametrize("what", ["far below", "no threshold", "infinite"])
def test_what_is_infinite_comes_to_its_end(what: str) -> None:
    """Of 16 columns, so that no padding makes NaN of it."""
    x, kappa = torch.ones(1, 16, 16, device=DEVICE), torch.ones(1, 1, 1, device=DEVICE)
    kappa *= {"far below": 1e-20, "no threshold": 0.0, "infinite": 1.0}[what]
    if what == "infinite":
        x[0, 3, 4] = math.inf
    assert not soft_threshold(x, kappa)[1] < singular_values.PRODUCTS_BELOW
    assert splitting.solve(x, torch.ones_like(x), x, kappa, torch.ones_like(kappa), 5, 5)[1].tolist() == [0]


def test_every_singular_value_at_the_threshold() -> None:
    x = 0.5 * torch.eye(16, device=DEVICE).unsqueeze(0)
    y, bounds = soft_threshold(x, torch.full((1, 1, 1), 0.5, device=DEVICE))
    assert y.abs().max() <= 1e-6
    assert bounds < singular_values.PRODUCTS_BELOW


@pytest.mark.parametrize("kappa", [1e-9, 1.0])
def test_a_soft_threshold_that_is_not_precise_is_left_to_torch(kappa: float, kernel: list[tuple[int, ...]]) -> None:
    x = gaussian((2, 9, 5))
    x[1] *= 1e-3 / kappa
    k = torch.full((2, 1, 1), kappa)
    y = finish(thresholding(x.to(DEVICE), k.to(DEVICE), fused=True)).cpu()
    assert kernel == [(2, 9, 5)]
    torch.testing.assert_close(y.double(), thresholded(x, k)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["no penalty", "nan", "inf", "far below"])
def test_what_the_kernel_cannot_do_is_left_to_torch(what: str, kernel: list[tuple[int, ...]]) -> None:
    """One matrix of three; the others come out as ever."""
    problem = pose((3, 12, 9), 64, dtype=torch.float32)
    penalty, solver = NuclearNorm(1.0), DouglasRachford(Tolerance(1e-3))
    if what == "no penalty":
        problem = replace(problem, tau=torch.tensor([1.3, 0.0, 1.3], device=DEVICE)[:, None, None])
    elif what == "far below":
        problem.metric[1], problem.direction[1] = 1.0, 1e6 * problem.direction[1]
    else:
        problem.direction[1, 2, 3] = float(what)
    problem = replace(problem)  # b was computed before
    z, _ = solved(problem, penalty, solver, fused=True)
    plain, _ = solved(problem, penalty, solver, fused=False)
    assert kernel == [(3, 12, 9)]
    torch.testing.assert_close(z, plain, rtol=1e-3, atol=1e-3, equal_nan=True)
    if what == "no penalty":
        torch.testing.assert_close(z[1], problem.unpenalised()[1], rtol=1e-6, atol=1e-6)
    elif what != "far below":
        assert z[1].isnan().all()


@pytest.mark.parametrize(
    "method", [espalier.RAMDA, espalier.ProxGen, espalier.RMDA, espalier.ProxSGD], ids=lambda m: m.__name__
)
def test_a_training_ends_alike_and_fused_false_has_none_of_it(
    method: type[espalier.RAMDA], kernel: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    start = [torch.randn(12, 7, device=DEVICE), torch.randn(5, 20, device=DEVICE)]
    target = [x[:, :2] @ x[:2] / 4 for x in start]
    ends = []
    for fused in (None, False):
        kernel.clear()
        ps = [nn.Parameter(x.clone()) for x in start]
        optimizer = method([{"params": ps, "penalty": NuclearNorm(0.02)}], lr=0.05, fused=fused)
        for _ in range(6):
            for p, x in zip(ps, target, strict=True):
                p.grad = p.detach() - x
            optimizer.step()
        assert len(kernel) == (0 if fused is False else 12)
        ends.append([p.detach() for p in ps])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_small_matrices_go_to_the_kernel() -> None:
    x = torch.zeros(1, 64, 128, device="cuda")
    assert kernels.takes(x)
    assert kernels.takes(x.mT)
    for other in (x.double(), x.cpu(), x[:, :0], x.new_zeros(1, 65, 128), x.new_zeros(1, 64, 129)):
        assert not kernels.takes(other)
    problem = pose((4, 128, 64), 65, 2.0, torch.float32)
    penalty, solver = penalty_for(problem, 0.2), DouglasRachford()
    (z, _), (plain, _) = (solved(problem, penalty, solver, fused) for fused in (True, False))
    torch.testing.assert_close(z, plain, rtol=0, atol=1e-3)
