"""Work that reads numbers from the device on its way, and several such works at a time.

A work is a generator: it yields a tensor that it must know, and is sent its values as lists. Alone it waits at each;
side by side the device computes for one while the host reads and decides for another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from espalier.recording import places

T = TypeVar("T")
Reading: TypeAlias = Generator[Tensor, Any, T]

# Works under way at a time, each on a stream of its own, which has another to record on; torch has 32.
_SIDES = 8


class _Sides(threading.local):
    def __init__(self) -> None:
        self.streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def of(self, device: torch.device) -> list[torch.cuda.Stream]:
        if device not in self.streams:
            self.streams[device] = [places.new_stream(device) for _ in range(_SIDES)]
        return self.streams[device]


_sides = _Sides()


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
    """Finish works that do not depend on each other; on a GPU several at a time, one on each of a few streams."""
    if device is None or device.type != "cuda" or len(works) < 2:
        for work in works:
            finish(work)
        return
    waiting = deque(works)
    main = torch.cuda.current_stream(device)
    streams = _sides.of(device)[: len(works)]
    for stream in streams:
        stream.wait_stream(main)
    under_way: deque[tuple[Reading[None], torch.cuda.Stream, Tensor | None]]
    under_way = deque((waiting.popleft(), stream, None) for stream in streams)
    try:
        while under_way:
            work, stream, wanted = under_way.popleft()
            with torch.cuda.stream(stream):
                try:
                    wanted = next(work) if wanted is None else work.send(wanted.tolist())
                except StopIteration:
                    if waiting:
                        under_way.append((waiting.popleft(), stream, None))
                    continue
            under_way.append((work, stream, wanted))
    finally:
        for stream in streams:
            main.wait_stream(stream)
