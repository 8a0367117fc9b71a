"""Text to numbers: words counted and numbered by how often they occur, as the adaptive softmax wants them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from espalier.app.errors import Problem

END, UNKNOWN = "<eos>", "<unk>"
# characters read at once: large enough that the time goes to splitting, small enough that 540 MB fit in little memory
CHUNK = 1 << 23

Ids = np.ndarray[Any, np.dtype[np.int32]]
Splitter = Callable[[str], list[str]]

_PARAGRAPH = re.compile(r"\n\s*\n")
_WORD = re.compile(rf"{END}|{UNKNOWN}|[^\W_]+(?:['’][^\W_]+)*|[^\w\s]|_")


def tokenised(text: str) -> list[str]:
    """The words of a text that was tokenised before, as WikiText is: between spaces, each line closed by <eos>."""
    return text.replace("\n", f" {END} ").split()


def plain(text: str) -> list[str]:
    """The words and punctuation marks of ordinary text, each paragraph (up to an empty line) closed by <eos>."""
    return _WORD.findall(_PARAGRAPH.sub(f" {END} ", text))


def plain_lower(text: str) -> list[str]:
    """As `plain`, in lower case."""
    return plain(text.lower())


def chunks(path: Path, *, strict: bool) -> Iterator[str]:
    """A file's text in parts that end where a paragraph does; if not strict, bytes that are not UTF-8 become �."""
    try:
        with path.open(encoding="utf-8-sig", errors="strict" if strict else "replace") as file:
            while part := file.read(CHUNK):
                lines = [part]
                while (line := file.readline()).strip():
                    lines.append(line)
                yield "".join([*lines, line])
    except UnicodeDecodeError as error:
        raise Problem(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): fetch it again or convert it"
        ) from None


class Counter:
    """Numbers words in the order they first appear."""

    def __init__(self) -> None:
        self.ids: defaultdict[str, int] = defaultdict()
        # the next free number; a dict that fills itself keeps the loop over words out of Python
        self.ids.default_factory = self.ids.__len__

    def number(self, parts: Iterable[str], splitter: Splitter) -> Ids:
        """The numbers of a text's words."""
        pieces = []
        for part in parts:
            words = splitter(part)
            pieces.append(np.fromiter(map(self.ids.__getitem__, words), np.int32, len(words)))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def by_frequency(counter: Counter, train: Ids, max_words: int) -> tuple[tuple[str, ...], Ids]:
    """The vocabulary of the training text, most frequent first, and the table from a counter's numbers to its own.

    Words beyond `max_words` (0: none), and words that the training text lacks, become <unk>, which takes the
    place that its frequency then gives it.
    """
    unknown = counter.ids[UNKNOWN]
    words = list(counter.ids)
    counts = np.bincount(train, minlength=len(words))
    known = np.flatnonzero(counts > 0)
    known = known[known != unknown]
    known = known[np.argsort(-counts[known], kind="stable")]
    if max_words:
        dropped, known = known[max_words - 1 :], known[: max_words - 1]
        counts[unknown] += counts[dropped].sum()
    known = np.append(known, unknown)
    known = known[np.argsort(-counts[known], kind="stable")]
    table = np.empty(len(words), np.int32)
    place = int(np.flatnonzero(known == unknown)[0])
    table.fill(place)
    table[known] = np.arange(len(known), dtype=np.int32)
    return tuple(words[number] for number in known), table
