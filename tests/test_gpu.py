"""On a GPU: the same results as on the CPU, and no waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


# groups over many programs: tall, wide, odd, with runs of 9 and 25; and rows too long for one
SHAPES = ((1100, 36), (301, 64), (130, 20, 3, 3), (33, 7, 5, 5), (20, 3000))


@pytest.mark.parametrize(
    ("grouping", "decades"),
    [("input", 1), ("input", 10), ("output", 10), (espalier.Input(block=2), 1)],
    ids=["input", "input-wide", "output-wide", "blocks"],
)
@every_penalty
@every_optimizer
def test_the_kernels_agree_with_float64(
    case: OptimizerCase, penalty: espalier.Penalty, decades: int, grouping: espalier.Grouping
) -> None:
    """Each step from the same state: 5e-6 of the larger of ‖w‖ and ‖W⁰‖, and the same zeros."""
    if isinstance(penalty, espalier.L1):
        penalty, grouping = espalier.L1(1e-3), "element"
    torch.manual_seed(decades)
    shapes = [s for s in SHAPES if not isinstance(grouping, espalier.Input) or s[1] % grouping.block == 0]
    ps = [nn.Parameter(0.1 * torch.randn(s, device="cuda")) for s in shapes]
    qs = [nn.Parameter(p.detach().double().cpu()) for p in ps]
    fused = case([{"params": ps, "penalty": penalty, "grouping": grouping}], fused=True)
    exact = case([{"params": qs, "penalty": penalty, "grouping": grouping}], fused=False)
    for step in range(2):
        for p, q in zip(ps, qs, strict=True):
            p.grad = 1e-2 * torch.randn_like(p) * 10 ** ((torch.rand_like(p) - 0.5) * decades)
            q.grad = p.grad.double().cpu()
            if step:
                q.data.copy_(p.data)
                for k, v in exact.state[q].items():
                    v.copy_(fused.state[p][k])
        fused.step()
        exact.step()
        for p, q in zip(ps, qs, strict=True):
            size = max(q.norm(), fused.state[p].get("anchor", p).norm().cpu())
            assert (p.cpu() - q).norm() <= 5e-6 * size
    with fused.structured(), exact.structured():
        for p, q in zip(ps, qs, strict=True):
            # a group that just missed zero, or just reached it
            assert ((p.cpu() - q) * ((p.cpu() == 0) != (q == 0))).norm() <= 1e-5 * size


def test_matrices_of_several_shapes_are_solved_side_by_side_as_alone() -> None:
    """On streams of their own; two of one shape in one batch, which may round otherwise."""
    torch.manual_seed(0)
    shapes = ((96, 64), (64, 64), (40, 64), (40, 64), (16, 10))
    start = [torch.randn(s, device="cuda") for s in shapes]
    together = [nn.Parameter(x.clone()) for x in start]
    alone = [nn.Parameter(x.clone()) for x in start]
    penalty = espalier.NuclearNorm(0.3)
    optimizers = [espalier.RAMDA([{"params": ps, "penalty": penalty}]) for ps in (together, *([p] for p in alone))]
    for _ in range(8):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_optimizer
def test_a_captured_step_replays_through_stages(case: OptimizerCase, dtype: torch.dtype) -> None:
    """A graph of the step gives what steps give, to the bit, across another lr, ε and c."""
    results = []
    for captured in (False, True):
        ps = parameters("cuda", dtype)
        for p in ps:
            p.grad = torch.zeros_like(p)
        optimizer = case(
            [{"params": ps[:2], "penalty": espalier.GroupLasso(3e-2)}, {"params": ps[2:]}], capturable=True
        )
        schedule = espalier.StagewiseRestart(optimizer, milestones=[3, 6], gamma=0.5)
        generator = torch.Generator("cuda").manual_seed(1)

        def draw(ps: list[nn.Parameter] = ps, generator: torch.Generator = generator) -> None:
            for p in ps:
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))

        for _ in range(2):
            draw()
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(9):
            draw()
            graph.replay() if captured else optimizer.step()
            schedule.step()
        for group in optimizer.param_groups:
            group["lr"].fill_(1e-3)
        draw()
        graph.replay() if captured else optimizer.step()
        results.append([x.clone() for p in ps for x in (p.detach(), *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("build", "lr"), [(espalier.RAMDA, 0.1), (espalier.RMDA, 1.0)])
def test_a_captured_step_replays_to_the_end_of_a_run_of_known_length(build: Any, lr: float) -> None:
    """c grows to 1 between the replays of one graph, and a restart between two of them leaves the last z."""
    results = []
    for captured in (False, True):
        ps = parameters("cuda", torch.float32)
        for p in ps:
            p.grad = torch.zeros_like(p)
        groups = [{"params": ps[:2], "penalty": espalier.SparseGroupLasso(1e-1)}, {"params": ps[2:]}]
        optimizer = build(groups, lr=lr, total_steps=40, capturable=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        generator = torch.Generator("cuda").manual_seed(1)
        graph = torch.cuda.CUDAGraph()
        for step in range(40):
            for p in ps:
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))
            if step == 2 and captured:
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay() if captured and step >= 2 else optimizer.step()
            schedule.step()
            if step in (20, 21):
                with optimizer.structured():
                    z = [p.detach().clone() for p in ps]
                if step == 20:
                    optimizer.restart()
                with optimizer.structured():
                    assert all(torch.equal(p, before) for p, before in zip(ps, z, strict=True))
        results.append([p.detach().clone() for p in ps])
        with optimizer.structured():
            for p, w in zip(ps, results[-1], strict=True):
                assert torch.equal(p == 0, w == 0)
                torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any((w == 0).any() for w in results[0])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capturing_without_capturable_is_refused() -> None:
    ps = parameters("cuda", torch.float32)
    optimizer = espalier.RAMDA(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("case", OPTIMIZERS[:4], ids=names(OPTIMIZERS[:4]))
def test_training_with_and_without_kernels_ends_alike(case: OptimizerCase) -> None:
    """300 steps: the same structure, and losses within 1e-4."""
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        x = torch.randn(512, 40, device="cuda")
        y = (x[:, :10] @ torch.randn(10, 5, device="cuda")).argmax(1)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5)).cuda()
        lr, lam = {
            "RAMDA": (1e-2, 2e-3), "RMDA": (1e-1, 1e-2), "ProxSGD": (3e-1, 5e-3), "ProxGen": (3e-3, 2e-3)
        }[case.name]  # fmt: skip
        optimizer = case.build(espalier.regularize(model, espalier.GroupLasso(lam)), lr=lr, fused=fused)
        schedule = espalier.StagewiseRestart(optimizer, milestones=[150], gamma=0.1)
        losses = []
        for _ in range(300):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        with optimizer.structured():
            ends.append((torch.stack(losses), [p == 0 for p in model.parameters()]))
    (a, zeros), (b, others) = ends
    assert (a - b).abs().max() <= 1e-4
    assert all(torch.equal(z, o) for z, o in zip(zeros, others, strict=True))
    assert zeros[0].any()
    assert a[-1] < 0.8 * a[0]


@pytest.mark.parametrize("case", OPTIMIZERS[:4], ids=names(OPTIMIZERS[:4]))
def test_the_kernels_take_little_memory(case: OptimizerCase) -> None:
    """2 % of the parameters at most, with all that is kept between steps."""
    ps = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((1024, 1024), (512, 512, 3, 3), (2048, 1024))]
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer = case([{"params": ps, "penalty": espalier.GroupLasso(1e-3)}], fused=True)
    optimizer.step()
    optimizer._fused = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * sum(p.nbytes for p in ps)
