"""NaN and Inf: never saved over a good checkpoint, never delivered; a bad batch ends the run there, or is skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from espalier.app import cookbook
from espalier.app.deliver import deliver
from espalier.app.errors import Problem
from espalier.app.finite import Diverged, first_nonfinite
from espalier.app.loop import Training, train
from espalier.app.machine import make_accelerator
from espalier.app.progress import Silent
from espalier.app.run import Job, Run, read
from espalier.app.tasks import Classification


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int, value: float = math.nan, where: str = "images") -> list[int]:
    """Bad numbers in the batches of these steps, in the images or in the loss alone; counts the batches."""
    real, seen = Classification.loss, [0]

    def loss(self: Any, model: torch.nn.Module, batch: Any, carry: list[Tensor]) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return real(self, model, batch, carry)
        seen[0] += 1
        if seen[0] not in steps:
            return real(self, model, batch, carry)
        if where == "images":
            return real(self, model, (batch[0].clone().index_fill_(0, torch.tensor([0]), value), batch[1]), carry)
        found, carry = real(self, model, batch, carry)
        return (found + value if where == "loss" else Bad.apply(found)), carry

    monkeypatch.setattr(Classification, "loss", loss)
    return seen


class Bad(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


def job_of(tmp_path: Path, *changes: str, method: str = "ramda", **more: Any) -> Job:
    return small.job("digits", tmp_path, method=method, changes=("save_minutes=0", *changes), **more)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["images", "loss", "gradient"])
def test_a_bad_batch_ends_the_run_there_and_leaves_the_last_good_checkpoint(
    where: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path)
    seen = poison(monkeypatch, 8, value=value, where=where)
    with pytest.raises(Diverged) as told:
        train(job, Silent())
    assert seen == [8]
    said = str(told.value)
    for part in (
        "between step 7 and step 8" if where == "gradient" else "at step 8",
        "training has diverged",
        "the data hold NaN or Inf",
        "checkpoint of step 7 is finite: the same command with --resume goes on from there",
        "--set skip_nonfinite=true",
        "smaller lr, --set methods.ramda.lr=",
    ):
        assert part in said
    assert "\n" not in said
    state = torch.load(job.out / "checkpoint.pt", weights_only=True)
    assert state["position"]["step"] == 7
    assert first_nonfinite(state["model"].items()) is None
    assert read(job.out).facts["status"] == "diverged"


@pytest.mark.parametrize("method", ["ramda", "proxsgd", "proxgen", "dense"])
@pytest.mark.parametrize("where", ["images", "loss", "gradient"])
def test_bad_batches_are_skipped_on_request_and_change_nothing(
    where: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, "skip_nonfinite=true", method=method)
    training = Training(job, Run(tmp_path / "run"), make_accelerator(job), Silent())
    poison(monkeypatch, 3, where=where)
    training.step()
    training.step()
    before = {k: v.clone() for k, v in training.model.state_dict().items()}
    total = training.loss.clone()
    training.step()
    for name, now in training.model.state_dict().items():
        assert torch.equal(now, before[name]), name
    assert torch.equal(training.loss, total)
    training.step()
    assert any(not torch.equal(now, before[name]) for name, now in training.model.state_dict().items())
    assert first_nonfinite(training.model.state_dict().items()) is None


def test_a_run_with_skipped_batches_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Listener(Silent):
        def say(self, line: str) -> None:
            told.append(line)

    poison(monkeypatch, 6, 9, 13)  # the first of them right after a look
    run = train(job_of(tmp_path, "skip_nonfinite=true"), Listener())
    assert [look["skipped"] for look in run.looks()] == [0, 2, 1, 0]
    assert "Skipped 2 batches with NaN or Inf up to step 10." in told
    assert run.facts["skip_nonfinite"] is True
    assert first_nonfinite(safetensors.torch.load_file(run.model).items()) is None


def test_a_period_of_bad_batches_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, *range(6, 11))
    with pytest.raises(Diverged, match=r"all batches between step .* and step 10 hold NaN or Inf"):
        train(job_of(tmp_path, "skip_nonfinite=true"), Silent())


@pytest.mark.parametrize("way", ["skip_nonfinite=true", "methods.ramda.lr=0.0001"])
def test_the_ways_on_that_the_message_names_go_on(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path)
    with monkeypatch.context() as patch:
        poison(patch, 8)
        with pytest.raises(Diverged):
            train(job, Silent())
    other = job_of(tmp_path, way)
    run = train(other, Silent(), resume=True)
    assert [look["step"] for look in run.looks()] == [5, 10, 15, 20]
    if way.startswith("skip"):
        whole = train(job_of(tmp_path, out="whole"), Silent())
        weights, others = (safetensors.torch.load_file(r.model) for r in (run, whole))
        assert all(torch.equal(weights[k], others[k]) for k in weights)  # nothing was bad this time
        return
    # from the checkpoint on each rate is the one of the other beginning
    rates = [look["lr"] for look in run.looks()]
    expected = [look["lr"] for look in train(job_of(tmp_path, way, out="small"), Silent()).looks()]
    assert rates[0] == pytest.approx(job.chosen.lr)
    assert rates[1:] == pytest.approx(expected[1:])
    assert run.facts["lr_changes"] == [{"step": 7, "from": job.chosen.lr, "to": 0.0001}]
    with pytest.raises(Problem, match=r"another run, with methods.ramda.lr = 0.0001"):  # it has not diverged now
        train(job, Silent(), resume=True)


@pytest.mark.parametrize("method", ["dense", "proxsgd"])
def test_another_lr_reaches_every_kind_of_schedule(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, method=method)
    with monkeypatch.context() as patch:
        poison(patch, 4)
        with pytest.raises(Diverged):
            train(job, Silent())
    run = train(job_of(tmp_path, f"methods.{method}.lr=0.0001", method=method), Silent(), resume=True)
    alone = train(job_of(tmp_path, f"methods.{method}.lr=0.0001", method=method, out="small"), Silent())
    assert [x["lr"] for x in run.looks()] == pytest.approx([x["lr"] for x in alone.looks()])


def test_a_diverged_run_is_not_delivered(tmp_path: Path) -> None:
    """ProxSGD's losses were finite, and its batch norm's variances were not."""
    loaded = cookbook.load("digits", ["methods.proxsgd.lr=1e4", "length=3", "milestones=[2]", "model.width=4"])
    job = Job("digits", loaded.only("proxsgd"), "proxsgd", 0, tmp_path / "run", device="cpu")
    with pytest.raises(Diverged, match=r"diverged.*smaller lr"):
        train(job, Silent())
    assert not (job.out / "model.safetensors").exists()


def test_what_is_delivered_is_finite_buffers_too(tmp_path: Path) -> None:
    job = job_of(tmp_path, method="dense")
    training = Training(job, Run(tmp_path / "run"), make_accelerator(job), Silent())
    name, buffer = next((n, b) for n, b in training.model.named_buffers() if n.endswith("running_var"))
    buffer[0] = math.inf
    with pytest.raises(Diverged, match=f"{name} holds NaN or Inf at the structured point, so no model is delivered"):
        deliver(training.run, training.accelerator, training.looker)
    assert not training.run.path.exists()


def test_a_device_that_is_not_read_at_each_step_is_checked_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the message says between which steps it happened."""
    job = job_of(tmp_path)
    job = replace(job, recipe=job.recipe.model_copy(update={"save_minutes": 1e9}))
    training = Training(job, Run(job.out), make_accelerator(job), Silent())
    training.watch.at_once = False
    poison(monkeypatch, 8)
    with pytest.raises(Diverged, match=r"at step 10 \(it was finite at step 5\).*There is no checkpoint yet"):
        training.go()
    assert not (job.out / "checkpoint.pt").exists()


