"""Whether the gradients are such that a step can be made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from espalier.checks import refuse_dtensor
from espalier.optim.checkpoint import named


def check_dense(groups: list[dict[str, Any]]) -> None:
    """Raise where a gradient is sparse."""
    for j, group in enumerate(groups):
        if any((g := p.grad) is not None and g.layout is not torch.strided for p in group["params"]):
            name = next(name for p, name in named(group, j) if p.grad is not None and p.grad.layout != torch.strided)
            raise RuntimeError(
                f"the gradient of {name} is sparse, and Espalier's optimizers need dense ones. "
                "Use sparse=False on its embedding, or leave it to another optimizer."
            )


def idle(groups: list[dict[str, Any]]) -> bool:
    """Whether lr is 0 everywhere and every gradient is zero, and there is one. An lr on a GPU is not read."""
    rates = [group["lr"] for group in groups]
    if any(r != 0 if not isinstance(r, Tensor) else r.device.type != "cpu" or bool(r != 0) for r in rates):
        return False
    grads = [g for group in groups for p in group["params"] if (g := p.grad) is not None]
    return bool(grads) and not any(bool(g.any()) for g in grads)


def all_finite(parameters: Iterable[tuple[Any, Tensor, str]]) -> Tensor | bool:
    """Whether every gradient is; a tensor where the answer is on a device."""
    flags = []
    for _, p, name in parameters:
        if p.grad is not None:
            refuse_dtensor(p.grad, name, "skip_nonfinite")
            flags.append(p.grad.isfinite().all())
    if all(f.device.type == "cpu" for f in flags):
        return all(bool(f) for f in flags)
    home = next(f.device for f in flags if f.device.type != "cpu")
    return torch.stack([f.to(home, non_blocking=True) for f in flags]).all()
