"""An optimizer goes on with a smaller model: convolutions in groups, and penalties that are not ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.penalties.base import RadialPenalty

QUICK: dict[str, Any] = {"latency": False, "gather": "never", "low_rank": "never"}


def separable(groups: int) -> nn.Module:
    """A convolution in groups between two of which the last reads ten of sixteen channels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=groups), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )
    with torch.no_grad():
        model[4].weight[:, :8] = 0
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("grouping", ["input", "output"])
@pytest.mark.parametrize("groups", [16, 4, 2])
@pytest.mark.parametrize("kind", [espalier.RAMDA, espalier.ProxSGD])
def test_convolutions_in_groups_train_on(kind: Any, groups: int, grouping: Any) -> None:
    model, x = separable(groups), torch.randn(2, 3, 9, 9)
    optimizer = kind(espalier.regularize(model, espalier.GroupLasso(1e-4), grouping=grouping), lr=1e-2)
    step(model, optimizer, x)
    with torch.no_grad():
        model[4].weight[:, :8] = 0
    found = espalier.shrink(model, x, **QUICK)
    small = found.model
    assert small[2].groups < groups
    new = found.optimizer(optimizer)
    (its,) = (g for g in new.param_groups if any(p is small[2].weight for p in g["params"]))
    assert its["grouping"].layout.parts == small[2].groups
    # as many entries a group as before, or the weight that they had
    step(small, new, x)
    assert all(p.isfinite().all() for p in small.parameters())
    new.load_state_dict(copy.deepcopy(new.state_dict()))
    espalier.structure(new)


class Plain(RadialPenalty):
    """A user's own penalty, and no dataclass."""

    default_grouping = "input"

    def __init__(self, lam: float, weight: float | None = None) -> None:
        self.lam, self.weight = lam, weight

    value, prox, radial = espalier.GroupLasso.value, espalier.GroupLasso.prox, espalier.GroupLasso.radial


@dataclass
class Unfrozen(Plain):
    """One that cannot be hashed."""

    lam: float
    weight: float | None = None


@pytest.mark.parametrize("penalty", [Plain(1e-4), Unfrozen(1e-4)], ids=lambda p: type(p).__name__)
def test_penalties_of_any_class_keep_their_weight(penalty: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight[:, :8] = 0
    optimizer = espalier.RAMDA(espalier.regularize(model, penalty), lr=1e-2)
    found = espalier.shrink(model, torch.randn(2, 6), **QUICK)
    new = found.optimizer(optimizer)
    (its,) = (g for g in new.param_groups if any(p is found.model[0].weight for p in g["params"]))
    assert its["penalty"].weight == 4.0  # √16, of the dense layer's columns
    assert penalty.weight is None
    step(found.model, new, torch.randn(2, 6))
