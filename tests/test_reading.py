"""Works that read from the device: alone one waits, side by side they take turns."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

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


def test_on_a_gpu_in_turns_each_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[Any, Any]] = []

    class Stream:
        def __init__(self, device: Any = None) -> None: ...

        def wait_stream(self, other: Any) -> None:
            waits.append((self, other))

    main = Stream()
    monkeypatch.setattr("espalier.reading._streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    log: list[str] = []
    side_by_side([halving("a", 4.0, log), halving("b", 2.0, log)], torch.device("cuda"))
    assert log == ["a computes 4.0", "b computes 2.0", "a computes 2.0", "b computes 1.0", "a computes 1.0"]
    begun, ended = waits[:2], waits[2:]
    assert [other for _, other in begun] == [main, main]
    assert [(after, before) for before, after in begun] == ended  # what comes later waits for both

    def failing() -> Reading[None]:
        yield torch.zeros(1)
        raise ValueError("no")

    waits.clear()
    with pytest.raises(ValueError, match="no"):
        side_by_side([failing(), halving("a", 4.0, log)], torch.device("cuda"))
    assert [after for after, _ in waits[2:]] == [main, main]
