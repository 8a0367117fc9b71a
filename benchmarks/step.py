"""Time and memory of an optimizer step, as a ratio to torch.optim.AdamW(fused=True) in the same process.

    python benchmarks/step.py                                       # results/benchmarks/step-cpu.json
    python benchmarks/step.py --device cuda                         # results/benchmarks/step-cuda.json

Only the penalised weights of a network step. Their gradients are those of a quadratic with noise, whose minimum differs
in scale between input channels, so that λ, found by bisection, can set half of the groups to zero at the structured
point once training is under way: after a warm-up of 20 steps, on a GPU of 200. Every round then starts from that state:
some AdamW steps, some of the optimizer, on the gradient without noise. Memory is what a step holds at its peak, and
from one step to the next, beyond weights, gradients and state. On a GPU TB/s counts each tensor that a step must read
or write once, next to a copy measured in the same process. Set OMP_NUM_THREADS=1 on a busy machine. The nuclear norm
has benchmarks/nuclear.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from report import report
from shapes import NETWORKS, Shape
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import espalier
from espalier.optim.base import StructuredOptimizer

METHODS = (espalier.RAMDA, espalier.RMDA, espalier.ProxSGD, espalier.ProxGen, espalier.ProxSSI)
OPTIMIZERS = {method.__name__: method for method in METHODS}
# tensors of the weights' size that a step reads or writes
TRAFFIC = {"AdamW": 7, "RAMDA": 8, "RMDA": 6, "ProxSGD": 5, "ProxGen": 7, "ProxSSI": 7}


def draw(shape: Shape, scale: float, device: str) -> Tensor:
    """Normal entries, times a factor for each input channel that spreads over a decade."""
    channels = torch.randn(shape[1], *[1] * (len(shape) - 2), device=device).mul_(0.5).exp_()
    return torch.randn(shape, device=device).mul_(scale * channels)


class Quadratic:
    """Weights, and gradients that pull them to a minimum, with noise."""

    def __init__(self, shapes: list[Shape], device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.weights = [draw(s, 0.05, device) for s in shapes]
        self.minimum = [draw(s, 0.05, device) for s in shapes]

    def backward(self, noise: float = 1e-2) -> None:
        for w, m in zip(self.weights, self.minimum, strict=True):
            w.grad = draw(w.shape, noise, self.device).add_(w - m, alpha=0.1)


def warm(name: str, lam: float, quadratic: Quadratic, args: argparse.Namespace) -> StructuredOptimizer:
    """An optimizer after its warm-up."""
    group = {"params": quadratic.weights, "penalty": espalier.GroupLasso(lam)}
    optimizer = OPTIMIZERS[name]([group], fused=False if args.unfused else None)
    for _ in range(args.warmup):
        quadratic.backward()
        optimizer.step()
    return optimizer


def zero_share(optimizer: StructuredOptimizer) -> float:
    """Of the groups, at the structured point."""
    with optimizer.structured():
        report = espalier.structure(optimizer)
    return report.group_sparsity


def half_zero(name: str, shapes: list[Shape], args: argparse.Namespace) -> float:
    """The λ that leaves about half, by bisection on one tensor of each shape."""
    shapes = list(dict.fromkeys(shapes))
    low, high, lam = 1e-6, 1e2, 1e-2
    for _ in range(12):
        share = zero_share(warm(name, lam, Quadratic(shapes, args.device), args))
        if abs(share - 0.5) < 0.03:
            break
        low, high = (lam, high) if share < 0.5 else (low, lam)
        lam = math.sqrt(low * high)
    return lam


def seconds(optimizer: Optimizer, steps: int, device: str) -> float:
    """What one of `steps` steps takes."""
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    wait()
    return (time.perf_counter() - start) / steps


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations create, from their creation to their end."""

    live = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in self.storages(out) - self.storages((args, kwargs)):
            self.live += storage.nbytes()
            weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def free(self, nbytes: int) -> None:
        self.live -= nbytes

    @staticmethod
    def storages(tree: Any) -> set[torch.UntypedStorage]:
        return {x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)}


def peak_bytes(optimizer: StructuredOptimizer, device: str) -> int:
    """The most that one step holds at a time beside weights, gradients and state."""
    if device == "cuda":
        optimizer._fused = None  # and what it keeps
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return int(torch.cuda.max_memory_allocated() - before)
    with LiveBytes() as memory:
        optimizer.step()
    return int(memory.peak)


def measure(network: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    shapes, device = NETWORKS[network], args.device
    lam = args.lam or half_zero(name, shapes, args)
    quadratic = Quadratic(shapes, device)
    optimizer = warm(name, lam, quadratic, args)
    params = quadratic.weights
    quadratic.backward(noise=0.0)  # the same noise step after step would move groups that are zero
    adamw = AdamW([p.clone() for p in params], fused=True)
    for copy, p in zip(adamw.param_groups[0]["params"], params, strict=True):
        copy.grad = p.grad

    share = zero_share(optimizer)
    live = [*params, *(v for state in optimizer.state.values() for v in state.values())]
    saved = [x.clone() for x in live]
    peak = peak_bytes(optimizer, device)
    # blocks long enough for the clock, and too short to lead far from the saved state
    lengths = [min(20, math.ceil(0.01 / min(seconds(o, 1, device) for _ in range(3)))) for o in (adamw, optimizer)]
    adamw_times, ratios = list[float](), list[float]()
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or len(ratios) < 5:
        for x, s in zip(live, saved, strict=True):
            x.copy_(s)
        adamw_times.append(seconds(adamw, lengths[0], device))
        ratios.append(seconds(optimizer, lengths[1], device) / adamw_times[-1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = 1e3 * statistics.median(adamw_times)
    size = 1e-9 * sum(p.nbytes for p in params)
    bandwidth = {
        "AdamW TB/s": TRAFFIC["AdamW"] * size / milliseconds,
        "TB/s": TRAFFIC[name] * size / (middle * milliseconds),
        "copy TB/s": args.copy,
    }
    return {
        "weights": network,
        "optimizer": name,
        "AdamW ms": milliseconds,
        "ratio": middle,
        "quartile 1": low,
        "quartile 3": high,
        "rounds": len(ratios),
        "memory / largest tensor": peak / max(p.nbytes for p in params),
        "memory / parameters": peak / sum(p.nbytes for p in params),
        "zero": share,
        "λ": lam,
        **(bandwidth if device == "cuda" else {}),
    }


def copy_bandwidth() -> float:
    """TB/s of a copy on the device, read and written."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return 2 * x.nbytes / statistics.median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", nargs="+", choices=NETWORKS, help="all, but gpt-350m on a CPU")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--unfused", action="store_true", help="without the kernels")
    parser.add_argument("--lam", type=float, help="λ, in place of the one that leaves half")
    parser.add_argument("--warmup", type=int, help="steps before those that are timed")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the rounds of each row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    networks = args.weights or [n for n in NETWORKS if args.device == "cuda" or n != "gpt-350m"]
    args.warmup = args.warmup or (200 if args.device == "cuda" else 20)
    args.copy = copy_bandwidth() if args.device == "cuda" else 0.0
    torch.zeros(31 << 20, dtype=torch.uint8)  # glibc keeps what is freed once a block this large was, as in training
    rows = [measure(network, name, args) for network in networks for name in args.optimizers]
    report("step", args.device, rows, args.out)


if __name__ == "__main__":
    main()
