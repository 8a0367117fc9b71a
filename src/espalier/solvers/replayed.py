"""The splitting on a GPU, for matrices whose products take less time than their launches.

An iteration is recorded as a CUDA graph, on memory that stays, with its mixing and the look at whether it is the last:
the host replays as many as the last problem took, and only then asks.
"""

from __future__ import annotations

import math
import threading
from functools import partial

import torch
from torch import Tensor

from espalier.penalties.singular_values import (
    PRODUCTS_BELOW,
    guess,
    products,
    sufficed,
    thresholding,
    worth_recording,
)
from espalier.reading import Reading
from espalier.recording import Recording
from espalier.solvers.splitting import RELAXATION, Posed, angles, descent, judged, reflected, scaled

# Entries up to which a batch may stay in memory; entries of the rings, half of all, that may in one thread.
_SETTLE_BELOW = 1 << 20
_SETTLED_BELOW = 1 << 26


def replayed(start: Tensor, memory: int) -> Replayed | None:
    """The place for matrices like these on this stream; None where recording does not pay or there is no room."""
    if start.dtype != torch.float32 or start.numel() > _SETTLE_BELOW or not worth_recording(start):
        return None
    entries = start.numel() * memory
    key = (start.device, torch.cuda.current_stream(start.device).cuda_stream, start.shape, memory)
    if key not in _kept.places:
        if _kept.entries + entries > _SETTLED_BELOW:
            return None
        with torch.inference_mode(False):
            _kept.places[key] = Replayed(start, memory)
        _kept.entries += entries
    return _kept.places[key]


class Replayed:
    """Where problems of one shape are solved, one after the other."""

    def __init__(self, start: Tensor, memory: int) -> None:
        from espalier.kernels import MOST_MEMORY

        count, device = len(start), start.device
        self.posed = Posed(*start.new_ones(3, *start.shape), *start.new_ones(2, count, 1, 1))
        self.scaled = scaled(self.posed)
        self.best, self.z, self.solution = start.new_zeros(3, *start.shape)
        self.points, self.moves = start.new_zeros(2, count, memory, *start.shape[1:])
        # what Anderson's mixing knows of each matrix, see `kernels/splitting.py`
        self.known = torch.zeros(count, MOST_MEMORY, MOST_MEMORY, dtype=torch.float64, device=device)
        self.state = torch.zeros(count, 3, dtype=torch.int32, device=device)
        self.least, self.gap = start.new_zeros(2, count)
        self.weights = start.new_zeros(count, memory)
        self.choice = torch.zeros(count, 4, dtype=torch.bool, device=device)
        self.taken = torch.zeros(count, dtype=torch.int32, device=device)  # by each matrix, once it is solved
        self.made = torch.zeros(1, dtype=torch.int32, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.bound = torch.zeros(1, dtype=torch.float64, device=device)  # of (σ/κ)² so far
        self.expected = 1
        self.begin: Recording[None] | None = None
        self.iterations: dict[int, Recording[Tensor]] = {}  # by the power of 2 that must bound (σ/κ)²

    def solving(self, problem: Posed, max_iters: int) -> Reading[tuple[Tensor, int] | None]:
        """The solutions, and how many iterations they took; None where products are not precise enough."""
        for mine, given in zip(self.posed, problem, strict=True):
            mine.copy_(given)
        start = self.posed.start
        while True:
            exponent = guess(start)
            if exponent not in self.iterations:
                self.iterations[exponent] = Recording(partial(self._iterate, exponent), start.device)
            if self.begin is None:
                self.begin = Recording(self._begin, start.device)
            self.begin()
            made = 0
            while True:
                for _ in range(max(1, min(self.expected, max_iters) - made)):
                    if made == max_iters - 1:
                        self.scaled.v.copy_(self.best)
                    status = self.iterations[exponent]()
                    made += 1
                *numbers, bound = yield status
                taken, lower = numbers[: len(start)], numbers[len(start) :]
                enough = bound < PRODUCTS_BELOW and sufficed(start, exponent, bound)
                if not enough or all(taken) or made == max_iters:
                    break
            if not bound < PRODUCTS_BELOW:
                return None
            if enough:
                break
        if not all(taken):
            yield from self._give_up(all(n or low for n, low in zip(taken, lower, strict=True)))
            taken = [made]
        self.expected = int(max(taken))
        return self.solution.clone(), self.expected

    def _begin(self) -> None:
        for mine, new in zip(self.scaled, scaled(self.posed), strict=True):
            mine.copy_(new)
        self.best.copy_(self.scaled.v)
        for x in (self.points, self.moves, self.known, self.state, self.taken, self.made, self.slot):
            x.zero_()
        self.bound.copy_(torch.where((self.posed.kappa == 0).any(), math.inf, 0.0))  # which products cannot do
        self.state[:, 2].fill_(1)
        self.least.fill_(math.inf)

    def _iterate(self, exponent: int) -> Tensor:
        """Does nothing to what is solved already, and nothing at all where the power of 2 is too small."""
        from espalier.kernels import splitting

        v, factor, constant, stiffness, kappa, limits = self.scaled
        y = reflected(v, factor, constant)
        z, bound = products(y, kappa, exponent)
        self.bound.copy_(torch.maximum(self.bound, bound))
        holds = self.bound <= 2.0**exponent
        move, residual, gap = judged(z, y, v, self.posed.start, stiffness)
        point = torch.add(v, move, alpha=RELAXATION)
        self.z.copy_(z)
        self.gap.copy_(gap)
        self.points.index_copy_(1, self.slot, point.unsqueeze(1))
        self.moves.index_copy_(1, self.slot, move.unsqueeze(1))
        splitting.judge(
            residual, gap, angles(self.moves, move), limits, holds, self.made, self.slot, self.known, self.state,
            self.least, self.taken, self.weights, self.choice,
        )  # fmt: skip
        solved, better, mixes, strays = (flag.reshape(-1, 1, 1) for flag in self.choice.unbind(1))
        self.solution.copy_(torch.where(solved, z, self.solution))
        self.best.copy_(torch.where(better, point, self.best))
        mixed = (self.weights[:, :, None, None] * self.points).sum(1)
        v.copy_(torch.where(mixes, mixed, torch.where(strays, self.best, v)))
        self.made.add_(1)
        self.slot.copy_(self.made % self.points.shape[1])
        return torch.cat((self.taken.double(), (~(gap < 0)).double(), self.bound))

    def _give_up(self, lower: bool) -> Reading[None]:
        """The last Z, or unless it is `lower`, what is below the start, where nothing is solved."""
        z = self.z
        if not lower:
            point, kappa = descent(self.posed.start, self.scaled.constant, self.scaled.stiffness, self.scaled.kappa)
            below = yield from thresholding(point, kappa)
            z = torch.where((self.gap < 0).reshape(-1, 1, 1), below, z)
        self.solution.copy_(torch.where((self.taken > 0).reshape(-1, 1, 1), self.solution, z))


class _Kept(threading.local):
    def __init__(self) -> None:
        self.places: dict[tuple[torch.device, int, torch.Size, int], Replayed] = {}
        self.entries = 0


_kept = _Kept()
