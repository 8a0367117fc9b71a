"""The soft-threshold of singular values by iteration from the last solution, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from espalier import NuclearNorm, ProximalGradient, Subproblem
from espalier.penalties import subspace
from espalier.penalties.singular_values import threshold_singular_values, thresholding
from espalier.reading import finish

N = subspace._SMALLEST + 8
EPS = torch.finfo(torch.float32).eps


def basis(rows: int, columns: int, seed: int) -> Tensor:
    return torch.linalg.qr(
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )[0]


class Case(NamedTuple):
    """κ = 1. `near` is the first `share` singular pairs above κ, soft-thresholded, of what is `moved` away."""

    singular: Tensor  # of X
    serves: bool | None  # whether the iteration finds it, lest the table test the eigenvalues alone; None for either
    share: float = 1.0
    moved: float = 0.0


def falling(rank: int, top: float, rate: float) -> Tensor:
    above = torch.logspace(math.log10(top), math.log10(1.3), rank, dtype=torch.float64)
    return torch.cat((above, 0.7 * rate ** torch.arange(N - rank, dtype=torch.float64)))


CASES = {
    "low rank": Case(falling(6, 1e3, 0.5), True),
    "low rank, moved": Case(falling(6, 1e3, 0.5), True, moved=0.3),
    "a larger rank, a slow fall": Case(falling(40, 3e3, 0.95), True, moved=0.3),
    "dense around κ": Case(torch.linspace(1.4, 0.6, N, dtype=torch.float64), False),
    # where rounding decides, which kinds of CPUs do in several ways
    "dense around κ, below a few large": Case(
        torch.cat((torch.full((3,), 2e3), torch.linspace(1.2, 0.1, N - 3))).double(), None
    ),
    "many on either side of κ, below a few large": Case(
        torch.cat((torch.full((3,), 2e3), torch.linspace(1.3, 1.05, 20), torch.linspace(0.9, 0.1, N - 23))).double(),
        True,
    ),
    "a value at κ": Case(
        torch.cat((falling(6, 1e3, 0.5)[:6], torch.full((2,), 1.0), torch.zeros(N - 8))).double(), None
    ),
    "equal values": Case(torch.cat((torch.full((9,), 50.0), torch.full((N - 9,), 0.05))).double(), True),
    "a hint of lower rank": Case(falling(6, 1e3, 0.5), True, share=0.5),
    "a hint of far lower rank": Case(falling(40, 1e3, 0.5), False, share=0.1),
    "all above κ": Case(torch.linspace(900.0, 1.5, N, dtype=torch.float64), False),
    "far above κ": Case(falling(6, 3e4, 0.5), True),
    # of a lower rank, from which one pass is far from enough: off by 14 000 roundings, were its e not asked for
    "a hint that takes several passes": Case(
        torch.cat((torch.full((3,), 100.0), torch.full((3,), 1.3), torch.linspace(0.7, 0.05, N - 6))).double(),
        True,
        share=0.5,
    ),
    "so far above κ that products are in float64": Case(falling(6, 1e6, 0.5), True),
    "that far, a larger rank, moved": Case(falling(30, 2e6, 0.9), True, moved=0.03),
    "that far, a hint that takes several passes": Case(falling(12, 4e5, 0.7), True, share=0.5),
    "too far above κ": Case(falling(6, 1e7, 0.5), False),
    "none above κ": Case(0.9 * 0.9 ** torch.arange(N, dtype=torch.float64), False, share=0.0),
}


def build(case: Case, shape: tuple[int, int], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, κ and the hint in float32, and the answer."""
    m, n = shape
    u, v = basis(m, N, 1), basis(n, N, 2)
    x = ((u * case.singular * scale) @ v.mT).float()
    kappa = torch.full((1, 1), scale)
    a, s, bt = torch.linalg.svd(x.double(), full_matrices=False)
    truth = (a * (s - scale).clamp(min=0)) @ bt
    count = int(case.share * int((s > scale).sum()))
    move = torch.randn(2, n, n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[0] / n
    turn = torch.linalg.matrix_exp(case.moved / 10 * (move - move.mT))
    near = (a[:, :count] * (s[:count] - scale).clamp(min=0)) @ bt[:count] @ turn
    return x, kappa, near.float(), truth


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call found an answer."""
    found: list[bool] = []
    plain = subspace.soft_threshold

    def watched(x: Tensor, kappa: float, near: Tensor) -> Tensor | None:
        y = plain(x, kappa, near)
        found.append(y is not None)
        return y

    monkeypatch.setattr(subspace, "soft_threshold", watched)
    return found


@pytest.mark.parametrize("shape", [(N, N), (N + 70, N), (N, N + 70)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e15, 1e-21, 1e18])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, shape: tuple[int, int], scale: float, counted: list[bool]) -> None:
    case = CASES[name]
    x, kappa, near, truth = build(case, shape, scale)
    y = finish(thresholding(x[None], kappa[None], near=near[None]))[0]
    size = torch.linalg.matrix_norm(x.double())
    # 2 e, e being 4 roundings, and what products in float32 lose; or 0.5, and the rounding of y
    roundings = 2 if size > 1e5 * scale else 10
    assert torch.linalg.matrix_norm(y - truth) <= roundings * EPS * size
    assert case.serves in (None, counted[-1])
    if not truth.any():
        assert not y.any()
    again = finish(thresholding(x[None], kappa[None], near=near[None]))[0]
    assert torch.equal(y, again)  # nothing is kept


HINTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "NaN": lambda x: torch.full_like(x, math.nan),
    "inf": lambda x: torch.where(x == x.max(), math.inf, x),
    "huge": lambda x: 1e38 * x,
    "itself": torch.clone,
    "its negative": torch.neg,
    "of another matrix": lambda x: x.flip(0),
    "of one entry": lambda x: torch.where(x == x.max(), x, 0.0),
}


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("everywhere", [False, True], ids=["", "however far"])
def test_any_hint_leads_to_the_answer(hint: str, everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if everywhere:
        monkeypatch.setattr(subspace, "_NEAR", math.inf)
    x, kappa, near, truth = build(CASES["low rank"], (N + 70, N))
    y = finish(thresholding(x[None], kappa[None], near=HINTS[hint](near)[None]))[0]
    assert torch.linalg.matrix_norm(y - truth) <= 10 * EPS * torch.linalg.matrix_norm(x.double())


def test_a_direction_that_no_column_of_v_has_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """X is exactly block diagonal, and the columns the iteration starts from have none of the second block."""
    x, kappa, near, _ = build(CASES["low rank"], (N, N))
    x, near = (torch.block_diag(a, torch.zeros(8, 8)) for a in (x, near))
    x[-1, -1] = 30.0
    span = subspace._span

    def blind(a: Tensor) -> Tensor | None:
        u = span(a)
        assert u is not None
        u[-8:] = 0
        return torch.linalg.qr(u)[0] * torch.ones(len(u), 1).index_fill_(0, torch.arange(len(u) - 8, len(u)), 0.0)

    monkeypatch.setattr(subspace, "_span", blind)
    assert subspace.soft_threshold(x, 1.0, near) is None
    y = finish(thresholding(x[None], kappa[None], near=near[None]))[0]
    assert y[-1, -1] == pytest.approx(29.0)
    # what the certificate is for
    monkeypatch.setattr(subspace, "_bounded", lambda *_: True)
    missed = subspace.soft_threshold(x, 1.0, near)
    assert missed is not None
    assert missed[-1, -1] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_matrix_of_a_stack_that_is_not_finite(value: float) -> None:
    rows = [
        build(CASES[name], (N + 70, N))
        for name in ("low rank", "a larger rank, a slow fall", "dense around κ", "low rank")
    ]
    x, kappa, near, truth = (torch.stack(part) for part in zip(*rows, strict=True))
    x[3, 5, 7] = value
    y = finish(thresholding(x, kappa, near=near))
    for i in range(3):
        assert torch.linalg.matrix_norm(y[i] - truth[i]) <= 10 * EPS * torch.linalg.matrix_norm(x[i].double())
    assert y[3].isnan().all()


@pytest.mark.parametrize("shape", [(3, 700, 300), (2, 40, 1100), (1, 5, 1), (0, 4, 4), (2, 0, 3)], ids=str)
def test_the_lower_triangle_of_a_gram_matrix(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(subspace.gram_lower(x).tril(), (x.mT @ x).tril(), rtol=0, atol=1e-11)
    if len(x):
        one = subspace.gram_lower(x[0])
        torch.testing.assert_close(one, subspace.gram_lower(x)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("sigma", "rho"), [([0.0], [0.0]), ([0.3], [0.5]), ([0.9], [0.1]), ([0.1, 0.8, 0.99], [0.4, 0.2, 0.05])]
)
def test_the_room_for_c_is_all_there_is(sigma: list[float], rho: list[float]) -> None:
    """Of a rest [Σ₂, ρ; 0, c], whose norm is κ where ‖C‖², c² and all ρᵢ² together, is the room."""
    a, beside = torch.tensor(sigma, dtype=torch.float64), torch.tensor(rho, dtype=torch.float64)
    room = 9 * subspace._room(1.0, sigma, beside.square().tolist())
    assert room == pytest.approx(subspace._room(3.0, (3 * a).tolist(), (3 * beside).square().tolist()))
    c = math.sqrt(room - float((3 * beside).square().sum()))
    rest = torch.diag(torch.cat((3 * a, torch.tensor([c], dtype=torch.float64))))
    rest[:-1, -1] = 3 * beside
    assert float(torch.linalg.matrix_norm(rest, 2)) == pytest.approx(3.0, rel=1e-12)
    assert subspace._room(1.0, [0.5, 1.0], [0.1, 0.0]) == 0


def test_defaults_and_autocast_change_nothing(counted: list[bool]) -> None:
    x, kappa, near, _ = build(CASES["low rank"], (N, N))
    dense = build(CASES["dense around κ"], (N, N))
    expected = [finish(thresholding(a[None], k[None], near=b[None])) for a, k, b in ((x, kappa, near), dense[:3])]
    subspace._directions.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert finish(thresholding(x[None], kappa[None], near=near[None])).equal(expected[0])
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", torch.bfloat16):
        assert finish(thresholding(x[None], kappa[None], near=near[None])).equal(expected[0])
        by_eigenvalues = finish(thresholding(dense[0][None], dense[1][None], near=dense[2][None]))
    assert torch.linalg.vector_norm(by_eigenvalues - expected[1]) <= 4 * EPS * torch.linalg.vector_norm(dense[0])
    assert counted == [True, False, True, True, False]


def test_only_float32_takes_the_hint(counted: list[bool]) -> None:
    x, kappa, near, truth = build(CASES["low rank"], (N, N))
    y = finish(thresholding(x.double()[None], kappa.double()[None], near=near.double()[None]))[0]
    torch.testing.assert_close(y, truth, rtol=0, atol=1e-10)
    assert not counted


@pytest.mark.parametrize("size", [0.5, 0.99, 1.01, 3.0])
@pytest.mark.parametrize("kind", ["one entry", "one direction"])
def test_proximal_gradient_screens_as_before(size: float, kind: str) -> None:
    """Zero exactly where ‖b‖ ≤ κ, whether or not a row's norm tells."""
    b = torch.zeros(2, 12, 9)
    b[0] = torch.eye(12, 9) * 20  # another matrix of the stack
    b[1, 2, 3] = size
    if kind == "one direction":
        b[1] = size / math.sqrt(12 * 9)
    problem = Subproblem(anchor=torch.zeros_like(b), direction=-b, metric=torch.ones_like(b), tau=1.0)
    start = torch.ones_like(b)
    z = finish(ProximalGradient(max_iters=1, min_iters=1, rtol=None).solving(problem, NuclearNorm(1.0), start)).point
    exact = threshold_singular_values(b, torch.ones(2, 1, 1))
    torch.testing.assert_close(z, exact, rtol=0, atol=1e-5)
    assert bool(z[1].any()) == (size > 1)
