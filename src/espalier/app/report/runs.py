"""What a run directory holds, read and checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter

from espalier.app.digest import verify
from espalier.app.errors import Problem
from espalier.app.picks import picked
from espalier.app.report.looks import Look, Part, first_of, read_looks

T = TypeVar("T")


class Paper(Part):
    """What the paper reports for this method, in the units of the run."""

    quality: FiniteFloat | None = None
    structure: FiniteFloat | None = None


class Info(Part):
    """`run.json`."""

    recipe: str
    title: str = ""
    method: str
    seed: int
    status: Literal["finished", "stopped", "diverged", "running"]
    metric: Literal["accuracy", "perplexity", "loss"]
    better: Literal["max", "min"]
    structure: Literal["weighted_group_sparsity", "low_rank_level", "element_sparsity"]
    pick: Literal["last", "most-structured"] = "last"
    settings: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    paper: Paper | None = None
    total_steps: int
    milestones: list[int] = Field(default_factory=list)
    seconds: float | None = None
    command: str = ""
    sha256: dict[str, str] = Field(default_factory=dict)

    @property
    def own_settings(self) -> dict[str, Any]:
        """The settings, those of the method beside the others."""
        methods = self.settings.get("methods")
        own = methods.get(self.method) if isinstance(methods, dict) else None
        return {k: v for k, v in self.settings.items() if k != "methods"} | (own if isinstance(own, dict) else {})


class Layer(Part):
    """One entry of `structure.json`."""

    name: str
    shape: list[int]
    groups: int
    zero_groups: int
    elements: int
    rank: int | None = None
    full_rank: int | None = None

    @property
    def share(self) -> float:
        """The share of the layer that is gone, in percent: of its rank where that was measured, else of its groups."""
        if self.rank is not None and self.full_rank:
            return 100 * (1 - self.rank / self.full_rank)
        return 100 * self.zero_groups / self.groups if self.groups else 0.0

    @property
    def count(self) -> str:
        """The numbers behind the share."""
        if self.rank is not None and self.full_rank:
            return f"rank {self.rank} of {self.full_rank}"
        return f"{self.zero_groups} of {self.groups} groups zero"


class Row(Part):
    """One model in `shrunk.json`."""

    name: str
    quality: float | None = None
    structure: float | None = None
    parameters: float
    bytes: float
    latency_ms: float | None = None


class Shrunk(Part):
    """`shrunk.json`."""

    rows: list[Row]
    difference: float | None = None
    device: str = ""
    batch: int | None = None

    @property
    def timed(self) -> str:
        """What latency was measured on."""
        return self.device + (f", batches of {self.batch}" if self.batch else "")

    def row(self, name: str) -> Row | None:
        """The model of that name, if it is there."""
        return next((row for row in self.rows if row.name == name), None)


class Run(Part):
    """A run directory."""

    path: Path
    info: Info
    looks: list[Look]
    layers: list[Layer]
    shrunk: Shrunk | None

    @property
    def last(self) -> Look:
        """The newest look."""
        return self.looks[-1]

    @property
    def dense(self) -> bool:
        """Whether no look saw a structured point."""
        return all(look.structured is None for look in self.looks)

    @cached_property
    def picked(self) -> Look:
        """The look that the run's numbers are taken from."""
        return Look.model_validate(picked([look.model_dump() for look in self.looks], self.info.pick))

    @property
    def quality(self) -> float | None:
        """The picked quality: at the structured point, or of the weights where there is none."""
        return finite((self.picked.structured or self.picked.weights).get(self.info.metric))

    @property
    def structure(self) -> float | None:
        """The picked structure at the structured point, in percent."""
        return finite(self.picked.structured.get("structure")) if self.picked.structured else None

    @property
    def unstable(self) -> Look | None:
        """The newest look that compared structures, if that saw a change."""
        measured = [look for look in self.looks if look.flipped is not None]
        return measured[-1] if measured and measured[-1].flipped else None

    @property
    def stable_since(self) -> float | None:
        """The epoch of the last change of structure; None where it changed at the newest look, or is not measured."""
        measured = [look for look in self.looks if look.flipped is not None]
        if not measured or measured[-1].flipped:
            return None
        changes = [look.epoch for look in measured if look.flipped]
        return changes[-1] if changes else measured[0].epoch


def finite(value: float | None) -> float | None:
    """The value, or None where it is NaN or infinite: a run that diverged has such numbers."""
    return value if value is not None and math.isfinite(value) else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run directories, and see that they can be compared."""
    if not paths:
        raise Problem("no run directory given: name at least one that `espalier train` has filled")
    # the same directory twice, as two patterns of a shell give it, is one run
    runs = [_read(path) for path in {os.path.realpath(path): path for path in paths}.values()]
    first = runs[0]
    for run in runs[1:]:
        for field in ("metric", "better", "structure"):
            one, other = getattr(first.info, field), getattr(run.info, field)
            if one != other:
                raise Problem(
                    f"{first.path} and {run.path} cannot share a report: their {field} is {one!r} and {other!r}; "
                    "write one report for each"
                )
    return runs


def _read(path: Path) -> Run:
    if not (path / "run.json").is_file():
        raise Problem(f"{path} is not a run directory: it has no run.json; name one that `espalier train` has filled")
    layers, shrunk = path / "structure.json", path / "shrunk.json"
    way_out = "delete it, and the report does without"
    info = _load(path / "run.json", TypeAdapter(Info), "train again, into another directory")
    verify(path, info.sha256)
    return Run(
        path=path,
        info=info,
        looks=read_looks(path / "metrics.jsonl", info.status == "finished"),
        layers=_load(layers, TypeAdapter(list[Layer]), way_out) if layers.exists() else [],
        shrunk=_load(shrunk, TypeAdapter(Shrunk), way_out) if shrunk.exists() else None,
    )


def _load(path: Path, kind: TypeAdapter[T], way_out: str) -> T:
    try:
        return kind.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"{path} cannot be read: {first_of(error)}; {way_out}") from error
