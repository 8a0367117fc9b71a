"""A run's directory: what it is made from, what it has written, and whether it may go on."""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import ValidationError

from espalier import __version__
from espalier.app import digest
from espalier.app.errors import Problem, one_line
from espalier.app.lock import NAME as LOCK
from espalier.app.recipe import Method, Recipe

# that every run.json says
FACTS = ["recipe", "title", "method", "seed", "status", "metric", "structure", "settings", "data", "data_root"]


# settings that a run may go on with when they differ
MAY_CHANGE = {"save_minutes", "cuda_graph", "skip_nonfinite", "title", "paper"}


@dataclass(frozen=True)
class Job:
    """One training to do: a recipe with one method, a seed, where the data are and where the run goes."""

    name: str
    recipe: Recipe
    method: str
    seed: int
    out: Path
    data: Path | None = None
    hub: bool = False
    device: str = "auto"
    command: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain values."""
        recipe = self.recipe.model_dump(mode="json", exclude=MAY_CHANGE)
        return {"recipe": self.name, "method": self.method, "seed": self.seed, **recipe}

    @property
    def data_root(self) -> str | None:
        """Where the data are, wherever it is asked from."""
        return "hub" if self.hub else None if self.data is None else os.path.realpath(self.data)

    @property
    def chosen(self) -> Method:
        """The settings of its method."""
        return self.recipe.methods[self.method]


@dataclass
class Run:
    """The directory of a run. Whatever is replaced in it is replaced whole."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def examples(self) -> Path:
        return self.path / "examples.pt"

    @property
    def missing(self) -> list[str]:
        """What a finished run delivers and this one does not have."""
        return [path.name for path in (self.model, self.examples) if not path.exists()]

    def verify(self) -> None:
        """Refuse a finished run with a damaged file, or one that can't be completed. Older runs have no digests."""
        digest.verify(self.path, self.facts.get("sha256") or {})
        if self.facts.get("status") == "finished" and self.missing and not self.checkpoint.exists():
            raise Problem(
                f"{self.path} is finished, but {self.missing[0]} and {self.checkpoint.name} are gone: restore one of "
                "them from a copy, or train again into another --out"
            )

    @property
    def finished(self) -> bool:
        return self.facts.get("status") == "finished" and not self.missing

    @property
    def delivered(self) -> dict[str, Any]:
        """Quality and structure of the structured point, or of dense weights, at the last look."""
        look: dict[str, Any] = max((look for look, _ in self._lines()), key=_step, default={})
        return look.get("structured") or look.get("weights") or {}

    def update(self, **facts: Any) -> None:
        """Change facts in run.json."""
        self.facts.update(facts)
        self.write_json("run.json", self.facts)

    def write_json(self, name: str, value: Any) -> None:
        """Write plain values whole; bytes of a path that are not UTF-8 as JSON's own escapes."""
        with replacing(self.path / name) as file:
            file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))

    def looks(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds; a line cut off in the middle of writing is not one."""
        return sorted((look for look, _ in self._lines()), key=_step)

    def _lines(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Each evaluation with its line, one after the other: there may be a million."""
        if not self.metrics.exists():
            return
        with self.metrics.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield self._parsed(line), line

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            look = json.loads(line)
            if isinstance(look["step"], int) and isinstance(look["weights"], dict):
                return dict(look)
        except (KeyError, TypeError, ValueError, RecursionError):
            pass
        raise Problem(
            f"{self.metrics} is damaged: each of its lines must be a JSON object with a step and weights. Restore it "
            "from a copy, or delete the lines that are not"
        )

    def forget_after(self, step: int) -> int:
        """Drop the looks beyond the checkpoint that a run goes on from: they will be taken again. How many are left."""
        kept = 0
        with replacing(self.metrics) as file:
            for look, line in self._lines():
                if look["step"] <= step:
                    file.write(line)
                    kept += 1
        return kept

    def add(self, look: dict[str, Any]) -> None:
        """Append a look, and have it on the disk before a checkpoint that counts on it."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(look) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _step(look: dict[str, Any]) -> int:
    return int(look["step"])


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is whole, and leaves it as it was when it can't be.

    `shared`: other processes may do the same at the same time, because no lock is held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part" if shared else f".{path.name}.part")
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> Run:
    """An existing run."""
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(f"{path} is no run: it has no run.json. `espalier train` makes one.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"can't read {path / 'run.json'}: {one_line(error)}") from None
    missing = [k for k in FACTS if k not in facts] if isinstance(facts, dict) else FACTS
    if missing or not isinstance(facts["settings"], dict) or not isinstance(facts["data"], dict):
        raise Problem(f"{path / 'run.json'} is damaged: it does not say {', '.join(missing) or 'its settings'}")
    return Run(path, facts)


def begin(job: Job, *, resume: bool) -> Run:
    """The job's run: a new one, or with `resume` the one that its directory holds, if that is the same."""
    if (job.out / "run.json").exists():
        run = read(job.out)
        _same(run, job)
        if not resume:
            way_on = "delete it to run it again" if run.finished else "add --resume to go on"
            raise Problem(f"{job.out} holds this run already ({run.facts['status']}): {way_on}, or name another --out")
        return run
    check_place(job.out)
    return Run(job.out)


def check_place(path: Path) -> None:
    """Refuse a path that holds something other than a run, before anything is written there."""
    if not path.exists() or (path / "run.json").exists():
        return
    if not path.is_dir() or any(not (p.name == LOCK or p.name.endswith(".part")) for p in path.iterdir()):
        raise Problem(f"{path} is there already and holds no run: name another --out")


def _same(run: Run, job: Job) -> None:
    """Refuse to go on with other settings than a run began with, and name the first that differs."""
    was = {**_flat(filled(run.facts["settings"])), "--data": run.facts["data_root"]}
    now = {**_flat(job.settings), "--data": job.data_root}
    if run.facts["status"] == "diverged":  # a smaller one is a way on
        was.pop(lr := f"methods.{job.method}.lr", None)
        now.pop(lr, None)
    for key in sorted(was.keys() | now.keys(), key=lambda k: (k != "recipe", k != "method", k != "seed", k)):
        if was.get(key) != now.get(key):
            if key == "--data" and job.data is not None and not job.data.is_dir():  # a slip, not another run
                raise Problem(f"--data {job.data}: there is no such directory")
            raise Problem(
                f"{run.path} holds another run, with {key} = {was.get(key)} instead of {now.get(key)}: "
                "name another --out"
            )


def filled(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with the defaults of those that there were not when it began."""
    own = {k: v for k, v in settings.items() if k in ("recipe", "method", "seed")}
    try:
        recipe = Recipe.model_validate({"title": "", **{k: v for k, v in settings.items() if k not in own}})
    except ValidationError:  # what differs is named
        return settings
    return {**own, **recipe.model_dump(mode="json", exclude=MAY_CHANGE)}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}".strip(".")).items()}


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """The versions and the machine that a run was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "espalier": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "processes": world,
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
