"""The commands. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from espalier import __version__
from espalier.app import cookbook, names
from espalier.app.errors import Problem, short, shown
from espalier.app.recipe import Recipe
from espalier.app.run import Job

app = typer.Typer(
    name="espalier",
    help="Train neural networks that come out exactly structured, and shrink them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
LARGEST_SEED = 2**32 - 1  # that NumPy takes
When = Literal["auto", "always", "never"]
console = Console(highlight=False, markup=False)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `espalier recipes`, or a .yaml file.")]
DataDir = Annotated[
    str | None, typer.Option("--data", metavar="DIR", help="Where the data are (see `espalier data`), or hub.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]
Changes = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: scale=0.1, methods.ramda.lr=1e-3."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run.")]


def version(asked: bool) -> None:
    """Print the version and leave."""
    if asked:
        print(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train neural networks that come out exactly structured, and shrink them."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("espalier-demo"),
) -> None:
    """Watch a small network become structured, then smaller: no data, no GPU, under a minute."""
    from espalier.app.demo import run_demo

    run_demo(console, out)


@app.command()
def train(
    recipe: RecipeName,
    data: DataDir = None,
    method: Annotated[str | None, typer.Option(help="Which of the recipe's methods; its first unless given.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the initial weights and the order of the data.")
    ] = 0,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="The run's directory; runs/RECIPE/METHOD-SEED unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    set_: Changes = [],  # noqa: B006 - Typer reads it
) -> None:
    """Train one method of a recipe; the model it delivers is the structured one."""
    from espalier.app.loop import train as run_training
    from espalier.app.machine import is_main
    from espalier.app.progress import Display
    from espalier.app.report import write_report

    loaded = cookbook.load(recipe, set_)
    job = make_job(recipe, loaded, method or next(iter(loaded.methods)), seed, out, data, device)
    with Display(console) as progress:
        run = run_training(job, progress, resume=resume)
    if not is_main():
        return
    report = write_report([run.path], run.path / "report.html")
    seen = run.delivered
    metric = run.facts["metric"]
    text = f"{metric} {seen[metric]:.4g}{' %' if metric == 'accuracy' else ''}"
    if "structure" in seen:
        text += f", {names.STRUCTURES[run.facts['structure']]} {seen['structure']:.2f} %"
    console.print(text, style="bold")
    console.print(f"Model: {run.model}\nReport: {report}", soft_wrap=True)
    if seen.get("structure"):
        console.print(f"Next: espalier shrink {shlex.quote(str(run.path))}", soft_wrap=True)


@app.command()
def compare(
    recipe: RecipeName,
    data: DataDir = None,
    methods: Annotated[str, typer.Option(help="Some of the recipe's methods, as ramda,rmda; all unless given.")] = "",
    seeds: Annotated[str, typer.Option(help="As 0,1,2.")] = "0",
    at_once: Annotated[int, typer.Option(min=1, help="Train so many runs at a time, each in its own process.")] = 1,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="The directory of the runs; runs/RECIPE unless given.")] = None,
    set_: Changes = [],  # noqa: B006
) -> None:
    """Run all methods of a recipe over seeds, and print the table beside the paper's; finished runs are kept."""
    from espalier.app.compare import compare_runs, train_all
    from espalier.app.machine import is_main
    from espalier.app.progress import Display

    loaded = cookbook.load(recipe, set_)
    chosen = list(dict.fromkeys(m.strip() for m in methods.split(","))) if methods else list(loaded.methods)
    where = out or Path("runs") / Path(recipe).stem
    jobs = [
        make_job(recipe, loaded, method, seed, where / f"{method}-{seed}", data, device)
        for method in chosen
        for seed in _seeds(seeds)
    ]
    with Display(console) as progress:
        runs = train_all(jobs, at_once, progress)
    if is_main():
        table, page = compare_runs(loaded, runs, where)
        console.print(table)
        console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or a directory of such.")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html beside the runs unless given.")] = None,
) -> None:
    """Write one HTML page about runs: quality and structure over epochs, layer by layer, and what shrinking gained."""
    from espalier.app.report import write_report

    runs = [path for path in runs if not path.is_file()] or runs  # of all that is beside runs, pages are no runs
    found = [run for path in runs for run in _runs_in(path)]
    # one run's page lies in it, that of several in the directory that they share
    shared = runs[0] if len(runs) == 1 else Path(os.path.commonpath([path.absolute() for path in runs]))
    console.print(str(write_report(found, out or shared / "report.html")), soft_wrap=True)


