"""What shrinking gains: parameters, FLOPs and latency of VGG19, ResNet50 and Tacotron2 with structured zeros, of
networks with the structure of a run, and of trained runs.

    python benchmarks/shrink.py                     # results/benchmarks/shrink-cpu.json, batches of 1 and 64
    python benchmarks/shrink.py --device cuda       # results/benchmarks/shrink-cuda.json, batches of 1 and 256
    python benchmarks/shrink.py --device cuda --runs RUN... --data DIR --out FILE   # models that training delivered

Input groups are set to zero at random until the paper's share of the weights is zero: 86 % for VGG19 on CIFAR-10, 82 %
for ResNet50, 53 % for Tacotron2, which is given 40 symbols and 100 frames of each text. "even": each layer has that
share; "late": it grows with depth as (1 + 3 depth)/4 of the last one's, so that the first layers, whose images are
large, keep more; a run's structure.json (--like): each layer has as many zero groups as there, or the rank. A trained
run has its own zeros, and examples of its test data.

Latency is that of the dense model and of the shrunk one, run in turns in this process, in float32 and eval mode; on a
GPU also replayed as CUDA graphs, without the host's time for each layer, where a model can be recorded. shrink() itself
compares the outputs, and raises where they differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import report
from torch import Tensor, nn

import espalier
from espalier.app.deliver import Delivered, open_delivered
from espalier.app.models.linear import logreg, mlp
from espalier.app.models.resnet import resnet50
from espalier.app.models.simmim import vit_mim
from espalier.app.models.tacotron2 import Tacotron2
from espalier.app.models.vgg import VGG19
from espalier.compact.report import measure

# and the share of zeros in the paper, where it has one
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float | None]] = {
    "vgg19": (VGG19, 0.86),
    "resnet50": (resnet50, 0.82),
    "tacotron2": (lambda: Tacotron2(symbols=40), 0.529),
    "vit": (vit_mim, None),
    "mlp": (mlp, None),
    "logreg": (logreg, None),
}


def inputs(network: str, batch: int, device: str) -> tuple[Tensor, ...]:
    if network != "tacotron2":
        images = torch.randn(batch, *((1, 28, 28) if network in ("mlp", "logreg") else (3, 32, 32)), device=device)
        if images.is_cuda:  # as the command's data are there
            images = images.contiguous(memory_format=torch.channels_last)
        return (images, torch.rand(batch, 64, device=device) < 0.6) if network == "vit" else (images,)
    symbols, frames = 40, 100
    text, mel = torch.randint(40, (batch, symbols)), torch.randn(batch, 80, frames)
    given = (text, torch.full((batch,), symbols), mel, torch.full((batch,), frames))
    return tuple(x.to(device) for x in given)


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
def structured(network: str, profile: str | Path, device: str) -> tuple[nn.Module, float]:
    """A network with random zeros, and the share of weights in zero groups."""
    torch.manual_seed(0)
    build, share = NETWORKS[network]
    model = build().eval()
    if isinstance(profile, Path):
        rows = json.loads(profile.read_text())
        weights = [model.get_parameter(row["name"]) for row in rows]
        # a layer that is one matrix has a rank, and no zero columns
        numbers = [row["zero_groups"] if row["rank"] is None else 0 for row in rows]
        for w, row in zip(weights, rows, strict=True):
            if row["rank"] is not None:
                m, n = w.flatten(1).shape
                lower = torch.randn(m, row["rank"]) @ torch.randn(row["rank"], n)
                w.copy_((lower * (w.std() / max(1, row["rank"]) ** 0.5)).view_as(w))
    else:
        assert share is not None
        weights = [p for name, p in model.named_parameters() if p.dim() > 1 and "embedding" not in name][1:]
        shares = zip(weights, rates(weights, share, profile), strict=True)
        numbers = [min(round(rate * w.shape[1]), w.shape[1] - 1) for w, rate in shares]
    zero = 0
    for w, number in zip(weights, numbers, strict=True):
        if not w.any():  # logistic regression starts there
            w.normal_(std=w.shape[1] ** -0.5)
        w[:, torch.randperm(w.shape[1])[:number]] = 0
        zero += number * w[:, 0].numel()
    return model.to(device), zero / sum(w.numel() for w in weights)


@dataclass
class Case:
    """A model to shrink, with what it is shown and what it is timed with."""

    network: str
    zeros: str
    zero: float  # the share of weights in zero groups
    model: nn.Module
    shown: tuple[Any, ...]
    timed: tuple[Any, ...]
    recordable: bool  # as a CUDA graph: text and speech ask for their lengths on the host


def made_up(network: str, profiles: list[str | Path], batches: list[int], device: str) -> Iterator[Case]:
    for profile, batch in itertools.product(profiles, batches):
        model, zero = structured(network, profile, device)
        x = inputs(network, batch, device)
        yield Case(network, str(profile), zero, model, tuple(t[:2] for t in x), x, network != "tacotron2")


def trained(run: Delivered, data: Path | None, batches: list[int]) -> Iterator[Case]:
    """A run's model, on examples of its test data."""
    path, task = run.run.path, run.task(data)
    structure = path / "structure.json"  # a dense run has none
    layers = json.loads(structure.read_text()) if structure.exists() else []
    zero = sum(x["zero_elements"] for x in layers) / sum(x["elements"] for x in layers) if layers else 0.0
    for batch in batches:
        yield Case(run.recipe.model.name, str(path), zero, run.model, run.examples, task.examples(batch), task.alike)


