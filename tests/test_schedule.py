"""The stages of the paper's appendix A.1, to the letter."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tables import OPTIMIZERS, OptimizerCase, names

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
DUAL_AVERAGING = [c for c in OPTIMIZERS if c.build.anchored]


def make(case: OptimizerCase, **settings: Any) -> tuple[nn.Parameter, Any]:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    return w, case([{"params": [w], "penalty": espalier.GroupLasso(1e-2)}], **settings)


def step(w: nn.Parameter, optimizer: Any, seed: int = 0) -> None:
    w.grad = torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


def test_a_milestone_restarts_ramda() -> None:
    w, optimizer = make(OptimizerCase(espalier.RAMDA), lr=1e-2, momentum=0.9, eps=1e-3)
    schedule = espalier.StagewiseRestart(optimizer, [2, 4], gamma=0.1)
    group = optimizer.param_groups[0]
    for count in range(1, 5):
        step(w, optimizer, count)
        before = w.detach().clone()
        schedule.step()
        stage = sum(count >= m for m in (2, 4))
        assert group["lr"] == pytest.approx(1e-2 * 0.1**stage)
        assert group["eps"] == pytest.approx(1e-3 * 0.1**stage)
        assert group["ramp"] == (stage == 2)
        state = optimizer.state[w]
        if count in (2, 4):
            assert torch.equal(state["anchor"], before)  # W⁰ ← W, not the structured point
            assert all(not state[k].any() for k in ("step", "alpha", "grad_sum", "square_sum"))
        else:
            assert state["step"] > 0
        assert torch.equal(w, before)


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.5])
def test_c_is_constant_until_the_last_stage_and_then_grows_to_one(case: OptimizerCase, momentum: float) -> None:
    w, optimizer = make(case, momentum=momentum)
    schedule = espalier.StagewiseRestart(optimizer, [3])
    reach = math.ceil((1 / (1 - momentum)) ** 2 - 1e-6)
    seen = []
    for count in range(reach + 5):
        before = w.detach().clone()
        step(w, optimizer, count)
        with optimizer.structured():
            z = w.detach().clone()
        # c from the update itself: w − before = c (z − before)
        seen.append((((w - before) * (z - before)).sum() / (z - before).square().sum()).item())
        if count < 3:
            schedule.step()
        if len(seen) > 3 + reach - 1:
            assert torch.allclose(w, z, rtol=1e-12)  # c = 1: z itself, but for where its iteration began
            assert torch.equal(w == 0, z == 0)
    c = 1 - momentum
    expected = [c] * 3 + [min(c * math.sqrt(i), 1) for i in range(1, reach + 3)]
    assert seen == pytest.approx(expected, abs=1e-6)


def test_the_zeros_reach_the_weights_exactly_when_the_ramp_ends() -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))  # Π (1 − c √i) underflows float32 before i = 100
    optimizer = espalier.RMDA([{"params": [w], "penalty": espalier.GroupLasso(5.0)}], lr=0.1, momentum=0.9)
    espalier.StagewiseRestart(optimizer, [])  # no milestone: the whole run is the last stage
    for i in range(1, 102):
        w.grad = 0.01 * torch.randn_like(w)
        optimizer.step()
        with optimizer.structured():
            assert not w.any() or i < 20
        assert bool((w == 0).all()) == (i >= 100)  # (1/c)² = 100


@pytest.mark.parametrize("case", [c for c in OPTIMIZERS if not c.build.anchored], ids=lambda c: c.name)
def test_other_methods_only_decay_lr(case: OptimizerCase) -> None:
    (w, a), (v, b) = make(case), make(case)
    schedule = espalier.StagewiseRestart(a, [2], gamma=0.5)
    settings = {k: x for k, x in a.param_groups[0].items() if k not in ("lr", "params")}
    for count in range(4):
        step(w, a, count)
        step(v, b, count)
        schedule.step()
        if count == 1:
            b.param_groups[0]["lr"] *= 0.5
    assert torch.equal(w, v)
    assert settings == {k: x for k, x in a.param_groups[0].items() if k not in ("lr", "params")}


@every_optimizer
def test_each_group_keeps_its_own_rate(case: OptimizerCase) -> None:
    a, b = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    optimizer = case([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}])
    schedule = espalier.StagewiseRestart(optimizer, [1], gamma=0.5)
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.005])


def test_a_tensor_rate_shared_by_groups_decays_once() -> None:
    a, b = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    optimizer = espalier.RAMDA([{"params": [a]}, {"params": [b]}], lr=torch.tensor(0.1))
    schedule = espalier.StagewiseRestart(optimizer, [1], gamma=0.1)
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.01, 0.01])


def test_the_ramp_is_the_schedules_own() -> None:
    """A group added in the last stage ramps as well; a new schedule begins without."""
    _, optimizer = make(OPTIMIZERS[0])
    espalier.StagewiseRestart(optimizer, [])
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))]})
    assert [g["ramp"] for g in optimizer.param_groups] == [True, True]
    espalier.StagewiseRestart(optimizer, [5])
    assert [g["ramp"] for g in optimizer.param_groups] == [False, False]


def test_state_dict_goes_on_and_refuses_another_plan() -> None:
    _, optimizer = make(OPTIMIZERS[0])
    schedule = espalier.StagewiseRestart(optimizer, [2, 4])
    schedule.step()
    saved = schedule.state_dict()
    fresh = espalier.StagewiseRestart(optimizer, [2, 4])
    fresh.load_state_dict(saved)
    assert fresh.count == 1
    for other in (espalier.StagewiseRestart(optimizer, [2, 5]), espalier.StagewiseRestart(optimizer, [2, 4], 0.5)):
        with pytest.raises(ValueError, match=r"checkpoint's schedule.*Build it"):
            other.load_state_dict(saved)
        assert other.count == 0


def test_a_last_stage_too_short_for_the_ramp_is_warned_of() -> None:
    _, optimizer = make(OPTIMIZERS[0], momentum=0.99)
    with pytest.warns(UserWarning, match=r"10000 steps.* it has 5000") as caught:
        espalier.StagewiseRestart(optimizer, [50, 150], total_steps=200, steps_per_call=100)
    # the way out it names is one: the momentum, and the milestone
    message = str(caught[0].message)
    momentum = float(message.split("a momentum of ")[1].split(" ")[0])
    milestone = int(message.split("or less would do, or ")[1].split(" ")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        espalier.StagewiseRestart(optimizer, [50, milestone], total_steps=200, steps_per_call=100)
        optimizer.param_groups[0]["momentum"] = momentum
        espalier.StagewiseRestart(optimizer, [50, 150], total_steps=200, steps_per_call=100)
        espalier.StagewiseRestart(optimizer, [50, 150])  # not told, not warned
        _, other = make(OPTIMIZERS[2])
        espalier.StagewiseRestart(other, [50, 199], total_steps=200)


def test_a_run_too_short_for_any_milestone_says_how_many_steps_it_needs() -> None:
    _, optimizer = make(OPTIMIZERS[0], momentum=0.99)
    with pytest.warns(UserWarning, match=r"9990 more optimizer steps"):
        espalier.StagewiseRestart(optimizer, [90], total_steps=100)


@pytest.mark.parametrize(
    ("milestones", "settings", "message"),
    [
        ([3, 2], {}, "increasing"),
        ([2, 2], {}, "increasing"),
        ([0], {}, "positive"),
        ([1], {"gamma": 0.0}, "gamma"),
        ([1], {"gamma": float("nan")}, "gamma"),
        ([5], {"total_steps": 5}, "total_steps"),
        ([1], {"steps_per_call": 0}, "steps_per_call"),
    ],
)
def test_bad_plans(milestones: list[int], settings: dict[str, Any], message: str) -> None:
    _, optimizer = make(OPTIMIZERS[0])
    with pytest.raises(ValueError, match=message):
        espalier.StagewiseRestart(optimizer, milestones, **settings)


def test_other_optimizers_are_sent_elsewhere() -> None:
    with pytest.raises(TypeError, match=r"SGD.*MultiStepLR"):
        espalier.StagewiseRestart(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [1])
