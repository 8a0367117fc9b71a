"""The training loop: train, look, save, and go on from there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from espalier.app import checkpoint
from espalier.app.checkpoint import Position
from espalier.app.data import Order, open_data
from espalier.app.deliver import deliver
from espalier.app.digest import digests
from espalier.app.errors import Problem, Stopped, one_line
from espalier.app.finite import Diverged, Skip, first_nonfinite, training_state, way_on
from espalier.app.graph import Replay
from espalier.app.lock import locked
from espalier.app.look import Looker
from espalier.app.machine import clock, denormals_as_zeros, make_accelerator
from espalier.app.methods import make_optimizer, make_schedule, rescale_lr
from espalier.app.names import MEASURES
from espalier.app.progress import Progress, Silent
from espalier.app.recipe import STRUCTURED, Solver
from espalier.app.run import Job, Run, begin, check_place, environment
from espalier.app.signals import Signals
from espalier.app.tasks import open_task


def train(job: Job, progress: Progress, *, resume: bool = False) -> Run:
    """Train a job to its end, and deliver the model at the structured point.

    With `resume`, go on from the last checkpoint, if there is one. Ctrl-C, SIGTERM and SIGHUP write one, and `Stopped`
    is raised.
    """
    accelerator = make_accelerator(job)
    check_place(job.out)
    with _locked(job, accelerator):
        run = begin(job, resume=resume)
        accelerator.wait_for_everyone()  # nobody writes before all have looked
        run.verify()
        if run.finished:
            progress.say(f"{job.out} is finished already.")
            return run
        with denormals_as_zeros():
            return Training(job, run, accelerator, progress if accelerator.is_main_process else Silent()).go()


@contextmanager
def _locked(job: Job, accelerator: Accelerator) -> Iterator[None]:
    """The run's directory for these processes alone: the first has the lock, and the others hear if that failed."""
    problem: Problem | OSError | None = None
    with ExitStack() as stack:
        if accelerator.is_main_process:
            try:
                stack.enter_context(locked(job.out, "train"))
            except (Problem, OSError) as error:
                problem = error
        said = gather_object([None if problem is None else str(problem)])[0]
        if said is not None:
            raise problem or Problem(said)
        yield


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
        replays = self._replays()
        self.waits = self._optimizer_waits()
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
        self.kept = self.at.step if resumed else None  # the step of the last checkpoint
        self.sound = self.at.step  # up to which all was finite
        self.loss = torch.tensor(self.at.loss, device=self.device)  # summed on the device: reading it would wait
        self.skip = Skip(self.model, self.loss) if self.recipe.skip_nonfinite else None
        # at once where the loss is on the host anyway, and no other process waits for us; otherwise when it is read
        self.at_once = self.device.type == "cpu" and self.shard["world"] == 1 and self.skip is None
        self.batches = self._stream()
        self.replay: Replay | None = None
        if capturable:
            self.replay = Replay(lambda batch: self._step_on([batch]))
        elif replays:  # all but the optimizer's step
            self.replay = Replay(lambda batch: self._differentiate([batch]), self.model.parameters())
        self.board: SummaryWriter | None = None

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
        self._announce()
        self.saved = time.monotonic()
        self.since = clock(self.device)
        with Signals() as signals:
            while at.step < plan.total:
                loss = self.step()
                try:
                    self.progress.step(at.step, loss)
                except OSError:  # a terminal that has gone, which SIGHUP says
                    if not signals.seen:
                        raise
                if at.step % plan.period == 0 or at.step == plan.total:
                    self._look()
                if at.step == plan.total:  # no restart after the last step: it would end the structured point
                    break
                self.schedule.step()
                late = time.monotonic() - self.saved >= 60 * self.recipe.save_minutes
                asked, due = signals.agreed(self.accelerator, at.step, late)
                if asked or due:
                    self._save()
                if asked:
                    self._stopped(asked)

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
        if self.skip:
            self.skip.remember(at.carry)
        for batch in parts:
            with accelerator.accumulate(self.net):
                with accelerator.autocast():
                    loss, at.carry = self.task.loss(self._net_for(batch), batch, at.carry)
                if self.at_once and not math.isfinite(seen := loss.item()):
                    raise self._diverged(f"the training loss is {seen} at step {at.step + 1}")
                accelerator.backward(loss)
            loss = loss.detach()
            self.loss += loss
        if self.skip:
            at.carry = self.skip.take_back(at.carry, self.shard["world"])
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
        if self.structured or self.skip is None or self.skip.finite:  # the package's optimizers skip by themselves
            self.stepper.step()
        self.stepper.zero_grad()

    def _replays(self) -> bool:
        """Whether steps can be recorded as a CUDA graph and replayed."""
        recipe, accelerator = self.recipe, self.accelerator
        alone = accelerator.num_processes == recipe.accumulate == 1 and accelerator.scaler is None
        recordable = self.structured or not recipe.skip_nonfinite  # torch's optimizers ask the host whether to skip
        return recipe.cuda_graph and self.device.type == "cuda" and alone and self.task.alike and recordable

    def _optimizer_waits(self) -> bool:
        """Whether its step may wait for the device, as the nuclear norm's does: then it can't be recorded."""
        chosen = self.job.chosen
        return self.structured and (self.recipe.penalty == "nuclear-norm" or chosen.solver != Solver())

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
        self._count_skipped()
        if not at.batches:
            raise self._diverged(f"all batches between step {self.sound} and step {at.step} hold NaN or Inf")
        look = {
            "step": at.step,
            "epoch": at.epoch + at.batch / self.parts,
            "seconds": at.seconds,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "train_loss": float(self.accelerator.reduce(self.loss.clone(), "mean")) / at.batches,
            "step_ms": 1000 * at.period / max(1, steps),
            **({"skipped": at.skipped} if self.skip else {}),
            **self.looker.look(),
        }
        self._check_look(look)
        if at.skipped:
            self.progress.say(f"Skipped {at.skipped} batches with NaN or Inf up to step {at.step}.")
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
        self.progress.look(look)
        self.since = clock(self.device)

    def _count_time(self) -> None:
        now = clock(self.device)
        self.at.seconds += now - self.since
        self.at.period += now - self.since
        self.since = now

    def _save(self) -> None:
        self._count_time()
        self._count_skipped()
        self.at.loss = float(self.loss)
        self._check_state()
        checkpoint.save(self.run.checkpoint, self.accelerator, self.at, self.stateful)
        self.kept = self.at.step
        self.saved, self.since = time.monotonic(), clock(self.device)

    def _count_skipped(self) -> None:
        """Take the skipped batches out of those that the sum of the losses is over."""
        if self.skip:
            skipped = int(self.skip.skipped) * self.recipe.accumulate
            self.at.batches -= skipped
            self.at.skipped += skipped
            self.skip.skipped.zero_()

    def _check_state(self) -> None:
        """Refuse to save what is not finite, in any process, over a checkpoint that is."""
        bad = first_nonfinite(training_state(self.model, self.optimizer))
        if not math.isfinite(self.at.loss):
            bad = "the training loss"
        found = [name for name in gather_object([bad]) if name is not None]
        if found:
            raise self._diverged(f"{found[0]} became NaN or Inf between step {self.sound} and step {self.at.step}")
        self.sound = self.at.step

    def _check_look(self, look: dict[str, Any]) -> None:
        """Refuse to go on with numbers that are not finite."""
        values = {"train_loss": look["train_loss"], **look["weights"], **(look["structured"] or {})}
        for name, value in values.items():
            if not math.isfinite(value):
                since = f" (it was finite at step {self.sound})" if self.sound < look["step"] - 1 else ""
                raise self._diverged(f"{name} is {value} at step {look['step']}{since}")
        self.sound = self.at.step

    def _diverged(self, what: str) -> Diverged:
        return Diverged(f"{what}: {way_on(self.job, self.kept)}")

    def _take_up_lr(self) -> None:
        """Go on with the learning rate that is asked for now, which `begin` lets differ only after divergence."""
        method, lr = self.job.method, self.job.chosen.lr
        before = self.at.lr or float(self.run.facts["settings"]["methods"][method]["lr"])
        if before != lr:
            rescale_lr(self.optimizer, self.schedule, lr / before)
            changes, now = self.run.facts.get("lr_changes", []), {"step": self.at.step, "from": before, "to": lr}
            self.run.facts["lr_changes"] = [x for x in changes if x != now] + [now]  # written by `_announce`

    def _stopped(self, asked: int) -> NoReturn:
        if self.accelerator.is_main_process:
            self.run.update(status="stopped")
        raise Stopped(asked, f"stopped at step {self.at.step}, checkpoint written")

    def _announce(self) -> None:
        """Say what begins, to the person and in run.json."""
        job, recipe, plan, task = self.job, self.recipe, self.plan, self.task
        wanted, momentum = job.chosen.momentum, self.optimizer.param_groups[0].get("momentum")
        if wanted is not None and momentum != wanted:
            self.progress.say(
                f"The last stage is too short to average as long as momentum {wanted:g} does and still end in exact "
                f"zeros: momentum is {momentum:g} in this run."
            )
        if self.accelerator.mixed_precision != recipe.mixed_precision:
            self.progress.say(f"mixed_precision {recipe.mixed_precision} needs a GPU: this run is in float32.")
        now = environment(self.device, self.shard["world"])
        was = self.run.facts.get("environment", {}).get("threads", now["threads"])
        if self.at.step and self.device.type == "cpu" and was != now["threads"]:
            self.progress.say(
                f"This run used {was} threads before and uses {now['threads']} now: sums round differently, so the end "
                f"will not be the same to the bit. OMP_NUM_THREADS={was} uses the same number."
            )
        if self.accelerator.is_main_process:
            paper = recipe.paper.get(job.method)
            self.run.update(
                recipe=job.name,
                title=recipe.title,
                method=job.method,
                seed=job.seed,
                status="running",
                metric=task.metric,
                better=task.better,
                structure=MEASURES[recipe.penalty],
                paper=paper and {k: v[0] for k, v in paper if v},
                settings=job.settings,
                skip_nonfinite=recipe.skip_nonfinite,
                sha256={},
                environment=now,
                command=job.command,
                data=dict(self.data.facts),
                data_root=job.data_root,
                total_steps=plan.total,
                milestones=plan.milestones,
                momentum=momentum,
                pick=job.chosen.pick,
            )
            self.run.forget_after(self.at.step)
            self.board = SummaryWriter(self.run.path / "tensorboard", purge_step=self.at.step + 1)
        self.progress.begin(job, self.data.facts, plan.total, self.at.step, task.metric)

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
