"""`espalier demo`: a dense network and a structured one side by side, and the small one that is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from espalier.app import cookbook
from espalier.app.deliver import shrink_run
from espalier.app.errors import Problem
from espalier.app.lock import NAME as LOCK
from espalier.app.lock import locked
from espalier.app.loop import train
from espalier.app.progress import Display
from espalier.app.report import write_report
from espalier.app.run import Job, check_place, read

RECIPE = "digits"
METHODS = ("dense", "ramda")
PAGE = "report.html"
COMMAND = "espalier demo"


def run_demo(console: Console, out: Path) -> None:
    """Train both, shrink the structured one, and show what that gives."""
    _check_place(out)
    with locked(out, "demo"):  # another demo would delete this one's runs
        _clear(out)
        _run(console, out)


def _run(console: Console, out: Path) -> None:
    digits = cookbook.load(RECIPE)
    console.print(
        "Two networks of one shape learn scikit-learn's handwritten digits: one dense, by AdamW, and one by RAMDA "
        "with group lasso, which drives whole input channels to exactly zero. Then the zeros are taken out.\n"
    )
    with _one_thread(), Display(console) as progress:
        for method in METHODS:
            train(Job(RECIPE, digits.only(method), method, 0, out / method, command=COMMAND), progress)
    structured = out / "ramda"
    with console.status("Shrinking the structured network, and checking that it computes the same ..."):
        shrunk = shrink_run(structured)
    found = json.loads((structured / "shrunk.json").read_text(encoding="utf-8"))
    console.print()
    console.print(_table(found["rows"]))
    console.print(
        f"The shrunk network computes what the structured one does: {shrunk.report.difference}.\n"
        f"It is saved in {structured / 'shrunk'}.\n"
        f"Report: {write_report([out / m for m in METHODS], out / PAGE)}",
        soft_wrap=True,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each number of threads rounds sums in another order, and would end with another network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_place(out: Path) -> None:
    """Refuse a place where something else than an earlier demo is."""
    if out.exists() and not (out.is_dir() and all(_of_a_demo(p) for p in out.iterdir())):
        raise Problem(f"{out} holds something else than a demo: name another directory with --out")


def _clear(out: Path) -> None:
    """Make way where an earlier demo was, and nowhere else."""
    _check_place(out)
    for method in METHODS:
        if (out / method).exists():
            shutil.rmtree(out / method)
    (out / PAGE).unlink(missing_ok=True)


def _of_a_demo(path: Path) -> bool:
    """Whether a demo wrote this: its page, its lock, or a run that says so itself or was not begun."""
    if path.name in (PAGE, LOCK) or path.name.endswith(".part"):
        return True
    try:
        check_place(path)
        begun = (path / "run.json").exists()
        return path.name in METHODS and (not begun or read(path).facts.get("command") == COMMAND)
    except Problem:
        return False


def _table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("network")
    for head in ("accuracy", "zero channels", "parameters", "size", "latency"):
        shown.add_column(head, justify="right")
    whole = rows[0]["parameters"]
    for row in rows:
        shown.add_row(
            row["name"],
            f"{row['quality']:.1f} %",
            "–" if row["structure"] is None else f"{row['structure']:.1f} %",
            f"{row['parameters']:,} ({row['parameters'] / whole:.0%})",
            f"{row['bytes'] / 1000:.1f} kB",
            "–" if row["latency_ms"] is None else f"{row['latency_ms']:.2f} ms",
        )
    return shown
