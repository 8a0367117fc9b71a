"""A bit that flips in a run's own files is noticed by whatever reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small
import torch

from espalier.app.checkpoint import FORMAT
from espalier.app.deliver import export_run, shrink_run
from espalier.app.digest import DELIVERED, MADE_AGAIN, intact, save
from espalier.app.errors import Problem
from espalier.app.loop import train
from espalier.app.progress import Silent
from espalier.app.report import write_report
from espalier.app.run import Job, Run, read, replacing

SHORT = ("length=4", "milestones=[2]", "evaluate_every=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    job = small.job("digits", tmp_path_factory.mktemp("finished"), changes=SHORT)
    return job, train(job, Silent())


def flips(path: Path, count: int) -> Iterator[int]:
    """Flip single bits in a file, one after the other, and put it back at the end."""
    good = path.read_bytes()
    chance = random.Random(0)
    try:
        for _ in range(count):
            bit = chance.randrange(8 * len(good))
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            yield bit
    finally:
        path.write_bytes(good)


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state = {"format": FORMAT, "weights": torch.randn(3)}
    with replacing(path) as file:
        save(state, file)
    good = path.read_bytes()
    assert intact(path)
    assert torch.load(path, weights_only=True)["weights"].equal(state["weights"])
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert not intact(path), bit
    for size in (0, 3, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert not intact(path), size


def test_a_flipped_bit_is_refused_by_resume(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=SHORT)
    run = train(job, Silent())
    model = run.model.read_bytes()
    run.model.unlink()
    for bit in flips(run.checkpoint, 10):
        with pytest.raises(Problem, match=r"checkpoint.pt: it is damaged. Delete it to begin the run anew"):
            train(job, Silent(), resume=True)
        assert not run.model.exists(), bit
    assert train(job, Silent(), resume=True).model.read_bytes() == model


def test_a_checkpoint_without_a_digest_is_an_older_one(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=SHORT)
    run = train(job, Silent())
    model = run.model.read_bytes()
    state = torch.load(run.checkpoint, weights_only=True)
    facts = json.loads((run.path / "run.json").read_text())
    del facts["sha256"], facts["skip_nonfinite"], state["position"]["lr"], state["position"]["skipped"]
    (run.path / "run.json").write_text(json.dumps(facts))
    run.model.unlink()
    torch.save(state, run.checkpoint)
    with pytest.raises(Problem, match="it has lost its SHA-256"):
        train(job, Silent(), resume=True)
    torch.save({**state, "format": 1}, run.checkpoint)
    assert train(job, Silent(), resume=True).model.read_bytes() == model


READERS: dict[str, Callable[[Job, Run], object]] = {
    "resume": lambda job, run: train(job, Silent(), resume=True),
    "shrink": lambda job, run: shrink_run(run.path),
    "export": lambda job, run: export_run(run.path, None, "pt2"),
    "report": lambda job, run: write_report([run.path], run.path / "report.html"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["model.safetensors", "examples.pt", "metrics.jsonl", "structure.json"])
def test_a_flipped_bit_in_what_is_delivered_is_refused(name: str, reader: str, finished: tuple[Job, Run]) -> None:
    job, run = finished
    assert set(read(run.path).facts["sha256"]) == set(DELIVERED) - {"words.json"}
    way_out = "delete it and run .*--resume" if name in MADE_AGAIN else "restore it from a copy"
    for _ in flips(run.path / name, 3):
        with pytest.raises(Problem, match=rf"{name} is damaged, or was changed: .*{way_out}") as told:
            READERS[reader](job, run)
        assert "\n" not in str(told.value)
    assert READERS["resume"](job, run) == read(run.path)


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_what_is_deleted_as_the_message_says_is_made_again(name: str, tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=SHORT)
    run = train(job, Silent())
    before = (run.path / name).read_bytes()
    (run.path / name).unlink()
    with pytest.raises(Problem, match=rf"has no {name}: .*--resume"):
        shrink_run(run.path)
    train(job, Silent(), resume=True)
    assert (run.path / name).read_bytes() == before
    shrink_run(run.path)
    # without the checkpoint nothing can be made, and training anew would overwrite what is left
    (run.path / name).unlink()
    run.checkpoint.unlink()
    left = {p: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    with pytest.raises(Problem, match=rf"finished.*{name} and checkpoint.pt are gone"):
        train(job, Silent(), resume=True)
    assert {p: p.read_bytes() for p in run.path.iterdir() if p.is_file()} == left
