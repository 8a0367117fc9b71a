"""The page: its sections, put together and written."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from espalier import __version__
from espalier.app import names
from espalier.app.errors import Problem
from espalier.app.report import plots, summary, tables, words
from espalier.app.report.runs import Run, read_runs
from espalier.app.run import replacing

# more layers than this are folded away until asked for
OPEN_LAYERS = 80


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML file about these run directories, and say where it is."""
    page = render(read_runs(runs))
    if out.is_dir():
        raise Problem(f"{out} is a directory: name a file in it with --out")
    try:
        with replacing(out, shared=True) as file:
            file.write(page.encode("utf-8", "replace"))
    except OSError as error:
        raise Problem(f"{out} cannot be written: {error.strerror or error}; name another file with --out") from error
    return out


def render(runs: list[Run]) -> str:
    """The page as text."""
    here = files("espalier.app.report")
    every, structured = _names(runs, runs), _names([run for run in runs if not run.dense], runs)
    lines = [*_band(runs), *_falls(runs)]
    measure = runs[0].info.structure
    kind = f"{names.STRUCTURES[measure].capitalize()}: {names.EXPLAINED[measure]}."
    changing = words.CHANGING[measure].capitalize()
    stable = f"{changing} that changed from one look to the next. At 0 the structure stands still."
    row = [
        _section("Quality against structure", _figure(plots.trade(runs), [*structured, *_diamond(runs)]), _TRADE),
        _section("Stability", _figure(plots.flips(runs), [*structured, *lines]), stable),
        _section("Training loss", _figure(plots.loss(runs), [*every, *lines]), _LOSS),
    ]
    both = _STYLES if structured else []
    sections = [
        _section("Summary", _summary(runs), hidden=True),
        _section("Predictive quality", _figure(plots.quality(runs), [*every, *both, *lines]), _QUALITY if both else ""),
        _section("Structure", _figure(plots.structure(runs), [*structured, *both, *lines]), kind),
        f'<div class="row">{"".join(row)}</div>',
        _section("Dense, structured, shrunk", _shrunk(runs), _SHRUNK),
        _section("Layer by layer", _layers(runs), _LAYERS.format(mean=", the mean over seeds" if _band(runs) else "")),
        _section("Settings", _settings(runs, "settings")),
        _section("Environment", _settings(runs, "environment")),
        _section("Commands", _commands(runs)),
    ]
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(summary.title(runs)),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        lead=summary.lead(runs),
        sections="\n".join(sections),
        version=escape(__version__),
    )


_STYLES = [
    '<span class="stroke" aria-hidden="true"></span>structured point',
    '<span class="stroke dashed" aria-hidden="true"></span>weights',
]
_QUALITY = (
    "On held-out data: at the structured point, whose structure is exact, and at the weights. Where the two differ, "
    "the structured point is evaluated with batch norm’s statistics taken anew, the weights with their running "
    "ones: their lines may part even where the weights have all but met the structured point."
)
_TRADE = "One point a run: the quality that it keeps, and how much of the network is gone."
_LOSS = "On the batches that the network learns from."
_SHRUNK = "Shrinking takes out what is zero. The shrunk model computes what the structured one does, to rounding."
_LAYERS = "How much of each layer is gone in the delivered model{mean}. Hover for the counts."


def _section(heading: str, body: str, text: str = "", hidden: bool = False) -> str:
    """A section with its heading; nothing where it has nothing to show."""
    if not body:
        return ""
    key = heading.lower().replace(" ", "-").replace(",", "")
    told = f"<p>{escape(text)}</p>" if text else ""
    return (
        f'<section aria-labelledby="{key}"><h2 id="{key}"{" class=unseen" if hidden else ""}>{escape(heading)}</h2>'
        f"{told}\n{body}</section>"
    )


def _summary(runs: list[Run]) -> str:
    means = f"<h3>Method by method</h3>{tables.means(runs)}" if len(runs) > 1 else ""
    fold = f"<h3>Run by run</h3>{tables.overview(runs)}" if len(runs) > 1 else ""
    return f"{summary.cards(runs)}{summary.warnings(runs)}{means}{fold}"


def _figure(drawn: list[str], keys: list[str]) -> str:
    """Plots side by side under their legend."""
    if not drawn:
        return ""
    legend = "".join(f"<li>{key}</li>" for key in keys)
    return f'<ul class="legend">{legend}</ul><div class="plots">{"".join(drawn)}</div>'


def _names(shown: list[Run], runs: list[Run]) -> list[str]:
    present = {words.family(run, runs) for run in shown}
    return [tables.swatch(index, name) for name, index in tables.colours(runs).items() if name in present]


def _band(runs: list[Run]) -> list[str]:
    several = any(len(members) > 1 for members in words.families(runs).values())
    return ['<span class="band" aria-hidden="true"></span>lowest to highest seed'] if several else []


def _falls(runs: list[Run]) -> list[str]:
    key = '<span class="stroke dotted" aria-hidden="true"></span>the learning rate falls'
    return [key] if plots.stages(runs) else []


def _diamond(runs: list[Run]) -> list[str]:
    return ['<span aria-hidden="true">◇ </span>the paper’s number'] if any(run.info.paper for run in runs) else []


def _shrunk(runs: list[Run]) -> str:
    done = [run for run in runs if run.shrunk]
    if not done:
        return ""
    worst = max(
        (run.shrunk.difference for run in done if run.shrunk and run.shrunk.difference is not None), default=None
    )
    devices = "; ".join(dict.fromkeys(run.shrunk.timed for run in done if run.shrunk and run.shrunk.device))
    told = f"Largest difference of an output: {words.number(worst, 2)}. " if worst is not None else ""
    told += f"Latency measured on {devices}." if devices else ""
    return f'{tables.shrunk(runs)}<p class="soft">{escape(told)}</p>'


def _layers(runs: list[Run]) -> str:
    count = max(len(run.layers) for run in runs)
    if not count:
        return ""
    state = " open" if count <= OPEN_LAYERS else ""
    return f"<details{state}><summary>{words.plural(count, 'layer')}</summary>{tables.layers(runs)}</details>"


def _settings(runs: list[Run], part: str) -> str:
    differs, shared = tables.settings(runs, part)
    if not differs or not shared:
        return differs + shared
    return f"<h3>What differs</h3>{differs}<details><summary>What all runs share</summary>{shared}</details>"


def _commands(runs: list[Run]) -> str:
    made = [run for run in runs if run.info.command]
    if len(runs) == 1:
        return "".join(f"<pre><code>{escape(run.info.command)}</code></pre>" for run in made)
    numbers = tables.colours(runs)
    rows = [
        [
            tables.swatch(numbers[words.family(run, runs)], words.label(run, runs)),
            f"<code>{escape(run.info.command)}</code>",
        ]
        for run in made
    ]
    return tables.table("The command that made each run", ["run", "command"], rows, "shared") if rows else ""
