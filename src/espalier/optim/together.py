"""A step for parameters whose subproblems are solved together, as the nuclear norm's are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.optim.arithmetic import average
from espalier.optim.checkpoint import Group
from espalier.partition import Partition
from espalier.reading import Reading, side_by_side
from espalier.subproblem import Subproblem, together

if TYPE_CHECKING:
    from espalier.optim.base import Clock, StructuredOptimizer, Tensors

# Entries of subproblems solved together: a solver of them keeps dozens of copies, and larger batches gain nothing.
_TOGETHER = 1 << 22


@dataclass(frozen=True)
class _Turn:
    """A parameter on its way through a step."""

    p: Tensor
    clock: Clock
    x: Tensors
    before: Tensors
    problem: Subproblem
    groups: Partition
    start: Tensor


def update_together(optimizer: StructuredOptimizer, group: Group, params: list[Tensor], finite: Tensor | bool) -> None:
    """A step for parameters whose subproblems are solved in batches, one for each shape, side by side."""
    batches: dict[Any, list[_Turn]] = defaultdict(list)
    for p in params:
        clock = optimizer._tick(optimizer._read_clock(optimizer.state[p]), group)
        ((x, groups),) = optimizer._pieces(group, p, optimizer.state[p], p.grad)
        before = optimizer._let_in(x, clock, group, finite)
        problem = optimizer._pose(x, clock, group).split(groups)
        turn = _Turn(p, clock, x, before, problem, groups, groups.split(x.get("point", x["weight"])))
        batches[p.device, x["weight"].dtype, groups.shape[1:]].append(turn)
    works: list[Reading[None]] = []
    entries, where = 0, None
    for (device, *_), batch in batches.items():
        size = batch[0].start.numel()
        most = max(1, _TOGETHER // size)
        for i in range(0, len(batch), most):
            turns = batch[i : i + most]
            if where != device or entries + len(turns) * size > _TOGETHER:
                side_by_side(works, where)
                works, entries, where = [], 0, device
            works.append(_solve_together(optimizer, group, turns, finite))
            entries += len(turns) * size
    side_by_side(works, where)


def _solve_together(
    optimizer: StructuredOptimizer, group: Group, turns: list[_Turn], finite: Tensor | bool
) -> Reading[None]:
    start = torch.cat([t.start for t in turns]) if len(turns) > 1 else turns[0].start
    problem = together([t.problem for t in turns])
    solver, fused = optimizer._solver(group), group["fused"] is not False
    solution = yield from solver.solving(problem, group["penalty"], start, fused)
    for t, point in zip(turns, torch.split(solution.point, [len(t.start) for t in turns]), strict=True):
        z = t.groups.merge(point, t.x["weight"].shape)
        if "point" in t.x:
            t.x["point"].copy_(z)
        average(t.x["weight"], z, optimizer._averaging(t.clock, group))
        optimizer._take_back(t.x, t.before, finite)
        optimizer._set_clock(t.p, t.clock, finite)
