"""The stages of the paper's appendix A.1, to the letter."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

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


# ------------------------------------------------------------------------------------------- runs of known length

TORCH_SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "constant": lambda optimizer, total: ConstantLR(optimizer, factor=1.0),
    "linear": lambda optimizer, total: LinearLR(optimizer, 1.0, 0.0, total_iters=total),
    "cosine": lambda optimizer, total: CosineAnnealingLR(optimizer, total),
    "one cycle, momentum too": lambda optimizer, total: OneCycleLR(
        optimizer, optimizer.defaults["lr"], total_steps=total
    ),
    "warm-up and cosine": lambda optimizer, total: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, total - 5)], [5]
    ),
}
FAST = {"RAMDA": 0.1, "RMDA": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "kernels": {"fused": True},
    "capturable": {"capturable": True},
    "capturable kernels": {"fused": True, "capturable": True},
}


def regression(**settings: Any) -> tuple[nn.Parameter, Callable[[Any, int], None]]:
    """Least squares with 3 of 8 columns at work, and noise in the gradients."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 8, generator=generator) * (torch.arange(8) < 3)
    w = nn.Parameter(torch.randn(4, 8, generator=generator))

    def go(optimizer: Any, seed: int) -> None:
        noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))
        w.grad = (w - truth + 0.3 * noise).detach()
        optimizer.step()

    return w, go


def penalised(w: nn.Parameter, lam: float = 0.2) -> list[dict[str, Any]]:
    return [{"params": [w], "penalty": espalier.GroupLasso(lam)}]


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [*((schedule, "eager") for schedule in TORCH_SCHEDULES), *(("warm-up and cosine", kind) for kind in SETTINGS)],
)
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_a_run_of_known_length_ends_with_exact_zeros(case: OptimizerCase, schedule: str, settings: str) -> None:
    total = 40
    w, go = regression()
    optimizer = case(penalised(w), lr=FAST[case.name], total_steps=total, **SETTINGS[settings])
    scheduler = TORCH_SCHEDULES[schedule](optimizer, total)
    for seed in range(total):
        go(optimizer, seed)
        if seed == 20:
            assert not (w == 0).any()
        scheduler.step()
    with optimizer.structured():
        z = w.detach().clone()
    assert torch.allclose(w, z, rtol=1e-5)  # z itself, except for where its iteration began
    assert torch.equal(w == 0, z == 0)
    assert 0 < int((w == 0).all(0).sum()) < 8
    assert espalier.structure(optimizer).group_sparsity > 0


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.parametrize(("total", "momentum"), [(400, 0.9), (1000, 0.9), (60, 0.9), (1, 0.9), (3, 0.5), (40, 0.0)])
def test_c_grows_to_one_when_95_percent_of_the_run_is_done(case: OptimizerCase, total: int, momentum: float) -> None:
    w, optimizer = make(case, momentum=momentum, total_steps=total)
    c, end = 1 - momentum, total - total // 20
    length = min((1 / c) ** 2, max(end // 4, 1))  # of the ramp
    for n in range(1, total + 4):  # and a few steps more than it was told
        step(w, optimizer, n)
        i = max(n - (end - round(length)), 0)
        expected = max(c, min(1, math.sqrt(i / length)))
        seen = optimizer._averaging({"step": n, "alpha": 1.0}, optimizer.param_groups[0])
        assert seen == pytest.approx(expected, abs=1e-8)
        assert (seen == 1) == (n >= end or momentum == 0)


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
def test_the_end_of_a_run_does_not_depend_on_restarts_gaps_or_late_parameters(case: OptimizerCase) -> None:
    total = 40
    (w, go), v, late = regression(), *(nn.Parameter(torch.randn(4, 8)) for _ in range(2))
    optimizer = case([{"params": [w, v], "penalty": espalier.GroupLasso(0.2)}], total_steps=total, skip_nonfinite=True)
    for n in range(total):
        if n == 5:
            optimizer.restart()
        if n == 30:
            optimizer.add_param_group({"params": [late], "penalty": espalier.GroupLasso(0.2)})
        v.grad = torch.randn_like(v) if n % 3 else None
        if n in (7, 33):
            v.grad = torch.full_like(v, math.nan)  # skipped, and yet a step of the user's loop
        late.grad = torch.randn_like(late)
        go(optimizer, n)
    before = [p.detach().clone() for p in (w, v, late)]
    with optimizer.structured():
        for p, x in zip((w, v, late), before, strict=True):
            assert torch.allclose(p, x, rtol=1e-5)
            assert torch.equal(p == 0, x == 0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_a_run_of_known_length_resumes_to_the_bit(case: OptimizerCase, settings: Any) -> None:
    total = 20
    (a, go_a), (b, go_b), (c, go_c) = (regression() for _ in range(3))
    whole, resumed = (case(penalised(w), lr=FAST[case.name], total_steps=total, **settings) for w in (a, b))
    for seed in range(17):  # into the ramp
        go_a(whole, seed)
        go_b(resumed, seed)
    file = io.BytesIO()
    torch.save(resumed.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        c.copy_(b)
    fresh = case(penalised(c), **settings)  # the checkpoint knows the length
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(17, total):
        go_a(whole, seed)
        go_c(fresh, seed)
    assert torch.equal(a, c)
    assert (c == 0).any()


@pytest.mark.parametrize("ramp", [False, True])
def test_a_checkpoint_from_before_the_ramp_at_the_end_still_loads(ramp: bool) -> None:
    w, go = regression()
    optimizer = espalier.RAMDA(penalised(w))
    optimizer.param_groups[0]["ramp"] = ramp
    for seed in range(5):
        go(optimizer, seed)
    saved = optimizer.state_dict()
    for key in ("total_steps", "steps", "floor"):
        del saved["param_groups"][0][key]
    fresh = espalier.RAMDA(penalised(w), total_steps=20)
    fresh.load_state_dict(saved)
    group = fresh.param_groups[0]
    assert (group["ramp"], group["total_steps"], group["steps"]) == (ramp, 20, 5)


@pytest.mark.parametrize(("total", "error"), [(0, ValueError), (-1, ValueError), (10.5, TypeError), (True, TypeError)])
def test_a_wrong_length_is_refused(total: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="total_steps must be"):
        espalier.RAMDA([nn.Parameter(torch.ones(1))], total_steps=total)
