"""The stages of the paper's appendix A.1, to the letter."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

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
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.005])


def test_a_tensor_rate_shared_by_groups_decays_once() -> None:
    a, b = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    optimizer = espalier.RAMDA([{"params": [a]}, {"params": [b]}], lr=torch.tensor(0.1))
    schedule = espalier.StagewiseRestart(optimizer, [1], gamma=0.1)
    optimizer.step()
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
    optimizer.step()
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
    with pytest.warns(UserWarning, match=r"9990 more optimizer steps.*once an epoch, give steps_per_call"):
        espalier.StagewiseRestart(optimizer, [90], total_steps=100)


def test_an_optimizer_that_knows_the_length_of_the_run_needs_no_long_last_stage() -> None:
    (w, go), total = regression(), 40
    optimizer = espalier.RAMDA(penalised(w), lr=0.1, total_steps=total)
    schedule = espalier.StagewiseRestart(optimizer, [20], total_steps=total)  # and so warns of nothing
    for seed in range(total):
        go(optimizer, seed)
        schedule.step()
    assert (w == 0).any()


def test_a_rebuilt_optimizer_goes_on_where_the_run_was() -> None:
    """As shrunk.optimizer is: from the groups of the old one."""
    w, go = regression()
    optimizer = espalier.RAMDA(penalised(w), total_steps=20)
    for seed in range(5):
        go(optimizer, seed)
    rebuilt = espalier.RAMDA(optimizer.param_groups, total_steps=20)
    assert rebuilt.param_groups[0]["steps"] == 5


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


# ----------------------------------------------------------------------------------------------- a torch scheduler


def restarts(optimizer: Any) -> list[int]:
    """Fills with the number of steps made before each restart."""
    seen: list[int] = []
    whole = optimizer.restart

    def restart() -> None:
        (state,) = optimizer.state.values()
        seen.append(int(state["step"]))
        whole()

    optimizer.restart = restart
    return seen


@every_optimizer
def test_stages_are_a_torch_scheduler(case: OptimizerCase) -> None:
    w, optimizer = make(case, lr=0.5)
    schedule = espalier.StagewiseRestart(optimizer, [2, 3], gamma=0.5)
    assert isinstance(schedule, LRScheduler)
    assert (schedule.last_epoch, schedule._step_count, schedule.base_lrs) == (0, 1, [0.5])
    for count, lr in enumerate((0.5, 0.25, 0.125, 0.125), start=1):
        step(w, optimizer, count)
        schedule.step()
        assert schedule.get_last_lr() == schedule._last_lr == [lr]
        assert schedule.last_epoch == schedule.count == count


def test_a_step_of_the_schedule_before_the_optimizers_is_warned_of() -> None:
    _, optimizer = make(OPTIMIZERS[0])
    schedule = espalier.StagewiseRestart(optimizer, [2])
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        schedule.step()


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
def test_a_warm_up_before_the_stages(case: OptimizerCase, tensor: bool) -> None:
    w, optimizer = make(case, lr=torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5)
    seen = restarts(optimizer)
    stages = espalier.StagewiseRestart(optimizer, [3, 5], gamma=0.1)
    schedule = SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=4), stages], [4])
    rates = []
    for count in range(11):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        step(w, optimizer, count)
        schedule.step()
    # the warm-up leaves lr below its end, where stages of torch begin at the whole of it, too
    expected = [0.125, 0.21875, 0.3125, 0.40625] + 3 * [0.5] + 2 * [0.05] + 2 * [0.005]
    assert rates == pytest.approx(expected)
    assert seen == [7, 2]
    assert optimizer.param_groups[0]["ramp"]


def test_chained_schedules_multiply() -> None:
    w, optimizer = make(OPTIMIZERS[0], lr=1.0)
    seen = restarts(optimizer)
    schedule = ChainedScheduler([ExponentialLR(optimizer, 0.5), espalier.StagewiseRestart(optimizer, [2], 0.1)])
    for count in range(3):
        step(w, optimizer, count)
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.0125])
    assert seen == [2]


@pytest.mark.parametrize("nested", [False, True])
def test_stages_resume_from_plain_values(nested: bool) -> None:
    def build(optimizer: Any) -> Any:
        stages = espalier.StagewiseRestart(optimizer, [2, 4])
        return SequentialLR(optimizer, [LinearLR(optimizer, 0.5, total_iters=2), stages], [2]) if nested else stages

    runs = [make(OPTIMIZERS[0], lr=torch.tensor(0.1), capturable=True) for _ in range(2)]
    (w, whole), (v, other) = runs
    first, second = build(whole), build(other)
    for count in range(7):
        step(w, whole, count)
        first.step()
    for count in range(3):
        step(v, other, count)
        second.step()
    file = io.BytesIO()
    torch.save([v.detach(), other.state_dict(), second.state_dict()], file)
    file.seek(0)
    weight, *saved = torch.load(file, weights_only=True)
    x, fresh = make(OPTIMIZERS[0], lr=torch.tensor(0.1), capturable=True)
    x.data = weight
    third = build(fresh)
    fresh.load_state_dict(saved[0])
    third.load_state_dict(saved[1])
    for count in range(3, 7):
        step(x, fresh, count)
        third.step()
    assert torch.equal(w, x)
    assert first.get_last_lr() == third.get_last_lr()


def test_a_schedule_saved_before_it_was_torchs_goes_on() -> None:
    w, optimizer = make(OPTIMIZERS[0])
    schedule = espalier.StagewiseRestart(optimizer, [2, 4])
    schedule.load_state_dict({"count": 3, "milestones": [2, 4], "gamma": 0.1})
    seen = restarts(optimizer)
    step(w, optimizer)
    schedule.step()
    assert schedule.count == 4
    assert seen == [1]


# --------------------------------------------------------------------------------------- z from a restart to the step


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "group lasso": (espalier.GroupLasso(0.1), {}),
    "no penalty": (None, {}),
    "nuclear norm": (espalier.NuclearNorm(0.1), {}),
    "kernels": (espalier.GroupLasso(0.1), {"fused": True}),
    "capturable": (espalier.GroupLasso(0.1), {"capturable": True}),
    "skip_nonfinite": (espalier.GroupLasso(0.1), {"skip_nonfinite": True}),
}


def points(optimizer: Any, w: nn.Parameter) -> torch.Tensor:
    with optimizer.structured():
        return w.detach().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("penalty", "settings"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_from_a_restart_to_the_next_step_z_is_that_of_the_stage_before(
    case: OptimizerCase, penalty: Any, settings: Any, dtype: torch.dtype
) -> None:
    w, idle = (nn.Parameter(torch.randn(6, 5).to(dtype)) for _ in range(2))
    group = {"params": [w, idle], "penalty": penalty}
    optimizer = case([group], lr=FAST[case.name], **settings)
    schedule = espalier.StagewiseRestart(optimizer, [4, 5])
    for seed in range(5):
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.step()
        z = points(optimizer, w)
        assert not torch.equal(z, w)
        schedule.step()
        before = w.detach().clone()
        assert torch.equal(points(optimizer, w), z)  # though eps is another one now
        assert torch.equal(w, before)
    # a checkpoint brings it along
    fresh = case([group], **settings)
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(points(fresh, w), z)
    for other in (optimizer, fresh):
        other.step()
        assert not torch.equal(points(other, w), z)
        assert not any("last" in state for state in other.state_dict()["state"].values())


def test_z_of_a_parameter_that_waits_is_kept_until_its_own_step() -> None:
    w, v = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    optimizer = espalier.RAMDA([{"params": [w, v], "penalty": espalier.GroupLasso(0.1)}], lr=0.1)
    w.grad, v.grad = torch.randn(3, 3), torch.randn(3, 3)
    optimizer.step()
    z = points(optimizer, v)
    optimizer.restart()
    v.grad = None
    optimizer.step()
    assert torch.equal(points(optimizer, v), z)
    optimizer.restart()  # once more, before v has moved
    assert torch.equal(points(optimizer, v), z)


# -------------------------------------------------------------------------------------------------- eval() and train()


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
def test_eval_puts_z_into_the_weights_and_train_puts_them_back(case: OptimizerCase) -> None:
    w, optimizer = make(case)
    optimizer.eval()  # before any step
    optimizer.train()
    step(w, optimizer)
    before, z = w.detach().clone(), points(optimizer, w)
    optimizer.eval()
    optimizer.eval()
    assert torch.equal(w, z)
    with optimizer.structured():
        pass
    assert torch.equal(w, z)
    for forbidden in (optimizer.step, optimizer.restart):
        with pytest.raises(RuntimeError, match=r"after eval\(\).*Call train\(\) first"):
            forbidden()
    optimizer.train()
    optimizer.train()
    assert torch.equal(w, before)
    step(w, optimizer)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_made_after_eval_brings_the_weights_along(model_first: bool) -> None:
    w, optimizer = make(DUAL_AVERAGING[0])
    step(w, optimizer)
    before = w.detach().clone()
    optimizer.eval()
    z, saved = w.detach().clone(), optimizer.state_dict()
    v, fresh = make(DUAL_AVERAGING[0])
    for load_model in (model_first, not model_first):
        if load_model:
            with torch.no_grad():
                v.copy_(z)
        else:
            fresh.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="train"):
        fresh.step()
    fresh.train()
    assert torch.equal(v, before)
    assert "weight" not in fresh.state_dict()["state"][0]


def test_what_is_written_into_the_weights_after_eval_stays() -> None:
    w, optimizer = make(DUAL_AVERAGING[0])
    step(w, optimizer)
    optimizer.eval()
    with torch.no_grad():
        w.fill_(3.0)  # as when the best model is loaded at the end
    optimizer.train()
    assert (w == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_write_after_eval_stays_too(dtype: torch.dtype) -> None:
    w, optimizer = make(DUAL_AVERAGING[0])
    w.data = w.data.to(dtype)
    step(w, optimizer)
    optimizer.eval()
    written = w.detach().clone()
    entries = written.view(-1)
    i = int(entries.abs().argmax())
    change = 0.01 * entries[i]
    entries[i] += change
    entries[i - 1] -= change  # the sum stays, or nearly
    with torch.no_grad():
        w.copy_(written)
    optimizer.train()
    assert torch.equal(w, written)


def test_a_model_that_was_cast_after_eval_gets_its_weights_back() -> None:
    w, optimizer = make(DUAL_AVERAGING[0])
    step(w, optimizer)
    before = w.detach().clone()
    optimizer.eval()
    w.data = w.data.bfloat16()
    optimizer.train()
    assert torch.equal(w, before.bfloat16())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
def test_a_copy_made_after_eval_or_a_restart_knows_weights_and_z(case: OptimizerCase, copied: Any) -> None:
    w, optimizer = make(case)
    step(w, optimizer)
    before, z = w.detach().clone(), points(optimizer, w)
    optimizer.eval()
    v, twin = copied((w, optimizer))
    with pytest.raises(RuntimeError, match="train"):
        twin.step()
    twin.train()
    assert torch.equal(v, before)
    assert torch.equal(w, z)
    optimizer.train()
    optimizer.restart()
    v, twin = copied((w, optimizer))
    assert torch.equal(points(twin, v), z)
    assert torch.equal(v, before)


@pytest.mark.parametrize("key", ["last", "weight"])
def test_a_point_of_another_shape_is_refused(key: str) -> None:
    w, optimizer = make(DUAL_AVERAGING[0])
    step(w, optimizer)
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], key: torch.ones(1)}
    with pytest.raises(ValueError, match=f"{key!r} for .* has shape"):
        optimizer.load_state_dict(saved)


def test_eval_and_train_serve_parameters_that_are_views_of_one_tensor() -> None:
    flat = torch.randn(2, 3, 4)
    ps = [nn.Parameter(x) for x in flat]
    optimizer = espalier.RAMDA([{"params": ps, "penalty": espalier.GroupLasso(0.1)}], lr=0.1)
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in ps]
    optimizer.eval()
    ps[0].data.view(-1)[0].add_(0.0)  # a write that changes nothing
    optimizer.train()
    assert all(map(torch.equal, ps, before))


def test_methods_that_hold_z_anyway_have_nothing_to_swap() -> None:
    w, optimizer = make(OPTIMIZERS[2])
    optimizer.eval()
    step(w, optimizer)
    optimizer.train()


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
@pytest.mark.parametrize(("total", "momentum"), [(400, 0.9), (1200, 0.9), (60, 0.9), (1, 0.9), (3, 0.5), (40, 0.0)])
def test_c_grows_to_one_when_95_percent_of_the_run_is_done(case: OptimizerCase, total: int, momentum: float) -> None:
    w, optimizer = make(case, momentum=momentum, total_steps=total)
    c, end = 1 - momentum, total - total // 20
    length = min((1 / c) ** 2, max(end // 10, 1))  # of the ramp
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


@pytest.mark.parametrize("settings", ["eager", "capturable kernels"])
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_a_run_of_known_length_resumes_to_the_bit(case: OptimizerCase, settings: str) -> None:
    total = 20
    (a, go_a), (b, go_b), (c, go_c) = (regression() for _ in range(3))
    whole, resumed = (case(penalised(w), lr=FAST[case.name], total_steps=total, **SETTINGS[settings]) for w in (a, b))
    for seed in range(17):  # into the ramp
        go_a(whole, seed)
        go_b(resumed, seed)
    file = io.BytesIO()
    torch.save(resumed.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        c.copy_(b)
    fresh = case(penalised(c), **SETTINGS[settings])  # the checkpoint knows the length
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


def test_a_length_that_is_taken_away_ends_the_ramp() -> None:
    w, go = regression()
    optimizer = espalier.RAMDA(penalised(w), lr=0.1, total_steps=10)
    for seed in range(10):
        go(optimizer, seed)
    assert optimizer.param_groups[0]["floor"] == 1
    optimizer.param_groups[0]["total_steps"] = None
    go(optimizer, 10)
    assert optimizer.param_groups[0]["floor"] == 0
    assert not torch.equal(w, points(optimizer, w))


@pytest.mark.parametrize(("total", "error"), [(0, ValueError), (-1, ValueError), (10.5, TypeError), (True, TypeError)])
def test_a_wrong_length_is_refused(total: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="total_steps must be"):
        espalier.RAMDA([nn.Parameter(torch.ones(1))], total_steps=total)


# ------------------------------------------------------------------------------------------------ warm-up and cosine


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW, espalier.RAMDA, espalier.ProxSGD])
def test_warm_up_and_cosine_by_hand(build: Any) -> None:
    optimizer = build([nn.Parameter(torch.ones(2))], lr=2.0)
    schedule = espalier.WarmupCosine(optimizer, total_steps=20, warmup=0.2)
    rates = []
    for _ in range(24):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    cosine = [1 + math.cos(math.pi * i / 16) for i in range(16)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, *cosine, 0, 0, 0, 0])
    assert schedule.get_last_lr() == [0.0]


@pytest.mark.parametrize("settings", [{}, {"capturable": True}], ids=["eager", "capturable"])
@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(tuple(DUAL_AVERAGING)))
def test_warm_up_and_cosine_end_with_exact_zeros_and_resume_to_the_bit(case: OptimizerCase, settings: Any) -> None:
    total = 40
    (a, go_a), (b, go_b), (c, go_c) = (regression() for _ in range(3))

    def build(w: nn.Parameter) -> tuple[Any, Any]:
        optimizer = case(penalised(w), lr=FAST[case.name], **settings)
        return optimizer, espalier.WarmupCosine(optimizer, total)

    (whole, first), (part, second), (fresh, third) = map(build, (a, b, c))
    for seed in range(total):
        go_a(whole, seed)
        first.step()
        if seed < 30:
            go_b(part, seed)
            second.step()
    file = io.BytesIO()
    torch.save([part.state_dict(), second.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        c.copy_(b)
    third.load_state_dict(saved[1])  # in either order
    fresh.load_state_dict(saved[0])
    for seed in range(30, total):
        go_c(fresh, seed)
        third.step()
    assert torch.equal(a, c)
    with fresh.structured():
        z = c.detach().clone()
    assert torch.equal(z == 0, c == 0)
    assert 0 < int((c == 0).all(0).sum()) < 8


def test_warm_up_and_cosine_after_other_training() -> None:
    w, go = regression()
    optimizer = espalier.RAMDA(penalised(w), lr=0.1)
    for seed in range(10):
        go(optimizer, seed)
    schedule = espalier.WarmupCosine(optimizer, 30)
    assert optimizer.param_groups[0]["total_steps"] == 40
    other = espalier.WarmupCosine(espalier.RAMDA(penalised(w)), 31)
    with pytest.raises(ValueError, match="steps 30, this one 31"):
        other.load_state_dict(schedule.state_dict())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"total_steps": 0}, ValueError),
        ({"total_steps": None}, TypeError),
        ({"total_steps": 5, "warmup": 1}, ValueError),
    ],
)
def test_bad_lengths_and_warm_ups(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"total_steps|warmup"):
        espalier.WarmupCosine(espalier.RAMDA([nn.Parameter(torch.ones(1))]), **settings)
