"""How the structure of a model changes while it is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from espalier.measure import listed, penalised, warned
from espalier.optim.checkpoint import Group


@dataclass(frozen=True)
class Change:
    """What one look of a `StructureMonitor` saw.

    Attributes:
        look: its number, from 1 on.
        flipped: groups that became zero or ceased to be since the last look, and matrices whose rank changed.
        groups: of all groups.
        stable_since: the look since which nothing has changed (the paper's T₀).
    """

    look: int
    flipped: int
    groups: int
    stable_since: int


class StructureMonitor:
    """Follows the structure over training: what flips, and since when nothing has.

    It looks at the weights; for RAMDA and RMDA look inside `optimizer.structured()`.
    """

    def __init__(self, target: Optimizer | Iterable[Group]) -> None:
        self._target = target if isinstance(target, Optimizer) else listed(target)
        self._look = 0
        self._stable_since = 0
        self._last: dict[str, Tensor] = {}

    def look(self) -> Change:
        """Compare the weights' structure with that of the last look; the first look sees no flip.

        Warns, once for each layer, of a trained layer that is zero as a whole; and if the run is over and nothing is.
        """
        self._look += 1
        flipped = groups = 0
        found = penalised(self._target)
        for i, x in enumerate(found):
            key = f"{i} {x.name}"  # two groups may both hold a "weight"
            now = (x.structure.zero if x.structure.rank is None else x.structure.rank).cpu()
            if key in self._last:
                if now.shape != self._last[key].shape:
                    raise ValueError(
                        f"{x.name} had {len(self._last[key])} groups and has {len(now)} now. "
                        "Begin a new monitor for another model."
                    )
                flipped += int((now != self._last[key]).sum())
            self._last[key] = now
            groups += x.groups
        warned(self._target, found, stacklevel=2)
        if flipped or self._look == 1:
            self._stable_since = self._look
        return Change(self._look, flipped, groups, self._stable_since)

    @property
    def stable_since(self) -> int:
        """The look since which nothing has changed; 0 before the first."""
        return self._stable_since

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {"look": self._look, "stable_since": self._stable_since, "last": dict(self._last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._look = state_dict["look"]
        self._stable_since = state_dict["stable_since"]
        self._last = {name: seen.cpu() for name, seen in state_dict["last"].items()}
