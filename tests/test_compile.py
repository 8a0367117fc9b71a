"""torch.compile changes nothing: neither around a step nor around a whole training function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.optim.base import StructuredOptimizer
from tables import OPTIMIZERS, OptimizerCase, names

BACKENDS = ("aot_eager", "inductor")
STEPS = 4


def problem(case: OptimizerCase) -> tuple[nn.Module, StructuredOptimizer]:
    """A layer for each kind of penalty; the biases have none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    rules = [espalier.Rule("1", espalier.L1(0.05)), espalier.Rule("2", espalier.NuclearNorm(0.5))]
    return model, case(espalier.regularize(model, espalier.GroupLasso(0.2), rules))


def run(case: OptimizerCase, backend: str | None = None, whole: bool = False) -> list[Tensor]:
    """Weights, structured points and clocks after a few steps with a restart and a schedule of torch's."""
    torch._dynamo.reset()
    model, optimizer = problem(case)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    restarts = espalier.StagewiseRestart(optimizer, [2])
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.step()

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        (optimizer.step if whole else step)()

    if backend and whole:
        train = torch.compile(train, backend=backend)
    elif backend:
        step = torch.compile(step, backend=backend)
    found = []
    for x in batches:
        train(x)
        restarts.step()
        decay.step()
        with optimizer.structured():
            found += [p.detach().clone() for p in model.parameters()]
    assert len(calls) == STEPS
    found += [p.detach() for p in model.parameters()]
    return found + [state[k] for state in optimizer.state.values() for k in optimizer.clock]


# torch's own: inductor imports a module of torch that uses it
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whole", [False, True], ids=["step", "training"])
@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_compiled_is_eager(case: OptimizerCase, whole: bool, backend: str) -> None:
    for eager, compiled in zip(run(case), run(case, backend, whole), strict=True):
        # the model's own gradients round otherwise in compiled code; the clock must be the same
        assert torch.allclose(eager, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_the_bound_step_itself_compiles(case: OptimizerCase) -> None:
    torch._dynamo.reset()
    model, optimizer = problem(case)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        step()
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}


@pytest.mark.parametrize("case", [c for c in OPTIMIZERS if c.build.anchored], ids=lambda c: c.name)
def test_what_swaps_weights_and_restarts_works_inside_a_compiled_function(case: OptimizerCase) -> None:
    torch._dynamo.reset()
    model, optimizer = problem(case)

    def within() -> Tensor:
        with optimizer.structured():
            return model(torch.ones(2, 4)).sum().detach()

    def between() -> Tensor:
        optimizer.eval()
        found = model(torch.ones(2, 4)).sum().detach()
        optimizer.train()
        return found

    def restarted() -> Tensor:
        optimizer.restart()
        return within()

    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    expected = within()
    for evaluate in (within, between, restarted):  # after a restart z is that of the stage before
        assert torch.allclose(torch.compile(evaluate, backend="aot_eager")(), expected)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert {float(s["step"]) for s in optimizer.state.values()} == {0.0}


def test_a_graph_without_breaks_is_refused_in_torchs_words() -> None:
    torch._dynamo.reset()
    _, optimizer = problem(OPTIMIZERS[0])
    with pytest.raises(Exception, match=r"StructuredOptimizer\.step"):
        torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=True)()
