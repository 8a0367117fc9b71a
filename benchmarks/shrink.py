"""What shrinking gains: parameters, FLOPs and latency of VGG19 and ResNet50 with structured zeros.

    python benchmarks/shrink.py                                     # results/shrink-cpu.json, batches of 1 and 64
    python benchmarks/shrink.py --device cuda                       # results/shrink-cuda.json, batches of 1 and 256

Input groups are set to zero at random until the paper's share of the weights is zero: 86 % for VGG19 on CIFAR-10, 82 %
for ResNet50. "even": each layer has that share; "late": it grows with depth as (1 + 3 depth)/4 of the last one's, so
that the first layers, whose images are large, keep more. Latency is that of the dense model and of the shrunk one, run
in turns in this process, in float32 and eval mode. shrink() itself compares the outputs, and raises where they differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from report import report
from torch import Tensor, nn

import espalier
from espalier.app.models.resnet import resnet50
from espalier.app.models.vgg import VGG19
from espalier.compact.report import measure

NETWORKS = {"vgg19": (VGG19, 0.86), "resnet50": (resnet50, 0.82)}


def rates(weights: list[Tensor], share: float, profile: str) -> list[float]:
    """The share of each layer's inputs to be zero, so that `share` of all weights is."""
    if profile == "even":
        return [share] * len(weights)
    depth = [(1 + 3 * i / (len(weights) - 1)) / 4 for i in range(len(weights))]
    low, high = 0.0, 2.0
    for _ in range(50):
        last = (low + high) / 2
        zero = sum(min(0.98, last * d) * w.numel() for d, w in zip(depth, weights, strict=True))
        low, high = (last, high) if zero < share * sum(w.numel() for w in weights) else (low, last)
    return [min(0.98, last * d) for d in depth]


@torch.no_grad()
def structured(network: str, profile: str, device: str) -> tuple[nn.Module, float]:
    """A network with random zeros, and the share of weights in zero groups."""
    torch.manual_seed(0)
    build, share = NETWORKS[network]
    model = build().eval()
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)][1:]
    zero = 0
    for w, rate in zip(weights, rates(weights, share, profile), strict=True):
        n = min(round(rate * w.shape[1]), w.shape[1] - 1)
        w[:, torch.randperm(w.shape[1])[:n]] = 0
        zero += n * w[:, 0].numel()
    return model.to(device), zero / sum(w.numel() for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="1 and 64, or 256 on a GPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row's latency")
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for network, gathers in (("vgg19", ("never",)), ("resnet50", ("never", "auto", "always"))):
        for profile in ("even", "late"):
            for batch in args.batches or (1, 256 if args.device == "cuda" else 64):
                model, zero = structured(network, profile, args.device)
                x = torch.randn(batch, 3, 32, 32, device=args.device)
                for gather in gathers:
                    found = espalier.shrink(model, x, gather=gather, align=args.align, latency=False)
                    timed = measure(model, found.model, (x,), seconds=args.seconds)
                    rows.append(
                        {
                            "network": network,
                            "zeros": profile,
                            "batch": batch,
                            "gather": gather,
                            "gathered layers": len(found.report.gathers),
                            "zero weights": zero,
                            "parameters": timed.parameters_ratio,
                            "FLOPs": timed.flops_ratio,
                            "dense ms": timed.dense.ms,
                            "shrunk ms": timed.small.ms,
                            "times faster": timed.dense.ms / timed.small.ms,
                            "difference": found.report.difference.largest,
                        }
                    )
    report("shrink", args.device, rows, args.out)


if __name__ == "__main__":
    main()
