"""Work on a GPU, recorded once as a CUDA graph and replayed: many small operations then cost the host one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

# memory that the recordings of a stream share: none runs beside another
_pools: dict[tuple[torch.device, int], Any] = {}


class Recording(Generic[T]):
    """A function of tensors that stay where they are. It must not read from the device, and bear being called twice in
    a row; what it returns lies where the stream's next recording may write."""

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        here = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()  # libraries set themselves up in a first run
            stream.synchronize()
            pool = _pools.setdefault((device, here.cuda_stream), torch.cuda.graph_pool_handle())
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._result = work()
            self._graph.capture_end()
        here.wait_stream(stream)

    def __call__(self) -> T:
        self._graph.replay()
        return self._result
