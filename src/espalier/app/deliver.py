"""What a run delivers: the model at the structured point, then the smaller model that computes the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn

import espalier
from espalier.app.cookbook import parse
from espalier.app.data import open_data
from espalier.app.errors import Problem, one_line
from espalier.app.finite import Diverged, first_nonfinite
from espalier.app.lock import locked
from espalier.app.look import Looker, at_structured_point
from espalier.app.recipe import Recipe
from espalier.app.run import Run, filled, read, replacing
from espalier.app.tasks import Task, build, open_task
from espalier.compact.denormals import denormal

CPU = torch.device("cpu")
When = Literal["auto", "always", "never"]


def deliver(run: Run, accelerator: Accelerator, looker: Looker) -> None:
    """Write the model as it stands at the structured point, its structure, and what it takes to use it."""
    with at_structured_point(looker.optimizer, looker.model, looker.task, looker.seed):
        if not accelerator.is_main_process:
            return
        if bad := first_nonfinite(looker.model.state_dict().items()):
            raise Diverged(
                f"{bad} holds NaN or Inf at the structured point, so no model is delivered: training has diverged. "
                "Train again with a smaller lr, into another --out"
            )
        if looker.monitor is not None:
            layers = espalier.structure(looker.optimizer).layers
            run.write_json("structure.json", [{**asdict(x), "elements": x.elements} for x in layers])
        if looker.task.data.words:  # what the model's numbers stand for
            run.write_json("words.json", looker.task.data.words)
        with replacing(run.examples) as file:
            torch.save([None if x is None else x.cpu().contiguous() for x in looker.task.examples()], file)
        with replacing(run.model) as file:
            file.write(safetensors.torch.save(_once(looker.model)))


def _once(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors, those with two names by the first."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.masked_fill(tiny, 0) if (tiny := denormal(tensor)).any() else tensor
        tensors.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), (name, value.contiguous()))
    return dict(tensors.values())


@dataclass(frozen=True)
class Delivered:
    """A finished run, its model as delivered and inputs to call that with, on one device and in eval mode."""

    run: Run
    recipe: Recipe
    model: nn.Module
    examples: tuple[Any, ...]
    device: torch.device

    def build(self) -> nn.Module:
        """The model's code, with fresh weights."""
        return build(self.recipe, self.run.facts["data"])

    def task(self, data: Path | None, hub: bool = False) -> Task:
        """The run's task on its data, to evaluate with."""
        wanted = self.recipe.data
        opened = open_data(
            wanted.name, data, device=self.device, hub=hub, holdout=wanted.holdout, options=wanted.options
        )
        return open_task(self.recipe, opened, self.device)

    @property
    def shrunk(self) -> Path:
        return self.run.path / "shrunk"


def open_delivered(path: Path, device: torch.device = CPU) -> Delivered:
    """The delivered model of a run's directory."""
    run = read(path)
    for file in (run.model, run.examples):
        if not file.exists():
            way_on = f"`espalier train ... --resume --out={path}` makes it"
            raise Problem(f"{path} has no {file.name}: {way_on}, from the checkpoint where there is one")
    run.verify()
    raw = {k: v for k, v in run.facts["settings"].items() if k not in ("recipe", "method", "seed")}
    recipe = parse({"title": run.facts["title"], **raw}, str(path / "run.json"))
    model = build(recipe, run.facts["data"])
    try:
        safetensors.torch.load_model(model, str(run.model))
        examples = torch.load(run.examples, weights_only=True)
    except Exception as error:
        names = f"{run.model.name} and {run.examples.name}"
        raise Problem(
            f"can't read the model of {path}: {one_line(error)}. If {names} are damaged, delete both, and "
            f"`espalier train ... --resume --out={path}` makes them again"
        ) from error
    inputs = tuple(None if x is None else x.to(device) for x in examples)
    return Delivered(run, recipe, model.eval().to(device), inputs, device)


def shrink_run(
    path: Path,
    *,
    data: Path | None = None,
    hub: bool = False,
    gather: When = "auto",
    low_rank: When = "always",
    align: int | None = None,
    batch: int | None = None,
    device: torch.device = CPU,
    tell: Callable[[str], object] = lambda doing: None,
) -> espalier.Shrunk:
    """Shrink a run's model, save it beside, and write the table of dense, structured and shrunk.

    Where the data are at hand both models are evaluated on them; elsewhere the table has what training saw. All of it
    happens on the device, latency included. It is that of a batch of examples saved with the run, or of so many others.
    `tell` hears what is being done.
    """
    read(path)  # a directory without a run gets no lock
    with locked(path, "shrink"):
        tell("Shrinking and checking ...")
        return _shrunk(open_delivered(path, device), data, hub, gather, low_rank, align, batch, tell)


