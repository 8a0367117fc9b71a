"""The training loop: train, look, save, and go on from there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from espalier.app import checkpoint
from espalier.app.announce import announce
from espalier.app.checkpoint import Position
from espalier.app.data import Order, open_data
from espalier.app.deliver import deliver
from espalier.app.digest import digests
from espalier.app.errors import Problem, Stopped, one_line
from espalier.app.finite import Diverged, Watch
from espalier.app.graph import Replay, optimizer_waits, replayable
from espalier.app.look import Looker
from espalier.app.machine import clock, denormals_as_zeros, locked_together, make_accelerator
from espalier.app.methods import make_optimizer, make_schedule, rescale_lr
from espalier.app.progress import Progress, Silent
from espalier.app.recipe import STRUCTURED
from espalier.app.run import Job, Run, begin, check_place
from espalier.app.signals import HANGUP, Signals
from espalier.app.tasks import open_task


def train(job: Job, progress: Progress, *, resume: bool = False) -> Run:
    """Train a job to its end, and deliver the model at the structured point.

    With `resume`, go on from the last checkpoint, if there is one. Ctrl-C, SIGTERM and SIGHUP write one, and `Stopped`
    is raised.
    """
    accelerator = make_accelerator(job)
    check_place(job.out)
    with locked_together(job.out, "train", accelerator) as held:
        run = begin(job, resume=resume)
        accelerator.wait_for_everyone()  # nobody writes before all have looked
        run.verify()
        if run.finished:
            progress.say(f"{job.out} is finished already.")
            return run
        if not held:
            progress.say(f"{job.out} can't be locked: see to it yourself that no other process trains there.")
        with denormals_as_zeros():
            return Training(job, run, accelerator, progress if accelerator.is_main_process else Silent()).go()


class Training:
    """Everything that a run consists of, built from its job."""

    def __init__(self, job: Job, run: Run, accelerator: Accelerator, progress: Progress) -> None:
        self.job, self.run, self.accelerator, self.progress = job, run, accelerator, progress
        self.recipe, self.device = job.recipe, accelerator.device
        self.shard = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        self.structured = job.chosen.optimizer in STRUCTURED
        set_seed(job.seed)
        wanted = self.recipe.data
        self.data = open_data(
            wanted.name, job.data, device=self.device, hub=job.hub, holdout=wanted.holdout, options=wanted.options
        )
        self.task = open_task(self.recipe, self.data, self.device, **self.shard)
        if self.recipe.compile and not self.task.alike:
            raise Problem(f"compile is for tasks whose batches are all of one shape, and {self.recipe.task} is none")
        # a batch is computed in this many parts; an epoch has this many of those
        self.part = self.recipe.batch // self.recipe.accumulate
        self.parts = self.data.train.steps(self.part, self.shard["world"])
        self.plan = self.recipe.plan(self.parts / self.recipe.accumulate)

        self.model = self.task.build().train()
        self.task.try_out(self.model, accelerator)
        if self.shard["world"] > 1:  # the same weights everywhere, and from here on chances of their own
            set_seed(job.seed, device_specific=True)
        replays = replayable(self.recipe, accelerator, self.task.alike, self.structured)
        self.waits = self.structured and optimizer_waits(self.recipe, job.chosen)
        capturable = replays and not self.waits
        self.optimizer = make_optimizer(self.recipe, job.chosen, self.model, self.plan, capturable)
        self.schedule = make_schedule(self.recipe, job.chosen, self.optimizer, self.plan)
        self.looker = Looker(self.task, self.model, self.optimizer, job.seed)
        # the optimizer's state is where it belongs already
        self.net, wrapped = accelerator.prepare(self.model, self.optimizer, device_placement=[True, False])
        # Accelerate's wrapper searches the disk for a package at every step, and is needed where gradients are scaled
        self.stepper = self.optimizer if accelerator.scaler is None else wrapped
        self.stateful: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "looker": self.looker,
        }
        if accelerator.scaler is not None:
            self.stateful["scaler"] = accelerator.scaler

        self.at = Position()
        resumed = bool(run.facts) and run.checkpoint.exists()  # `begin` has found this run, and was asked to resume
        if resumed:
            self.at = checkpoint.load(run.checkpoint, accelerator, self.stateful)
            self._take_up_lr()
        self.at.lr = job.chosen.lr
        self.loss = torch.tensor(self.at.loss, device=self.device)  # summed on the device: reading it would wait
        self.watch = Watch(job, accelerator, self.model, self.optimizer, self.loss, self.at)
        if resumed:
            self.watch.kept = self.at.step
        self.batches = self._stream()
        self.replay: Replay | None = None
        if capturable:
            self.replay = Replay(lambda batch: self._step_on([batch]))
        elif replays:  # all but the optimizer's step
            self.replay = Replay(lambda batch: self._differentiate([batch]), self.model.parameters())
        self.board: SummaryWriter | None = None
        self.signals = Signals()

    def go(self) -> Run:
        """From wherever the run is to its end."""
        try:
            self._train()
            self._finish()
        except Diverged:
            if self.accelerator.is_main_process:
                self.run.update(status="diverged")
            raise
        except torch.OutOfMemoryError as error:
            less = f"a smaller batch, --set accumulate={2 * self.recipe.accumulate}"
            if self.replay is not None:
                less += ", --set cuda_graph=false"
            raise Problem(f"the GPU's memory is full at step {self.at.step}: try {less}") from error
        except RuntimeError as error:
            if not self.recipe.compile or not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            raise Problem(f"torch.compile failed, try --set compile=false: {one_line(error)}") from error
        finally:
            self.replay = None  # with the memory of its graph
        return self.run

    def _train(self) -> None:
        at, plan = self.at, self.plan
        announce(self)
        self.saved = time.monotonic()
        self.since = clock(self.device)
        with self.signals:
            while at.step < plan.total:
                loss = self.step()
                last = at.step == plan.total
                self._tell(self.progress.step, at.step, loss)
                if at.step % plan.period == 0 or last:
                    self._look()
                if not last:  # a restart after the last step would end the structured point
                    self.schedule.step()
                late = not last and time.monotonic() - self.saved >= 60 * self.recipe.save_minutes
                asked, due = self.signals.agreed(self.accelerator, at.step, late, last)
                if asked or due:
                    self._save()
                if asked:
                    self._stopped(asked)

    def _tell(self, tell: Callable[..., None], *said: Any) -> None:
        """Tell the person. If the terminal has gone, the run stops with a checkpoint, as SIGHUP asks just then."""
        try:
            tell(*said)
        except OSError as error:
            if not self.signals.seen and error.errno != errno.EIO:
                raise
            self.signals.seen = self.signals.seen or HANGUP

    def step(self) -> torch.Tensor:
        """One step of the optimizer, on all parts of a batch; the loss of the last."""
        parts = islice(self.batches, self.recipe.accumulate)
        if self.replay is None:
            loss = self._step_on(parts)
        else:
            loss = self.replay(next(parts))
            if self.waits:
                self._apply()
        self.at.batches += self.recipe.accumulate
        self.at.step += 1
        return loss

    def _step_on(self, parts: Iterable[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        loss = self._differentiate(parts)
        self._apply()
        return loss

    def _differentiate(self, parts: Iterable[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        accelerator, at = self.accelerator, self.at
        skip = self.watch.skip
        if skip:
            skip.remember(at.carry)
        for batch in parts:
            with accelerator.accumulate(self.net):
                with accelerator.autocast():
                    loss, at.carry = self.task.loss(self._net_for(batch), batch, at.carry)
                self.watch.batch(loss)
                accelerator.backward(loss)
            loss = loss.detach()
            self.loss += loss
        if skip:
            at.carry = skip.take_back(at.carry, self.shard["world"])
        if self.recipe.clip is not None:
            accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        return loss

    def _net_for(self, batch: tuple[torch.Tensor, ...]) -> nn.Module:
        """The network to train on a batch: the compiled one, or for an epoch's last, smaller batch what it was made of,
        which would have to be compiled again."""
        compiled = len(batch[0]) == self.part
        net: nn.Module = self.net if compiled else getattr(self.net, "_orig_mod", self.net)
        return net

    def _apply(self) -> None:
        skip = self.watch.skip
        # the package's optimizers skip by themselves; a scaler does so for any, and has to see what it scaled too far
        skips = self.structured or self.accelerator.scaler is not None
        if skips or skip is None or skip.finite:
            self.stepper.step()
        self.stepper.zero_grad()

    def _stream(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Batches without end, from where the run is."""
        at = self.at
        while True:
            order = Order(self.job.seed, at.epoch)
            for batch in self.data.train.batches(self.part, order=order, first=at.batch, **self.shard):
                at.batch += 1
                yield self.task.drawn(batch)
            at.epoch, at.batch, at.carry = at.epoch + 1, 0, []

    def _look(self) -> None:
        """Evaluate the weights and the structured point, and write down what is seen."""
        at = self.at
        self._count_time()
        steps = at.batches // self.recipe.accumulate
        self.watch.count_skipped()
        self.watch.some_left()
        look = {
            "step": at.step,
            "epoch": at.epoch + at.batch / self.parts,
            "seconds": at.seconds,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "train_loss": float(self.accelerator.reduce(self.loss.clone(), "mean")) / at.batches,
            "step_ms": 1000 * at.period / max(1, steps),
            **({"skipped": at.skipped} if self.watch.skip else {}),
            **self.looker.look(),
        }
        self.watch.look(look)
        if at.skipped:
            self._tell(self.progress.say, f"Skipped {at.skipped} batches with NaN or Inf up to step {at.step}.")
        at.batches, at.period, at.skipped = 0, 0.0, 0
        self.loss.zero_()
        if self.board is not None:
            self.run.add(look)
            for kind in ("weights", "structured"):
                for name, value in (look[kind] or {}).items():
                    self.board.add_scalar(f"{name}/{kind}", value, at.step)
            for name in ("train_loss", "lr", "step_ms", "flipped"):
                if name in look:
                    self.board.add_scalar(name, look[name], at.step)
        self._tell(self.progress.look, look)
        self.since = clock(self.device)

    def _count_time(self) -> None:
        now = clock(self.device)
        self.at.seconds += now - self.since
        self.at.period += now - self.since
        self.since = now

    def _save(self) -> None:
        self._count_time()
        self.watch.count_skipped()
        self.at.loss = float(self.loss)
        self.watch.state()
        checkpoint.save(self.run.checkpoint, self.accelerator, self.at, self.stateful)
        self.watch.kept = self.at.step
        self.saved, self.since = time.monotonic(), clock(self.device)

    def _take_up_lr(self) -> None:
        """Go on with the learning rate that is asked for now, which `begin` lets differ only after divergence."""
        method, lr = self.job.method, self.job.chosen.lr
        before = self.at.lr or float(self.run.facts["settings"]["methods"][method]["lr"])
        if before != lr:
            rescale_lr(self.optimizer, self.schedule, lr / before)
            changes, now = self.run.facts.get("lr_changes", []), {"step": self.at.step, "from": before, "to": lr}
            self.run.facts["lr_changes"] = [x for x in changes if x != now] + [now]  # written by `announce`

    def _stopped(self, asked: int) -> NoReturn:
        if self.accelerator.is_main_process:
            self.run.update(status="stopped")
        raise Stopped(asked, f"stopped at step {self.at.step}, checkpoint written")

    def _finish(self) -> None:
        """Write the model as it is delivered, and the last checkpoint."""
        self._save()
        deliver(self.run, self.accelerator, self.looker)
        if self.looker.removed == 0 and self.job.chosen.lam:
            more = f"--set methods.{self.job.method}.lam={3 * self.job.chosen.lam:g}"
            self.progress.say(
                f"The penalty removed nothing: λ = {self.job.chosen.lam:g} is too small for this run. Try {more}"
            )
        if self.board is not None:
            self.board.close()
            self.run.update(status="finished", seconds=self.at.seconds, sha256=digests(self.run.path))
        self.accelerator.wait_for_everyone()
