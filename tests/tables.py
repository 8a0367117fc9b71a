"""The tables that the tests run over: a new penalty or optimizer is one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import espalier
from espalier.optim.base import StructuredOptimizer


class ElasticNet(espalier.Penalty):
    """A penalty that the library does not have: λ (‖x‖₁ + ‖x‖²/2), with value and prox and nothing else."""

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def value(self, x: Tensor, groups: espalier.Partition) -> Tensor:
        return self.lam * (x.abs().sum() + 0.5 * x.square().sum())

    def prox(self, x: Tensor, step: float | Tensor, groups: espalier.Partition) -> Tensor:
        kappa = step * self.lam
        return torch.sign(x) * (x.abs() - kappa).clamp(min=0) / (1 + kappa)


@dataclass(frozen=True)
class PenaltyCase:
    """A penalty by its strength, and the groupings it is tested on."""

    build: Callable[[float], espalier.Penalty]
    groupings: tuple[str | espalier.Grouping, ...]

    @property
    def name(self) -> str:
        return type(self.build(1.0)).__name__


_GROUPED: tuple[str | espalier.Grouping, ...] = (
    "input",
    "output",
    espalier.Input(block=2),
    espalier.Input(layout=espalier.Layout(parts=2)),
)

PENALTIES = (
    PenaltyCase(espalier.L1, ("element", "input")),
    PenaltyCase(espalier.GroupLasso, (*_GROUPED, "element")),
    PenaltyCase(espalier.SparseGroupLasso, _GROUPED),
    PenaltyCase(espalier.GroupMCP, _GROUPED),
    PenaltyCase(espalier.NuclearNorm, ("matrix", espalier.Matrix(layout=espalier.Layout(input_dim=0, output_dim=1)))),
    PenaltyCase(ElasticNet, ("element",)),
)


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer with settings under which a small problem trains."""

    build: type[StructuredOptimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        return self.build.__name__ + (f"-{self.variant}" if self.variant else "")

    def __call__(self, params: Any, **settings: Any) -> StructuredOptimizer:
        return self.build(params, **{**self.settings, **settings})


OPTIMIZERS = (
    OptimizerCase(espalier.RAMDA, {"lr": 1e-2}),
    OptimizerCase(espalier.RMDA, {"lr": 1e-1}),
    OptimizerCase(espalier.ProxSGD, {"lr": 1e-1}),
    OptimizerCase(espalier.ProxGen, {"lr": 1e-2}),
    OptimizerCase(espalier.ProxGen, {"lr": 1e-2, "amsgrad": True, "weight_decay": 1e-2}, "amsgrad"),
    OptimizerCase(espalier.ProxSSI, {"lr": 1e-2}),
)


def names(cases: tuple[Any, ...]) -> list[str]:
    return [c.name for c in cases]
