"""Checkpoints that others write and read: by name, by torch.distributed.checkpoint, in hooks, of other versions."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import espalier
from espalier.optim.base import StructuredOptimizer
from tables import OPTIMIZERS, OptimizerCase, names

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
every_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def build(case: OptimizerCase, model: nn.Module, **settings: Any) -> StructuredOptimizer:
    rules = [espalier.Rule("1", espalier.L1(0.05)), espalier.Rule("2", espalier.NuclearNorm(0.1))]
    return case(espalier.regularize(model, espalier.GroupLasso(0.05), rules), **settings)


def train(model: nn.Module, optimizer: StructuredOptimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------- names


def of_two(case: OptimizerCase, *order: str, wrapped: str = "") -> tuple[dict[str, nn.Parameter], StructuredOptimizer]:
    params = {k: nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(ord(k)))) for k in "ab"}
    return params, case([(wrapped + k, params[k]) for k in order])


def step(params: dict[str, nn.Parameter], optimizer: StructuredOptimizer) -> list[Tensor]:
    for i, p in enumerate(params.values(), start=1):
        p.grad = torch.full_like(p, float(i))
    optimizer.step()
    return [p.detach().clone() for p in params.values()]


@every_optimizer
@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.module."])
def test_named_parameters_in_another_order_are_matched_by_name(case: OptimizerCase, wrapped: str) -> None:
    params, optimizer = of_two(case, "a", "b")
    step(params, optimizer)
    others, other = of_two(case, "b", "a", wrapped=wrapped)
    for k, p in others.items():
        p.data.copy_(params[k])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == [wrapped + "b", wrapped + "a"]
    assert same(step(params, optimizer), step(others, other))


@every_optimizer
def test_other_names_are_refused_and_change_nothing(case: OptimizerCase) -> None:
    params, optimizer = of_two(case, "a", "b")
    step(params, optimizer)
    saved = optimizer.state_dict()
    _, other = of_two(case, "a", "b", wrapped="encoder.")
    with pytest.raises(ValueError, match=r"other names.*encoder\.a.*delete 'param_names'"):
        other.load_state_dict(saved)
    assert not other.state
    for group in saved["param_groups"]:
        del group["param_names"]
    other.load_state_dict(saved)
    assert other.param_groups[0]["param_names"] == ["encoder.a", "encoder.b"]


@every_optimizer
def test_parameters_that_share_a_name_keep_their_order_or_are_refused(case: OptimizerCase) -> None:
    def build(*order: str) -> StructuredOptimizer:
        return case([(k, nn.Parameter(torch.ones(3, 3))) for k in order])

    optimizer = build("w", "w", "v")
    for i, p in enumerate(optimizer.param_groups[0]["params"], start=1):
        p.grad = torch.full_like(p, float(i))
    optimizer.step()
    same_order, other_order = build("w", "w", "v"), build("v", "w", "w")
    same_order.load_state_dict(optimizer.state_dict())
    for old, new in zip(optimizer.state.values(), same_order.state.values(), strict=True):
        assert same(list(old.values()), list(new.values()))
    with pytest.raises(ValueError, match=r"share a name.*delete 'param_names'"):
        other_order.load_state_dict(optimizer.state_dict())


@every_optimizer
def test_without_names_order_counts_as_in_torch(case: OptimizerCase) -> None:
    params, optimizer = of_two(case, "a", "b")
    step(params, optimizer)
    unnamed = case([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
    unnamed.load_state_dict(optimizer.state_dict())
    assert unnamed.param_groups[0]["param_names"] == ["a", "b"]
    _, other = of_two(case, "b", "a")
    other.load_state_dict(case([nn.Parameter(torch.randn(3, 3)) for _ in range(2)]).state_dict())
    assert other.param_groups[0]["param_names"] == ["b", "a"]


# ---------------------------------------------------------------------------------------------- torch.distributed


@every_form
@every_optimizer
def test_distributed_checkpoints_go_on_to_the_bit(case: OptimizerCase, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = network()
    optimizer = build(case, model)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    twin = copy.deepcopy(model)
    other = build(case, twin)
    set_optimizer_state_dict(twin, other, saved, options=options)
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert same(weights(model), weights(twin))


@every_optimizer
def test_distributed_checkpoints_match_by_name(case: OptimizerCase) -> None:
    model = network()
    named = list(model.named_parameters())
    optimizer = case(named)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin = copy.deepcopy(model)
    other = case(list(twin.named_parameters())[::-1])
    set_optimizer_state_dict(twin, other, saved)
    train(model, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(weights(model), weights(twin))


@every_form
@pytest.mark.parametrize("case", [c for c in OPTIMIZERS if c.build.anchored], ids=lambda c: c.name)
def test_distributed_checkpoints_made_after_eval_bring_the_weights_or_are_refused(
    case: OptimizerCase, flat: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = network()
    optimizer = build(case, model)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    before = weights(model)
    optimizer.eval()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    twin = copy.deepcopy(model)
    other = build(case, twin)
    if flat:  # its keys are those of the optimizer that loads
        with pytest.raises(ValueError, match=r"after eval\(\).*missing.*call optimizer\.train\(\)"):
            set_optimizer_state_dict(twin, other, saved, options=options)
        return
    set_optimizer_state_dict(twin, other, saved, options=options)
    other.train()
    assert same(weights(twin), before)


@every_optimizer
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_the_step_that_only_makes_state_leaves_no_trace(case: OptimizerCase, tensor: bool) -> None:
    settings = {"lr": torch.tensor(case.settings["lr"])} if tensor else {}
    plain, initialised = network(), network()
    with torch.no_grad():
        initialised[0].weight.zero_()
    optimizers = [build(case, model, **settings) for model in (plain, initialised)]
    assert get_optimizer_state_dict(initialised, optimizers[1])["state"]  # there is something to load into
    assert all(float(s["step"]) == 0 for s in optimizers[1].state.values())
    initialised.load_state_dict(plain.state_dict())  # weights may come after it: the anchor is W at the first real step
    with optimizers[1].structured():
        assert same(weights(plain), weights(initialised))
    train(plain, optimizers[0], range(4))
    train(initialised, optimizers[1], range(4))
    assert same(weights(plain), weights(initialised))
    for a, b in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert a.keys() == b.keys()
        assert same(list(a.values()), list(b.values()))


@every_optimizer
def test_a_first_step_of_a_warm_up_counts(case: OptimizerCase) -> None:
    model = network()
    optimizer = build(case, model, lr=0.0)
    train(model, optimizer, range(2))
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


# ---------------------------------------------------------------------------------------------- hooks, other versions


@every_optimizer
def test_a_hook_sees_what_is_returned(case: OptimizerCase) -> None:
    model = network()
    optimizer = build(case, model, solver=espalier.ProximalGradient() if case.name == "RAMDA" else "auto")
    train(model, optimizer, range(2))
    file = io.BytesIO()
    seen: list[dict[str, Any]] = []

    def save(_: Any, saved: dict[str, Any]) -> None:
        seen.append(saved)
        torch.save(saved, file)

    optimizer.register_state_dict_post_hook(save, prepend=True)
    saved = optimizer.state_dict()
    assert seen[0] is saved
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["param_groups"][0]["method"] == case.build.__name__
    optimizer.load_state_dict(loaded)
    optimizer.register_state_dict_post_hook(lambda *_: {"replaced": True})
    assert optimizer.state_dict() == {"replaced": True}


@every_optimizer
def test_a_clock_may_be_a_plain_number(case: OptimizerCase) -> None:
    model = network()
    optimizer = build(case, model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.update({k: state[k].item() for k in optimizer.clock})
    twin = copy.deepcopy(model)
    other = build(case, twin)
    other.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(weights(model), weights(twin))


@every_optimizer
def test_a_checkpoint_without_the_solver_loads(case: OptimizerCase) -> None:
    """Earlier versions left it out."""
    model = network()
    optimizer = build(case, model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["solver"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["solver"] == "auto"
