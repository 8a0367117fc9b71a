"""What RAMDA and RMDA share: sums weighted by s_t = η √t from an anchor W⁰, and averaging with c."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.optim.arithmetic import rate
from espalier.optim.base import Clock, Group, StructuredOptimizer
from espalier.subproblem import Scalar, as_tensor


class DualAveraging(StructuredOptimizer):
    """Abstract: a dual averaging method. c grows to 1 in the paper's last stage, or as a run of known length ends.

    A group's `ramp` says that the last stage is on, and `floor` is the least c at the end of a run of `total_steps`.

    The anchor W⁰ and the sums stay when somebody writes into the weights, so a written value is forgotten within about
    1/c steps. `restart()` after writing makes the written weights the anchor.
    """

    anchored: ClassVar[bool] = True
    clock: ClassVar[tuple[str, ...]] = ("step", "alpha")

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. A group that joins later has made as many steps of the run as the others."""
        if self.param_groups:
            steps = self.param_groups[0]["steps"]
            param_group.setdefault("steps", float(steps) if isinstance(steps, Tensor) else steps)
        super().add_param_group(param_group)

    def _check_numbers(self, group: Group) -> None:
        check_number("momentum", group["momentum"], low=0, high=1)
        check_total_steps(group["total_steps"])
        super()._check_numbers(group)

    def _begin_step(self) -> None:
        for group in self.param_groups:
            group["steps"] += 1  # in place where it is a tensor, which a captured graph reads
            if group["total_steps"] is not None:
                set_option(group, "floor", final_ramp(group["steps"], group["total_steps"], 1 - group["momentum"]))
            elif not isinstance(group["floor"], Tensor):
                group["floor"] = 0.0  # the length was taken away

    def _tick(self, clock: Clock, group: Group) -> Clock:
        t = clock["step"] + 1
        s = rate(group) * t**0.5  # s_t = η √t
        return {"step": t, "alpha": clock["alpha"] + s, "s": s}  # α_t = α_{t−1} + s_t

    def _averaging(self, clock: Clock, group: Group) -> Scalar:
        c, ramp = 1 - group["momentum"], group["ramp"]
        floor: Scalar = group["floor"]
        if isinstance(ramp, Tensor):
            staged: Scalar = torch.where(ramp != 0, as_tensor(ramped(c, clock["step"]), ramp), c)
        else:
            staged = ramped(c, clock["step"]) if ramp else float(c)
        if isinstance(staged, Tensor):
            return torch.maximum(staged, as_tensor(floor, staged))
        return max(staged, floor)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. A checkpoint that does not fit raises before anything changes.

        The length of the run is this optimizer's if it has one, otherwise the checkpoint's.
        """
        totals = [group["total_steps"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, saved, total in zip(self.param_groups, state_dict["param_groups"], totals, strict=True):
            if total is not None:
                group["total_steps"] = total
            if "steps" not in saved:  # from a version that did not count them: those of the stage are known
                steps = max([float(self.state[p]["step"]) for p in group["params"] if self.state.get(p)], default=0)
                set_option(group, "steps", int(steps))


def ramp_options(total_steps: int | None) -> Group:
    """The options of c that each group has.

    Besides `total_steps`: whether this is the last stage, calls of step() so far, the least c of the present step.
    """
    return {"total_steps": total_steps, "ramp": False, "steps": 0, "floor": 0.0}


def set_option(group: Group, key: str, value: Any) -> None:
    """Set a group's option, in place if it is a tensor: a captured graph may read it."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def check_total_steps(total_steps: Any) -> None:
    if total_steps is None:
        return
    if not isinstance(total_steps, int) or isinstance(total_steps, bool):
        raise TypeError(f"total_steps must be a whole number of optimizer steps, or None, not {total_steps!r}.")
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, not {total_steps}.")


def ramped(c: float, i: Scalar) -> Scalar:
    """min(c √i, 1): c in the i-th step of the last stage."""
    # 1 − 0.9 falls 3e-17 short of 0.1; without the slack step (1/c)² would leave 1e-16 w in place of a zero
    grown = c * i**0.5 * (1 + 1e-9)
    return torch.clamp(grown, max=1.0) if isinstance(grown, Tensor) else min(grown, 1.0)


def ramp_length(c: float) -> int:
    """Steps until c √i reaches 1: (1/c)²."""
    return math.ceil((1 / (c * (1 + 1e-9))) ** 2)


def final_ramp(n: Scalar, total_steps: int, c: float) -> Scalar:
    """The least c in step n of a run: c √i, where i counts the run's last (1/c)² steps.

    It is 1 from 95% of the run on, because a gradient scaler skips steps that the user counted. A run shorter than
    10 (1/c)² steps gives a tenth of its own; then c jumps to the root of 1 over their number.
    """
    end = total_steps - total_steps // 20
    c = max(c, max(end // 10, 1) ** -0.5)
    i = n - (end - ramp_length(c))
    return ramped(c, i.clamp(min=0) if isinstance(i, Tensor) else max(i, 0))
