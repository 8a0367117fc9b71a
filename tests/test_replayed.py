"""Recorded iterations of the splitting lead where plain ones do. Without a GPU recordings are made anew each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import DouglasRachford, NuclearNorm, Subproblem, Tolerance
from espalier.penalties import singular_values
from espalier.penalties.singular_values import thresholding
from espalier.reading import finish
from espalier.solvers import Solution, replayed
from test_nuclear import ask, least_subgradient, penalty_for, values
from test_nuclear import pose as nuclear_pose

pytest.importorskip("triton")

from espalier import kernels
from espalier.recording import Recording

# the interpreter computes masked lanes too, and there it divides by zero
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((3, 40, 24), (2, 17, 30), (2, 16, 16), (1, 1, 9), (2, 9, 1))


class Anew:
    """A recording that is made anew each time, with what a recording does: its result lies in one place."""

    def __init__(self, work: Callable[[], Tensor | None], device: torch.device) -> None:
        self.work = work
        with torch.inference_mode(False), torch.no_grad():
            self.result = work()

    def __call__(self) -> Tensor | None:
        found = self.work()
        return None if self.result is None or found is None else self.result.copy_(found)


class Counted:
    """On a GPU recordings, without one what is made anew."""

    made = 0
    replays = 0

    def __init__(self, work: Callable[[], Tensor | None], device: torch.device) -> None:
        Counted.made += 1
        self.recording = (Recording if DEVICE == "cuda" else Anew)(work, device)

    def __call__(self) -> Tensor | None:
        Counted.replays += 1
        return self.recording()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 0

    Counted.made = Counted.replays = 0
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
        monkeypatch.setattr(replayed, "worth_recording", lambda x: True)
    monkeypatch.setattr(kernels, "takes", lambda x: False)
    monkeypatch.setattr(replayed, "Recording", Counted)
    monkeypatch.setattr(replayed, "_kept", replayed._Kept())
    for name in ("_guesses", "_spare"):
        monkeypatch.setattr(singular_values, name, {})


def pose(*args: Any) -> Subproblem:
    problem = nuclear_pose(*args)
    there = {k: getattr(problem, k).to(DEVICE) for k in ("anchor", "direction", "metric")}
    return replace(problem, **there)


def solve(problem: Subproblem, penalty: NuclearNorm, solver: DouglasRachford, fused: bool = True) -> Solution:
    return finish(solver.solving(problem, penalty, problem.anchor, fused))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_solutions_in_the_same_memory(shape: tuple[int, ...]) -> None:
    """Several problems, one after the other, with thresholds far apart."""
    problems = [replace(pose(shape, 30 + i, 1.5, torch.float32), t=30) for i in range(4)]
    penalties = [penalty_for(p, share) for p, share in zip(problems, (0.3, 1e-4, 0.6, 1.5), strict=True)]
    solver, made = DouglasRachford(Tolerance(1e-3)), []
    for _ in range(2):
        Counted.made = 0
        for problem, penalty in zip(problems, penalties, strict=True):
            plain, found = (solve(problem, penalty, solver, fused) for fused in (False, True))
            torch.testing.assert_close(found.point, plain.point, rtol=0, atol=1e-4 * float(plain.point.abs().max() + 1))
            assert abs(int(found.iterations) - int(plain.iterations)) <= 1 + 0.1 * int(plain.iterations)
            slack = 2e-5 * float(torch.linalg.matrix_norm(problem.linear).max())
            assert (least_subgradient(problem, penalty, found.point) <= ask(shape, solver, 30, penalty) + slack).all()
            assert (values(problem, penalty, found.point) <= values(problem, penalty, problem.anchor)).all()
        made.append(Counted.made)
    assert not found.point.any()  # κ was above all singular values
    assert 2 <= made[0] <= 7  # the beginning, and one for each power of 2 that was needed
    assert made[1] <= 1  # a lower power, once it has been enough for a while


def reads(problem: Subproblem, penalty: NuclearNorm, solver: DouglasRachford) -> tuple[int, int]:
    """How often the host asks, and how many iterations it takes."""
    work, count = solver.solving(problem, penalty, problem.anchor), 0
    wanted: Any = next(work)
    try:
        while True:
            count += 1
            wanted = work.send(wanted.tolist())
    except StopIteration as end:
        return count, int(end.value.iterations)


@pytest.mark.usefixtures("recorded")
def test_a_problem_that_ends_at_the_limit_costs_its_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step of proximal gradient only where it is not sure to have come down."""
    problem = pose((2, 20, 14), 40, 1.5, torch.float32)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford(Tolerance(1e-9), max_iters=6)
    steps = []
    monkeypatch.setattr(replayed, "thresholding", lambda *args: steps.append(args) or thresholding(*args))
    solve(problem, penalty, solver)
    Counted.replays = 0
    assert reads(problem, penalty, solver) == (1, 6)
    assert Counted.replays == 1 + 6
    assert not steps
    far = replace(problem, direction=30 * problem.direction, metric=problem.metric.pow(6))
    solve(far, penalty, replace(solver, max_iters=1))
    assert len(steps) == 1


