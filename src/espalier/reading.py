"""Work that reads numbers from the device on its way, and several such works at a time.

A work is a generator: it yields a tensor that it must know, and is sent its values as lists. Alone it waits at each;
side by side the device computes for one while the host reads and decides for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Reading: TypeAlias = Generator[Tensor, Any, T]

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def finish(work: Reading[T]) -> T:
    """The result of one work."""
    try:
        wanted = next(work)
        while True:
            wanted = work.send(wanted.tolist())
    except StopIteration as end:
        result: T = end.value
        return result


def side_by_side(works: Sequence[Reading[None]], device: torch.device | None) -> None:
    """Finish works that do not depend on each other; on a GPU each has a stream of its own."""
    if device is None or device.type != "cuda" or len(works) < 2:
        for work in works:
            finish(work)
        return
    streams = _streams.setdefault(device, [])
    streams += [torch.cuda.Stream(device) for _ in works[len(streams) :]]  # type: ignore[no-untyped-call]
    main = torch.cuda.current_stream(device)
    under_way: deque[tuple[Reading[None], torch.cuda.Stream, Tensor | None]] = deque()
    for work, stream in zip(works, streams, strict=False):
        stream.wait_stream(main)
        under_way.append((work, stream, None))
    try:
        while under_way:
            work, stream, wanted = under_way.popleft()
            with torch.cuda.stream(stream):
                try:
                    wanted = next(work) if wanted is None else work.send(wanted.tolist())
                except StopIteration:
                    continue
            under_way.append((work, stream, wanted))
    finally:
        for stream in streams[: len(works)]:
            main.wait_stream(stream)
