"""The tables of the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from espalier.app import names
from espalier.app.report import words
from espalier.app.report.runs import Layer, Row, Run
from espalier.app.report.svg import SERIES


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells, in a box that scrolls where the screen is narrow; each row's first cell is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n' for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}"><table class="{kind}">'
        f'<caption class="unseen">{escape(name)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def swatch(index: int, text: str) -> str:
    """A name beside the colour of its lines."""
    return f'<span class="swatch s{index % SERIES}" aria-hidden="true"></span>{escape(text)}'


def colours(runs: list[Run]) -> dict[str, int]:
    """The number of each family's colour."""
    return {name: index for index, name in enumerate(words.families(runs))}


def counted(members: list[Run]) -> list[Run]:
    """The runs that a mean is taken of: the finished ones, or all while none is."""
    return [run for run in members if run.info.status == "finished"] or members


def spread(values: Sequence[float]) -> tuple[float, float | None] | None:
    """Mean and sample standard deviation; one value has no deviation."""
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def means(runs: list[Run]) -> str:
    """Each method's mean over its seeds, and the paper's number beside it, where it has one."""
    info, told, compared = runs[0].info, _picky(runs), any(run.info.paper for run in runs)
    rows = []
    for index, (name, members) in enumerate(words.families(runs).items()):
        chosen, paper = counted(members), members[0].info.paper
        qualities = [run.quality for run in chosen if run.quality is not None]
        structures = [run.structure for run in chosen if run.structure is not None]
        finished = sum(run.info.status == "finished" for run in members)
        seeds = str(len(members)) if finished == len(members) else f"{len(members)}, {finished} finished"
        rows.append(
            [
                swatch(index, name),
                seeds,
                _mean(qualities, info.metric == "accuracy"),
                *([_paper(paper.quality if paper else None, qualities)] if compared else []),
                _mean(structures, True),
                *([_paper(paper.structure if paper else None, structures)] if compared else []),
                *([" or ".join(dict.fromkeys(map(words.source, chosen)))] if told else []),
            ]
        )
    paper_head = ["paper"] if compared else []
    head = ["method", "seeds", info.metric, *paper_head, names.STRUCTURES[info.structure], *paper_head]
    head += ["numbers from"] if told else []
    return table("Each method's mean and standard deviation over seeds", head, rows, "numbers")


def _picky(runs: list[Run]) -> bool:
    """Whether it must be said which look the numbers are from: the last one goes without saying."""
    return any(run.info.pick != "last" and not run.dense for run in runs)


def _mean(values: list[float], share: bool) -> str:
    found = spread(values)
    if found is None:
        return words.MISSING
    digits = ".2f" if share or abs(found[0]) >= 10 else ".4g"
    deviation = "" if found[1] is None else f' <span class="soft">± {found[1]:{".2f" if share else ".2g"}}</span>'
    return f"<strong>{found[0]:{digits}}</strong>{deviation}{' %' if share else ''}"


def _paper(value: float | None, ours: list[float]) -> str:
    if value is None:
        return words.MISSING
    if not ours:
        return f"{value:g}"
    gap = f"{statistics.fmean(ours) - value:{'+.2f' if abs(value) >= 10 else '+.2g'}}".replace("-", "−")
    return f'{value:g} <span class="soft" title="ours less the paper\'s">({gap})</span>'


def overview(runs: list[Run]) -> str:
    """One row a run: where it stands."""
    info, numbers, told = runs[0].info, colours(runs), _picky(runs)
    rows = []
    for run in runs:
        last = run.last
        rows.append(
            [
                swatch(numbers[words.family(run, runs)], words.label(run, runs)),
                f'<span class="badge {run.info.status}">{run.info.status}</span>',
                f"{words.epoch(last.epoch)}{words.progress(run)}",
                words.quality(info, run.quality),
                words.quality(info, run.picked.weights.get(info.metric)),
                words.percent(run.structure),
                words.MISSING if run.dense else _wrapped(words.stability(run).removeprefix("stable ")),
                words.duration(run.info.seconds),
                words.number(last.step_ms),
                *([_wrapped(words.numbers_from(run))] if told else []),
            ]
        )
    head = ["run", "status", "epoch", f"{info.metric}, structured point", f"{info.metric}, weights"]
    head += [names.STRUCTURES[info.structure], "stable", "time", "ms\u00a0a\u00a0step"]
    head += ["numbers from"] if told else []
    return table("Where each run stands", head, rows, "numbers")


