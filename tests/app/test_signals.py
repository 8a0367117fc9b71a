"""A stop that goes to all processes of a job, as Slurm, `timeout` and a closed terminal send it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import tiny
import torch

from espalier.app import processes
from espalier.app.data import open_data
from espalier.app.errors import Stopped
from espalier.app.loop import train
from espalier.app.progress import Silent
from espalier.app.run import read
from espalier.app.signals import STOPS, Signals

posix = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="POSIX signals")

# two trainings that say when they are under way. Both in one process, because the imports take longer than they do
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import small
from espalier.app.errors import Stopped
from espalier.app.loop import train
from espalier.app.progress import Silent
class Told(Silent):
    def step(self, step, loss):
        print(step, flush=True)
changes = ("length=1000000", "milestones=[10]", "evaluate_every=1000000", "data.workers=2", "batch=2", "data.size=16")
for out in sys.argv[3:]:
    try:
        train(small.job("resnet50-imagenet", Path(sys.argv[2]), changes=changes, out=out), Told())
    except Stopped as stopped:
        print("stopped", stopped.signal, flush=True)
"""


@posix
def test_a_stop_of_the_whole_group_with_its_workers_writes_the_checkpoint(tmp_path: Path) -> None:
    tiny.make("imagenet", tmp_path / "data")
    stops = {"one": signal.SIGTERM, "other": signal.SIGHUP}
    words = [sys.executable, "-c", PROGRAM, os.path.dirname(small.__file__), str(tmp_path), *stops]
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, text=True) as begun:
        assert begun.stdout is not None
        for out, number in stops.items():
            assert begun.stdout.readline() == "1\n"  # in the middle of an epoch of 8 steps
            os.killpg(begun.pid, number)
            assert next(line for line in begun.stdout if not line.strip().isdigit()) == f"stopped {number:d}\n"
            assert read(tmp_path / out).facts["status"] == "stopped"
            assert torch.load(tmp_path / out / "checkpoint.pt", weights_only=True)["position"]["step"] >= 1
    assert begun.returncode == 0


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the sender of a signal is not told")
def test_workers_ignore_the_stops_of_others_and_end_by_their_parents(tmp_path: Path) -> None:
    tiny.make("imagenet", tmp_path)
    data = open_data("imagenet", tmp_path, device=torch.device("cpu"), options={"size": 16, "workers": 2})
    batches = data.train.batches(1)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    kills = "; ".join(f"kill -{number} {worker.pid}" for worker in workers for number in STOPS)
    subprocess.run(["sh", "-c", f"{kills}; {kills}"], check=True)
    assert len(list(batches)) == 15
    batches = data.train.batches(1)
    next(batches)
    for worker in (workers := multiprocessing.active_children()):
        worker.terminate()  # as at the parent's own end, which waits for them
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0


class Hangup(Silent):
    """A terminal that is closed: writing fails, and the signal arrives before that or after, or is ignored."""

    def __init__(self, where: str, told: bool) -> None:
        self.where, self.told = where, told

    def _gone(self) -> None:
        if self.told:
            signal.raise_signal(signal.SIGHUP)
        raise OSError(errno.EIO, "Input/output error")

    def step(self, step: int, loss: object) -> None:
        if self.where == "step" and step == 5:
            self._gone()

    def look(self, look: dict[str, object]) -> None:
        if self.where == "look" and look["step"] == 5:
            self._gone()


@posix
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("where", ["step", "look"])
def test_a_closed_terminal_ends_with_a_checkpoint(where: str, told: bool, tmp_path: Path) -> None:
    job = small.job("digits", tmp_path)
    with pytest.raises(Stopped, match="stopped at step 5, checkpoint written") as stopped:
        train(job, Hangup(where, told))
    assert stopped.value.signal == signal.SIGHUP
    assert train(job, Silent(), resume=True).finished


class StopInTheLastLook(Silent):
    def look(self, look: dict[str, object]) -> None:
        if look["step"] == 20:
            signal.raise_signal(signal.SIGTERM)


def test_a_stop_in_the_last_evaluation_is_heard(tmp_path: Path) -> None:
    """It would otherwise not stop the next run of `compare`."""
    whole = train(small.job("digits", tmp_path, out="whole"), Silent())
    job = small.job("digits", tmp_path)
    with pytest.raises(Stopped, match="stopped at step 20, checkpoint written"):
        train(job, StopInTheLastLook())
    assert train(job, Silent(), resume=True).model.read_bytes() == whole.model.read_bytes()


@posix
def test_a_second_signal_acts_at_once_and_nohup_is_respected() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.seen
            signal.raise_signal(signal.SIGTERM)
            assert (signals.seen, heard) == (signal.SIGTERM, [])
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, hup)


def test_ctrl_c_is_heard_in_a_background_job_of_a_shell() -> None:
    """Such a job begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.seen == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


@posix
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (-9, "ramda, seed 0 was killed: .*memory.*--at-once"),
        (-11, "ramda, seed 0 was ended by signal 11"),
        (3, "ramda, seed 0 ended with exit code 3"),
    ],
)
def test_how_a_run_of_compare_ended_that_said_nothing(end: int, said: str, tmp_path: Path) -> None:
    ear, mouth = multiprocessing.Pipe(duplex=False)
    worker = object.__new__(processes._Worker)
    worker.job, worker.error, worker.ear = small.job("digits", tmp_path), None, ear
    worker.process = SimpleNamespace(join=lambda: None, exitcode=end)  # type: ignore[assignment]
    mouth.close()
    assert worker.listen()
    assert re.search(rf"^{said}.*The same command goes on$", str(worker.error))
