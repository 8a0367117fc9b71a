"""Regularized momentum dual averaging."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from espalier.optim.base import Clock, Group, Tensors
from espalier.optim.dual_averaging import DualAveraging, ramp_options
from espalier.solvers import Solver
from espalier.subproblem import Scalar, Subproblem, add_scaled


class RMDA(DualAveraging):
    """RMDA (Huang & Lee, 2022), dual averaging with momentum and a scalar metric; without a penalty, MDA.

    What is written into the weights between steps (a mask, an average, loaded values) counts, but the anchor and the
    sums stay: the written values are forgotten within about 1/c steps. Call `restart()` after writing to keep them.

    Args:
        params: parameter groups from `espalier.regularize`, written by hand, or plain parameters.
        lr: η.
        momentum: the share of the old weights that a step keeps; the paper's c is 1 − momentum.
        total_steps: optimizer steps of the whole run. Given them, c grows to 1 over the last of them, under any
            learning rate schedule, so that the run ends with exact zeros in the weights. `WarmupCosine` sets it.
        solver: "auto", "exact", "pg", "newton", "dr" or a solver object.
        maximize: maximise the objective.
        skip_nonfinite: a step whose gradients hold NaN or Inf changes nothing.
        fused: Triton kernels on a GPU: None where they serve, True everywhere or an error that says why not, False
            nowhere.
        capturable: the step can be captured in a CUDA graph; lr and what a stage changes then live on the device.
    """

    scalar_metric: ClassVar[bool] = True
    kernel: ClassVar[str] = "rmda"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-1,
        momentum: float = 0.9,
        *,
        total_steps: int | None = None,
        solver: str | Solver = "auto",
        maximize: bool = False,
        skip_nonfinite: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            solver=solver,
            maximize=maximize,
            skip_nonfinite=skip_nonfinite,
            fused=fused,
            capturable=capturable,
            options={"momentum": momentum, **ramp_options(total_steps)},
        )

    def _buffers(self, group: Group) -> tuple[str, ...]:
        return ("anchor", "grad_sum")

    def _accumulate(self, x: Tensors, clock: Clock, group: Group) -> None:
        add_scaled(x["grad_sum"], x["grad"], clock["s"])  # V_t = V_{t−1} + s_t g_t

    def _pose(self, x: Tensors, clock: Clock, group: Group) -> Subproblem:
        return Subproblem(
            anchor=x["anchor"],  # W⁰
            direction=x["grad_sum"],  # V_t
            metric=at_least_one(clock["step"]) ** 0.5,  # √t; before the first step V = 0 and any metric gives W⁰
            tau=clock["alpha"],  # α_t
            t=clock["step"],
        )


def at_least_one(t: Scalar) -> Scalar:
    """max(t, 1)."""
    return t.clamp(min=1) if isinstance(t, Tensor) else max(t, 1.0)
