"""NaN and Inf: noticed before they are saved or delivered, and skipped on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def way_on(job: Job, checkpoint: int | None) -> str:
    """The end of a message about NaN or Inf: the causes, and how to go on."""
    start = "There is no checkpoint yet, so the same command with --resume begins anew"
    if checkpoint is not None:
        start = f"The checkpoint of step {checkpoint} is finite: the same command with --resume goes on from there"
    return (
        "training has diverged. Either the data hold NaN or Inf, or the learning rate is too large. "
        f"{start}. Add --set skip_nonfinite=true to skip such batches, or try a smaller lr, "
        f"--set methods.{job.method}.lr={job.chosen.lr / 3:.1g}"
    )


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
