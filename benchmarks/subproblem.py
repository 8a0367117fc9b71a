"""What solving the subproblem exactly is worth: RAMDA's by the exact solver and by proximal gradient, as Algorithm 2
states it, with and without its early stopping.

    python benchmarks/subproblem.py --data DIR --device cuda        # results/benchmarks/subproblem-cuda.json

Each trains vgg19-cifar10 from the same start on the same batches, for a few epochs of its schedule scaled down. Time is
that of whole steps, as a ratio to the dense baseline's in the same process. Every few steps one is taken with
`diagnostics()`, outside the timing: the residual is the norm, over all layers, of (z − z⁺)/θ for one more proximal step
z⁺ of size θ, relative to the largest norm that an element of τ ∂ψ can have.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loop import prepared
from report import report

import espalier
from espalier.app import cookbook
from espalier.app.loop import Training
from espalier.app.machine import clock
from espalier.optim.base import StructuredOptimizer
from espalier.solvers import proximal_gradient

RECIPE = "vgg19-cifar10"
SOLVERS: dict[str, espalier.Solver | None] = {
    "dense": None,
    "exact": None,
    "pg, 1e-8, at most 100": espalier.ProximalGradient(max_iters=100, rtol=1e-8),
    "pg, always 100": espalier.ProximalGradient(max_iters=100, rtol=None),
}


@contextmanager
def looking() -> Iterator[None]:
    """Let proximal gradient leave its loop when its rule holds, on a GPU, too, where that waits for the device: so does
    the published code."""
    real = proximal_gradient.may_branch
    proximal_gradient.may_branch = lambda x: True
    try:
        yield
    finally:
        proximal_gradient.may_branch = real


def solving(name: str, changes: list[str], data: Path, device: str) -> Training:
    """A training by that solver."""
    method = "dense" if name == "dense" else "ramda"
    solver = SOLVERS[name]
    if solver is not None:  # the recipe's own word for it: such steps are not replayed as a CUDA graph
        changes = [*changes, "methods.ramda.solver={name: pg}"]
    training = prepared(RECIPE, method, changes, data, device)
    if solver is not None:
        for group in training.optimizer.param_groups:
            group["solver"] = solver
    return training


def diagnosed(training: Training) -> tuple[float, float]:
    """A step that tells the iterations a layer took, and the residual that is left."""
    optimizer = training.optimizer
    assert isinstance(optimizer, StructuredOptimizer)
    replay, training.replay = training.replay, None  # a replay shows nothing
    with optimizer.diagnostics() as found:
        training.step()
    training.replay = replay
    solves = found.solves
    size = 0.0
    for group in optimizer.param_groups:
        if group["penalty"] is not None:
            for p in group["params"]:
                # τ λ √(entries of a group) for each group: together τ λ √(entries); τ is α_t
                size += (float(optimizer.state[p]["alpha"]) * group["penalty"].lam) ** 2 * p.numel()
    left = sum(s.residual**2 for s in solves) ** 0.5 / size**0.5
    return statistics.mean(s.iterations for s in solves), left


def run(name: str, changes: list[str], data: Path, device: str, every: int) -> dict[str, object]:
    """Train to the end."""
    training = solving(name, changes, data, device)
    total, seconds, steps = training.plan.total, 0.0, 0
    iterations: list[float] = []
    residuals: list[float] = []
    begun = clock(training.device)
    for i in range(1, total + 1):
        if name != "dense" and i % every == 0:
            seconds += clock(training.device) - begun
            count, left = diagnosed(training)
            iterations.append(count)
            residuals.append(left)
            begun = clock(training.device)
        elif i <= 20:  # recording and compiling
            training.step()
            begun = clock(training.device)
        else:
            training.step()
            steps += 1
        if i < total:
            training.schedule.step()
    seconds += clock(training.device) - begun
    look = training.looker.look()
    seen = look["structured"] or look["weights"]
    return {
        "solver": name,
        "ms a step": 1000 * seconds / steps,
        "seconds an epoch": seconds / steps * training.parts,
        "accuracy %": seen["accuracy"],
        "sparsity %": seen.get("structure", 0.0),
        "iterations": statistics.mean(iterations) if iterations else 0.0,
        "residual": statistics.median(residuals) if residuals else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--every", type=int, default=200, help="steps between two with diagnostics")
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS), choices=list(SOLVERS))
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scale = args.epochs / cookbook.load(RECIPE, []).length
    rows = []
    with looking():
        for name in args.solvers:
            rows.append(run(name, [f"scale={scale}", *args.set], args.data, args.device, args.every))
            print(rows[-1], flush=True)
    baseline = next((r["ms a step"] for r in rows if r["solver"] == "dense"), None)
    if baseline:
        rows = [{**r, "ratio to dense": r["ms a step"] / baseline} for r in rows]  # type: ignore[operator]
    report("subproblem", args.device, rows, args.out)


if __name__ == "__main__":
    main()
