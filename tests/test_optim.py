"""What every optimizer must do as a citizen of torch.optim, and with its structure. One table runs through all."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import espalier
from espalier.optim import base
from tables import OPTIMIZERS, ElasticNet, OptimizerCase, names

PENALTIES = (
    None,
    espalier.GroupLasso(1e-2),
    espalier.SparseGroupLasso(1e-2),
    espalier.GroupMCP(3e-2),
    espalier.L1(1e-2),
    espalier.NuclearNorm(2e-1),
    ElasticNet(1e-2),
)

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
every_penalty = pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: type(p).__name__)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        # a bias before a batch norm has rounding noise for a gradient, which adaptive metrics blow up
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(),
        nn.Linear(128, 5),
    ).to(dtype)


def groups(model: nn.Module, penalty: espalier.Penalty | None = PENALTIES[1]) -> list[dict[str, Any]]:
    if penalty is None:
        return [{"params": list(model.named_parameters())}]
    return espalier.regularize(model, penalty)


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator), torch.randint(5, (8,), generator=generator))
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    for x, y in batches(steps, seed):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values()]


# ---------------------------------------------------------------------------------------------- training


@every_penalty
@every_optimizer
def test_trains_and_structures(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    model = network()
    optimizer = case(groups(model, penalty))
    x, y = batches(1)[0]
    before = loss_of(model, x, y).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    assert loss_of(model, x, y).item() < 0.7 * before
    if penalty is not None:
        with optimizer.structured():
            report = espalier.structure(optimizer)
        reached = report.low_rank_level if isinstance(penalty, espalier.NuclearNorm) else report.element_sparsity
        assert reached > 0.01


@every_penalty
@every_optimizer
def test_cut_into_blocks_gives_the_same(
    case: OptimizerCase, penalty: espalier.Penalty | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path works on blocks of groups that fit a cache; the plain one on whole tensors."""
    results = []
    for block in (16, 10**9):
        monkeypatch.setattr(base, "_BLOCK", block)
        model = network(torch.float64)
        optimizer = case(groups(model, penalty))
        train(model, optimizer, 20)
        with optimizer.structured():
            results.append((values(model), [p == 0 for p in model.parameters()]))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert same(results[0][1], results[1][1])


