"""With ψ = 0 the methods are MADGRAD, MDA, SGD with momentum and dampening, and AdamW: to 1e-12 over 200 steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from madgrad import MADGRAD
from torch import Tensor, nn

import espalier

STEPS = 200
TOLERANCE = 1e-12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).double()


def train(model: nn.Module, step: Callable[[], object]) -> list[Tensor]:
    """The parameters after STEPS steps on fresh random batches, the same for everyone."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(16, 3, 6, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(5, (16,), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step()
    return [p.detach() for p in model.parameters()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


def groups(model: nn.Module, penalised: bool) -> list[dict]:
    """Either plain parameters, or a penalty of strength 0, which takes another way through the code."""
    return espalier.regularize(model, espalier.GroupLasso(0.0)) if penalised else [{"params": model.parameters()}]


both_ways = pytest.mark.parametrize("penalised", [False, True], ids=["none", "lambda=0"])


@both_ways
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ramda_is_madgrad(momentum: float, penalised: bool) -> None:
    lr, eps = 1e-2, 1e-6
    ours, theirs = network(), network()
    a = espalier.RAMDA(groups(ours, penalised), lr=lr + eps, momentum=momentum, eps=eps)
    b = MADGRAD(theirs.parameters(), lr=lr, momentum=momentum, eps=eps)  # adds eps to lr by itself
    assert_same(train(ours, a.step), train(theirs, b.step))


@both_ways
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("build", [espalier.ProxGen, espalier.ProxSSI])
def test_prox_gen_is_adamw(build: type, weight_decay: float, amsgrad: bool, penalised: bool) -> None:
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": weight_decay, "amsgrad": amsgrad}
    ours, theirs = network(), network()
    a = build(groups(ours, penalised), **settings)
    b = torch.optim.AdamW(theirs.parameters(), **settings)
    assert_same(train(ours, a.step), train(theirs, b.step))


@both_ways
def test_rmda_is_its_definition(penalised: bool) -> None:
    lr, momentum = 0.1, 0.9
    ours, theirs = network(), network()
    anchors = [p.detach().clone() for p in theirs.parameters()]
    sums = [torch.zeros_like(p) for p in theirs.parameters()]
    t = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal t
        t += 1
        for w, v, p in zip(anchors, sums, theirs.parameters(), strict=True):
            v += lr * t**0.5 * p.grad
            p.copy_(momentum * p + (1 - momentum) * (w - v / t**0.5))

    optimizer = espalier.RMDA(groups(ours, penalised), lr=lr, momentum=momentum)
    assert_same(train(ours, optimizer.step), train(theirs, step))


@both_ways
def test_prox_sgd_is_its_definition(penalised: bool) -> None:
    lr, momentum = 0.1, 0.9
    ours, theirs = network(), network()
    averages = [torch.zeros_like(p) for p in theirs.parameters()]

    @torch.no_grad()
    def step() -> None:
        for m, p in zip(averages, theirs.parameters(), strict=True):
            m.copy_(momentum * m + (1 - momentum) * p.grad)
            p -= lr * m

    optimizer = espalier.ProxSGD(groups(ours, penalised), lr=lr, momentum=momentum)
    assert_same(train(ours, optimizer.step), train(theirs, step))


def test_ramda_solves_the_papers_subproblem() -> None:
    """Algorithm 1 written out, with the solution checked by its optimality condition rather than by our solver."""
    lam, lr, momentum, eps = 0.3, 0.1, 0.9, 1e-3
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    anchor, v, u, alpha = w.detach().clone(), 0.0, 0.0, 0.0
    group = {"params": [w], "penalty": espalier.GroupLasso(lam), "grouping": "input"}
    optimizer = espalier.RAMDA([group], lr=lr, momentum=momentum, eps=eps)
    for t in range(1, 40):
        g = torch.randn(6, 5, dtype=torch.float64) * torch.tensor([0.03, 0.3, 1.0, 3.0, 10.0])
        s = lr * t**0.5
        v, u, alpha = v + s * g, u + s * g * g, alpha + s
        before = w.detach().clone()
        w.grad = g
        optimizer.step()
        z = (w.detach() - momentum * before) / (1 - momentum)
        with optimizer.structured():
            assert torch.allclose(w, z, atol=1e-12)
            z = w.detach().clone()
        # −(V + P (z − W⁰)) ∈ α λ √6 ∂‖z_g‖ for every column
        pull = -(v + (u ** (1 / 3) + eps) * (z - anchor))
        kappa, norm = alpha * lam * 6**0.5, z.norm(dim=0)
        zero = norm == 0
        assert (pull.norm(dim=0)[zero] <= kappa).all()
        assert torch.allclose(pull[:, ~zero], (kappa * z / norm)[:, ~zero], atol=1e-9)
    assert 0 < int(zero.sum()) < 5
