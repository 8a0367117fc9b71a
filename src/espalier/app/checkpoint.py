"""Checkpoints: whole, and whole at every moment, so that a run killed anywhere goes on to the bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from espalier.app import digest
from espalier.app.errors import Problem, one_line
from espalier.app.run import replacing

FORMAT = 2
WITHOUT_DIGEST = 1  # the format before


@dataclass
class Position:
    """Where a run is: what the loop itself counts."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0
    batch: int = 0  # of this epoch, the next to take
    seconds: float = 0.0  # of training, not counting evaluation
    period: float = 0.0  # of these, since the last look
    loss: float = 0.0  # summed since the last look
    batches: int = 0  # that the sum is over
    skipped: int = 0  # batches with NaN or Inf since the last look
    lr: float = 0.0  # that the method is to begin with; 0 in older checkpoints
    carry: list[Tensor] = field(default_factory=list)  # what a batch leaves to the next: Transformer-XL's memory


def save(path: Path, accelerator: Accelerator, position: Position, parts: dict[str, Any]) -> None:
    """Write a checkpoint, in the main process; the last good one stays until this one is whole."""
    mine = {"rng": _rng(accelerator), "carry": [c.cpu() for c in position.carry], "loss": position.loss}
    ranks = gather_object([mine])
    if accelerator.is_main_process:
        state = {k: part.state_dict() for k, part in parts.items()}
        where = {k: v for k, v in asdict(position).items() if k not in ("carry", "loss")}
        try:
            with replacing(path) as file:
                digest.save({"format": FORMAT, "position": where, "ranks": ranks, **state}, file)
        except (OSError, RuntimeError) as error:
            kept = f"the last good one is kept, {path}" if path.exists() else "there is none yet"
            raise Problem(f"could not save a checkpoint ({_why(error)}); {kept}") from error
    accelerator.wait_for_everyone()


def load(path: Path, accelerator: Accelerator, parts: dict[str, Any]) -> Position:
    """Take all parts back to where a checkpoint was written."""
    damaged = f"can't read {path}: it is damaged. Delete it to begin the run anew"
    intact = digest.intact(path)
    if intact is False:
        raise Problem(f"{damaged} (its SHA-256 is not the one that it was saved with)")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:  # it may be whole, and not ours to read
        raise
    except Exception as error:
        raise Problem(f"{damaged} ({one_line(error)})") from error
    if not isinstance(state, dict) or state.get("format") not in (FORMAT, WITHOUT_DIGEST):
        raise Problem(f"{path} is no checkpoint of this version of espalier")
    if intact is None and state["format"] != WITHOUT_DIGEST:
        raise Problem(f"{damaged} (it has lost its SHA-256)")
    try:
        ranks = state["ranks"]
        if len(ranks) != accelerator.num_processes:
            raise Problem(f"{path} was written by {len(ranks)} processes, not by {accelerator.num_processes}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        mine = ranks[accelerator.process_index]
        torch.set_rng_state(mine["rng"]["cpu"])
        if "cuda" in mine["rng"] and accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(mine["rng"]["cuda"], accelerator.device)
        carry = [c.to(accelerator.device) for c in mine["carry"]]
        return Position(**state["position"], loss=mine["loss"], carry=carry)
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise Problem(f"{path} belongs to another run, or is damaged: {one_line(error)}") from error


def _rng(accelerator: Accelerator) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def _why(error: BaseException) -> str:
    # torch wraps what the file system said
    cause = error.__context__ if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError) else error
    return str(getattr(cause, "strerror", None) or cause).splitlines()[0]
