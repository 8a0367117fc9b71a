"""A step of the app's loop under each method, as a ratio to the same loop under fused AdamW or the dense baseline.

    python benchmarks/loop.py --device cuda        # results/benchmarks/loop-cuda.json

Whole steps: batch, forward, backward, optimizer, schedule, on made-up data of the real sets' form and size of batch.
A few steps of each in turn, in one process; the ratio is the median over turns of that to the peer's of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from report import report

from espalier.app import cookbook
from espalier.app.loop import Training
from espalier.app.machine import clock, find_device, make_accelerator
from espalier.app.progress import Silent
from espalier.app.run import Job, Run

METHODS = ("ramda", "rmda", "proxgen", "proxsgd")
ADAMW = "methods.dense={optimizer: adamw, lr: 1e-4, schedule: constant}"
WARM_UP = 3  # turns


def cifar10(folder: Path) -> None:
    """50 000 + 10 000 images of noise."""
    chance = np.random.default_rng(0)
    for name, count in (*((f"data_batch_{i}.bin", 10_000) for i in range(1, 6)), ("test_batch.bin", 128)):
        records = chance.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def text(folder: Path) -> None:
    """Words as rare as Zipf's law has them, as many different ones as the adaptive softmax has clusters for."""
    chance = np.random.default_rng(0)
    words = np.minimum(chance.zipf(1.1, 2_000_000), 250_000)
    words[:250_000] = np.arange(250_000)
    for name, part in (("train", words), ("valid", words[:20_000]), ("test", words[:20_000])):
        lines = (" ".join(f"w{w}" for w in part[i : i + 50]) for i in range(0, len(part), 50))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


TASKS: dict[str, tuple[str, Callable[[Path], None], int]] = {  # data, how to make them up, steps a turn
    "vgg19-cifar10": ("cifar10", cifar10, 30),
    "resnet50-cifar10": ("cifar10", cifar10, 15),
    "transformerxl-wt103": ("text", text, 4),
}


def prepared(name: str, method: str, changes: list[str], data: Path, device: str) -> Training:
    """A training that is ready for its first step, and writes nothing."""
    job = Job(name, cookbook.load(name, changes).only(method), method, 0, Path(), data, device=device)
    return Training(job, Run(Path()), make_accelerator(job), Silent())


def timed(training: Training, steps: int, device: torch.device) -> float:
    """Milliseconds a step."""
    begun = clock(device)
    for _ in range(steps):
        training.step()
        training.schedule.step()
    return 1000 * (clock(device) - begun) / steps


def measure(trainings: dict[str, Training], steps: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds a step of each, a few steps of one after the other, every other time in reverse."""
    ms: dict[str, list[float]] = {method: [] for method in trainings}
    for turn in range(-WARM_UP, rounds):
        for method in list(trainings)[:: 1 if turn % 2 else -1]:
            found = timed(trainings[method], steps, device)
            if turn >= 0:
                ms[method].append(found)
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--precisions", nargs="+", default=["no"], choices=["no", "bf16"])
    parser.add_argument("--peer", default="adamw", choices=["adamw", "dense"], help="dense: the recipe's baseline")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = find_device(args.device)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.tasks:
            folder, make, steps = TASKS[name]
            data = Path(scratch) / folder
            if not data.exists():
                data.mkdir()
                make(data)
            for precision in args.precisions:
                changes = ["unit=steps", "length=1000000", "milestones=[500000]", f"mixed_precision={precision}"]
                if args.peer == "adamw":
                    changes.append(ADAMW)
                methods = ("dense", *args.methods)
                trainings = {m: prepared(name, m, changes, Path(scratch), args.device) for m in methods}
                ms = measure(trainings, steps, args.rounds, device)
                # each turn against the peer's of the same turn: what slows the machine slows both
                for method, seen in ms.items():
                    ratios = [a / b for a, b in zip(seen, ms["dense"], strict=True)]
                    rows.append(
                        {
                            "task": name,
                            "precision": "float32 (TF32)" if precision == "no" else precision,
                            "method": "AdamW (fused)" if (method, args.peer) == ("dense", "adamw") else method,
                            "ratio": statistics.median(ratios),
                            "quartiles": " – ".join(f"{q:.3f}" for q in statistics.quantiles(ratios, n=4)[::2]),
                            "ms a step": statistics.median(seen),
                        }
                    )
                    print(rows[-1], flush=True)
                del trainings
                torch.cuda.empty_cache()
    report("loop", args.device, rows, args.out)


if __name__ == "__main__":
    main()
