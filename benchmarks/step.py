"""Time and memory of an optimizer step, as a ratio to torch.optim.AdamW(fused=True) in the same process.

    python benchmarks/step.py                                       # results/step-cpu.json
    python benchmarks/step.py --device cuda                         # results/step-cuda.json
    python benchmarks/step.py --device cuda --penalty nuclear       # results/step-cuda-nuclear.json

Only the penalised weights of a network step, with gradients given. Input channels differ in scale, so that λ, found by
bisection, can set half of the groups (of the singular values, for the nuclear norm) to zero at the structured point
after a warm-up with fresh gradients. Every round then starts from that state: some AdamW steps, some of the optimizer.
Memory is what a step allocates at its peak beyond weights, gradients and state.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import NETWORKS, Shape
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import espalier
from espalier.optim.base import StructuredOptimizer
from espalier.tables import table

OPTIMIZERS: dict[str, type[StructuredOptimizer]] = {
    cls.__name__: cls for cls in (espalier.RAMDA, espalier.RMDA, espalier.ProxSGD, espalier.ProxGen, espalier.ProxSSI)
}
PENALTIES: dict[str, type[espalier.GroupLasso | espalier.NuclearNorm]] = {
    "group-lasso": espalier.GroupLasso,
    "nuclear": espalier.NuclearNorm,
}
WARM_UP = 20


def draw(p: Tensor, scale: float) -> Tensor:
    """Normal entries, times a factor for each input channel that spreads over a decade."""
    channels = torch.randn(p.shape[1], *[1] * (p.dim() - 2), device=p.device).mul_(0.5).exp_()
    return torch.randn_like(p).mul_(scale * channels)


class Cell:
    """One optimizer on one network's weights."""

    def __init__(self, optimizer: type[StructuredOptimizer], shapes: Sequence[Shape], device: str) -> None:
        torch.manual_seed(0)
        self.params = [torch.empty(shape, device=device) for shape in shapes]
        for p in self.params:
            p.copy_(draw(p, 0.05))
        self.optimizer = optimizer(self.params)

    def penalise(self, penalty: espalier.GroupLasso | espalier.NuclearNorm) -> Cell:
        self.optimizer.param_groups[0].update(
            penalty=penalty, grouping=espalier.groupings.as_grouping(penalty.default_grouping)
        )
        return self

    def warm_up(self) -> Cell:
        for _ in range(WARM_UP):
            for p in self.params:
                p.grad = draw(p, 1e-2)
            self.optimizer.step()
        return self

    def zero_share(self) -> float:
        """Of the groups, or of the singular values, at the structured point."""
        with self.optimizer.structured():
            report = espalier.structure(self.optimizer)
        return report.group_sparsity if report.layers[0].rank is None else report.low_rank_level

    def tensors(self) -> list[Tensor]:
        return [*self.params, *(v for state in self.optimizer.state.values() for v in state.values())]


def half_zero(optimizer: type[StructuredOptimizer], penalty: type[Any], shapes: Sequence[Shape], device: str) -> float:
    """The λ that leaves about half, by bisection on one tensor of each shape."""
    sample = list(dict.fromkeys(shapes))
    # dual averaging's sums do not depend on λ
    sums = Cell(optimizer, sample, device).warm_up() if optimizer.anchored else None
    low, high, lam = 1e-6, 1e2, 1e-2
    for _ in range(12):
        lam = math.sqrt(low * high)
        cell = (sums or Cell(optimizer, sample, device)).penalise(penalty(lam))
        share = (cell if sums else cell.warm_up()).zero_share()
        if abs(share - 0.5) < 0.03:
            break
        low, high = (lam, high) if share < 0.5 else (low, lam)
    return lam


def seconds(optimizer: Optimizer, steps: int) -> float:
    """What one of `steps` steps takes."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else time.perf_counter
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    wait()
    return (time.perf_counter() - start) / steps


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations create, from their creation to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)} - old:
            if storage not in self.known:
                self.known.add(storage)
                weakref.finalize(storage, self._grow, -storage.nbytes())
                self._grow(storage.nbytes())
        return out

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def peak_bytes(optimizer: Optimizer, device: str) -> int:
    """The most that one step has allocated at a time."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as bytes_:
        optimizer.step()
    return bytes_.peak


def measure(network: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    shapes, cls, penalty = NETWORKS[network], OPTIMIZERS[name], PENALTIES[args.penalty]
    lam = half_zero(cls, penalty, shapes, args.device) if args.lam is None else args.lam
    cell = Cell(cls, shapes, args.device).penalise(penalty(lam)).warm_up()
    adamw = AdamW([p.clone() for p in cell.params], fused=True)
    for copy, p in zip(adamw.param_groups[0]["params"], cell.params, strict=True):
        copy.grad = p.grad

    live = cell.tensors()
    saved = [x.clone() for x in live]
    zero_share = cell.zero_share()
    peak = peak_bytes(cell.optimizer, args.device)
    # blocks long enough for the clock, short enough for the state
    adamw_steps, steps = (
        min(20, max(1, math.ceil(0.01 / min(seconds(o, 1) for _ in range(3))))) for o in (adamw, cell.optimizer)
    )
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or len(times) < 5:
        for x, s in zip(live, saved, strict=True):
            x.copy_(s)
        times.append((seconds(adamw, adamw_steps), seconds(cell.optimizer, steps)))
    sizes = [p.nbytes for p in cell.params]
    return {
        "weights": network,
        "optimizer": name,
        "penalty": repr(penalty(lam)),
        "zero_share": zero_share,
        "adamw_ms": 1e3 * statistics.median(a for a, _ in times),
        "ratio": statistics.median(o / a for a, o in times),
        "ratio_quartiles": statistics.quantiles([o / a for a, o in times], n=4)[::2],
        "rounds": len(times),
        "memory_of_largest_tensor": peak / max(sizes),
        "memory_of_parameters": peak / sum(sizes),
    }


def show(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["ratio_quartiles"]
    return (
        row["weights"], row["optimizer"], f"{row['adamw_ms']:.3g}", f"{row['ratio']:.2f}×", f"{low:.2f}–{high:.2f}",
        f"{row['memory_of_largest_tensor']:.2f}", f"{row['memory_of_parameters']:.1%}", f"{row['zero_share']:.0%}",
        row["penalty"],
    )  # fmt: skip


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return models[0].split(":")[1].strip() if models else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", nargs="+", choices=NETWORKS, help="all, but gpt-350m on a CPU")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, help="all; RAMDA for the nuclear norm")
    parser.add_argument("--penalty", choices=PENALTIES, default="group-lasso")
    parser.add_argument("--lam", type=float, help="λ, in place of the one that leaves half")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the rounds of each row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    nuclear = args.penalty == "nuclear"
    networks = args.weights or [n for n in NETWORKS if args.device == "cuda" or n != "gpt-350m"]
    out = args.out or Path("results") / f"step-{args.device}{'-nuclear' * nuclear}.json"

    rows = []
    for network in networks:
        for name in args.optimizers or (["RAMDA"] if nuclear else OPTIMIZERS):
            rows.append(measure(network, name, args))
            print(*show(rows[-1]), file=sys.stderr, flush=True)
    head = ("weights", "optimizer", "AdamW ms", "ratio", "quartiles", "memory / largest", "/ all", "zero", "penalty")
    print(table(head, [show(row) for row in rows]))
    report = {
        "command": f"python benchmarks/step.py {shlex.join(sys.argv[1:])}".strip(),
        "torch": torch.__version__,
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
