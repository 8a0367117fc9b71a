"""Several runs at a time, each in a process of its own: a small training leaves most of a GPU idle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from espalier.app.errors import Problem, Stopped
from espalier.app.loop import train
from espalier.app.progress import SHOW_EVERY, Display
from espalier.app.run import Job, Run, begin, read
from espalier.app.signals import Signals

LISTEN = 0.2  # seconds, before it looks for signals again
TELL_EVERY = 2 * SHOW_EVERY


def train_side_by_side(jobs: Sequence[Job], at_once: int, display: Display) -> list[Run]:
    """Train what is not trained yet, so many at a time, on all GPUs in turn unless one is named.

    The first problem stops the others, and so do Ctrl-C, SIGTERM and SIGHUP: all write a checkpoint.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("--at-once has one process for a run, accelerate launch has several: take one of the two")
    # before anything runs: a directory with another run is a problem
    waiting = deque(job for job in jobs if not begin(job, resume=True).finished)
    if len(waiting) < len(jobs):
        display.say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished already.")
    workers: list[_Worker] = []
    failure: Exception | None = None
    threads = max(1, torch.get_num_threads() // max(1, min(at_once, len(waiting))))
    saved = True
    with Signals() as signals, _ended(workers):
        while workers or (waiting and failure is None):
            while waiting and failure is None and len(workers) < at_once:
                workers.append(_Worker(_placed(waiting.popleft(), workers), threads, display.beside()))
            heard = wait([worker.ear for worker in workers], LISTEN)
            ended = [worker for worker in workers if worker.ear in heard and worker.listen()]
            errors = [worker.error for worker in ended if worker.error is not None]
            saved = saved and all(isinstance(error, Stopped) for error in errors)
            for worker in ended:
                workers.remove(worker)
            if signals.seen:
                errors = [Stopped(signals.seen, "stopped")]
            if errors and failure is None:
                failure = errors[0]
                for worker in workers:
                    worker.process.terminate()
    if isinstance(failure, Stopped):
        raise Stopped(failure.signal, "stopped, checkpoints written" if saved else "stopped")
    if failure is not None:
        raise failure
    return [read(job.out) for job in jobs]


def _placed(job: Job, workers: Sequence[_Worker]) -> Job:
    """The job on the GPU that has the fewest, unless it names its device."""
    if job.device not in ("auto", "cuda") or torch.cuda.device_count() < 2:
        return job
    taken = [worker.job.device for worker in workers]
    return replace(job, device=min((f"cuda:{n}" for n in range(torch.cuda.device_count())), key=taken.count))


@contextmanager
def _ended(workers: Sequence[_Worker]) -> Iterator[None]:
    """Whatever happens within, none is left behind."""
    try:
        yield
    finally:
        for worker in workers:
            worker.ear.close()  # lest it wait to be heard
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


class _Worker:
    """A process that trains a job, what it says, and where that is shown."""

    def __init__(self, job: Job, threads: int, shown: Display) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.job, self.shown = job, shown
        self.error: Exception | None = None
        self.ear, mouth = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=_work, args=(job, threads, mouth))
        with _deaf():
            self.process.start()
        mouth.close()

    def listen(self) -> bool:
        """Show what it says next; whether that was the last."""
        try:
            name, said = self.ear.recv()
        except (EOFError, OSError):  # at its end, or in the middle of a word
            self.process.join()
            if self.error is None and self.process.exitcode:
                self.error = Problem(f"{self._name} {_end(self.process.exitcode)}. The same command goes on")
            return True
        if name == "error":
            self.error = Problem(f"{self._name}: {said[0]}") if isinstance(said[0], Problem) else said[0]
        else:
            getattr(self.shown, name)(*said)
        return False

    @property
    def _name(self) -> str:
        return f"{self.job.method}, seed {self.job.seed}"


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start within do not hear Ctrl-C, which a terminal sends to all: they are told by SIGTERM."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which hears everything again when it has started its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(code: int) -> str:
    """How a process has ended that said nothing."""
    if -code == getattr(signal, "SIGKILL", 0):
        return "was killed: the machine may have run out of memory, try a smaller --at-once"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _work(job: Job, threads: int, mouth: Connection) -> None:
    """What a process does."""
    torch.set_num_threads(threads)
    Signals.patient = True
    try:
        train(job, _Teller(mouth), resume=True)
    except (Problem, Stopped, OSError) as error:
        with suppress(OSError):  # nobody is there any more
            mouth.send(("error", (error,)))


class _Teller:
    """A run's progress, on its way to the process that shows it."""

    def __init__(self, mouth: Connection) -> None:
        self.mouth, self.told, self.total = mouth, 0.0, 0
        self.heard = True

    def begin(self, job: Job, facts: Mapping[str, Any], total: int, at: int, metric: str) -> None:
        self.total = total
        self._tell("begin", job, dict(facts), total, at, metric)

    def step(self, step: int, loss: Tensor | float) -> None:
        now = time.monotonic()
        if now - self.told < TELL_EVERY and step < self.total:
            return
        self.told = now
        self._tell("step", step, float(loss))

    def look(self, look: dict[str, Any]) -> None:
        self._tell("look", look)

    def say(self, line: str) -> None:
        self._tell("say", line)

    def _tell(self, name: str, *said: Any) -> None:
        if not self.heard:
            return
        try:
            self.mouth.send((name, said))
        except OSError:  # nobody is there any more: as if asked to stop
            self.heard = False
            signal.raise_signal(signal.SIGTERM)
