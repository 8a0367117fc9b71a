"""The machine a run is on: its device and processes, its clock."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, gather_object, patch_environment

from espalier.app.errors import Problem
from espalier.app.lock import locked
from espalier.app.run import Job

COMPILER = "inductor"  # torch.compile's own


def make_accelerator(job: Job) -> Accelerator:
    """Accelerate on the device that was asked for; a process may make several, one after the other."""
    device = find_device(job.device)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1  # then each process has its own device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, which cuDNN's convolutions use by themselves
        if not launched:
            torch.cuda.set_device(device)
    fp16_on_cpu = device.type == "cpu" and job.recipe.mixed_precision == "fp16"  # which Accelerate refuses
    compiled = TorchDynamoPlugin(backend=COMPILER, dynamic=False) if job.recipe.compile else None
    AcceleratorState._reset_state(reset_partial_state=not launched)
    with patch_environment(**({} if launched else {"accelerate_torch_device": str(device)})):
        return Accelerator(
            mixed_precision="no" if fp16_on_cpu else job.recipe.mixed_precision,
            gradient_accumulation_steps=job.recipe.accumulate,
            cpu=device.type == "cpu",
            dynamo_plugin=compiled,
        )


def find_device(asked: str) -> torch.device:
    """The device of this name; "auto" is the GPU where there is one."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,4})?", asked):
        raise Problem(f"--device {asked}: no such device; take auto, cpu, cuda, cuda:1 or mps")
    device = torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Problem(f"--device {asked}: {torch.cuda.device_count()} GPUs are visible to torch here; try --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise Problem(f"--device {asked}: torch finds none here; try --device cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@contextmanager
def locked_together(directory: Path, doing: str, accelerator: Accelerator) -> Iterator[bool]:
    """A run's directory for these processes alone: the first has the lock, and the others hear if that failed."""
    problem: Problem | OSError | None = None
    held = True
    with ExitStack() as stack:
        if accelerator.is_main_process:
            try:
                held = stack.enter_context(locked(directory, doing))
            except (Problem, OSError) as error:
                problem = error
        said = gather_object([None if problem is None else str(problem)])[0]
        if said is not None:
            raise problem or Problem(said)
        yield held


def is_main() -> bool:
    """Whether this process is the only one, or the first of those that `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def clock(device: torch.device) -> float:
    """Seconds, after what the device has been asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def denormals_as_zeros() -> Iterator[None]:
    """Within, a CPU takes numbers below 1e-38 for 0. (1 − c) w of a weight that fades would end among these and never
    get there, and an Intel core takes 3.5 times as long over them (RMDA's step on mnist-logreg)."""
    before = not bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1)  # torch does not tell
    torch.ones(1 << 20, device="cpu").mul(2)  # threads that begin within would keep it to themselves
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