def _shrunk(
    found: Delivered,
    data: Path | None,
    hub: bool,
    gather: When,
    low_rank: When,
    align: int | None,
    batch: int | None,
    tell: Callable[[str], object],
) -> espalier.Shrunk:
    path, device = found.run.path, found.device
    task = _task(found, data, hub)
    timed = found.examples
    if batch is not None:
        if task is None:
            raise Problem("--batch takes examples from the test data, which are not where they were: name --data")
        timed = task.examples(batch)
    try:
        shrunk = espalier.shrink(
            found.model, found.examples, gather=gather, low_rank=low_rank, align=align, timed=timed
        )
    except espalier.ShrinkError as error:
        raise Problem(f"{path} can't be shrunk: {one_line(error)}") from error
    espalier.save(shrunk.model, found.shrunk)
    metric = found.run.facts["metric"]
    dense = _dense_beside(found.run)
    rows = []
    if dense is not None:  # of the same shape as the structured one, and measured with it
        sizes = shrunk.report.dense
        rows.append(_row("dense", dense.delivered.get(metric), None, sizes.parameters, sizes.bytes, sizes.ms))
    last = found.run.delivered
    for name, model, sizes in (
        ("structured", found.model, shrunk.report.dense),
        ("shrunk", shrunk.model.eval(), shrunk.report.small),
    ):
        quality = last.get(metric) if name == "structured" else None
        if task:
            tell(f"Evaluating the {name} model on the test data ...")
            quality = task.evaluate(model)[metric]
        structure = last.get("structure") if name == "structured" else None
        rows.append(_row(name, quality, structure, sizes.parameters, sizes.bytes, sizes.ms))
    difference = shrunk.report.difference and shrunk.report.difference.largest
    told = {"difference": difference, "device": device.type, "batch": len(timed[0])}
    found.run.write_json("shrunk.json", {"rows": rows, **told})
    return shrunk


def _task(found: Delivered, data: Path | None, hub: bool) -> Task | None:
    """The run's task: on the data that are named now, or on those it was trained with, where they still are."""
    if data is not None or hub:
        return found.task(data, hub)
    recorded = found.run.facts.get("data_root")
    try:
        return found.task(None if recorded is None else Path(recorded))
    except Problem:
        return None


def _row(
    name: str, quality: float | None, structure: float | None, parameters: int, size: int, latency: float | None
) -> dict[str, Any]:
    return {
        "name": name,
        "quality": quality,
        "structure": structure,
        "parameters": parameters,
        "bytes": size,
        "latency_ms": latency,
    }


def _dense_beside(run: Run) -> Run | None:
    """A finished dense run with the same settings in the directory beside, of the same seed if there is one."""
    found = []
    for path in sorted(Path(os.path.realpath(run.path)).parent.glob("*/run.json")):
        try:
            other = read(path.parent)
        except Problem:  # a damaged neighbour is no concern of this run
            continue
        if other.finished and other.facts["method"] == "dense" and _shared(other) == _shared(run):
            found.append(other)
    return min(found, key=lambda r: r.facts["seed"] != run.facts["seed"], default=None)


def _shared(run: Run) -> dict[str, Any]:
    """The settings that runs of several methods and seeds have in common."""
    return {k: v for k, v in filled(run.facts["settings"]).items() if k not in ("method", "seed", "methods")}


def export_run(path: Path, out: Path | None, format: str) -> tuple[Path, bool]:
    """Export a run's shrunk model, or the structured one of a run that was not shrunk; where to, and whether shrunk."""
    read(path)  # a directory without a run gets no lock
    with locked(path, "export"):
        return _exported(open_delivered(path), path, out, format)


def _exported(found: Delivered, path: Path, out: Path | None, format: str) -> tuple[Path, bool]:
    shrunk = found.shrunk.exists()
    try:
        model = espalier.load(found.shrunk, found.build) if shrunk else found.model
        where = espalier.export(model, out or path / f"model.{format}", found.examples, format=format)
    except ImportError:
        raise Problem('ONNX needs more packages: pip install "torch-espalier[onnx]", or take --format pt2') from None
    except (RuntimeError, ValueError, OSError) as error:
        raise Problem(f"{path} can't be exported as {format}: {one_line(error)}") from error
    return where, shrunk
