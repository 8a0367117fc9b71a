"""All methods of a recipe, over seeds: the paper's table, beside the paper's own numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from espalier.app import names
from espalier.app.errors import Problem, one_line
from espalier.app.loop import train
from espalier.app.picks import picked
from espalier.app.processes import train_side_by_side
from espalier.app.progress import Display
from espalier.app.recipe import Recipe, Spread
from espalier.app.report import write_report
from espalier.app.run import Job, Run, replacing


@dataclass(frozen=True)
class Row:
    """One method: its quality and structure over seeds, the paper's, and the time of a step."""

    method: str
    quality: tuple[float, ...]
    structure: tuple[float, ...]
    step_ms: float
    epoch: float  # at which the numbers were seen, on average
    paper_quality: Spread | None = None
    paper_structure: Spread | None = None


@dataclass(frozen=True)
class Numbers:
    """What one run shows in its row."""

    quality: float
    structure: float | None
    epoch: float
    step_ms: tuple[float, ...]


def _numbers(run: Run, pick: str) -> Numbers:
    looks = run.looks()
    try:
        look = picked(looks, pick)
        seen = look.get("structured") or look["weights"]
        structure = float(seen["structure"]) if "structure" in seen else None
        times = tuple(float(x["step_ms"]) for x in looks)
        return Numbers(float(seen[run.facts["metric"]]), structure, float(look["epoch"]), times)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Problem(
            f"{run.metrics} is empty or damaged ({one_line(error)}): restore it from a copy, or delete {run.path} and "
            "run the same command again"
        ) from error


def rows(recipe: Recipe, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """A row for each method, from its finished runs."""
    made = []
    for method, finished in runs.items():
        numbers = [_numbers(run, recipe.methods[method].pick) for run in finished]
        paper = recipe.paper.get(method)
        made.append(
            Row(
                method,
                tuple(x.quality for x in numbers),
                tuple(x.structure for x in numbers if x.structure is not None),
                statistics.median(ms for x in numbers for ms in x.step_ms),
                statistics.fmean(x.epoch for x in numbers),
                paper.quality if paper else None,
                paper.structure if paper else None,
            )
        )
    return made


def spread(values: Sequence[float] | None, digits: int) -> str:
    """mean ± standard deviation, where there is more than one."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _paper(values: Spread | None, digits: int) -> str:
    return "–" if values is None else " ± ".join(f"{v:.{digits}f}" for v in values)


def table(recipe: Recipe, made: Sequence[Row], metric: str, structure: str) -> Table:
    """The table to print; the paper's columns where it has numbers."""
    percent = metric == "accuracy"
    digits = 2 if percent or metric == "perplexity" else 4
    short = "" if recipe.scale == 1 else f", its schedule × {recipe.scale:g}"
    shown = Table(title=f"{recipe.title}{short}", title_justify="left")
    shown.add_column("method")
    told = any(row.paper_quality for row in made)
    paper = ["paper"] if told else []
    for head in (metric + " %" * percent, *paper, f"{names.STRUCTURES[structure]} %", *paper, "ms a step", "runs"):
        shown.add_column(head, justify="right")
    for row in made:
        shown.add_row(
            names.method(row.method),
            spread(row.quality, digits),
            *([_paper(row.paper_quality, digits)] if told else []),
            spread(row.structure, 2),
            *([_paper(row.paper_structure, 2)] if told else []),
            f"{row.step_ms:.3g}",
            str(len(row.quality)),
        )
    return shown


def train_all(jobs: Sequence[Job], at_once: int, display: Display) -> dict[str, list[Run]]:
    """Train what is not trained yet; the runs of each method."""
    if at_once > 1:
        trained = train_side_by_side(jobs, at_once, display)
    else:
        trained = [train(job, display, resume=True) for job in jobs]
    runs: dict[str, list[Run]] = {}
    for job, run in zip(jobs, trained, strict=True):
        runs.setdefault(job.method, []).append(run)
    return runs


def compare_runs(recipe: Recipe, runs: Mapping[str, Sequence[Run]], out: Path) -> tuple[Table, Path]:
    """Write the comparison and the report into `out`; the table to print, and the report's path."""
    made = rows(recipe, runs)
    facts = next(iter(runs.values()))[0].facts
    with replacing(out / "compare.json", shared=True) as file:
        file.write((json.dumps([asdict(row) for row in made], indent=1) + "\n").encode())
    report = write_report([run.path for each in runs.values() for run in each], out / "report.html")
    return table(recipe, made, facts["metric"], facts["structure"]), report
