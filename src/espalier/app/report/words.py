"""Numbers and names as a person reads them."""

from __future__ import annotations

import math
from typing import Any

from espalier.app import names
from espalier.app.report.runs import Info, Run, finite

# what can change from one look to the next
CHANGING = {"weighted_group_sparsity": "groups", "low_rank_level": "ranks", "element_sparsity": "weights"}
MISSING = "–"


def quality(info: Info, value: float | None) -> str:
    """A value of the run's metric."""
    value = finite(value)
    if value is None:
        return MISSING
    if info.metric == "accuracy":
        return f"{value:.2f} %"
    return f"{value:.2f}" if info.metric == "perplexity" else f"{value:.4g}"


def percent(value: float | None, digits: int = 2) -> str:
    """A share that is in percent already."""
    return MISSING if finite(value) is None else f"{value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """Any number."""
    return MISSING if finite(value) is None else f"{value:.{digits}g}"


def scaled(value: float, unit: str = "") -> str:
    """A count with a prefix: 20.1 M, 80.1 MB. The two never part at the end of a line."""
    for power, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:.3g}\u00a0{prefix}{unit}"
    return f"{value:.0f}\u00a0{unit}".strip()


def count(value: int) -> str:
    """A whole number, in threes where it is long."""
    return f"{value:,}".replace(",", "\u202f") if value >= 10_000 else str(value)


def duration(seconds: float | None) -> str:
    """A time span in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def epoch(value: float | None) -> str:
    """An epoch, whole where it is."""
    return MISSING if value is None else f"{value:g}" if value < 1e6 else f"{value:.0f}"


def progress(run: Run) -> str:
    """How far a run has come that is not finished."""
    done = min(1.0, run.last.step / max(run.info.total_steps, 1))
    return "" if run.info.status == "finished" else f", {done:.0%} of the way"


def stability(run: Run) -> str:
    """Since when the structure stands still, or how much of it changed last."""
    if run.unstable is not None:
        look, noun = run.unstable, CHANGING[run.info.structure]
        of = f" of {count(look.groups)}" if look.groups else ""
        return f"not stable: {count(look.flipped or 0)}{of} {noun} changed at the last look"
    return MISSING if run.stable_since is None else f"stable since epoch {epoch(run.stable_since)}"


def source(run: Run) -> str:
    """The epoch that the run's numbers are taken from; to a dense run all are alike, and the last counts."""
    return "the last epoch" if run.dense or run.info.pick == "last" else "the most structured epoch"


def numbers_from(run: Run) -> str:
    """The same with its number, where that is not the last."""
    said = source(run)
    return said if run.picked.step == run.last.step else f"{said}, {epoch(run.picked.epoch)}"


def setting(value: Any) -> str:
    """A value of the recipe."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(setting, value)) or "empty"
    return f"{value:g}" if isinstance(value, float) else str(value)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as one level of dotted names."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = setting(value)
    return flat


def family(run: Run, runs: list[Run]) -> str:
    """The name that runs differing only in their seed share."""
    one_recipe = len({other.info.recipe for other in runs}) == 1
    method = names.method(run.info.method)
    return method if one_recipe else f"{run.info.recipe} · {method}"


def families(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by family, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(family(run, runs), []).append(run)
    return found


def label(run: Run, runs: list[Run]) -> str:
    """The name of one run; its directory too where a seed was run twice."""
    name = f"{family(run, runs)}, seed {run.info.seed}"
    same = [other for other in runs if (family(other, runs), other.info.seed) == (family(run, runs), run.info.seed)]
    return name if len(same) == 1 else f"{name} ({run.path})"


def plural(count: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
