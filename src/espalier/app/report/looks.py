"""The evaluations of a run, as metrics.jsonl holds them: all of them, or of very many as many as a page can show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from espalier.app.errors import Problem
from espalier.app.picks import structure

MOST = 10_000  # kept of one run; a plot is some hundred dots wide


class Part(BaseModel):
    """A piece of a run directory: it does not change, and what a newer version adds is let pass."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Look(Part):
    """One line of `metrics.jsonl`."""

    step: int
    epoch: FiniteFloat
    lr: float | None = None
    train_loss: float | None = None
    step_ms: float | None = None
    weights: dict[str, float | None]
    structured: dict[str, float | None] | None = None
    flipped: int | None = None
    groups: int | None = None


def read_looks(path: Path, finished: bool) -> list[Look]:
    """The evaluations of a run by step."""
    found = []
    try:
        if path.is_file():
            with path.open("rb") as file:
                lines = sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))
                file.seek(0)
                found = _kept(path, file, 1 + lines // MOST)
    except OSError as error:
        raise Problem(f"{path} cannot be read: {first_of(error)}") from error
    if not found and finished:
        raise Problem(
            f"{path.parent} is finished, and {path.name} is empty or gone: restore it from a copy, or train again into "
            "another --out. The model is as it was, and can be shrunk and exported"
        )
    if not found:
        raise Problem(f"{path.parent} has no metrics yet: wait for the first line of metrics.jsonl")
    return sorted(found, key=lambda look: look.step)


def _kept(path: Path, lines: Iterable[bytes], every: int) -> list[Look]:
    """One of so many, and besides those that the page names: the last, the most structured, the last to change."""
    kept: dict[int, Look] = {}
    named: dict[str, tuple[int, object]] = {}
    best = -math.inf
    damage: Problem | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if damage is not None:
            raise damage
        try:
            raw = json.loads(line.decode(errors="replace"))
            if number % every == 0:
                kept[number] = Look.model_validate(raw)
                continue
            if structure(raw) >= best:
                best, named["best"] = structure(raw), (number, raw)
            if raw.get("flipped"):
                named["changed"] = (number, raw)
            if not math.isfinite(raw.get("train_loss") or 0.0):
                named.setdefault("not finite", (number, raw))
            named["last"] = (number, raw)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # a run that is being written, or was killed: its last line may be half there
            damage = Problem(f"{path}, line {number} cannot be read: {first_of(error)}; delete this line")
    return list((kept | {number: Look.model_validate(raw) for number, raw in named.values()}).values())


def first_of(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return f"{'.'.join(map(str, detail['loc'])) or 'the whole'}: {detail['msg']}"
    return str(error).splitlines()[0]