def graphs(dense: nn.Module, small: nn.Module, x: tuple[Tensor, ...]) -> dict[str, float]:
    """Latency of both as CUDA graphs."""
    replays = []
    with torch.no_grad():
        for model in (dense, small):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(*x)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(*x)
            replays.append(graph)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(50):
        for graph, taken in zip(replays, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
    before, after = map(statistics.median, times)
    return {"dense graph ms": before, "shrunk graph ms": after, "times faster as graphs": before / after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="1 and 64, or 256 on a GPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row's latency")
    paper = [name for name, (_, share) in NETWORKS.items() if share is not None]
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--networks", nargs="+", choices=NETWORKS, default=paper)
    models.add_argument("--runs", type=Path, nargs="+", help="trained runs; needs --out, and --data but for digits")
    parser.add_argument("--data", type=Path, help="where the data of --runs are")
    parser.add_argument("--like", type=Path, nargs="+", help="structure.json of runs of the one network")
    when = ("never", "auto", "always")
    parser.add_argument("--gather", nargs="+", default=when, choices=when, help="but for VGG19, where no layer could")
    parser.add_argument("--low-rank", nargs="+", default=["always"], choices=when, help="where layers become two")
    parser.add_argument("--align", type=int, nargs="+", default=[1], help="multiples to keep channels at")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.like and (args.runs or len(args.networks) > 1):
        parser.error("--like is of one network: name it by --networks")
    if not args.like and not set(args.networks) <= set(paper):
        parser.error("the paper has no share of zeros for these: give a run's by --like")
    if args.runs and not args.out:
        parser.error("the file without --out is of made-up zeros: say where --runs go")
    batches = args.batches or [1, 256 if args.device == "cuda" else 64]
    if args.runs:
        opened = [open_delivered(path, torch.device(args.device)) for path in args.runs]
        found = (trained(run, args.data, batches) for run in opened)
    else:
        profiles = args.like or ["even", "late"]
        found = (made_up(network, profiles, batches, args.device) for network in args.networks)
    rows: list[dict[str, Any]] = []
    for case in itertools.chain.from_iterable(found):
        gathers = args.gather if case.network != "vgg19" else ["never"]
        for gather, low_rank, align in itertools.product(gathers, args.low_rank, args.align):
            shrunk = espalier.shrink(
                case.model, case.shown, timed=case.timed, gather=gather, low_rank=low_rank, align=align,
                latency=False,
            )  # fmt: skip
            timed = measure(case.model, shrunk.model, case.timed, seconds=args.seconds)
            rows.append(
                {
                    "network": case.network,
                    "zeros": case.zeros,
                    "batch": len(case.timed[0]),
                    "gather": gather,
                    "align": align,
                    "gathered layers": len(shrunk.report.gathers),
                    "low rank": low_rank,
                    "layers made two": len(shrunk.report.low_rank),
                    "zero weights": case.zero,
                    "parameters": timed.parameters_ratio,
                    "FLOPs": timed.flops_ratio,
                    "dense ms": timed.dense.ms,
                    "shrunk ms": timed.small.ms,
                    "times faster": timed.dense.ms / timed.small.ms,
                    **(
                        graphs(case.model, shrunk.model, case.timed)
                        if args.device == "cuda" and case.recordable
                        else {}
                    ),
                    "difference": shrunk.report.difference.largest,
                }
            )
    report("shrink", args.device, rows, args.out)


if __name__ == "__main__":
    main()
