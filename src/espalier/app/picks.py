"""The look that a run's numbers are taken from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def picked(looks: Sequence[Mapping[str, Any]], pick: str) -> Mapping[str, Any]:
    """The last look of metrics.jsonl, or the most structured one, of equals the latest."""
    if not looks:
        raise ValueError("there is no evaluation")
    if pick == "last":
        return looks[-1]
    if pick == "most-structured":
        return max(looks, key=lambda look: (structure(look), look["step"]))
    raise ValueError(f"pick is {pick!r}, but must be 'last' or 'most-structured'")


def structure(look: Mapping[str, Any]) -> float:
    """The structure where the quality is taken; a NaN of a run that diverged is less than all."""
    value = (look.get("structured") or look["weights"]).get("structure")
    return value if value is not None and math.isfinite(value) else -math.inf
