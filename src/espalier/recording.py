"""Work on a GPU, recorded once as a CUDA graph and replayed: many small operations then cost the host one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class _Places(threading.local):
    """What belongs to each stream of a thread: the one to capture on, with its own workspaces, and memory that the
    recordings share, none of which runs beside another."""

    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, int], tuple[torch.cuda.Stream, Any]] = {}
        self.streams: dict[torch.device, set[int]] = {}

    def at(self, device: torch.device) -> tuple[torch.cuda.Stream, Any]:
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        if key not in self.known:
            self.known[key] = (self.new_stream(device), torch.cuda.graph_pool_handle())
        return self.known[key]

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that nothing here has yet: torch has 32, and gives them out again and again."""
        taken = self.streams.setdefault(device, set())
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for _ in range(32):
            if stream.cuda_stream not in taken:
                break
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        taken.add(stream.cuda_stream)
        return stream


places = _Places()


class Recording(Generic[T]):
    """A function of tensors that stay where they are. It must not read from the device, and bear being called twice in
    a row; what it returns lies where the stream's next recording may write.

    It must be kept: memory that it shares with others goes with the last of them, and with any of them workspaces.
    """

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        here = torch.cuda.current_stream(device)
        stream, pool = places.at(device)
        stream.wait_stream(here)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            work()  # libraries set themselves up in a first run
            stream.synchronize()
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._result = work()
            finally:
                self._graph.capture_end()
        here.wait_stream(stream)

    def __call__(self) -> T:
        self._graph.replay()
        return self._result
