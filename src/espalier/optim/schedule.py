"""The paper's stages (appendix A.1): decay, restart, and let c grow to 1 in the last one."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from espalier.checks import check_number
from espalier.optim.base import StructuredOptimizer
from espalier.optim.dual_averaging import ramp_length


class StagewiseRestart:
    """At each milestone lr ← γ lr and, for dual averaging, ε ← γ ε, W⁰ ← W and t, α, V, U ← 0.

    c stays constant until the last stage and is min(c √i, 1) there, i a parameter's steps in that stage. Methods
    without an anchor (ProxSGD, ProxGen, ProxSSI) only decay lr.

    Args:
        optimizer: an optimizer of this package.
        milestones: counts of this schedule's own `step()` calls, be they made per epoch or per batch. Without any,
            the whole run is the last stage.
        gamma: γ.
        total_steps: how many calls of `step()` the run will make. Given it, a last stage too short for c to reach 1,
            which would end without a single zero in the weights, is warned of before training.
        steps_per_call: optimizer steps between two calls: 1, or the batches of an epoch when called once an epoch.
    """

    def __init__(
        self,
        optimizer: StructuredOptimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        *,
        total_steps: int | None = None,
        steps_per_call: int = 1,
    ) -> None:
        if not isinstance(optimizer, StructuredOptimizer):
            raise TypeError(
                f"StagewiseRestart works on Espalier's optimizers, not on {type(optimizer).__name__}. "
                "For others use torch.optim.lr_scheduler.MultiStepLR."
            )
        check_number("gamma", gamma, low=0, open_low=True)
        self.optimizer = optimizer
        self.milestones = [operator.index(m) for m in milestones]
        self.gamma = float(gamma)
        self.count = 0
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

    def step(self) -> None:
        """Count one call; at a milestone, begin the next stage."""
        self.count += 1
        if self.count in self.milestones:
            self._decay()
            self.optimizer.restart()
            self._ramp(self.count == self.milestones[-1])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Plain values; what a stage changed in the optimizer is in the optimizer's own state."""
        return {"count": self.count, "milestones": list(self.milestones), "gamma": self.gamma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved count. A checkpoint of other milestones or γ raises before anything changes."""
        for key in ("milestones", "gamma"):
            if state_dict[key] != getattr(self, key):
                raise ValueError(
                    f"the checkpoint's schedule has {key} {state_dict[key]}, this one {getattr(self, key)}. "
                    "Build it with the saved ones."
                )
        self.count = int(state_dict["count"])

    def _decay(self) -> None:
        shared: dict[int, Tensor] = {}  # by identity: groups may share a tensor
        for group in self.optimizer.param_groups:
            for k in ("lr", "eps") if self.optimizer.anchored else ("lr",):
                if isinstance(group.get(k), Tensor):
                    shared[id(group[k])] = group[k]
                elif k in group:
                    group[k] = group[k] * self.gamma
        for option in shared.values():
            option.mul_(self.gamma)

    def _ramp(self, on: bool) -> None:
        if self.optimizer.anchored:
            self.optimizer.defaults["ramp"] = on
            for group in self.optimizer.param_groups:
                if isinstance(group["ramp"], Tensor):
                    group["ramp"].fill_(on)
                else:
                    group["ramp"] = on

    def _warn_if_short(self, total: int, last: int, steps_per_call: int) -> None:
        if not self.optimizer.anchored:
            return
        stage = (total - last) * steps_per_call
        momenta = {g["momentum"] for g in self.optimizer.param_groups if g["penalty"] is not None}
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
            warnings.warn(
                f"with momentum {momentum:g} the weights are exactly structured only after {needed} steps of the last "
                f"stage, and it has {stage}: {way_out}. Otherwise deliver optimizer.structured() in place of the "
                "weights.",
                stacklevel=3,
            )
