"""ProxGen with ProxSSI's subproblem solver."""

from __future__ import annotations

from typing import ClassVar

from espalier.optim.prox_gen import ProxGen
from espalier.solvers import NewtonRaphson, Solver


class ProxSSI(ProxGen):
    """ProxSSI (Deleu & Bengio, 2021): `ProxGen`, its subproblem solved by Newton–Raphson."""

    kernel: ClassVar[str] = "prox_gen"
    preferred_solver: ClassVar[Solver] = NewtonRaphson()
