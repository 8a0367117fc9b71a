"""Signals that ask a run to stop: kept until its step is done, so that it can write a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_EVERY = 10  # steps after which the processes ask each other whether to stop or to save
# Ctrl-C, what Slurm and `timeout` send, and what a closed terminal sends
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
HANGUP = STOPS[-1]
_ASKED = (signal.SIGINT, signal.SIGTERM)  # sent to stop this very run


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that arrive within act at its end. Processes that start within do not hear them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def deaf_to_stop(worker: int) -> None:
    """Let a data loader's worker ignore stops, which may go to all processes of a job, unless its parent sends them.

    A worker that is killed ends the training without a checkpoint. It ends by itself soon after its parent.
    The worker has to start with signals held back: they stay so, and a thread takes them.
    """
    parent = os.getppid()

    def listen() -> None:
        while signal.sigwaitinfo(STOPS).si_pid != parent:
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=listen, daemon=True).start()
    elif hasattr(signal, "pthread_sigmask"):  # macOS: the sender is not told
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


class Signals:
    """Ctrl-C, SIGTERM and SIGHUP, kept until the loop asks. A second one acts at once, unless `patient`."""

    # of a process that is asked by several others, as by the one that started it and by whoever stops them all
    patient: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        try:
            # under nohup SIGHUP stays ignored; a shell's background jobs ignore SIGINT, and a run hears it all the same
            heard = [s for s in STOPS if s in _ASKED or signal.getsignal(s) != signal.SIG_IGN]
            self.before = {s: signal.signal(s, self._keep) for s in heard}
        except ValueError:  # not the main thread: whoever runs us there has the signals
            self.before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._back()

    def agreed(self, accelerator: Accelerator, step: int, due: bool, last: bool) -> tuple[int, bool]:
        """The signal that any process has seen, or 0, and whether a checkpoint is due: the same answer for all.

        The last step asks, too: a signal that it leaves unheard would not stop what comes after this run.
        """
        if accelerator.num_processes == 1:
            return self.seen, due
        if step % AGREE_EVERY and not last:
            return 0, False
        seen, late = accelerator.gather(torch.tensor([[self.seen, due]], device=accelerator.device)).amax(0).tolist()
        return seen, bool(late)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.seen = number
        if not self.patient:
            self._back()

    def _back(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
