"""A method's settings made into an optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import espalier
from espalier.app.errors import Problem, one_line
from espalier.app.recipe import DUAL_AVERAGING, WITHOUT_DECAY, Method, Plan, Recipe, Solver
from espalier.optim.base import StructuredOptimizer

PENALTIES: dict[str, Callable[[float], espalier.Penalty]] = {
    "group-lasso": espalier.GroupLasso,
    "nuclear-norm": espalier.NuclearNorm,
    "l1": espalier.L1,
}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "ramda": espalier.RAMDA,
    "rmda": espalier.RMDA,
    "proxsgd": espalier.ProxSGD,
    "proxgen": espalier.ProxGen,
    "proxssi": espalier.ProxSSI,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Schedule(Protocol):
    """What the loop asks of a schedule."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def make_optimizer(recipe: Recipe, method: Method, model: nn.Module, plan: Plan, capturable: bool = False) -> Optimizer:
    """The optimizer, its penalty on the model's weights; if capturable, its step may be part of a CUDA graph."""
    kind = OPTIMIZERS[method.optimizer]
    options: dict[str, Any] = {"lr": method.lr}
    averages, stages = method.optimizer in DUAL_AVERAGING, method.schedule == "stages"
    if method.momentum is not None:
        options["momentum"] = plan.momentum(method.momentum) if averages and stages else method.momentum
    if averages and not stages:
        options["total_steps"] = plan.total  # c grows to 1 at the end, as it does in a last stage
    if method.eps is not None:
        options["eps"] = method.eps
    if method.optimizer not in WITHOUT_DECAY:
        options["weight_decay"] = method.weight_decay  # even 0: AdamW's own default is another
    if not issubclass(kind, StructuredOptimizer):
        return _torchs_own(kind, list(model.parameters()), options, capturable)
    options["capturable"] = capturable
    options["skip_nonfinite"] = recipe.skip_nonfinite
    if method.solver != Solver():
        options["solver"] = _solver(method.solver)
    try:
        rules = [espalier.Rule(name, penalty=None) for name in recipe.unpenalised]
        groups = espalier.regularize(model, PENALTIES[recipe.penalty](method.lam), rules=rules)
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise Problem(f"{method.optimizer} can't take these settings: {one_line(error)}") from error


def _torchs_own(
    kind: type[Optimizer], params: list[nn.Parameter], options: dict[str, Any], capturable: bool
) -> Optimizer:
    own: dict[str, Any] = {"fused": any(p.is_cuda for p in params)}
    if kind is not torch.optim.SGD:
        own["capturable"] = capturable
    lr = torch.tensor(options["lr"], device=params[0].device) if capturable else options["lr"]  # a graph reads it there
    optimizer = kind(params, **{**options, **own, "lr": lr})

    def as_here(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """How this machine steps is not for a checkpoint to say."""
        groups = [{**group, **own, "lr": float(group["lr"])} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def back_to_tensor(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr.fill_(group["lr"]) if isinstance(lr, Tensor) else group["lr"]

    optimizer.register_load_state_dict_pre_hook(as_here)
    optimizer.register_load_state_dict_post_hook(back_to_tensor)
    return optimizer


def rescale_lr(optimizer: Optimizer, schedule: Schedule, ratio: float) -> None:
    """Multiply each learning rate, as if the method had begun with another one."""
    shared: set[int] = set()
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if not isinstance(group.get(key), Tensor):
                if key in group:
                    group[key] *= ratio
            elif id(group[key]) not in shared:  # groups may share a tensor
                shared.add(id(group[key].mul_(ratio)))
    if isinstance(schedule, LRScheduler):
        schedule.base_lrs = [lr * ratio for lr in schedule.base_lrs]


def _solver(settings: Solver) -> str | espalier.Solver:
    solvers = {"pg": espalier.ProximalGradient, "dr": espalier.DouglasRachford}
    if settings.name not in solvers:
        return settings.name
    options = settings.model_dump(exclude={"name"}, exclude_none=True)
    if settings.rtol == 0:
        options["rtol"] = None
    made: espalier.Solver = solvers[settings.name](**options)
    return made


def make_schedule(recipe: Recipe, method: Method, optimizer: Optimizer, plan: Plan) -> Schedule:
    """The schedule, stepped once after each optimizer step."""
    if isinstance(optimizer, StructuredOptimizer) and optimizer.anchored and method.schedule == "stages":
        return espalier.StagewiseRestart(optimizer, plan.milestones, recipe.gamma, total_steps=plan.total)
    warm = round(method.warmup * plan.total)
    shapes: dict[str, Callable[[int], float]] = {
        "stages": lambda step: recipe.gamma ** sum(step >= m for m in plan.milestones),
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * (step - warm) / (plan.total - warm))),
        "linear": lambda step: 1 - (step - warm) / (plan.total - warm),
        "constant": lambda step: 1.0,
    }
    for group in optimizer.param_groups:
        group["initial_lr"] = method.lr  # a number, where lr itself may be a tensor
    shape = shapes[method.schedule]
    return LambdaLR(optimizer, lambda step: (step + 1) / warm if step < warm else shape(step))
