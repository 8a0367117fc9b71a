"""A RAMDA step under the nuclear norm, as a ratio to one torch.linalg.svd of the same matrix in the same process.

    python benchmarks/nuclear.py --device cuda        # results/benchmarks/nuclear-cuda.json

Gradients pull the weights to a matrix of low rank, with noise, row and column scales: 60 steps, of which the last 15
count. λ, scaled by the noise's own singular values, leaves about half or a tenth of the rank. Only the step is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import report

import espalier

# λ that leave half of the rank, and a tenth, for each shape
STRENGTHS = {
    (64, 32): (1.2e-2, 8e-2),
    (128, 64): (1.5e-2, 1e-1),
    (256, 128): (2.3e-2, 1.4e-1),
    (512, 512): (2.9e-2, 2.25e-1),
    (2048, 512): (6.5e-2, 4.6e-1),
    (1024, 4096): (9e-2, 6.3e-1),
}


def timed(work: Callable[[], Any], device: str) -> float:
    """Seconds that it takes."""
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def measure(shape: tuple[int, int], lam: float, count: int, svd: float, steps: int, device: str) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    m, n = shape
    rank = min(shape) // 8
    params = [torch.nn.Parameter(0.05 * torch.randn(shape, device=device)) for _ in range(count)]
    targets = [
        0.1 * torch.randn(m, rank, device=device) @ torch.randn(rank, n, device=device) / rank**0.5 for _ in params
    ]
    scales = [
        (0.5 * torch.randn(m, 1, device=device)).exp() * (0.5 * torch.randn(1, n, device=device)).exp() for _ in params
    ]
    optimizer = espalier.RAMDA([{"params": params, "penalty": espalier.NuclearNorm(lam)}], lr=1e-2)
    seconds = []
    for _ in range(steps):
        with torch.no_grad():
            for p, target, scale in zip(params, targets, scales, strict=True):
                p.grad = 0.01 * (3 * (p - target) + torch.randn_like(p)) * scale
        seconds.append(timed(optimizer.step, device))
    with optimizer.structured():
        ranks = [row.rank for row in espalier.structure(optimizer).layers]
    each = statistics.median(seconds[-15:]) / count
    return {
        "shape": f"{m}×{n}",
        "together": count,
        "rank": statistics.mean(ranks),
        "ms a matrix": 1e3 * each,
        "of an svd": each / svd,
        "svd ms": 1e3 * svd,
        "first step ms": 1e3 * seconds[0] / count,
        "λ": lam,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shapes", type=int, default=len(STRENGTHS), help="how many of the shapes, from the smallest")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for shape, strengths in list(STRENGTHS.items())[: args.shapes]:
        x = torch.randn(shape, device=args.device)
        torch.linalg.svd(x, full_matrices=False)
        svds = [timed(lambda x=x: torch.linalg.svd(x, full_matrices=False), args.device) for _ in range(5)]
        for lam in strengths:
            for count in (1, 8):
                rows.append(measure(shape, lam, count, statistics.median(svds), args.steps, args.device))
    report("nuclear", args.device, rows, args.out)


if __name__ == "__main__":
    main()