@pytest.mark.usefixtures("recorded")
def test_the_host_asks_once_where_the_last_problem_took_as_long() -> None:
    problem = pose((2, 20, 14), 40, 1.5, torch.float32)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford(Tolerance(1e-3))

    first, iterations = reads(problem, penalty, solver)
    assert first >= iterations > 4
    Counted.replays = 0
    assert reads(problem, penalty, solver) == (1, iterations)
    assert Counted.replays == 1 + iterations
    # an easier one is frozen where it is solved, though replays go on
    easier = replace(solver, tolerance=Tolerance(0.3))
    found, plain = (solve(problem, penalty, easier, fused) for fused in (True, False))
    assert found.iterations == plain.iterations < iterations
    torch.testing.assert_close(found.point, plain.point, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("max_iters", [1, 2, 3, 9])
def test_it_gives_up_as_plain_iterations_do(max_iters: int) -> None:
    problem = pose((3, 16, 12), 41, 6.0, torch.float32)
    penalty, solver = penalty_for(problem, 0.1), DouglasRachford(Tolerance(1e-7), max_iters=max_iters)
    for _ in range(2):
        found, plain = (solve(problem, penalty, solver, fused) for fused in (True, False))
        assert found.iterations == plain.iterations == max_iters
        size = float(plain.point.abs().max())
        torch.testing.assert_close(found.point, plain.point, rtol=0, atol=1e-3 * size)
        before = values(problem, penalty, problem.anchor)
        assert (values(problem, penalty, found.point) <= before + 1e-5 * before.abs()).all()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("what", ["no penalty", "nan", "inf", "far below"])
def test_what_products_cannot_do_is_left_to_plain_iterations(what: str) -> None:
    """One matrix of three; and the next problem finds nothing of it."""
    problem = pose((3, 12, 9), 42, 1.0, torch.float32)
    penalty, solver = NuclearNorm(1.0), DouglasRachford(Tolerance(1e-3))
    sound = solve(problem, penalty, solver, fused=False).point
    broken = replace(problem, direction=problem.direction.clone(), metric=problem.metric.clone())
    if what == "no penalty":
        broken = replace(broken, tau=torch.tensor([1.3, 0.0, 1.3], device=DEVICE)[:, None, None])
    elif what == "far below":
        broken.metric[1], broken.direction[1] = 1.0, 1e6 * broken.direction[1]
    else:
        broken.direction[1, 2, 3] = float(what)
    for _ in range(2):
        found, plain = (solve(broken, penalty, solver, fused).point for fused in (True, False))
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3, equal_nan=True)
        if what == "no penalty":
            assert torch.equal(found[1], broken.unpenalised()[1])
        elif what != "far below":
            assert found[1].isnan().all()
        torch.testing.assert_close(solve(problem, penalty, solver).point, sound, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("recorded")
def test_a_power_of_2_that_is_too_small_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pose((2, 12, 9), 43, 1.5, torch.float32)
    penalty, solver = penalty_for(problem, 1e-3), DouglasRachford(Tolerance(1e-3))
    plain = solve(problem, penalty, solver, fused=False).point
    for _ in range(2):
        singular_values._guesses[problem.anchor.device, problem.anchor.shape] = 6
        torch.testing.assert_close(solve(problem, penalty, solver).point, plain, rtol=0, atol=1e-3)
        assert singular_values.guess(problem.anchor) > 6


@pytest.mark.usefixtures("recorded")
def test_room_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "_SETTLED_BELOW", 1000)
    solver = DouglasRachford()
    for shape in ((1, 12, 9), (1, 11, 9), (1, 5, 9)):
        problem = pose(shape, 44, 1.0, torch.float32)
        solve(problem, penalty_for(problem, 0.3), solver)
    assert [key[2][1] for key in replayed._kept.places] == [12, 5]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("method", [espalier.RAMDA, espalier.ProxGen], ids=lambda m: m.__name__)
def test_a_training_ends_alike(method: type[espalier.RAMDA]) -> None:
    torch.manual_seed(0)
    start = [torch.randn(s, device=DEVICE) for s in ((12, 7), (5, 20), (12, 7))]
    target = [x[:, :2] @ x[:2] / 4 for x in start]
    ends = []
    for fused in (None, False):
        ps = [nn.Parameter(x.clone()) for x in start]
        optimizer = method([{"params": ps, "penalty": NuclearNorm(0.02)}], lr=0.05, fused=fused)
        for _ in range(8):
            for p, x in zip(ps, target, strict=True):
                p.grad = p.detach() - x
            Counted.replays = 0
            optimizer.step()
            assert (Counted.replays > 0) == (fused is None)
        ends.append([p.detach() for p in ps])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("recorded")
def test_what_inference_mode_began_serves_training() -> None:
    problem = pose((1, 9, 7), 45, 1.0, torch.float32)
    penalty, solver = penalty_for(problem, 0.3), DouglasRachford()
    with torch.inference_mode():
        solve(problem, penalty, solver)
    assert math.isfinite(float(solve(problem, penalty, solver).point.sum()))
    assert not any(x.is_inference() for place in replayed._kept.places.values() for x in place.posed)
