"""A learning rate schedule for a run of known length."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from espalier.checks import check_number
from espalier.optim.dual_averaging import check_total_steps
from espalier.optim.schedule import check_same_plan


class WarmupCosine(LRScheduler):
    """A linear warm-up, then a cosine to 0. Call `step()` after each optimizer step.

    It works with any torch optimizer. RAMDA and RMDA are told the length of the run, so that it ends with exact zeros
    in the weights (their `total_steps`).

    Args:
        optimizer: any torch optimizer, or a framework's wrapper around one.
        total_steps: optimizer steps of the run, from here on.
        warmup: the share of the run that is warm-up; 0.1 suits most runs.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: float = 0.1) -> None:
        if total_steps is None:
            raise TypeError("total_steps must be a whole number of optimizer steps, not None.")
        check_total_steps(total_steps)
        check_number("warmup", warmup, low=0, high=1)
        # not total_steps: Accelerate counts micro-batches against an attribute of that name, and stops there
        self.steps = total_steps
        self.warmup = float(warmup)
        super().__init__(optimizer)
        # RAMDA and RMDA count their steps, and may have trained before
        self._tell_length(total_steps + max((int(g.get("steps", 0)) for g in optimizer.param_groups), default=0))

    def _tell_length(self, end: int) -> None:
        self._end = end
        for group in self.optimizer.param_groups:
            if "floor" in group:
                group["total_steps"] = end

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of the step to come."""
        return [lr * self._factor(self.last_epoch) for lr in self.base_lrs]

    _get_closed_form_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        plain = {k: getattr(self, k) for k in ("steps", "warmup", "last_epoch", "_step_count", "_end")}
        return plain | {k: [float(lr) for lr in getattr(self, k)] for k in ("base_lrs", "_last_lr")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved count. A checkpoint of another length or warm-up raises before anything changes."""
        check_same_plan(self, state_dict, ("steps", "warmup"))
        super().load_state_dict(state_dict)
        self._tell_length(self._end)

    def _factor(self, done: int) -> float:
        """The share of lr after so many steps."""
        warm = round(self.warmup * self.steps)
        if done < warm:
            return (done + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min((done - warm) / max(self.steps - warm, 1), 1)))
