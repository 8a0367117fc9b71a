"""On a GPU: the same results as on the CPU, and no waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import espalier
from tables import OPTIMIZERS, OptimizerCase, names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
PENALTIES = (
    espalier.GroupLasso(3e-2),
    espalier.SparseGroupLasso(3e-2),
    espalier.GroupMCP(3e-2),
    espalier.L1(1e-2),
)
every_penalty = pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: type(p).__name__)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to(device, dtype)) for s in ((16, 12, 3, 3), (20, 33), (7,))]


@every_penalty
@every_optimizer
def test_agrees_with_the_cpu(case: OptimizerCase, penalty: espalier.Penalty) -> None:
    results = []
    for device in ("cpu", "cuda"):
        ps = parameters(device, torch.float64)
        optimizer = case([{"params": ps[:2], "penalty": penalty}, {"params": ps[2:]}])
        generator = torch.Generator().manual_seed(1)
        for step in range(30):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device)
            optimizer.step()
            if step == 10:
                optimizer.restart()
        with optimizer.structured():
            results.append([p.detach().clone().cpu() for p in ps])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
        assert torch.equal(a == 0, b == 0)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_penalty
@every_optimizer
def test_never_waits_for_the_device(
    case: OptimizerCase, penalty: espalier.Penalty, dtype: torch.dtype, skip: bool
) -> None:
    ps = parameters("cuda", dtype)
    optimizer = case([{"params": ps[:2], "penalty": penalty}, {"params": ps[2:]}], skip_nonfinite=skip)
    grads = [torch.randn_like(p) for p in ps]
    with no_synchronisation():
        for step in range(4):
            for p, g in zip(ps, grads, strict=True):
                p.grad = g * (step + 1)
            optimizer.step()
            with optimizer.structured():
                pass
            if step == 1:
                optimizer.restart()
    assert all(p.isfinite().all() for p in ps)


@every_penalty
@every_optimizer
def test_skip_nonfinite_leaves_everything_untouched(case: OptimizerCase, penalty: espalier.Penalty) -> None:
    ps = parameters("cuda", torch.float32)
    optimizer = case([{"params": ps[:2], "penalty": penalty}, {"params": ps[2:]}], skip_nonfinite=True)
    for step in range(6):
        for p in ps:
            p.grad = torch.randn_like(p)
        if step % 2:
            ps[step % 3].grad.view(-1)[0] = float("nan")
        before = [x.clone() for p in ps for x in (p.detach(), *optimizer.state[p].values())]
        optimizer.step()
        after = [x for p in ps for x in (p.detach(), *optimizer.state[p].values())]
        if step:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == bool(step % 2)


@every_optimizer
def test_own_penalty_and_nuclear_norm(case: OptimizerCase) -> None:
    from tables import ElasticNet

    for penalty in (ElasticNet(1e-2), espalier.NuclearNorm(1e-1)):
        results = []
        for device in ("cpu", "cuda"):
            p = parameters(device, torch.float64)[1]
            optimizer = case([{"params": [p], "penalty": penalty}])
            generator = torch.Generator().manual_seed(1)
            for _ in range(5):
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device)
                optimizer.step()
            results.append(p.detach().cpu())
        assert torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-8)