@every_optimizer
def test_layout_in_memory_does_not_matter(case: OptimizerCase) -> None:
    """channels_last, transposed and sliced parameters end where contiguous ones do."""

    def run(arrange: Callable[[Tensor], Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        w = nn.Parameter(arrange(torch.randn(6, 8, 3, 3, dtype=torch.float64, generator=generator)))
        group = {"params": [w], "penalty": espalier.GroupLasso(0.1), "grouping": "input"}
        optimizer = case([group])
        for _ in range(20):
            w.grad = torch.randn(6, 8, 3, 3, dtype=torch.float64, generator=generator)
            optimizer.step()
        assert w.stride() == arrange(torch.empty(6, 8, 3, 3)).stride()
        with optimizer.structured():
            return w.detach().clone()

    expected = run(lambda x: x)

    def into_slice(x: Tensor) -> Tensor:
        return torch.zeros(6, 8, 3, 6, dtype=torch.float64)[..., ::2].copy_(x)

    for arrange in (
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
        into_slice,
    ):
        assert torch.allclose(run(arrange), expected, rtol=1e-10)


@every_optimizer
def test_maximize(case: OptimizerCase) -> None:
    up, down = network(), network()
    a, b = case(groups(up), maximize=True), case(groups(down))
    for x, y in batches(5):
        a.zero_grad()
        b.zero_grad()
        (-loss_of(up, x, y)).backward()
        loss_of(down, x, y).backward()
        gradients = [p.grad.clone() for p in up.parameters()]
        a.step()
        b.step()
        assert same(gradients, [p.grad for p in up.parameters()])  # the user's gradients are left as they were
    assert same(values(up), values(down))


@every_optimizer
def test_half_precision_keeps_a_master_copy(case: OptimizerCase) -> None:
    """Steps far below bfloat16's resolution must add up, and the weights be the master's rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        model, exact = network(dtype), network(dtype).float()
        a, b = case(groups(model), lr=1e-4), case(groups(exact), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        for _ in range(30):
            for p, q in zip(model.parameters(), exact.parameters(), strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                q.grad = p.grad.float()
            a.step()
            b.step()
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            assert torch.equal(p, q.to(dtype))
            assert all(v.dtype != dtype for v in a.state[p].values())
        with a.structured(), b.structured():
            for p, q in zip(model.parameters(), exact.parameters(), strict=True):
                assert torch.equal(p, q.to(dtype))


# ---------------------------------------------------------------------------------------------- torch.optim's habits


@every_optimizer
def test_closure_runs_with_gradients_and_returns_the_loss(case: OptimizerCase) -> None:
    model = network()
    optimizer = case(groups(model))
    x, y = batches(1)[0]

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    before = values(model)
    assert isinstance(optimizer.step(closure), Tensor)
    assert not same(before, values(model))
    optimizer.zero_grad()
    assert optimizer.step() is None


@every_optimizer
def test_step_hooks(case: OptimizerCase) -> None:
    model = network()
    optimizer = case(groups(model))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 2)
    assert calls == ["pre", "post"] * 2


@every_optimizer
def test_state_dict_hooks(case: OptimizerCase) -> None:
    model = network()
    optimizer = case(groups(model))
    train(model, optimizer, 2)
    seen: list[str] = []
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loading", "loaded"]


@every_optimizer
def test_groups_may_come_later_and_differ(case: OptimizerCase) -> None:
    model = network()
    all_groups = groups(model)
    optimizer = case(all_groups[:1])
    train(model, optimizer, 2)
    optimizer.add_param_group({**all_groups[1], "lr": 0.0})
    frozen = [p.detach().clone() for p in optimizer.param_groups[1]["params"]]
    train(model, optimizer, 3)
    # lr = 0 leaves the weights alone, to the bit but for the rounding of (1 − c) w + c w
    for before, after in zip(frozen, optimizer.param_groups[1]["params"], strict=True):
        assert torch.allclose(before, after, rtol=1e-6) if optimizer.anchored else torch.equal(before, after)
    assert optimizer.param_groups[1]["param_names"]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: lr_scheduler.LambdaLR(o, lambda e: min(1.0, e / 3)),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR", "ReduceLROnPlateau"],
)
@every_optimizer
def test_torch_schedulers(case: OptimizerCase, schedule: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = case(groups(model))
    scheduler = schedule(optimizer)
    rates, history = [], []
    for x, y in batches(6):
        history.append([{k: g[k] for k in ("lr", "momentum", "betas") if k in g} for g in optimizer.param_groups])
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    # the same rates set by hand give the same weights
    by_hand = network()
    again = case(groups(by_hand))
    for (x, y), settings in zip(batches(6), history, strict=True):
        for group, options in zip(again.param_groups, settings, strict=True):
            group.update(options)
        again.zero_grad()
        loss_of(by_hand, x, y).backward()
        again.step()
    assert same(values(model), values(by_hand))


@every_optimizer
def test_grad_scaler(case: OptimizerCase) -> None:
    plain, scaled = network(), network()
    a, b = case(groups(plain)), case(groups(scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, a, 4)
    for x, y in batches(4):
        b.zero_grad()
        scaler.scale(loss_of(scaled, x, y)).backward()
        scaler.step(b)
        scaler.update()
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5)
    # an overflow: the scaler skips the step
    before = values(scaled)
    scaler.scale(loss_of(scaled, x * float("inf"), y)).backward()
    scaler.step(b)
    scaler.update()
    assert same(before, values(scaled))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@every_optimizer
def test_copies_go_on_alike(case: OptimizerCase, duplicate: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = case(groups(model))
    train(model, optimizer, 3)
    twin, twin_optimizer = duplicate((model, optimizer))
    train(model, optimizer, 3, seed=2)
    train(twin, twin_optimizer, 3, seed=2)
    assert same(values(model), values(twin))
    with twin_optimizer.structured():
        assert espalier.structure(twin_optimizer).layers


# ---------------------------------------------------------------------------------------------- checkpoints


@every_penalty
@every_optimizer
def test_a_checkpoint_goes_on_to_the_bit(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    def make() -> tuple[nn.Module, Any, espalier.StagewiseRestart]:
        model = network()
        optimizer = case(groups(model, penalty))
        return model, optimizer, espalier.StagewiseRestart(optimizer, [4, 8])

    def go(model: nn.Module, optimizer: Any, schedule: espalier.StagewiseRestart, seeds: range) -> None:
        for seed in seeds:
            train(model, optimizer, 1, seed)
            schedule.step()

    whole, resumed = make(), make()
    go(*whole, range(12))
    go(*resumed, range(6))
    file = io.BytesIO()
    torch.save([x.state_dict() for x in resumed], file)
    file.seek(0)
    fresh = make()
    # the schedule too: tensors and plain values only
    for x, saved in zip(fresh, torch.load(file, weights_only=True), strict=True):
        x.load_state_dict(saved)
    go(*fresh, range(6, 12))
    assert same(values(whole[0]), values(fresh[0]))
    assert same(state_tensors(whole[1]), state_tensors(fresh[1]))
    assert whole[1].param_groups[0]["lr"] == fresh[1].param_groups[0]["lr"]


@every_optimizer
def test_loading_shares_nothing_with_the_checkpoint(case: OptimizerCase) -> None:
    model = network()
    optimizer = case(groups(model))
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    twin = network()
    other = case(groups(twin))
    other.load_state_dict(saved)
    before = [v.clone() for s in saved["state"].values() for v in s.values()]
    train(twin, other, 2)
    assert same(before, [v for s in saved["state"].values() for v in s.values()])


@every_optimizer
def test_half_precision_state_survives_a_checkpoint(case: OptimizerCase) -> None:
    """torch casts state to the parameters' type on loading; float32 state would not come back whole."""
    model = network(torch.bfloat16)
    optimizer = case(groups(model))
    train(model, optimizer, 3)
    twin = copy.deepcopy(model)
    other = case(groups(twin))
    other.load_state_dict(optimizer.state_dict())
    assert same(state_tensors(optimizer), state_tensors(other))
    train(model, optimizer, 3, seed=2)
    train(twin, other, 3, seed=2)
    assert same(values(model), values(twin))


def _other_penalty(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["penalty"] = repr(espalier.GroupLasso(1.0))


def _other_grouping(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["grouping"] = repr(espalier.Output())


def _other_shape(saved: dict[str, Any]) -> None:
    state = saved["state"][0]
    key = next(k for k, v in state.items() if v.dim())
    state[key] = state[key][:1]


def _other_method(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        group["method"] = "SomethingElse"


def _other_library(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        del group["method"]


def _missing_state(saved: dict[str, Any]) -> None:
    for state in saved["state"].values():
        key = next(k for k, v in state.items() if v.dim())
        state["exp_avg"] = state.pop(key)


def _other_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].pop()


SPOILED = [
    _other_penalty,
    _other_grouping,
    _other_shape,
    _other_method,
    _other_library,
    _missing_state,
    _other_groups,
]


@pytest.mark.parametrize("spoil", SPOILED)
@every_optimizer
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    case: OptimizerCase, spoil: Callable[[dict[str, Any]], None]
) -> None:
    model = network()
    optimizer = case(groups(model))
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = state_tensors(optimizer)
    with pytest.raises(ValueError, match=r"(?s)(saved|checkpoint).*(Build|Load)"):
        optimizer.load_state_dict(saved)
    assert same(before, state_tensors(optimizer))


# ---------------------------------------------------------------------------------------------- odd parameters


@every_optimizer
def test_gradients_that_come_late_or_never(case: OptimizerCase) -> None:
    early, late, never = (nn.Parameter(torch.randn(4, 3)) for _ in range(3))
    alone = nn.Parameter(late.detach().clone())
    penalised = {"penalty": espalier.GroupLasso(1e-2)}
    optimizer = case([{"params": [early, late, never], **penalised}])
    fresh = case([{"params": [alone], **penalised}])
    untouched = never.detach().clone()
    for step in range(6):
        early.grad = torch.randn(4, 3)
        if step >= 3:
            late.grad = torch.randn(4, 3)
            alone.grad = late.grad.clone()
            fresh.step()
        optimizer.step()
    assert torch.equal(never, untouched)
    assert never not in optimizer.state
    # a parameter's own first gradient is its first step
    assert torch.equal(late, alone)
    with optimizer.structured():
        espalier.structure(optimizer)
    optimizer.restart()
    optimizer.load_state_dict(optimizer.state_dict())


@every_optimizer
def test_empty_and_scalar_parameters(case: OptimizerCase) -> None:
    empty, scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
    hollow = nn.Parameter(torch.empty(3, 0))
    optimizer = case([{"params": [empty, hollow], "penalty": espalier.GroupLasso(1e-2)}, {"params": [scalar]}])
    for p in (empty, hollow, scalar):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert scalar.item() < 2.0
    with optimizer.structured():
        assert espalier.structure(optimizer).weighted_group_sparsity == 0.0


@every_optimizer
def test_skip_nonfinite_is_not_a_groups_business(case: OptimizerCase) -> None:
    with pytest.raises(ValueError, match="give it to the optimizer"):
        case([{"params": [nn.Parameter(torch.ones(2))], "skip_nonfinite": True}])


@every_optimizer
def test_skip_nonfinite_leaves_everything_untouched(case: OptimizerCase) -> None:
    model, clean = network(), network()
    optimizer, reference = case(groups(model), skip_nonfinite=True), case(groups(clean))
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if step % 2:
            p = random.Random(step).choice(list(model.parameters()))
            p.grad.view(-1)[-1] = float("nan") if step == 1 else float("inf")
        else:
            reference.zero_grad()
            loss_of(clean, x, y).backward()
            reference.step()
        before, states = values(model), state_tensors(optimizer)
        optimizer.step()
        if step % 2:
            assert same(before, values(model))
            assert same(states, state_tensors(optimizer))
        for p, q in zip(model.buffers(), clean.buffers(), strict=True):
            q.copy_(p)  # batch statistics saw the bad batch; not the optimizer's business
    assert same(values(model), values(clean))


# ---------------------------------------------------------------------------------------------- structured, restart


@every_penalty
@every_optimizer
def test_structured_swaps_and_swaps_back(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    model = network()
    optimizer = case(groups(model, penalty))
    with optimizer.structured():  # nothing has happened yet
        pass
    train(model, optimizer, 10)
    before, states = values(model), state_tensors(optimizer)
    pointers = [p.data_ptr() for p in model.parameters()]
    with optimizer.structured():
        inside = values(model)
        with optimizer.structured():
            assert same(inside, values(model))
        for forbidden in (optimizer.step, optimizer.restart):
            with pytest.raises(RuntimeError, match="inside structured"):
                forbidden()
    assert same(before, values(model))
    assert same(states, state_tensors(optimizer))
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert same(before, inside) == (not optimizer.anchored)
    with pytest.raises(KeyError), optimizer.structured():
        raise KeyError
    assert same(before, values(model))
    train(model, optimizer, 1)


@every_penalty
@every_optimizer
def test_restart_begins_anew(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    """On 4-D convolutions too; afterwards a dual averaging method is one that starts at the current weights."""
    model = network()
    optimizer = case(groups(model, penalty))
    optimizer.restart()
    train(model, optimizer, 5)
    with optimizer.structured():
        z = [x.clone() for x in values(model)]
    optimizer.restart()
    twin = copy.deepcopy(model)
    fresh = case(groups(twin, penalty))
    with optimizer.structured():
        assert same(values(model), z)
    train(model, optimizer, 5, seed=2)
    train(twin, fresh, 5, seed=2)
    assert same(values(model), values(twin)) == optimizer.anchored


@every_penalty
@every_optimizer
def test_diagnostics(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    model = network(torch.float64)
    optimizer = case(groups(model, penalty))
    train(model, optimizer, 5)
    watched = copy.deepcopy((model, optimizer))
    train(model, optimizer, 1, seed=2)
    with watched[1].diagnostics() as seen:
        train(*watched, 1, seed=2)
    for p, q in zip(values(model), values(watched[0]), strict=True):
        assert torch.allclose(p, q, rtol=1e-12)  # watching changes nothing
    solves = {s.name: s for s in seen.solves}
    assert set(solves) == (set() if penalty is None else {"0.weight", "3.weight", "5.weight"})
    for s in solves.values():
        assert s.iterations >= 0
        assert s.decrease >= -1e-9
        assert 0 <= s.active <= s.groups
        assert s.name in str(seen)
        if penalty is not None and not isinstance(penalty, ElasticNet | espalier.NuclearNorm | espalier.GroupMCP):
            assert s.residual < 1e-8  # solved exactly
    before = str(seen)
    train(model, optimizer, 1)
    assert str(seen) == before


@pytest.mark.parametrize("lr", [1e-2, 1e-4])
@pytest.mark.parametrize("case", [c for c in OPTIMIZERS if not c.build.scalar_metric], ids=lambda c: c.name)
def test_proximal_gradient_stops_in_the_methods_own_units(case: OptimizerCase, lr: float) -> None:
    """ProxGen poses η times the paper's objective; a tolerance must not loosen as η shrinks."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(64, 20, dtype=torch.float64, generator=generator))
    solver = espalier.ProximalGradient(max_iters=20_000, tolerance=espalier.Tolerance(1e-3))
    optimizer = case([{"params": [w], "penalty": espalier.GroupLasso(1e-2)}], lr=lr, solver=solver)
    for _ in range(3):
        w.grad = torch.randn(64, 20, dtype=torch.float64, generator=generator)
        with optimizer.diagnostics() as seen:
            optimizer.step()
    (solve,) = seen.solves
    assert 1 < solve.iterations < 20_000
    assert solve.residual <= 1e-3 * 3**-0.6


# ---------------------------------------------------------------------------------------------- bad input


@every_optimizer
@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", -1.0), ("lr", float("nan")), ("lr", float("inf")), ("lr", "fast"), ("solver", "magic"), ("solver", 3)],
)
def test_bad_settings(case: OptimizerCase, setting: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=setting):
        case(groups(network()), **{setting: value})


@pytest.mark.parametrize(
    ("build", "setting", "value"),
    [
        *((b, "momentum", v) for b in (espalier.RAMDA, espalier.RMDA, espalier.ProxSGD) for v in (1.0, -0.1, 2.0)),
        (espalier.RAMDA, "momentum", float("nan")),
        (espalier.RAMDA, "eps", 0.0),
        (espalier.RAMDA, "eps", -1e-8),
        (espalier.ProxGen, "eps", -1e-8),
        (espalier.ProxGen, "betas", (0.9, 1.0)),
        (espalier.ProxGen, "betas", (-0.1, 0.9)),
        (espalier.ProxGen, "weight_decay", -1.0),
    ],
)
def test_bad_settings_of_one_method(build: type, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        build(groups(network()), **{setting: value})


@every_optimizer
def test_a_model_is_sent_to_regularize(case: OptimizerCase) -> None:
    with pytest.raises(TypeError, match=r"espalier\.regularize"):
        case(network())


@every_optimizer
def test_a_bad_group_is_not_added(case: OptimizerCase) -> None:
    optimizer = case([nn.Parameter(torch.randn(3))])
    w = nn.Parameter(torch.randn(3))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"params": [("bias", w)], "penalty": espalier.GroupLasso(1e-3)}, r"bias.*input groups"),
        ({"params": [w], "penalty": espalier.NuclearNorm(1e-3)}, r"no matrix"),
        ({"params": [w], "penalty": espalier.GroupLasso(1e-3), "grouping": "rows"}, r"rows.*input"),
        ({"params": [w], "penalty": espalier.GroupLasso(1e-3), "grouping": "matrix"}, r"GroupLasso.*Matrix"),
        ({"params": [w], "penalty": "lasso"}, r"espalier\.Penalty"),
        ({"params": [w], "grouping": "input"}, r"no penalty"),
        ({"params": [nn.Parameter(torch.randn(3, dtype=torch.complex64))]}, r"complex"),
    ]
    for group, message in bad:
        named = [("w", p) if isinstance(p, Tensor) else p for p in group["params"]]
        optimizer = case([("first", nn.Parameter(torch.randn(3)))])
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.add_param_group({**group, "params": named})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("build", [espalier.RAMDA, espalier.ProxGen])
@pytest.mark.parametrize(
    ("solver", "penalty", "grouping"),
    [
        ("exact", espalier.NuclearNorm(1e-3), "matrix"),
        ("newton", espalier.NuclearNorm(1e-3), "matrix"),
        ("newton", espalier.GroupMCP(1e-3), "input"),
        ("exact", ElasticNet(1e-3), "element"),
        (espalier.ClosedForm(), espalier.GroupLasso(1e-3), "input"),
    ],
)
def test_a_solver_that_cannot_serve(build: type, solver: Any, penalty: espalier.Penalty, grouping: str) -> None:
    group = {"params": [nn.Parameter(torch.randn(3, 3))], "penalty": penalty, "grouping": grouping}
    with pytest.raises(ValueError, match=rf"cannot serve {type(penalty).__name__}.*solver="):
        build([group], solver=solver)


@every_optimizer
def test_sparse_gradients_raise_before_anything_changes(case: OptimizerCase) -> None:
    table, first = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.randn(3))
    optimizer = case([("first", first), ("table", table.weight)])
    (table(torch.tensor([1, 2])).sum() + first.sum()).backward()
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match=r"table is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not optimizer.state
