"""Text for language models: one long stream of words, cut into columns that are read side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.app.data.base import Data, Dataset, Order, check_batch, held_count, span_of
from espalier.app.data.source import DataSet, at_least, parse
from espalier.app.data.words import Counter, Splitter, by_frequency, chunks, plain, plain_lower, tokenised
from espalier.app.errors import Problem

FORMS = ("wiki.{}.tokens", "{}.txt")
# of loose text files, which have no test split of their own
LOOSE_TEST_SHARE = 0.05


@dataclass(frozen=True)
class TextOptions:
    """What a recipe may choose."""

    # words that a batch holds of each column
    length: int = 192
    # words in the vocabulary, <unk> among them; 0: all
    max_words: int = 0
    # lower case; for loose .txt files only, since the others are tokenised as they are meant to be
    lower: bool = False
    # the split that is tested on where the set has three: test or valid
    split: str = "test"


@dataclass(frozen=True)
class Stream(Dataset):
    """Words as numbers, on the device; every step goes on, in each column, where the step before stopped."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return len(self.tokens)

    def _height(self, batch: int) -> int:
        height = (len(self) - 1) // batch
        if height < 1:
            raise Problem(
                f"a text of {len(self)} words cannot be cut into a batch of {batch} columns: give a smaller batch"
            )
        return height

    def steps(self, batch: int, world: int = 1) -> int:
        check_batch(batch, world)
        return -(-self._height(batch) // self.length)

    def batches(
        self, batch: int, *, order: Order | None = None, first: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, ...]]:
        steps, height = self.steps(batch, world), self._height(batch)
        start, stop = span_of(0, batch, rank, world)
        words = self.tokens[: batch * height].view(batch, height)[start:stop]
        nexts = self.tokens[1 : batch * height + 1].view(batch, height)[start:stop]
        for step in range(first, steps):
            window = slice(step * self.length, (step + 1) * self.length)
            yield words[:, window].long(), nexts[:, window].long()

    def hold_out(self, share: float) -> tuple[Dataset, Dataset]:
        """Here the last part of the text: words drawn from all over would not be a text."""
        kept = len(self) - held_count(len(self), share)
        return replace(self, tokens=self.tokens[:kept]), replace(self, tokens=self.tokens[kept:])


@dataclass(frozen=True)
class Text(DataSet):
    """Three files tokenised as WikiText is, or any text files, whose last 5 % of words (files by name) are the test."""

    def missing(self, directory: Path) -> list[str]:
        return [] if _training_files(directory) else ["wiki.train.tokens, train.txt or any *.txt"]

    def claims(self, directory: Path) -> bool:
        """Only by name: many a directory has some file in .txt."""
        return any((directory / form.format("train")).is_file() for form in FORMS)

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        chosen = parse(TextOptions, options, self.name)
        named = _named(directory, chosen.split)
        if named is not None:
            train, test = (chunks(path, strict=True) for path in named)
            return self.build(train, test, tokenised, device, chosen, str(directory))
        splitter = plain_lower if chosen.lower else plain
        loose = (part for path in _loose(directory) for part in chunks(path, strict=False))
        return self.build(loose, None, splitter, device, chosen, str(directory))

    def build(
        self,
        train: Iterable[str],
        test: Iterable[str] | None,
        splitter: Splitter,
        device: torch.device,
        options: TextOptions,
        source: str,
    ) -> Data:
        """The data set of two texts; without a second, the last 5 % of the first is the test."""
        at_least(self.name, "length", options.length, 1)
        at_least(self.name, "max_words", options.max_words, 0)
        counter = Counter()
        first = counter.number(train, splitter)
        if test is None:
            kept = len(first) - held_count(max(2, len(first)), LOOSE_TEST_SHARE)
            first, second = first[:kept], first[kept:]
        else:
            second = counter.number(test, splitter)
        for part, ids in (("training", first), ("test", second)):
            if not len(ids):
                raise Problem(f"{source} has no {part} text: its files hold no words; {self.way_out}")
        words, table = by_frequency(counter, first, options.max_words)
        parts = [Stream(torch.from_numpy(table[ids]).to(device), options.length) for ids in (first, second)]
        facts = {"vocab": len(words), "length": options.length, "train": len(first), "test": len(second)}
        return Data(parts[0], parts[1], {**facts, "source": source}, words)


def _named(directory: Path, split: str) -> tuple[Path, Path] | None:
    """The files to train and to test on, where the directory has the splits by name."""
    check_split(split)
    for form in FORMS:
        train, test = directory / form.format("train"), directory / form.format(split)
        if train.is_file():
            if not test.is_file():
                raise Problem(f"{directory} has {train.name} but no {test.name} to test on: add it beside {train.name}")
            return train, test
    return None


def check_split(split: str) -> str:
    """Refuse a split that cannot be tested on."""
    if split not in ("test", "valid"):
        raise Problem(f"data.split is {split!r}: data set text expects test or valid")
    return split


def _loose(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.txt") if path.is_file())


def _training_files(directory: Path) -> list[Path]:
    named = [directory / form.format("train") for form in FORMS]
    return [path for path in named if path.is_file()] or _loose(directory)
