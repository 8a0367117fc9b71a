"""What a data set is to the training loop: two splits, each cut into batches that depend on (seed, epoch) alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.app.errors import Problem

# the split that `holdout` makes must be the same in every run, so it has a seed of its own
HOLDOUT_SEED = 20_230_401


@dataclass(frozen=True)
class Order:
    """The training order of one epoch: all chance in it comes from the seed and the epoch."""

    seed: int
    epoch: int

    def generator(self) -> torch.Generator:
        """A CPU generator for this epoch; on the CPU because its draws are then the same for every device."""
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self.epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**63 - 1)
        return torch.Generator().manual_seed(mixed)


class Dataset(ABC):
    """One split of a data set, cut into batches, on a device."""

    @abstractmethod
    def __len__(self) -> int:
        """How many examples (for text: words) there are."""

    @abstractmethod
    def steps(self, batch: int, world: int = 1) -> int:
        """How many batches an epoch has; a partial last one counts, unless it is too small for `world` processes."""

    @abstractmethod
    def batches(
        self, batch: int, *, order: Order | None = None, first: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, ...]]:
        """The slice of each global batch that belongs to process `rank`, from batch number `first` on."""

    @abstractmethod
    def hold_out(self, share: float) -> tuple[Dataset, Dataset]:
        """This split without a fixed share of it, and that share, which is not augmented."""


@dataclass(frozen=True)
class Data:
    """A data set: what to train on, what to test on, and what a model must know of it."""

    train: Dataset
    test: Dataset
    facts: Mapping[str, Any]
    # the vocabulary of a text and the characters of speech, by their number
    words: tuple[str, ...] = ()


class Examples(Dataset):
    """A split of separate examples, which are shuffled by themselves."""

    def steps(self, batch: int, world: int = 1) -> int:
        check_batch(batch, world)
        whole, rest = divmod(len(self), batch)
        return whole + (rest >= world)

    def batches(
        self, batch: int, *, order: Order | None = None, first: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, ...]]:
        spans = [
            span_of(step * batch, min((step + 1) * batch, len(self)), rank, world)
            for step in range(first, self.steps(batch, world))
        ]
        return self.produce(spans, order)

    @abstractmethod
    def produce(self, spans: list[tuple[int, int]], order: Order | None) -> Iterator[tuple[Tensor, ...]]:
        """One batch for each span of positions in the epoch's order."""

    def hold_out(self, share: float) -> tuple[Dataset, Dataset]:
        kept, held = split(len(self), share)
        return self.select(kept, augment=True), self.select(held, augment=False)

    @abstractmethod
    def select(self, chosen: Tensor, *, augment: bool) -> Dataset:
        """The examples of these numbers; `augment=False` turns augmentation off for good."""


def span_of(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    """The slice of [start, stop) that process `rank` of `world` takes: never empty if there are `world` examples."""
    size = stop - start
    return start + size * rank // world, start + size * (rank + 1) // world


def split(count: int, share: float) -> tuple[Tensor, Tensor]:
    """The numbers 0 … count − 1 in two sorted parts, the second a fixed random `share` of them."""
    held = held_count(count, share)
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(HOLDOUT_SEED))
    return mixed[: count - held].sort().values, mixed[count - held :].sort().values


def held_count(count: int, share: float) -> int:
    """How many of `count` examples a share is: at least one, and never all."""
    if not 0 < share < 1:
        raise Problem(
            f"holdout is {share}: it is the share of the training set to test on, between 0 and 1, such as 0.1"
        )
    if count < 2:
        raise Problem(f"holdout needs at least 2 training examples to split, there are {count}")
    return min(max(1, math.floor(count * share + 0.5)), count - 1)


def check_batch(batch: int, world: int) -> None:
    """Refuse a batch that leaves a process without examples."""
    if batch < world:
        raise Problem(
            f"batch is {batch}, but each of {world} processes needs at least one example of it: give batch ≥ {world}"
        )
    if batch < 1:
        raise Problem(f"batch is {batch}: it must be at least 1")