def _wrapped(text: str) -> str:
    """Words among numbers: they may break, so that the table stays narrow."""
    return f'<span class="words">{escape(text)}</span>'


def shrunk(runs: list[Run]) -> str:
    """Dense, structured and shrunk: a row for each of one run, or a row for each run."""
    info, done = runs[0].info, [(run, run.shrunk) for run in runs if run.shrunk]
    name = "The dense, the structured and the shrunk model"
    if len(runs) == 1:
        rows = [
            [escape(row.name), words.quality(info, row.quality), words.percent(row.structure), *_costs([row])]
            for _, small in done
            for row in small.rows
        ]
        head = ["model", info.metric, names.STRUCTURES[info.structure], "parameters", "size", "latency"]
        return table(name, head, rows, "numbers")
    numbers, rows = colours(runs), []
    for run, small in done:
        qualities = [words.quality(info, row.quality) for row in small.rows]
        ends = [row for row in small.rows if row.name != "structured"]
        first = swatch(numbers[words.family(run, runs)], words.label(run, runs))
        rows.append([first, " → ".join(qualities), *_costs(ends)])
    head = ["run", f"{info.metric}: dense → structured → shrunk", "parameters", "size", "latency"]
    return table(name, head, rows, "numbers")


def _costs(models: list[Row]) -> list[str]:
    return [
        " → ".join(words.scaled(row.parameters) for row in models),
        " → ".join(words.scaled(row.bytes, "B") for row in models),
        " → ".join(words.MISSING if row.latency_ms is None else f"{row.latency_ms:.3g} ms" for row in models),
    ]


def layers(runs: list[Run]) -> str:
    """A bar for each layer and method: the share that is gone, the mean over seeds."""
    found = {
        name: group for name, members in words.families(runs).items() if (group := [r for r in members if r.layers])
    }
    numbers = colours(runs)
    by_name: dict[str, Layer] = {layer.name: layer for group in found.values() for run in group for layer in run.layers}
    rows = []
    for layer in by_name.values():
        shape = "×".join(map(str, layer.shape))
        cells = [f'<code>{escape(layer.name)}</code> <span class="soft">{shape}</span>', words.scaled(layer.elements)]
        for name, group in found.items():
            seen = [(run, own) for run in group for own in run.layers if own.name == layer.name]
            cells.append(_bar(numbers[name], seen) if seen else words.MISSING)
        rows.append(cells)
    head = ["layer", "weights", *(swatch(numbers[name], name) for name in found)]
    return table("The share of each layer that is gone", head, rows, "bars")


def _bar(index: int, seen: list[tuple[Run, Layer]]) -> str:
    share = statistics.fmean(layer.share for _, layer in seen)
    told = escape("\n".join(f"seed {run.info.seed}: {layer.count}" for run, layer in seen))
    return (
        f'<span class="bar" title="{told}"><span class="fill s{index % SERIES}" style="width:{share:.1f}%"></span>'
        f"</span><span>{share:.0f} %</span>"
    )


def settings(runs: list[Run], part: str) -> tuple[str, str]:
    """What differs between the runs and what they share, of their settings or environment; empty where nothing does."""
    flat = [words.flatten(run.info.own_settings if part == "settings" else run.info.environment) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    same = [key for key in keys if len({one.get(key) for one in flat}) == 1]
    other = [key for key in keys if key not in same]
    shared = [[f"<code>{escape(key)}</code>", escape(flat[0][key])] for key in same]
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<mark>{escape(one.get(key, words.MISSING))}</mark>" for one in flat)]
        for key in other
    ]
    names = [escape(words.label(run, runs)) for run in runs]
    return (
        table(f"What differs between the runs: {part}", [part, *names], rows, "differs") if rows else "",
        table(f"What all runs share: {part}", [part, "value"], shared, "shared") if shared else "",
    )