@app.command()
def shrink(
    run: RunDir,
    data: DataDir = None,
    gather: Annotated[When, typer.Option(help="Let layers select some of their inputs; auto: where faster.")] = "auto",
    low_rank: Annotated[When, typer.Option(help="Make two layers of one of low rank; auto: where faster.")] = "always",
    align: Annotated[
        int | None, typer.Option(min=1, help="Keep numbers of channels at multiples of this: 8 on a GPU, 1 elsewhere.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Time batches of so many test examples.")] = None,
    device: Annotated[str, typer.Option(help="Where it is checked and timed: auto, cpu, cuda, cuda:1 or mps.")] = "cpu",
) -> None:
    """Take what is zero out of a run's model, check that the rest computes the same, and save it in RUN/shrunk."""
    from espalier.app.deliver import shrink_run
    from espalier.app.machine import find_device
    from espalier.app.report import write_report

    root, hub = where_data_are(data)
    with console.status("Shrinking ...") as status:
        where = find_device(device)
        shrunk = shrink_run(
            run, data=root, hub=hub, gather=gather, low_rank=low_rank, align=align, batch=batch, device=where,
            tell=status.update,
        )  # fmt: skip
    console.print(str(shrunk.report), soft_wrap=True)
    count = json.loads((run / "shrunk.json").read_text())["batch"]
    console.print(f"FLOPs and ms are of {count} examples at a time.", soft_wrap=True)
    console.print(f"Saved in {run / 'shrunk'}\nReport: {write_report([run], run / 'report.html')}", soft_wrap=True)


@app.command()
def export(
    run: RunDir,
    format: Annotated[Literal["onnx", "pt2"], typer.Option(help="ONNX, or torch.export.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="The file; RUN/model.onnx unless given.")] = None,
) -> None:
    """Write a run's model, shrunk if it was, as a file that runs without its code."""
    from espalier.app.deliver import export_run

    with console.status("Exporting and checking ..."):
        where, shrunk = export_run(run, out, format)
    which = "the shrunk model" if shrunk else "the structured model (`espalier shrink` it first for the small one)"
    console.print(f"{where}: {which}, checked by running it.", soft_wrap=True)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe whole.")] = None,
) -> None:
    """List the recipes, or print one."""
    if name is not None:
        print(cookbook.text(name), end="")
        return
    table = Table(box=None)
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("what")
    table.add_column("data", no_wrap=True)
    table.add_column("length", no_wrap=True)
    for each in cookbook.names():
        r = cookbook.load(each)
        table.add_row(each, r.title, r.data.name, f"{r.length:,} {r.unit}")
    console.print(table)
    console.print(
        "\nMethods: ramda, rmda, proxsgd, proxgen, proxssi (where the paper has it) and dense.", soft_wrap=True
    )


@app.command()
def data(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="Where to look.")] = None,
) -> None:
    """Say which data sets are in a directory, which are not, and how to lay them out."""
    from espalier.app.data import describe

    if directory is not None and not directory.is_dir():
        raise Problem(f"there is no directory {directory}")
    for each in describe(directory):
        console.print(Text.assemble((f"{each.name:14}", "bold"), each.what), soft_wrap=True)
        if not each.needs_directory:
            console.print("    needs no files", style="green")
        elif each.found is not None:
            console.print(f"    found in {each.found}", style="green", soft_wrap=True)
        elif directory is not None:
            console.print(f"    not found: {each.missing}", style="yellow", soft_wrap=True)
        else:
            console.print(f"    lay it out as {each.layout}\n    {each.page}", soft_wrap=True)


def make_job(name: str, recipe: Recipe, method: str, seed: int, out: Path | None, data: str | None, device: str) -> Job:
    """What the command line asks for."""
    root, hub = where_data_are(data)
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    where = out or Path("runs") / stem / f"{method}-{seed}"
    try:
        str(where).encode()
    except UnicodeEncodeError:
        raise Problem(f"--out {shown(str(where))}: this name is not UTF-8, as TensorBoard needs it") from None
    command = shlex.join(["espalier", *sys.argv[1:]])
    return Job(stem, recipe.only(method), method, seed, where, root, hub, device, command)


def where_data_are(data: str | None) -> tuple[Path | None, bool]:
    """The directory, and whether it is the hub instead."""
    return (None, True) if data == "hub" else (None if data is None else Path(data), False)


def _seeds(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise Problem(f"--seeds {short(text, 80)}: write numbers with commas, such as 0,1,2") from None
    if not all(0 <= seed <= LARGEST_SEED for seed in found):
        raise Problem(f"--seeds {short(text, 80)}: seeds are numbers from 0 to {LARGEST_SEED}")
    return found


def _runs_in(path: Path) -> list[Path]:
    """The run at a path, or those in the directories right below."""
    below = sorted(p.parent for p in path.glob("*/run.json"))
    return [path] if (path / "run.json").exists() or not below else below
