"""Works that read from the device: alone one waits, side by side they take turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from espalier import reading, recording
from espalier.reading import Reading, finish, side_by_side


def halving(name: str, x: float, log: list[str]) -> Reading[None]:
    """Halves x until it is below 1."""
    while True:
        log.append(f"{name} computes {x}")
        (x,) = yield torch.tensor([x / 2])
        if x < 1:
            return


def test_a_work_is_sent_the_values_that_it_asks_for() -> None:
    def work() -> Reading[float]:
        (a, b) = yield torch.tensor([1.0, 2.0])
        c = yield torch.tensor(a + b)
        return float(c + 1)

    assert finish(work()) == 4


def test_on_a_cpu_one_after_the_other() -> None:
    log: list[str] = []
    side_by_side([halving("a", 4.0, log), halving("b", 2.0, log)], torch.device("cpu"))
    assert log == ["a computes 4.0", "a computes 2.0", "a computes 1.0", "b computes 2.0", "b computes 1.0"]


class Stream:
    """A stream of which there are 40, given out again and again, as torch does with 32."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.cuda_stream = Stream.made % 40
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """A device that is none; the streams that are current, the last one now."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    places = recording._Places()
    monkeypatch.setattr(recording, "places", places)
    monkeypatch.setattr(reading, "places", places)
    monkeypatch.setattr(reading, "_sides", reading._Sides())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return current


DEVICE = torch.device("cuda")


def test_on_a_gpu_in_turns_and_what_comes_later_waits_for_all(gpu: list[Stream]) -> None:
    log: list[str] = []
    (main,) = gpu
    side_by_side([halving("a", 4.0, log), halving("b", 2.0, log)], DEVICE)
    assert log == ["a computes 4.0", "b computes 2.0", "a computes 2.0", "b computes 1.0", "a computes 1.0"]
    assert len(main.waits) == 2
    assert all(side.waits == [main] for side in main.waits)

    def failing() -> Reading[None]:
        yield torch.zeros(1)
        raise ValueError("no")

    main.waits.clear()
    with pytest.raises(ValueError, match="no"):
        side_by_side([failing(), halving("a", 4.0, log)], DEVICE)
    assert len(main.waits) == 2


def test_a_stream_has_one_work_at_a_time(gpu: list[Stream]) -> None:
    """What a work is still to read would be overwritten by another on the same stream."""
    holding: dict[int, int] = {}
    ended = []

    def work(number: int, reads: int) -> Reading[None]:
        for _ in range(reads):
            assert holding.setdefault(gpu[-1].cuda_stream, number) == number
            yield torch.zeros(1)
        assert holding.pop(gpu[-1].cuda_stream) == number
        ended.append(number)

    side_by_side([work(i, 1 + i % 7) for i in range(50)], DEVICE)
    assert sorted(ended) == list(range(50))


def test_each_stream_records_on_one_of_its_own(gpu: list[Stream]) -> None:
    """Two that share one would share the workspace of its matrix products, and may run at the same time."""
    seen: dict[int, set[int]] = {}

    def work() -> Reading[None]:
        for _ in range(3):
            seen.setdefault(gpu[-1].cuda_stream, set()).add(recording.places.at(DEVICE)[0].cuda_stream)
            Stream()  # others take some, too
            yield torch.zeros(1)

    recording.places.at(DEVICE)
    for _ in range(5):
        side_by_side([work() for _ in range(20)], DEVICE)
    captures = [stream for each in seen.values() for stream in each]
    assert len(captures) == len(set(captures)) == len(seen)
    assert not set(captures) & set(seen)
