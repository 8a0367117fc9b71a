"""The paper's stages (appendix A.1): decay, restart, and let c grow to 1 in the last one."""

from __future__ import annotations

import math
import operator
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from espalier.checks import check_number
from espalier.optim.dual_averaging import ramp_length, set_option
from espalier.optim.wrappers import unwrap


class StagewiseRestart(LRScheduler):
    """At each milestone lr ← γ lr and, for dual averaging, ε ← γ ε, W⁰ ← W and t, α, V, U ← 0.

    c stays constant until the last stage and is min(c √i, 1) there, i a parameter's steps in that stage. Methods
    without an anchor (ProxSGD, ProxGen, ProxSSI) only decay lr. It is a torch scheduler: frameworks take it, and
    `SequentialLR` can put a warm-up before it.

    Args:
        optimizer: an optimizer of this package, or a framework's wrapper around one.
        milestones: counts of this schedule's own `step()` calls, be they made per epoch or per batch. Without any,
            the whole run is the last stage.
        gamma: γ.
        total_steps: how many calls of `step()` the run will make. Given it, a last stage too short for c to reach 1,
            which would end without a single zero in the weights, is warned of before training.
        steps_per_call: optimizer steps between two calls: 1, or the batches of an epoch when called once an epoch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        *,
        total_steps: int | None = None,
        steps_per_call: int = 1,
    ) -> None:
        unwrap(optimizer, "For others use torch.optim.lr_scheduler.MultiStepLR.")
        check_number("gamma", gamma, low=0, open_low=True)
        self.optimizer = optimizer
        self.milestones = [operator.index(m) for m in milestones]
        self.gamma = float(gamma)
        if any(m < 1 for m in self.milestones) or sorted(set(self.milestones)) != self.milestones:
            raise ValueError(f"milestones must be positive and increasing, not {list(milestones)}.")
        if steps_per_call < 1:
            raise ValueError(f"steps_per_call must be at least 1, not {steps_per_call}.")
        last = self.milestones[-1] if self.milestones else 0
        if total_steps is not None:
            if total_steps <= last:
                raise ValueError(f"total_steps is {total_steps}, so the milestone {last} is never followed by a stage.")
            self._warn_if_short(total_steps, last, steps_per_call)
        self._ramp(not self.milestones)
        super().__init__(optimizer)

    @property
    def count(self) -> int:
        """Calls of `step()` so far."""
        return self.last_epoch

    def step(self, epoch: int | None = None) -> None:
        """Count one call; at a milestone, begin the next stage."""
        super().step(epoch)
        if self.last_epoch in self.milestones:
            unwrap(self.optimizer).restart()
            self._decay_eps()
            self._ramp(self.last_epoch == self.milestones[-1])

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of the present call. What other schedulers make of lr is kept."""
        gamma = self.gamma if self.last_epoch in self.milestones else 1.0
        return [group["lr"] * gamma for group in self.optimizer.param_groups]

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        """For `SequentialLR`, which begins this schedule at a count, whatever the one before has made of lr."""
        return [lr * self.gamma ** bisect_right(self.milestones, self.last_epoch) for lr in self.base_lrs]

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Plain values; what a stage changed in the optimizer is in the optimizer's own state."""
        return {
            "milestones": list(self.milestones),
            "gamma": self.gamma,
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": [float(lr) for lr in self.base_lrs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved count. A checkpoint of other milestones or γ raises before anything changes."""
        check_same_plan(self, state_dict, ("milestones", "gamma"))
        # before it was a torch scheduler it saved its count alone
        self.last_epoch = int(state_dict["last_epoch"] if "last_epoch" in state_dict else state_dict["count"])
        self._step_count = int(state_dict.get("_step_count", self.last_epoch + 1))
        self.base_lrs = list(state_dict.get("base_lrs", self.base_lrs))

    def _decay_eps(self) -> None:
        shared: dict[int, Tensor] = {}  # by identity: groups may share a tensor
        for group in self.optimizer.param_groups if unwrap(self.optimizer).anchored else ():
            if isinstance(group.get("eps"), Tensor):
                shared[id(group["eps"])] = group["eps"]
            elif "eps" in group:
                group["eps"] = group["eps"] * self.gamma
        for eps in shared.values():
            eps.mul_(self.gamma)

    def _ramp(self, on: bool) -> None:
        inner = unwrap(self.optimizer)
        if inner.anchored:
            inner.defaults["ramp"] = on
            for group in self.optimizer.param_groups:
                set_option(group, "ramp", on)

    def _warn_if_short(self, total: int, last: int, steps_per_call: int) -> None:
        if not unwrap(self.optimizer).anchored:
            return
        stage = (total - last) * steps_per_call
        # where the optimizer knows the length of the run, c grows as fast as that needs
        groups = [g for g in self.optimizer.param_groups if g["penalty"] is not None and g["total_steps"] is None]
        momenta = {g["momentum"] for g in groups}
        for momentum in sorted(momenta):
            needed = ramp_length(1 - momentum)
            if needed <= stage:
                continue
            enough = math.floor((1 - 1 / math.sqrt(stage)) * 1e4) / 1e4
            way_out = f"a momentum of {enough:g} or less would do"
            milestone = total - math.ceil(needed / steps_per_call)
            before = self.milestones[-2] if len(self.milestones) > 1 else 0
            if milestone > before:
                way_out += f", or {milestone} as the last milestone"
            else:
                way_out += f", or {needed - stage} more optimizer steps"
            hint = "If step() is called once an epoch, give steps_per_call=len(loader). " if steps_per_call == 1 else ""
            warnings.warn(
                f"with momentum {momentum:g} the weights are exactly structured only after {needed} steps of the last "
                f"stage, and it has {stage}: {way_out}. {hint}Or build the optimizer with total_steps=, the optimizer "
                "steps of the whole run. Otherwise deliver optimizer.structured() in place of the weights.",
                stacklevel=3,
            )


def check_same_plan(schedule: LRScheduler, state_dict: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise if a checkpoint is of another schedule."""
    for key in keys:
        if state_dict[key] != getattr(schedule, key):
            raise ValueError(
                f"the checkpoint's schedule has {key} {state_dict[key]}, this one {getattr(schedule, key)}. "
                "Build it with the saved ones."
            )
