"""Which plots the page shows, and what is in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from espalier.app.names import STRUCTURES
from espalier.app.report.chart import Line, Point, Style, lines, points
from espalier.app.report.looks import Look
from espalier.app.report.runs import Run
from espalier.app.report.words import CHANGING, families, label

METRIC = {"accuracy": "accuracy, %", "perplexity": "perplexity", "loss": "validation loss"}
UNIT = {"accuracy": " %", "perplexity": "", "loss": ""}


def quality(runs: list[Run]) -> list[str]:
    """Predictive quality over the epochs, and near their end."""
    metric = runs[0].info.metric
    data = _points_of(runs, metric)
    scale = "linear" if metric == "accuracy" else _scale(data)
    # the exponential of a loss explodes where the loss does not
    frame = 100 if metric == "perplexity" else math.inf
    style = Style("quality", METRIC[metric], UNIT[metric], scale, frame=frame)
    return _with_zoom(style, data, runs)


def structure(runs: list[Run]) -> list[str]:
    """Structure over the epochs, and near their end; dense runs have none to show."""
    data = _points_of([run for run in runs if not run.dense], "structure", runs)
    return _with_zoom(Style("structure", f"{STRUCTURES[runs[0].info.structure]}, %", " %"), data, runs)


def loss(runs: list[Run]) -> list[str]:
    """Training loss over the epochs."""
    data = _collect(runs, runs, lambda look: look.train_loss)
    if not data:
        return []
    return [lines(Style("loss", "training loss", "", _scale(data), stages=stages(runs)), data)]


def flips(runs: list[Run]) -> list[str]:
    """Groups that changed from one look to the next."""
    data = _collect([run for run in runs if not run.dense], runs, lambda look: look.flipped)
    if not data:
        return []
    title = f"{CHANGING[runs[0].info.structure]} that changed"
    return [lines(Style("flips", title, "", "symlog", stages=stages(runs)), data)]


def trade(runs: list[Run]) -> list[str]:
    """Quality against structure, one point a run, and the paper's."""
    info = runs[0].info
    data = []
    for index, (name, members) in enumerate(families(runs).items()):
        for run in members:
            if run.quality is not None and run.structure is not None:
                data.append(Point(label(run, runs), index, run.structure, run.quality, hollow=False))
        paper = members[0].info.paper
        if paper and paper.quality is not None and paper.structure is not None:
            data.append(Point(f"{name}, paper", index, paper.structure, paper.quality, hollow=True))
    if sum(not point.hollow for point in data) < 2:
        return []
    return [points("trade", f"{STRUCTURES[info.structure]}, %", METRIC[info.metric], data)]


def _collect(some: list[Run], runs: list[Run], value: Callable[[Look], float | None], main: bool = True) -> list[Line]:
    """The lines of these runs; a NaN or infinite value is left out, and a run that has no other has no line."""
    found = []
    for index, (name, members) in enumerate(families(runs).items()):
        own = []
        for run in members:
            pairs = [(look.epoch, value(look)) for look in run.looks] if run in some else []
            kept = [(x, y) for x, y in pairs if y is not None and np.isfinite(y)]
            if kept:
                x, y = np.array(kept, dtype=np.float64).T
                own.append(Line(label(run, runs), index, x, y, main))
        found += _merged(name, own)
    return found


def _merged(name: str, seeds: list[Line]) -> list[Line]:
    """Seeds as their mean in a band from lowest to highest; as they are where they were not looked at alike."""
    if len(seeds) < 2 or not all(np.array_equal(seeds[0].x, line.x) for line in seeds):
        return seeds
    first, values = seeds[0], np.stack([line.y for line in seeds])
    named = f"{name}, mean of {len(seeds)} seeds"
    return [Line(named, first.colour, first.x, values.mean(0), first.main, values.min(0), values.max(0))]


def _points_of(some: list[Run], name: str, runs: list[Run] | None = None) -> list[Line]:
    """Lines of the structured points, solid, and of the weights, dashed; a dense run has the weights only, solid."""
    everyone = runs or some
    dense = [run for run in some if run.dense]
    others = [run for run in some if not run.dense]
    return [
        *_collect(others, everyone, lambda look: look.weights.get(name), main=False),
        *_collect(others, everyone, lambda look: look.structured.get(name) if look.structured else None),
        *_collect(dense, everyone, lambda look: look.weights.get(name)),
    ]


def _with_zoom(style: Style, data: list[Line], runs: list[Run]) -> list[str]:
    if not data:
        return []
    falls = stages(runs)
    whole = lines(replace(style, stages=falls), data)
    first, last = min(line.x[0] for line in data), max(line.x[-1] for line in data)
    near = [line.between(last - (last - first) / 5, last) for line in data]
    near = [line for line in near if len(line.x)]
    # fewer than three looks make no picture
    if max((len(line.x) for line in near if line.main), default=0) < 3:
        return [whole]
    return [
        whole,
        lines(
            replace(
                style,
                key=f"{style.key}-end",
                title=f"{style.title} · last fifth of the epochs",
                zoom=True,
                stages=falls,
                frame=math.inf,
            ),
            near,
        ),
    ]


def _scale(data: list[Line]) -> Literal["linear", "log"]:
    values = np.concatenate([line.y for line in data])
    return "log" if values.min() > 0 and values.max() > 10 * values.min() else "linear"


def stages(runs: list[Run]) -> tuple[float, ...]:
    """The epochs after which the learning rate fell by half or more at once, in every run that has come so far."""
    falls = [(_falls(run), run.last.epoch) for run in runs]
    candidates: set[float] = set().union(*(own for own, _ in falls))
    return tuple(sorted(x for x in candidates if all(x in own or x >= last for own, last in falls)))


def _falls(run: Run) -> set[float]:
    """At the milestones between two looks; at the first of these where none is known."""
    found: set[float] = set()
    rates = [(look, look.lr) for look in run.looks if look.lr]
    for (a, before), (b, after) in pairwise(rates):
        if after <= 0.5 * before:
            here = [step for step in run.info.milestones if a.step <= step < b.step]
            found |= {round(b.epoch * step / b.step, 6) for step in here} or {a.epoch}
    return found
