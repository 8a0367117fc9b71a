"""One process in a run's directory: the loser says who is there, and a process that dies leaves nothing locked."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import small

from espalier.app.deliver import export_run, shrink_run
from espalier.app.errors import Problem
from espalier.app.lock import NAME, locked
from espalier.app.loop import Training, train
from espalier.app.machine import make_accelerator
from espalier.app.progress import Silent
from espalier.app.run import Run, replacing

HOLD = "import sys; from pathlib import Path; from espalier.app.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1]), 'train'): print('mine', flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_a_killed_process_leaves_no_lock_and_a_living_one_is_named(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        said = rf"in use by process {other.pid} on {socket.gethostname()} \(espalier train, since 20.*\): wait .*kill"
        with pytest.raises(Problem, match=said), locked(tmp_path, "train"):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert json.loads((tmp_path / NAME).read_text())["pid"] == other.pid  # which does no harm
        with locked(tmp_path, "train"):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    with locked(tmp_path, "train"):
        worker = fork.Process(target=there.recv)
        worker.start()
    try:
        with locked(tmp_path, "train"):
            assert worker.is_alive()
    finally:
        here.send("end")
        worker.join()


def test_a_directory_where_nothing_was_begun_is_left_as_it_was(tmp_path: Path) -> None:
    with locked(tmp_path / "a/b", "train"):
        assert (tmp_path / "a/b" / NAME).exists()
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a/b", "train"):
        (tmp_path / "a/b/run.json").write_text("{}")
    assert (tmp_path / "a/b" / NAME).read_bytes() == b""
    job = small.job("digits", tmp_path, changes=("unpenalised=[nosuch]",))
    with pytest.raises(Problem, match="nosuch"):
        train(job, Silent())
    assert not job.out.exists()
    job.out.mkdir()
    (job.out / "thesis.tex").write_text("years of work")
    with pytest.raises(Problem, match="holds no run"):
        train(job, Silent())
    assert [p.name for p in job.out.iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_a_file_system_without_locks_is_said_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    said: list[str] = []

    class Listener(Silent):
        def say(self, line: str) -> None:
            said.append(line)

    monkeypatch.setattr("fcntl.flock", flock)
    job = small.job("digits", tmp_path, changes=("length=2", "milestones=[]"))
    assert train(job, Listener()).finished
    assert any("can't be locked" in line for line in said)


def test_two_processes_may_write_one_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with replacing(path, shared=True) as one:
        with replacing(path, shared=True) as other:
            other.write(b"other")
        one.write(b"one")
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


class Meddler(Silent):
    """Another process's attempts while a run trains."""

    def __init__(self, where: Path) -> None:
        self.where, self.refused = where, 0

    def step(self, step: int, loss: object) -> None:
        with pytest.raises(Problem, match="espalier train"), locked(self.where, "train"):
            pass
        self.refused += 1


def test_who_works_in_a_run_has_it_alone(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=("length=4", "milestones=[2]"))
    other = Meddler(job.out)
    run = train(job, other)
    assert other.refused == 4
    before = {p: p.read_bytes() for p in job.out.rglob("*") if p.is_file() and p.name != NAME}
    with locked(job.out, "shrink"):
        for again in (
            lambda: train(job, Silent(), resume=True),
            lambda: shrink_run(run.path),
            lambda: export_run(run.path, None, "pt2"),
        ):
            with pytest.raises(Problem, match=rf"in use by process {os.getpid()} .*espalier shrink"):
                again()
    assert {p: p.read_bytes() for p in job.out.rglob("*") if p.is_file() and p.name != NAME} == before
    for call in (lambda: shrink_run(tmp_path / "none"), lambda: export_run(tmp_path / "none", None, "pt2")):
        with pytest.raises(Problem, match="is no run"):
            call()
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_is_loaded_only_when_resuming_was_asked_for(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=("length=4", "milestones=[2]"))
    run = train(job, Silent())
    accelerator = make_accelerator(job)
    assert Training(job, run, accelerator, Silent()).at.step == 4
    fresh = Training(job, Run(run.path), accelerator, Silent())  # a new run, beside another's checkpoint
    assert fresh.at.step == 0
