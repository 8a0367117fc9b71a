"""What a user sets: in the constructor, and on a group between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.optim.base import StructuredOptimizer
from tables import OPTIMIZERS, OptimizerCase, names

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))


def build(case: OptimizerCase, penalty: espalier.Penalty | None = None, **settings: Any) -> StructuredOptimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))][: 1 if penalty else 2]
    return case([{"params": params, "penalty": penalty}], **settings)


def step(optimizer: StructuredOptimizer) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.detach().clone() for p in params]


# ---------------------------------------------------------------------------------------------- set on a group


WRONG: tuple[tuple[str, Any], ...] = (
    ("penalty", "lasso"),
    ("penalty", espalier.NuclearNorm(1e-3)),
    ("grouping", "rows"),
    ("grouping", "matrix"),
    ("solver", "magic"),
    ("fused", "yes"),
    ("lr", -1.0),
    ("lr", float("nan")),
    ("lr", "fast"),
    ("lr", torch.tensor([0.1, 0.1])),
    ("lr", torch.tensor(-1.0)),
    ("momentum", 1.5),
    ("betas", (0.9, 1.5)),
    ("betas", 0.9),
    ("eps", 0.0),
    ("weight_decay", -1.0),
    ("total_steps", 2.5),
)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [(case, key, value) for case in OPTIMIZERS for key, value in WRONG if key in build(case).defaults],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_wrong_value_set_later_raises_what_the_constructor_raises(case: OptimizerCase, key: str, value: Any) -> None:
    optimizer = build(case, espalier.GroupLasso(1e-2))
    before = step(optimizer)
    group = dict(optimizer.param_groups[0])
    with pytest.raises((TypeError, ValueError)) as expected:
        case([{**group, "params": [nn.Parameter(torch.randn(4, 3))], key: value}])
    optimizer.param_groups[0][key] = value
    with pytest.raises(expected.type) as found:
        optimizer.step()
    assert str(found.value) == str(expected.value)
    assert torch.equal(before[0], optimizer.param_groups[0]["params"][0])
    optimizer.param_groups[0][key] = group[key]
    step(optimizer)


@every_optimizer
def test_a_penalty_set_later_gets_its_groups(case: OptimizerCase) -> None:
    optimizer, known = (build(case, espalier.GroupLasso(1e-9)) for _ in range(2))
    optimizer.param_groups[0].update(penalty=None, grouping=None)
    for o in (optimizer, known):
        step(o)
        o.param_groups[0]["penalty"] = espalier.GroupLasso(0.5)
    assert torch.allclose(step(optimizer)[0], step(known)[0], atol=1e-6)
    assert optimizer.param_groups[0]["grouping"] == espalier.Input()


@every_optimizer
def test_a_penalty_set_later_that_does_not_fit_names_the_parameter(case: OptimizerCase) -> None:
    optimizer = build(case)
    step(optimizer)
    optimizer.param_groups[0]["penalty"] = espalier.GroupLasso(0.5)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: input groups need an axis 1"):
        optimizer.step()


@every_optimizer
def test_a_grouping_may_stay_without_its_penalty_but_not_come_alone(case: OptimizerCase) -> None:
    optimizer = build(case, espalier.GroupLasso(0.5))
    step(optimizer)
    optimizer.param_groups[0]["penalty"] = None
    step(optimizer)
    optimizer = build(case)
    step(optimizer)
    optimizer.param_groups[0]["grouping"] = "input"
    with pytest.raises(ValueError, match="a grouping but no penalty"):
        optimizer.step()


@every_optimizer
def test_a_schedule_that_ends_just_below_zero_goes_on(case: OptimizerCase) -> None:
    optimizer = build(case)
    optimizer.param_groups[0]["lr"] = -5e-18  # as LinearLR's end_factor=0 rounds
    step(optimizer)


# ---------------------------------------------------------------------------------------------- lr


@every_optimizer
@pytest.mark.parametrize("penalty", [None, espalier.GroupLasso(1e-2)], ids=lambda p: type(p).__name__)
def test_lr_may_be_a_tensor_of_one(case: OptimizerCase, penalty: espalier.Penalty | None) -> None:
    lr = case.settings["lr"]
    shapes = (torch.tensor(lr), torch.tensor([lr]), torch.tensor([[lr]]))
    results = []
    for tensor in shapes:
        optimizer = build(case, penalty, lr=tensor)
        step(optimizer)
        with optimizer.structured():
            pass
        optimizer.load_state_dict(optimizer.state_dict())
        results.append(step(optimizer))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@every_optimizer
def test_lr_of_two_elements_is_torchs_error(case: OptimizerCase) -> None:
    with pytest.raises(ValueError, match="lr must be one number"):
        build(case, lr=torch.tensor([0.1, 0.2]))


# ---------------------------------------------------------------------------------------------- the constructor

TORCHS = ("weight_decay", "betas", "momentum", "nesterov", "foreach")


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in OPTIMIZERS for name in TORCHS if name not in build(case).defaults],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_setting_of_torchs_that_is_not_there_gives_a_hint(case: OptimizerCase, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{case.build.__name__} has no {name}\. .*(Give|ProxGen|Leave)"):
        build(case, **{name: 0.1})


def test_a_subclass_may_take_what_its_method_does_not() -> None:
    class Decayed(espalier.RAMDA):
        def __init__(self, params: Any, **settings: Any) -> None:
            self.decay = settings.pop("weight_decay", 0.0)
            super().__init__(params, **settings)

    assert Decayed([nn.Parameter(torch.ones(1))], weight_decay=0.1).decay == 0.1


def test_an_unknown_setting_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        build(OPTIMIZERS[0], speed=3)