def test_an_evaluation_that_is_not_finite_is_told_from_a_training_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = Classification.evaluate, [0]

    def evaluate(self: Any, model: torch.nn.Module) -> dict[str, float]:
        count[0] += 1  # of the weights first, then of the structured point
        return {**real(self, model), **({"loss": math.nan} if count[0] == 1 else {})}

    monkeypatch.setattr(Classification, "evaluate", evaluate)
    said = r"the evaluation's loss is nan at step 5, and the weights are finite. .*test data.* smaller lr"
    with pytest.raises(Diverged, match=said) as told:
        train(job_of(tmp_path), Silent())
    assert "skip_nonfinite" not in str(told.value)


def test_a_scaler_sees_the_batches_that_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It scales less after gradients overflow; without that all batches would be skipped."""
    job = job_of(tmp_path, "skip_nonfinite=true", "clip=1.0", method="dense")
    training = Training(job, Run(tmp_path / "run"), make_accelerator(job), Silent())
    real = Classification.loss
    monkeypatch.setattr(Classification, "loss", lambda *given: (1e6 * real(*given)[0], []))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-10)
    training.accelerator.scaler = scaler
    training.stepper = AcceleratedOptimizer(training.optimizer, scaler=scaler)
    training.accelerator._optimizers[:] = [training.stepper]
    before = next(training.model.parameters()).clone()
    for _ in range(8):
        training.step()
    assert training.watch.skip is not None
    assert 0 < int(training.watch.skip.skipped) < 8
    assert not torch.equal(next(training.model.parameters()), before)
