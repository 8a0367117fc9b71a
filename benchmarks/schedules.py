"""RAMDA and RMDA under the paper's stages and under a warm-up with a cosine, on scikit-learn's digits.

python benchmarks/schedules.py [--epochs 20] [--seeds 2] [--lambdas 0 3e-4 1e-3 3e-3]

Prints a Markdown table: the accuracy and the structure of the weights themselves, as the run leaves them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

import espalier
from espalier.app.models.convnet import ConvNet

BATCH, TRAIN = 64, 1437
METHODS: dict[str, Callable[[Any], Any]] = {
    "RAMDA, lr 1e-2": lambda groups: espalier.RAMDA(groups, lr=1e-2),
    "RAMDA, lr 2e-2": lambda groups: espalier.RAMDA(groups, lr=2e-2),
    "RMDA, lr 1": lambda groups: espalier.RMDA(groups, lr=1.0),  # SGD's 0.1 / (1 − momentum)
}
SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "stages at 40, 60, 80%": lambda optimizer, n: espalier.StagewiseRestart(optimizer, [n * k // 5 for k in (2, 3, 4)]),
    "stage at 50%": lambda optimizer, n: espalier.StagewiseRestart(optimizer, [n // 2]),
    "WarmupCosine": espalier.WarmupCosine,
}


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[mixed] / 16, torch.tensor(labels)[mixed]


def run(method: str, schedule_name: str, lam: float, epochs: int, seed: int) -> tuple[float, float]:
    """Test accuracy, and the share of penalised weights in groups that are zero."""
    x, y = digits()
    torch.manual_seed(seed)
    model = ConvNet(width=16)
    optimizer = METHODS[method](espalier.regularize(model, espalier.GroupLasso(lam)))
    schedule = SCHEDULES[schedule_name](optimizer, epochs * (TRAIN // BATCH))
    for _ in range(epochs):
        for batch in torch.randperm(TRAIN)[: TRAIN // BATCH * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean().item()
    return accuracy, espalier.structure(optimizer).weighted_group_sparsity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.0, 3e-4, 1e-3, 3e-3])
    args = parser.parse_args()
    print(f"{args.epochs} epochs of {TRAIN // BATCH} steps, {args.seeds} seeds, {1797 - TRAIN} test images.")
    print("Accuracy %, and the weights in zero groups %, of the weights after the last step.\n")
    print("| optimizer | schedule |", " | ".join(f"λ {lam:g}" for lam in args.lambdas), "|")
    print("|---|---|" + "---|" * len(args.lambdas), flush=True)
    for method in METHODS:
        for schedule in SCHEDULES:
            cells = []
            for lam in args.lambdas:
                found = [run(method, schedule, lam, args.epochs, seed) for seed in range(args.seeds)]
                accuracy, sparsity = (100 * mean(column) for column in zip(*found, strict=True))
                cells.append(f"{accuracy:.1f} at {sparsity:.0f}")
            print(f"| {method} | {schedule} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
