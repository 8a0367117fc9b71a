"""What a training says when it begins or goes on: to the person, and in run.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from espalier.app.names import MEASURES
from espalier.app.run import environment

if TYPE_CHECKING:
    from espalier.app.loop import Training


def announce(training: Training) -> None:
    """Say what begins, to the person and in run.json."""
    job, recipe, plan, task = training.job, training.recipe, training.plan, training.task
    run, at, progress = training.run, training.at, training.progress
    wanted, momentum = job.chosen.momentum, training.optimizer.param_groups[0].get("momentum")
    if wanted is not None and momentum != wanted:
        progress.say(
            f"The last stage is too short to average as long as momentum {wanted:g} does and still end in exact "
            f"zeros: momentum is {momentum:g} in this run."
        )
    if training.accelerator.mixed_precision != recipe.mixed_precision:
        progress.say(f"mixed_precision {recipe.mixed_precision} needs a GPU: this run is in float32.")
    now = environment(training.device, training.shard["world"])
    was = run.facts.get("environment", {}).get("threads", now["threads"])
    if at.step and training.device.type == "cpu" and was != now["threads"]:
        progress.say(
            f"This run used {was} threads before and uses {now['threads']} now: sums round differently, so the end "
            f"will not be the same to the bit. OMP_NUM_THREADS={was} uses the same number."
        )
    if training.accelerator.is_main_process:
        paper = recipe.paper.get(job.method)
        run.update(
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
            data=dict(training.data.facts),
            data_root=job.data_root,
            total_steps=plan.total,
            milestones=plan.milestones,
            momentum=momentum,
            pick=job.chosen.pick,
        )
        _count_looks(training, run.forget_after(at.step))
        training.board = SummaryWriter(run.path / "tensorboard", purge_step=at.step + 1)
    progress.begin(job, training.data.facts, plan.total, at.step, task.metric)


def _count_looks(training: Training, kept: int) -> None:
    at, plan = training.at, training.plan
    taken = at.step // plan.period + (at.step == plan.total and at.step % plan.period > 0)
    if kept < taken:
        training.progress.say(
            f"{training.run.metrics} holds {kept} of the {taken} evaluations up to step {at.step}: the others are lost "
            "and missing in reports. The training itself goes on as it was."
        )
