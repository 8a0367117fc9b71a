"""The head of the page: what came out, in plain words and big numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from html import escape

from espalier.app import names
from espalier.app.report import words
from espalier.app.report.runs import Run
from espalier.app.report.tables import counted


@dataclass(frozen=True)
class Card:
    """One big number, its name and what to know about it."""

    name: str
    big: str
    note: str

    def html(self) -> str:
        """The card as part of a description list."""
        return (
            f'<div class="card"><dt>{escape(self.name)}</dt><dd class="big">{escape(self.big)}</dd>'
            f'<dd class="note">{escape(self.note)}</dd></div>'
        )


def title(runs: list[Run]) -> str:
    """The recipes' titles, each once; the name of a recipe that has none."""
    return " and ".join(dict.fromkeys(run.info.title.strip() or run.info.recipe for run in runs))


def lead(runs: list[Run]) -> str:
    """One or two sentences: what was trained, and how far it has come."""
    if len(runs) == 1:
        run = runs[0]
        state = {"stopped": "stopped before its end", "running": "still running"}
        said, where = state.get(run.info.status, run.info.status), run.info.environment.get("device")
        return escape(
            f"{words.label(run, runs)}: {said} at epoch {words.epoch(run.last.epoch)}"
            f"{words.progress(run)}, after {words.duration(run.info.seconds)}{f' on {where}' if where else ''}."
        )
    groups = words.families(runs)
    count = Counter(run.info.status for run in runs)
    told = "all finished" if len(count) == 1 and count["finished"] else _join([f"{n} {s}" for s, n in count.items()])
    return escape(f"{words.plural(len(runs), 'run')} of {words.plural(len(groups), 'method')}: {told}.")


def cards(runs: list[Run]) -> str:
    """The big numbers."""
    found = _one(runs[0]) if len(runs) == 1 else _many(runs)
    return f'<dl class="cards">{"".join(card.html() for card in found)}</dl>'


def warnings(runs: list[Run]) -> str:
    """What a reader must know before believing the numbers."""
    told = []
    for run in runs:
        bad = [look.epoch for look in run.looks if look.train_loss is not None and not math.isfinite(look.train_loss)]
        if bad:
            told.append(
                f"{words.label(run, runs)}: the training loss is not a finite number "
                f"at {words.plural(len(bad), 'look')}, first at epoch {words.epoch(bad[0])}."
            )
        if len(runs) > 1 and run.info.status in ("stopped", "diverged"):
            what = run.info.status
            told.append(f"{words.label(run, runs)}: {what} at epoch {words.epoch(run.last.epoch)}, before its end.")
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in told)


def _one(run: Run) -> list[Card]:
    info, paper = run.info, run.info.paper
    where = "of the weights" if run.dense else "at the structured point"
    if not run.dense and info.pick != "last":
        where += f" of {words.numbers_from(run)}"
    beside = f"; the paper has {paper.quality:g}" if paper and paper.quality is not None else ""
    found = [Card(info.metric, words.quality(info, run.quality), f"{where}{beside}")]
    if not run.dense:
        beside = f"; the paper has {paper.structure:g}" if paper and paper.structure is not None else ""
        note = f"{words.stability(run)}{beside}"
        found.append(Card(names.STRUCTURES[info.structure], words.percent(run.structure), note))
    found += _size([run], "size, ")
    steps = f"{words.count(run.last.step)} of {words.count(info.total_steps)} steps in {words.duration(info.seconds)}"
    return [*found, Card("status", info.status, steps)]


def _many(runs: list[Run]) -> list[Card]:
    info = runs[0].info
    everyone = {name: counted(members) for name, members in words.families(runs).items()}
    structured = {name: kept for name, members in everyone.items() if (kept := [r for r in members if not r.dense])}
    groups = structured or everyone
    qualities = {
        name: statistics.fmean(values)
        for name, members in groups.items()
        if (values := [run.quality for run in members if run.quality is not None])
    }
    shares = {
        name: statistics.fmean(values)
        for name, members in groups.items()
        if (values := [run.structure for run in members if run.structure is not None])
    }
    found = []
    if qualities:
        name = (max if info.better == "max" else min)(qualities, key=lambda key: qualities[key])
        note = f"{name}, {_mean_of(groups[name])}"
        kind = "structured " if structured else ""
        found.append(Card(f"best {kind}{info.metric}", words.quality(info, qualities[name]), note))
    if shares:
        name = max(shares, key=lambda key: shares[key])
        note = f"{name}, {_mean_of(groups[name])}"
        found.append(Card(f"highest {names.STRUCTURES[info.structure]}", words.percent(shares[name]), note))
    found += _size(runs, "smallest, ")
    done = sum(run.info.status == "finished" for run in runs)
    total = sum(run.info.seconds or 0 for run in runs)
    found.append(Card("finished", f"{done} of {len(runs)} runs", f"{words.duration(total)} of training in all"))
    return found


def _size(runs: list[Run], before: str) -> list[Card]:
    """The size before and after, of the run that became smallest."""
    sizes = []
    for run in runs:
        dense, small = (run.shrunk.row(name) if run.shrunk else None for name in ("dense", "shrunk"))
        if dense and small and small.bytes > 0:
            sizes.append((small.bytes, dense.bytes, run))
    if not sizes:
        return []
    small_bytes, dense_bytes, run = min(sizes, key=lambda size: size[0])
    who = f"{words.label(run, runs)}: " if len(runs) > 1 else ""
    # no-break spaces: a card is wide enough for both
    big = f"{words.scaled(dense_bytes, 'B')}\u00a0→\u00a0{words.scaled(small_bytes, 'B')}"
    return [Card(f"{before}before → after", big, f"{who}{dense_bytes / small_bytes:.3g} times smaller")]


def _mean_of(members: list[Run]) -> str:
    return f"seed {members[0].info.seed}" if len(members) == 1 else f"mean of {len(members)} seeds"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
