"""ψ(X) = λ weight ‖X‖_*: low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from espalier.checks import check_number
from espalier.partition import Partition
from espalier.penalties.base import Penalty, Structure
from espalier.penalties.singular_values import thresholding
from espalier.reading import Reading, finish
from espalier.subproblem import Scalar, as_tensor


@dataclass(frozen=True)
class NuclearNorm(Penalty):
    """λ times the sum of singular values of each layer as a matrix. `weight` multiplies it, 1 as in the paper."""

    lam: float
    weight: float = 1.0

    separable: ClassVar[bool] = True
    synchronises: ClassVar[bool] = True
    needs_matrices: ClassVar[bool | None] = True
    default_grouping: ClassVar[str] = "matrix"

    def __post_init__(self) -> None:
        check_number("lam", self.lam)
        check_number("weight", self.weight)

    def value(self, x: Tensor, groups: Partition) -> Tensor:
        singular: Tensor = torch.linalg.svdvals(x)
        return self.lam * self.weight * singular.sum()

    def prox(self, x: Tensor, step: Scalar, groups: Partition) -> Tensor:
        return finish(self.proximal(x, step))

    def proximal(self, x: Tensor, step: Scalar, fused: bool = False, near: Tensor | None = None) -> Reading[Tensor]:
        """`prox`, U max(Σ − step λ, 0) Vᵀ, as a work that others may go on beside; one step, or one for each matrix.
        `near` as in `thresholding`."""
        kappa = as_tensor(step * self.lam * self.weight, x).reshape(-1, 1, 1).expand(len(x), 1, 1)
        kept = kappa == 0  # x to the bit then
        y = yield from thresholding(x, torch.where(kept, 1.0, kappa), fused, near)
        return y if x.device.type == "cpu" and not kept.any() else torch.where(kept, x, y)

    def structure(self, x: Tensor, groups: Partition) -> Structure:
        """Rank: singular values above max(m, n) · ε · σ_max, ε the rounding unit of the entries' type (float32 at
        most, for what a prox computes in float32 is that precise)."""
        matrix = x.to(torch.promote_types(x.dtype, torch.float32))
        full = min(matrix.shape[-2:])
        if not full:
            return Structure(groups.zero(x), torch.zeros(len(matrix), dtype=torch.long, device=x.device), full_rank=0)
        finite = matrix.isfinite().flatten(1).all(1)
        singular = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
        eps = torch.finfo(matrix.dtype).eps
        floor = max(matrix.shape[-2:]) * eps * singular[:, 0]
        if x.dtype != matrix.dtype:
            # rounding to x's type moves no singular value by more than ε/2 ‖X‖_F
            floor = floor.maximum(torch.finfo(x.dtype).eps / 2 * singular.square().sum(1).sqrt())
        rank = torch.where(finite, (singular > floor[:, None]).sum(1), full)
        return Structure(groups.zero(x), rank, full_rank=full)
