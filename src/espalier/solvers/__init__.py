"""From a subproblem to its solution."""

from __future__ import annotations

from espalier.penalties.base import Penalty
from espalier.solvers.base import Solution as Solution
from espalier.solvers.base import Solver as Solver
from espalier.solvers.closed_form import ClosedForm as ClosedForm
from espalier.solvers.douglas_rachford import DouglasRachford as DouglasRachford
from espalier.solvers.exact import Exact as Exact
from espalier.solvers.newton_raphson import NewtonRaphson as NewtonRaphson
from espalier.solvers.proximal_gradient import ProximalGradient as ProximalGradient
from espalier.solvers.proximal_gradient import Tolerance as Tolerance

NAMED: dict[str, Solver] = {
    "exact": Exact(),
    "pg": ProximalGradient(),
    "newton": NewtonRaphson(),
    "dr": DouglasRachford(),
}


def pick(solver: str | Solver, penalty: Penalty, scalar_metric: bool, preferred: Solver = NAMED["exact"]) -> Solver:
    """The solver asked for; for "auto" the best one for what the penalty and the metric declare."""
    if isinstance(solver, str) and solver == "auto":
        if scalar_metric:
            return ClosedForm()
        candidates = (preferred, NAMED["exact"], NAMED["dr"], NAMED["pg"])
        return next(s for s in candidates if s.lacks(penalty, scalar_metric) is None)
    if not isinstance(solver, Solver):
        if solver not in NAMED:
            known = ", ".join(f'"{n}"' for n in ("auto", *NAMED))
            raise ValueError(
                f"no solver is called {solver!r}. Choose one of {known}, or an object such as "
                "espalier.ProximalGradient(max_iters=100)."
            )
        solver = NAMED[solver]
    missing = solver.lacks(penalty, scalar_metric)
    if missing is not None:
        raise ValueError(
            f"{type(solver).__name__} cannot serve {type(penalty).__name__}: it needs {missing}. "
            'Use solver="auto" or solver="pg".'
        )
    return solver
