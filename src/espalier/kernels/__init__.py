"""Triton kernels, and the two seams behind which they stand.

`Fused` takes the parameters whose whole step the kernels serve, and `takes` small matrices under the nuclear norm; the
torch code in `solvers/` and `optim/` is the reference, and does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from espalier.kernels.branches import Branches
from espalier.partition import Partition
from espalier.penalties import L1, GroupLasso, GroupMCP, SparseGroupLasso
from espalier.solvers import ClosedForm, Exact, NewtonRaphson

if TYPE_CHECKING:
    from espalier.kernels.launch import Plan
    from espalier.optim.base import StructuredOptimizer

Group: TypeAlias = dict[str, Any]

_PENALTIES = (type(None), GroupLasso, SparseGroupLasso, GroupMCP, L1)
_SOLVERS = (ClosedForm, Exact, NewtonRaphson)
_OLDEST_TRITON = (3, 4)
# products in float64, and the GPUs on which these are fast and find room: A100, H100, H200
_OLDEST_TRITON_IN_FLOAT64 = (3, 5)
_IN_FLOAT64 = ((8, 0), (9, 0))
# sets of parameters with a gradient, in each group, whose plans are remembered
_KEPT = 8
# rows and columns of a matrix that one program keeps at hand, and how many of its last points it mixes
_MOST_ROWS, _MOST_COLUMNS = 128, 64
MOST_MEMORY = 8
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def lacking(optimizer: StructuredOptimizer, group: Group, p: Tensor) -> str | None:
    """Why the kernels do not serve this parameter; None where they do."""
    penalty = group["penalty"]
    if "kernel" not in vars(type(optimizer)):
        return f"there is no kernel for {type(optimizer).__name__}"
    if type(penalty) not in _PENALTIES:
        return f"there is no kernel for {type(penalty).__name__}"
    if penalty is not None and not isinstance(optimizer._solver(group), _SOLVERS):
        return f"there is no kernel for {type(optimizer._solver(group)).__name__}"
    if (reason := missing()) is not None:
        return reason
    from espalier.kernels import launch
    from espalier.kernels.geometry import geometry, tile_of

    # the interpreter is for tests: only where it is asked for
    if p.device.type != "cuda" and not (p.device.type == "cpu" and group["fused"] and interpreted()):
        return f"it is on {p.device.type}, not on a CUDA device"
    if type(p) not in (Tensor, nn.Parameter):
        return f"it is a {type(p).__name__}, not a plain tensor"
    if p.dtype not in _TYPES:
        return f"its type is {p.dtype}, not float32, bfloat16 or float16"
    at = geometry(optimizer._partition(group, p), tuple(p.shape), p.stride())
    if at is None:
        return f"its memory, with strides {p.stride()}, has gaps or another order than its groups"
    if isinstance(penalty, L1 | None):
        return None
    if tile_of(at, launch.processors(p.device)) is None:
        return f"its groups of {at.rows * at.run} entries are too large"
    return None


def takes(x: Tensor) -> bool:
    """Whether the kernels in `singular_values` and `splitting` take these matrices (L, m, n)."""
    small = min(x.shape[1:]) <= _MOST_COLUMNS and max(x.shape[1:]) <= _MOST_ROWS and x.numel() > 0
    return small and x.is_cuda and x.dtype == torch.float32 and _in_float64(x.device)


@cache
def _in_float64(device: torch.device) -> bool:
    return missing(_OLDEST_TRITON_IN_FLOAT64) is None and torch.cuda.get_device_capability(device) in _IN_FLOAT64


def missing(oldest: tuple[int, int] = _OLDEST_TRITON) -> str | None:
    """Why no kernel runs here; None where they do."""
    if torch.version.hip:
        return "the kernels are for NVIDIA GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < oldest:
        return f"Triton {triton.__version__} is too old: 3.4, which torch 2.8 brings, is the first that compiles them"
    return None


def interpreted() -> bool:
    """Whether Triton runs its interpreter, which takes the CPU's tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def first_radius(groups: Partition, weight: Tensor) -> Tensor:
    """Where Newton begins in a first step: each group's norm, the scale of its series, and the norm's trend."""
    norms = groups.norm(groups.split(weight)).reshape(-1)
    return torch.stack([norms, norms.clamp(min=1e-6) / 4, torch.zeros_like(norms)])


def capturing() -> bool:
    """Whether a CUDA graph is being recorded."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class Fused:
    """The plans of an optimizer's steps, made when first needed and kept."""

    def __init__(self, optimizer: StructuredOptimizer) -> None:
        self._optimizer = optimizer
        self._plans: dict[tuple[Any, ...], tuple[list[Plan], list[Tensor]]] = {}
        self._recorded: list[Plan] = []
        self._branches = Branches()

    def side_by_side(self) -> AbstractContextManager[None]:
        """Within, a CUDA graph has the groups whose programs wait for nobody beside the others."""
        return self._branches.fork() if capturing() else nullcontext()

    def step(self, group: Group, params: Sequence[Tensor], finite: Tensor | None) -> list[Tensor]:
        """Step what the kernels serve; give back the parameters that are left."""
        plans, rest = self._take(group, params)
        for plan in plans:
            with self._branches.branch() if plan.waiting == 0 else nullcontext():
                plan.step(finite)
        return rest

    def deliver(self, group: Group, params: Sequence[Tensor]) -> list[Tensor]:
        """Put the structured point into what the kernels serve; give back the parameters that are left."""
        plans, rest = self._take(group, params)
        for plan in plans:
            plan.deliver()
        return rest

    def _take(self, group: Group, params: Sequence[Tensor]) -> tuple[list[Plan], list[Tensor]]:
        penalty = group["penalty"]
        key = (
            *map(id, params), type(penalty), getattr(penalty, "weight", None), group["grouping"], group["solver"],
            group["maximize"], group.get("amsgrad"),
        )  # fmt: skip
        found = self._plans.pop(key, None)
        if found is None or not all(plan.current() for plan in found[0]):
            self._drop(found)
            found = self._plan(group, params)
        self._plans[key] = found  # the latest last
        while len(self._plans) > _KEPT * len(self._optimizer.param_groups):
            self._drop(self._plans.pop(next(iter(self._plans))))
        return found

    def _drop(self, found: tuple[list[Plan], list[Tensor]] | None) -> None:
        # a CUDA graph may still replay what it recorded
        self._recorded += [plan for plan in (found[0] if found else ()) if plan.recorded]

    def _plan(self, group: Group, params: Sequence[Tensor]) -> tuple[list[Plan], list[Tensor]]:
        served = {p: lacking(self._optimizer, group, p) is None for p in params}
        rest = [p for p in params if not served[p]]
        by_device: dict[torch.device, list[Tensor]] = {}
        for p in params:
            if served[p]:
                by_device.setdefault(p.device, []).append(p)
        if not by_device:
            return [], rest
        if capturing():
            raise RuntimeError("take a step before capturing one: tables must be made that a CUDA graph cannot make.")
        from espalier.kernels.launch import Plan

        return [Plan(self._optimizer, group, some) for some in by_device.values()], rest
