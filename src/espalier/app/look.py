"""A look at a run: the quality and the structure of the weights, and of the structured point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import espalier
from espalier.app.data import Order
from espalier.app.names import MEASURES
from espalier.app.tasks import Task
from espalier.optim.base import StructuredOptimizer


@contextmanager
def recalibrated(model: nn.Module, task: Task, seed: int) -> Iterator[None]:
    """The model with batch norm's statistics taken anew from training batches, and its own ones back afterwards.

    They follow the weights during training; at the structured point the activations differ.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    kept = [(b, b.clone()) for m in norms for b in m.buffers()]
    momenta, training = [m.momentum for m in norms], model.training
    try:
        if norms:
            with task.in_use(model):
                for m in norms:
                    m.reset_running_stats()
                    m.momentum = None  # the plain average over batches
                    m.train()
                _forward(model, task, seed)
            share_statistics(model, task)
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
        model.train(training)


def share_statistics(model: nn.Module, task: Task) -> None:
    """Let all processes have the mean of batch norm's statistics, which each has taken from its own batches."""
    if task.world == 1:
        return
    for m in model.modules():
        for buffer in m.buffers(recurse=False) if isinstance(m, _BatchNorm) else ():
            if buffer.is_floating_point():
                torch.distributed.all_reduce(buffer)
                buffer.div_(task.world)


@torch.no_grad()
def _forward(model: nn.Module, task: Task, seed: int) -> None:
    batches = task.data.train.batches(task.recipe.batch, order=Order(seed, 0), rank=task.rank, world=task.world)
    carry: list[Tensor] = []
    for _, batch in zip(range(task.recipe.recalibrate), batches, strict=False):
        _, carry = task.loss(model, task.drawn(batch), carry)


@contextmanager
def at_structured_point(optimizer: Optimizer, model: nn.Module, task: Task, seed: int) -> Iterator[bool]:
    """The model as it is delivered: at the structured point, batch norm's statistics its own.

    Gives whether that point differs from the weights.
    """
    if not isinstance(optimizer, StructuredOptimizer) or not optimizer.anchored:
        yield False
        return
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.structured():
        differs = not all(map(torch.equal, before, model.parameters()))
        del before
        if not differs:
            yield False
        else:
            with recalibrated(model, task, seed):
                yield True


class Looker:
    """Takes looks, and remembers the structure between them."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        self.task, self.model, self.optimizer, self.seed = task, model, optimizer, seed
        self.measure = MEASURES[task.recipe.penalty]
        structured = isinstance(optimizer, StructuredOptimizer)
        self.monitor = espalier.StructureMonitor(optimizer) if structured else None
        self.removed: float | None = None  # percent, when last looked at

    def look(self) -> dict[str, Any]:
        """Quality and structure (in percent), and what has flipped since the last look."""
        share_statistics(self.model, self.task)
        weights = self._measured()
        if self.monitor is None:
            return {"weights": weights, "structured": None}
        with at_structured_point(self.optimizer, self.model, self.task, self.seed) as differs:
            structured = self._measured() if differs else weights
            change = self.monitor.look()
        self.removed = structured["structure"]
        return {
            "weights": weights,
            "structured": structured,
            "flipped": change.flipped,
            "groups": change.groups,
            "stable_since": change.stable_since,
        }

    def _measured(self) -> dict[str, float]:
        found = self.task.evaluate(self.model)
        if self.monitor is not None:
            found["structure"] = 100 * getattr(espalier.structure(self.optimizer), self.measure)
        return found

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return self.monitor.state_dict() if self.monitor else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From checkpoints."""
        if self.monitor:
            self.monitor.load_state_dict(state)
