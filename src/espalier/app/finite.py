"""NaN and Inf: noticed before they are saved or delivered, and skipped on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from espalier.app.checkpoint import Position
from espalier.app.errors import Problem
from espalier.app.run import Job


class Diverged(Problem):
    """Training has met NaN or Inf. The last checkpoint is finite, and the run may go on from it with another lr."""


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or Inf. Waits for the device once."""
    numbers = [(name, x) for name, x in tensors if x.is_floating_point() and x.numel()]
    if not numbers:
        return None
    home = numbers[0][1].device
    finite = torch.stack([x.isfinite().all().to(home) for _, x in numbers]).tolist()
    return next((name for (name, _), fine in zip(numbers, finite, strict=True) if not fine), None)


def training_state(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a training, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"the optimizer's {key} of {names[p]}", value


class Skip:
    """Undoes a batch with NaN or Inf on the device, without waiting for it.

    The optimizer skips a step whose gradients are not all finite. Batch norm's statistics, the memory that is carried
    to the next batch and the sum of the losses have changed before that, and are taken back here.
    """

    def __init__(self, model: nn.Module, total: Tensor) -> None:
        self.parameters, self.buffers = list(model.parameters()), list(model.buffers())
        self.total = total
        self.skipped = torch.zeros((), dtype=torch.int64, device=total.device)
        self.finite = torch.ones((), dtype=torch.bool, device=total.device)

    def remember(self, carry: list[Tensor]) -> None:
        """Before a batch."""
        self.before = [x.clone() for x in (*self.buffers, self.total)]
        self.carry = carry

    def take_back(self, carry: list[Tensor], world: int) -> list[Tensor]:
        """After its gradients are there. Returns the memory for the next batch."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        finite = torch.stack([x.isfinite().all() for x in (*gradients, self.total)]).all()
        if world > 1:
            votes = finite.float()
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
            finite = votes > 0
        for x, old in zip((*self.buffers, self.total), self.before, strict=True):
            x.copy_(torch.where(finite, x, old))
        gradients[0].add_(torch.where(finite, 0.0, torch.nan))  # a loss may be infinite where no gradient is
        self.skipped += ~finite
        self.finite = finite
        return carry if not carry or finite else self.carry


class Watch:
    """Looks for NaN and Inf where that costs nothing: in what is read anyway, and before it is saved.

    A CPU knows each loss at once. A GPU is not waited for: its message says between which steps it happened.
    """

    def __init__(
        self, job: Job, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, total: Tensor, at: Position
    ) -> None:
        self.job, self.model, self.optimizer, self.at = job, model, optimizer, at
        self.skip = Skip(model, total) if job.recipe.skip_nonfinite else None
        # another process would wait for us in vain
        self.at_once = accelerator.device.type == "cpu" and accelerator.num_processes == 1 and self.skip is None
        self.kept: int | None = None  # the step of the last checkpoint
        self.sound = at.step  # up to which all was finite

    def batch(self, loss: Tensor) -> None:
        """Refuse a batch before it changes anything, if its loss is on the host anyway."""
        if self.at_once and not math.isfinite(seen := loss.item()):
            raise self._diverged(f"the training loss is {seen} at step {self.at.step + 1}")

    def count_skipped(self) -> None:
        """Take the skipped batches out of those that the sum of the losses is over."""
        if self.skip is None:
            return
        skipped = int(self.skip.skipped) * self.job.recipe.accumulate
        self.at.batches -= skipped
        self.at.skipped += skipped
        self.skip.skipped.zero_()

    def some_left(self) -> None:
        """Refuse a mean loss over no batch at all."""
        if not self.at.batches:
            raise self._diverged(f"all batches between step {self.sound} and step {self.at.step} hold NaN or Inf")

    def state(self) -> None:
        """Refuse to save what is not finite, in any process, over a checkpoint that is."""
        bad = first_nonfinite(training_state(self.model, self.optimizer))
        if not math.isfinite(self.at.loss):
            bad = "the training loss"
        found = [name for name in gather_object([bad]) if name is not None]
        if found:
            raise self._diverged(f"{found[0]} became NaN or Inf between step {self.sound} and step {self.at.step}")
        self.sound = self.at.step

    def look(self, look: dict[str, Any]) -> None:
        """Refuse to go on with numbers that are not finite."""
        measured = [*look["weights"].items(), *(look["structured"] or {}).items()]
        for name, value in [("train_loss", look["train_loss"]), *((f"the evaluation's {k}", v) for k, v in measured)]:
            if not math.isfinite(value):
                since = f" (it was finite at step {self.sound})" if 0 < self.sound < look["step"] - 1 else ""
                trained = name == "train_loss" or first_nonfinite(training_state(self.model, self.optimizer))
                raise self._diverged(f"{name} is {value} at step {look['step']}{since}", tested=not trained)
        self.sound = self.at.step

    def _diverged(self, what: str, *, tested: bool = False) -> Diverged:
        """The error; `tested`: all that is trained is finite, and only the evaluation was not."""
        start = "There is no checkpoint yet, so the same command with --resume begins anew"
        if self.kept is not None:
            start = f"The checkpoint of step {self.kept} is finite: the same command with --resume goes on from there"
        smaller = f"a smaller lr, --set methods.{self.job.method}.lr={self.job.chosen.lr / 3:.1g}"
        if tested:
            causes = "the weights are finite. Either the test data hold NaN or Inf, or the learning rate is too large"
            return Diverged(f"{what}, and {causes}. {start}. Check the test data, or try {smaller}")
        return Diverged(
            f"{what}: training has diverged. Either the data hold NaN or Inf, or the learning rate is too large. "
            f"{start}. Add --set skip_nonfinite=true to skip such batches, or try {smaller}"
        )
