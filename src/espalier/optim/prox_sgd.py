"""Proximal SGD with momentum."""

from __future__ import annotations

from typing import ClassVar

from torch.optim.optimizer import ParamsT

from espalier.checks import check_number
from espalier.optim.arithmetic import rate
from espalier.optim.base import Clock, Group, StructuredOptimizer, Tensors
from espalier.solvers import Solver
from espalier.subproblem import Subproblem


class ProxSGD(StructuredOptimizer):
    """ProxSGD (Yang et al., 2020); without a penalty, SGD with momentum μ and dampening μ, from a zero average.

    Args:
        params: parameter groups from `espalier.regularize`, written by hand, or plain parameters.
        lr: η.
        momentum: μ of the gradient average m.
        solver: "auto", "exact", "pg", "newton", "dr" or a solver object.
        maximize: maximise the objective.
        skip_nonfinite: a step whose gradients hold NaN or Inf changes nothing.
        fused: Triton kernels on a GPU: None where they serve, True everywhere or an error that says why not, False
            nowhere.
        capturable: the step can be captured in a CUDA graph; lr and what a stage changes then live on the device.
    """

    scalar_metric: ClassVar[bool] = True
    kernel: ClassVar[str] = "prox_sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-1,
        momentum: float = 0.9,
        *,
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
            options={"momentum": momentum},
        )

    def _check_numbers(self, group: Group) -> None:
        check_number("momentum", group["momentum"], low=0, high=1)
        super()._check_numbers(group)

    def _buffers(self, group: Group) -> tuple[str, ...]:
        return ("grad_average",)

    def _tick(self, clock: Clock, group: Group) -> Clock:
        return {"step": clock["step"] + 1}

    def _accumulate(self, x: Tensors, clock: Clock, group: Group) -> None:
        mu = group["momentum"]
        x["grad_average"].lerp_(x["grad"], 1 - mu)  # m = μ m + (1 − μ) g

    def _pose(self, x: Tensors, clock: Clock, group: Group) -> Subproblem:
        # <m, x> + ‖x − w‖²/2η + ψ, times η: the same solution, and η = 0 is an ordinary case
        lr = rate(group)
        return Subproblem(
            anchor=x["weight"], direction=x["grad_average"], pull=lr, metric=1.0, tau=lr, t=clock["step"], scale=lr
        )
