"""Units: channels that can only leave a network together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

RIGID = 0  # the unit of everything that must stay


@dataclass
class Units:
    """Sets of channels under union; those joined with RIGID stay."""

    _parent: list[int] = field(default_factory=lambda: [RIGID])

    def new(self, n: int) -> Tensor:
        """n units, each by itself."""
        first = len(self._parent)
        self._parent.extend(range(first, first + n))
        return torch.arange(first, first + n)

    def find(self, unit: int) -> int:
        root = unit
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[unit] != root:
            self._parent[unit], unit = root, self._parent[unit]
        return root

    def join(self, a: Tensor, b: Tensor) -> None:
        """Entry by entry."""
        assert a.numel() == b.numel()
        count = len(self._parent)
        # as one number each: torch.unique of pairs takes 2 ms, and a network that unrolls in time joins at every frame
        for pair in torch.unique(a.reshape(-1) * count + b.reshape(-1)).tolist():
            x, y = divmod(pair, count)
            # the least is the root, so that RIGID is always one
            low, high = sorted((self.find(x), self.find(y)))
            self._parent[high] = low

    def pin(self, units: Tensor) -> None:
        """Let them stay."""
        found = torch.unique(units)
        self.join(found, torch.zeros_like(found))

    def rooted(self, units: Tensor) -> Tensor:
        """The same, with RIGID for those that stay; the very same tensor where none does."""
        found = [u for u in torch.unique(units).tolist() if u != RIGID and self.find(u) == RIGID]
        return torch.where(torch.isin(units, torch.tensor(found)), RIGID, units) if found else units

    def roots(self) -> Tensor:
        """The set of each unit, by its root."""
        return torch.tensor([self.find(i) for i in range(len(self._parent))])
