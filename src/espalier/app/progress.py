"""How a run goes, for the person who watches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from torch import Tensor

from espalier.app.run import Job

SHOW_EVERY = 0.25  # seconds: reading the loss waits for the device
PRINT_EVERY = 10.0  # seconds, where there is no terminal to draw on


class Progress(Protocol):
    """Who is told how a run goes."""

    def begin(self, job: Job, facts: Mapping[str, Any], total: int, at: int, metric: str) -> None: ...
    def step(self, step: int, loss: Tensor | float) -> None: ...
    def look(self, look: dict[str, Any]) -> None: ...
    def say(self, line: str) -> None: ...


class Silent:
    """Tells nobody."""

    def begin(self, job: Job, facts: Mapping[str, Any], total: int, at: int, metric: str) -> None: ...
    def step(self, step: int, loss: Tensor | float) -> None: ...
    def look(self, look: dict[str, Any]) -> None: ...
    def say(self, line: str) -> None: ...


class Display:
    """Bars with loss, quality and structure in a terminal; a line now and then elsewhere."""

    def __init__(self, console: Console, bars: Bars | None = None) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(),
        )
        self.bars = bars or Bars(*columns, console=console, disable=not console.is_terminal)
        self.task: TaskID | None = None
        self.name, self.metric, self.total = "", "", 0
        self.loss = self.seen = ""
        self.shown = self.printed = 0.0

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def beside(self) -> Display:
        """For another run, beside this one."""
        return Display(self.console, self.bars)

    def begin(self, job: Job, facts: Mapping[str, Any], total: int, at: int, metric: str) -> None:
        self.name, self.metric, self.total = f"{job.method}, seed {job.seed}", metric, total
        self.loss = self.seen = ""
        self.printed = time.monotonic()
        size = f"{facts['train']:,} to train on" if "train" in facts else ""
        going_on = f", going on from step {at}" if at else ""
        self.say(f"{job.recipe.title}: {job.method}, {total:,} steps, {size}{going_on} → {job.out}")
        self.task = self.bars.add_task(self.name, total=total, completed=at, state="")

    def step(self, step: int, loss: Tensor | float) -> None:
        now = time.monotonic()
        if self.task is None or (now - self.shown < SHOW_EVERY and step < self.total):
            return
        self.shown = now
        self.loss = f"loss {float(loss):.3f}"
        self.bars.update(self.task, completed=step, state=f"{self.loss} {self.seen}")
        if now - self.printed > PRINT_EVERY:
            self._print(step, self.loss)

    def look(self, look: dict[str, Any]) -> None:
        measured = look["structured"] or look["weights"]
        sign = " %" if self.metric == "accuracy" else ""
        self.seen = f"{self.metric} {measured[self.metric]:.4g}{sign}"
        if "structure" in measured:
            self.seen += f", structured {measured['structure']:.1f} %"
        if self.task is not None:
            self.bars.update(self.task, state=f"{self.loss} {self.seen}")
        if time.monotonic() - self.printed > PRINT_EVERY or look["step"] == self.total:
            self._print(look["step"], f"loss {look['train_loss']:.3f}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _print(self, step: int, loss: str) -> None:
        """A line, where there is no terminal to draw on."""
        self.printed = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"  {self.name}: step {step} of {self.total}, {loss}{', ' if self.seen else ''}{self.seen}")
