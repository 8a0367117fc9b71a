"""Anderson mixing of a fixed-point iteration: which of its last points to mix, and how.

It works on a handful of numbers, in plain Python: the same in tensors takes ten times as long, and a GPU would wait for
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# A residual this many times the least so far is a failure of mixing.
STRAY = 2.0
# Added to the squared lengths, 1, of the moves mixed: their products are no more precise in float32.
RIDGE = 1e-7


@dataclass
class Anderson:
    """The points lie in a ring of slots; the next one is Σ c_i x_i with the c, of sum 1, for which Σ c_i f_i is
    shortest, f_i the move that led to x_i.

    After a failure the ring is forgotten, and some steps are made without mixing, twice as many each time: where these
    converge, the whole does.
    """

    products: dict[tuple[int, int], float] = field(default_factory=dict)  # <f_i, f_j>
    usable: list[int] = field(default_factory=list)
    least: float = math.inf
    pause: int = 1
    plain: int = 0

    def add(self, slot: int, residual: float, products: list[float]) -> tuple[bool, bool]:
        """A step was made into this slot. Returns whether it is the best so far, and whether it strays: then to go back
        to the best."""
        for i, product in enumerate(products):
            self.products[slot, i] = self.products[i, slot] = product
        better, stray = residual < self.least, residual > STRAY * self.least
        if better:
            self.least = residual
        if stray:
            self.usable = []
            self.plain, self.pause = self.pause, 2 * self.pause
        else:
            self.plain = max(self.plain - 1, 0)
            self.usable = [i for i in self.usable if i != slot] + [slot]
        return better, stray

    def weights(self, slot: int, memory: int) -> list[float]:
        """c, one for each slot."""
        c = dict.fromkeys(range(memory), 0.0)
        c[slot] = 1.0
        if not self.plain and len(self.usable) > 1:
            shares = _shortest([[self.products[i, j] for j in self.usable] for i in self.usable])
            if shares is not None:
                c.update(zip(self.usable, shares, strict=True))
        return list(c.values())


def _shortest(products: list[list[float]]) -> list[float] | None:
    """The c of sum 1 for which Σ c_i f_i is shortest, given <f_i, f_j>; None where rounding leaves none."""
    n = len(products)
    squares = [products[i][i] for i in range(n)]
    if not all(0 < x < math.inf for x in squares):
        return None
    length = [math.sqrt(x) for x in squares]
    # (cosines + ridge) y = 1/length by elimination, c = y/length but for the sum
    rows = [[products[i][j] / (length[i] * length[j]) for j in range(n)] + [1 / length[i]] for i in range(n)]
    for k in range(n):
        rows[k][k] += RIDGE
        if not rows[k][k] > 0:
            return None
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            for j in range(k + 1, n + 1):
                rows[i][j] -= factor * rows[k][j]
    c = [0.0] * n
    for k in reversed(range(n)):
        c[k] = (rows[k][n] - sum(rows[k][j] * c[j] for j in range(k + 1, n))) / rows[k][k]
    c = [c[k] / length[k] for k in range(n)]
    total = sum(c)
    return [x / total for x in c] if total and math.isfinite(total) else None
