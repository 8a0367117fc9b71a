"""Regularized adaptive momentum dual averaging."""

from __future__ import annotations

from typing import ClassVar

from torch.optim.optimizer import ParamsT

from espalier.checks import check_number
from espalier.optim.arithmetic import add_square
from espalier.optim.base import Clock, Group, Tensors
from espalier.optim.dual_averaging import DualAveraging, ramp_options
from espalier.solvers import Solver
from espalier.subproblem import Subproblem, add_scaled


class RAMDA(DualAveraging):
    """RAMDA, Algorithm 1 of the paper; without a penalty, MADGRAD.

    What is written into the weights between steps (a mask, an average, loaded values) counts, but the anchor and the
    sums stay: the written values are forgotten within about 1/c steps. Call `restart()` after writing to keep them.

    Args:
        params: parameter groups from `espalier.regularize`, written by hand, or plain parameters.
        lr: η.
        momentum: the share of the old weights that a step keeps; the paper's c is 1 − momentum.
        eps: ε of the metric ∛U + ε.
        total_steps: optimizer steps of the whole run. Given them, c grows to 1 over the last of them, under any
            learning rate schedule, so that the run ends with exact zeros in the weights. `WarmupCosine` sets it.
        solver: "auto", "exact", "pg", "newton", "dr" or a solver object.
        maximize: maximise the objective.
        skip_nonfinite: a step whose gradients hold NaN or Inf changes nothing.
        fused: Triton kernels on a GPU: None where they serve, True everywhere or an error that says why not, False
            nowhere.
        capturable: the step can be captured in a CUDA graph; lr and what a stage changes then live on the device.
    """

    kernel: ClassVar[str] = "ramda"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        momentum: float = 0.9,
        eps: float = 1e-6,
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
            options={"momentum": momentum, **ramp_options(total_steps), "eps": eps},
        )

    def _check_numbers(self, group: Group) -> None:
        check_number("eps", group["eps"], low=0, open_low=True)
        super()._check_numbers(group)

    def _buffers(self, group: Group) -> tuple[str, ...]:
        return ("anchor", "grad_sum", "square_sum")

    def _accumulate(self, x: Tensors, clock: Clock, group: Group) -> None:
        add_scaled(x["grad_sum"], x["grad"], clock["s"])  # V_t = V_{t−1} + s_t g_t
        add_square(x["square_sum"], x["grad"], clock["s"])  # U_t = U_{t−1} + s_t g_t², at most the largest number

    def _pose(self, x: Tensors, clock: Clock, group: Group) -> Subproblem:
        return Subproblem(
            anchor=x["anchor"],  # W⁰
            direction=x["grad_sum"],  # V_t
            # ∛U_t + ε; pow(1/3) takes ten times as long on a CPU
            metric=x["square_sum"].log2().mul_(1 / 3).exp2_().add_(group["eps"]),
            tau=clock["alpha"],  # α_t
            t=clock["step"],
        )
