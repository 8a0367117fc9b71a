"""Kernels beside each other in a CUDA graph: one's programs run where another's leave processors idle at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branches:
    """Streams beside the one that a CUDA graph is recorded from; as long as there is no fork, there are none.

    A branch may be the stem of others: an optimizer forks for its groups, and each of these for its launches.
    """

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._fork: torch.cuda.Event | None = None
        self._count = 0

    @contextmanager
    def fork(self) -> Iterator[None]:
        """All branches taken within begin here, and what comes after waits for them."""
        stem = torch.cuda.current_stream()
        self._fork, self._count = stem.record_event(), 0
        try:
            yield
        finally:  # after an error, too: a recording can't end with a branch left open
            self._fork = None
            for stream in self._streams[: self._count]:
                stem.wait_stream(stream)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is launched within waits for nothing since the fork."""
        if self._fork is None:
            yield
            return
        if self._count == len(self._streams):
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        stream = self._streams[self._count]
        self._count += 1
        stream.wait_event(self._fork)
        with torch.cuda.stream(stream):
            yield
