"""The programs of a panel share its groups. In the interpreter each runs in a process of its own, on shared memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from tables import OPTIMIZERS

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

from espalier.kernels import device, interpreted, launch

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="on a GPU tests/test_gpu.py shows it"),
    # the interpreter computes masked lanes too, and there it divides by zero
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

PATIENCE = 90  # seconds for programs that wait for each other


class SideBySide:
    """A kernel whose programs run at the same time."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(work: Tensor, *args: Any, **options: Any) -> None:
            def program(i: int) -> None:
                os.nice(10)  # sixteen that wait by asking again leave something to the tests beside them
                self.kernel[(1,)](work[i:], *args, **options)

            fork = multiprocessing.get_context("fork")
            programs = [fork.Process(target=program, args=(i,)) for i in range(*grid)]
            for p in programs:
                p.start()
            end = time.monotonic() + PATIENCE
            for p in programs:
                p.join(max(0, end - time.monotonic()))
            ends = [p.exitcode for p in programs]
            for p in programs:
                p.kill()
            assert ends == [0] * len(programs)

        return launch


def in_shared_memory(plan: launch.Plan) -> None:
    tensors = [plan._clocks, plan._scalars, plan._options.values, plan._counters]
    for x in (*tensors, *(one.later for one in plan._launches)):
        x.share_memory_()


@pytest.mark.parametrize(
    ("shape", "grouping"),
    [
        ((130, 40), "input"),
        ((70, 20, 3), "input"),
        ((65, 4, 3, 3), "input"),
        ((3, 5000), "output"),
        ((2, 3, 3000), "input"),
    ],
    ids=["rows", "runs", "runs of nine", "long rows", "rows of long runs"],
)
@pytest.mark.parametrize(
    ("name", "penalty", "decades"),
    [
        ("RAMDA", espalier.GroupLasso(3e-2), 0),
        ("RAMDA", espalier.GroupMCP(3e-2), 4),
        ("ProxGen", espalier.SparseGroupLasso(3e-2), 8),
        ("RMDA", espalier.GroupLasso(3e-2), 0),
    ],
    ids=["RAMDA", "RAMDA-MCP", "ProxGen-wide", "RMDA"],
)
def test_programs_that_share_groups_agree_with_float64(
    name: str,
    penalty: espalier.Penalty,
    decades: int,
    shape: tuple[int, ...],
    grouping: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "processors", lambda where: 16)
    monkeypatch.setattr(device, "step_groups", SideBySide(device.step_groups))
    # the interpreter copies its arguments back, onto themselves: other programs' changes would be lost
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).share_memory_())
    q = nn.Parameter(p.detach().double())
    case = next(c for c in OPTIMIZERS if c.name == name)
    fused, exact = (case([{"params": [x], "penalty": penalty, "grouping": grouping}], fused=False) for x in (p, q))
    (group,) = fused.param_groups
    fused._new_state(group, p)
    launch.Plan(fused, group, [p])  # which adds to the state
    for x in fused.state[p].values():
        x.share_memory_()
    plan = launch.Plan(fused, group, [p])
    in_shared_memory(plan)
    assert max(len(one.work) for one in plan._launches) > 2
    for _ in range(2):
        p.grad = (torch.randn(shape) * 10 ** (decades * (torch.rand(shape) - 0.5))).share_memory_()
        q.grad = p.grad.double()
        plan.step(None)
        exact.step()
    assert (p - q).norm() <= 1e-5 * q.norm()
