"""Signals that ask a run to stop: kept until its step is done, so that it can write a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_EVERY = 10  # steps after which the processes ask each other whether to stop or to save
# Ctrl-C, what Slurm and `timeout` send, and what a closed terminal sends
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def deaf_to_stop(worker: int = 0) -> None:
    """Let a data loader's worker ignore the first signal of each kind. Its end would end the training, too.

    A signal may reach all processes of a job. The worker ends when its parent does.
    """

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in STOPS:
        signal.signal(number, once)


class Signals:
    """Ctrl-C, SIGTERM and SIGHUP, kept until the loop asks. A second one acts at once, unless `patient`."""

    # of a process that is asked by several others, as by the one that started it and by whoever stops them all
    patient: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        try:
            heard = [s for s in STOPS if signal.getsignal(s) != signal.SIG_IGN]  # under nohup SIGHUP is ignored
            self.before = {s: signal.signal(s, self._keep) for s in heard}
        except ValueError:  # not the main thread: whoever runs us there has the signals
            self.before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._back()

    def agreed(self, accelerator: Accelerator, step: int, due: bool) -> tuple[int, bool]:
        """The signal that any process has seen, or 0, and whether a checkpoint is due: the same answer for all."""
        if accelerator.num_processes == 1:
            return self.seen, due
        if step % AGREE_EVERY:
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
