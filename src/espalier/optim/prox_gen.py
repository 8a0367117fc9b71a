"""Proximal AdamW."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.optim.optimizer import ParamsT

from espalier.checks import check_number
from espalier.optim.arithmetic import add_square, rate
from espalier.optim.base import (
    Clock,
    Group,
    StructuredOptimizer,
    Tensors,
)
from espalier.solvers import Solver
from espalier.subproblem import Subproblem


class ProxGen(StructuredOptimizer):
    """ProxGen (Yun et al., 2021) with AdamW's metric; without a penalty, AdamW.

    Args:
        params: parameter groups from `espalier.regularize`, written by hand, or plain parameters.
        lr: η.
        betas: β₁ and β₂ of the running averages.
        eps: of the metric √v̂ + eps.
        weight_decay: decoupled, as in AdamW; it moves the anchor to (1 − η · weight_decay) w.
        amsgrad: use the largest v so far.
        solver: "auto", "exact", "pg", "newton", "dr" or a solver object.
        maximize: maximise the objective.
        skip_nonfinite: a step whose gradients hold NaN or Inf changes nothing.
        fused: Triton kernels on a GPU: None where they serve, True everywhere or an error that says why not, False
            nowhere.
        capturable: the step can be captured in a CUDA graph; lr and what a stage changes then live on the device.
    """

    kernel: ClassVar[str] = "prox_gen"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
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
            options={
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
            },
        )

    def _check_numbers(self, group: Group) -> None:
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, not {group['betas']!r}.")
        for i, beta in enumerate(group["betas"], start=1):
            check_number(f"betas: β{i}", beta, low=0, high=1)
        check_number("eps", group["eps"], low=0, open_low=True)
        check_number("weight_decay", group["weight_decay"], low=0)
        super()._check_numbers(group)

    def _buffers(self, group: Group) -> tuple[str, ...]:
        buffers = ("grad_average", "square_average")
        return (*buffers, "square_max") if group["amsgrad"] else buffers

    def _tick(self, clock: Clock, group: Group) -> Clock:
        return {"step": clock["step"] + 1}

    def _accumulate(self, x: Tensors, clock: Clock, group: Group) -> None:
        beta1, beta2 = group["betas"]
        x["grad_average"].lerp_(x["grad"], 1 - beta1)  # m = β₁ m + (1 − β₁) g
        # v = β₂ v + (1 − β₂) g², at most the largest number
        add_square(x["square_average"].mul_(beta2), x["grad"], 1 - beta2)
        if group["amsgrad"]:
            torch.maximum(x["square_max"], x["square_average"], out=x["square_max"])

    def _pose(self, x: Tensors, clock: Clock, group: Group) -> Subproblem:
        beta1, beta2 = group["betas"]
        t, lr, decay = clock["step"], rate(group), group["weight_decay"]
        v = x["square_max"] if group["amsgrad"] else x["square_average"]
        # <m̂, x> + <x − a, (√v̂ + eps)(x − a)>/2η + ψ, times η: the same solution, and η = 0 is an ordinary case
        return Subproblem(
            anchor=x["weight"] * (1 - lr * decay) if decay else x["weight"],
            direction=x["grad_average"],
            pull=lr / (1 - beta1**t),  # η m̂
            metric=v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"]),  # √v̂ + eps
            tau=lr,
            t=t,
            scale=lr,
        )
