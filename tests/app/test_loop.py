"""Every recipe trains, saves, goes on and reports; a run that was cut off ends bit for bit like one that was not."""

from __future__ import annotations

import html
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small
import tiny
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import espalier
from espalier.app import cookbook, machine
from espalier.app.data import open_data
from espalier.app.deliver import deliver, open_delivered, shrink_run
from espalier.app.errors import Problem, Stopped
from espalier.app.loop import Training, train
from espalier.app.machine import denormals_as_zeros, make_accelerator
from espalier.app.methods import make_optimizer
from espalier.app.progress import Silent
from espalier.app.report import write_report
from espalier.app.run import Job, Run, read
from espalier.app.tasks import Language, open_task


class StopAt(Silent):
    """Sends a signal once a step is reached."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.at, self.number = step, number

    def step(self, step: int, loss: Tensor) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


def outcome(run: Run) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """What must not depend on how often a run was cut off: the model and all looks, but for times."""
    looks = [{k: v for k, v in look.items() if k not in ("seconds", "step_ms")} for look in run.looks()]
    return safetensors.torch.load_file(run.model), looks


def assert_same(a: Run, b: Run) -> None:
    (weights, looks), (others, seen) = outcome(a), outcome(b)
    assert weights.keys() == others.keys()
    for name in weights:
        assert torch.equal(weights[name], others[name]), name
    assert looks == seen


@pytest.mark.parametrize("name", cookbook.names())
def test_a_recipe_trains_goes_on_and_reports(name: str, tmp_path: Path) -> None:
    whole = train(small.job(name, tmp_path, out="whole"), Silent())
    cut = small.job(name, tmp_path, out="cut")
    with pytest.raises(Stopped, match="step 8"):
        train(cut, StopAt(8))
    run = train(cut, Silent(), resume=True)
    assert_same(whole, run)
    assert [look["step"] for look in run.looks()] == [5, 10, 15, 20]
    facts = run.facts
    assert facts["status"] == "finished"
    assert facts["metric"] in run.delivered
    assert 0 <= run.delivered["structure"] <= 100
    page = write_report([run.path], run.path / "report.html").read_text()
    assert html.escape(facts["title"]) in page


@pytest.mark.parametrize("name", cookbook.names())
def test_a_recipe_is_delivered_at_the_structured_point_and_shrinks(name: str, tmp_path: Path) -> None:
    # λ so large that something goes within 20 steps
    job = small.job(name, tmp_path)
    strong = small.job(name, tmp_path, changes=(f"methods.{job.method}.lam=0.02",))
    run = train(strong, Silent())
    layers = json.loads((run.path / "structure.json").read_text())
    zero = sum(x["elements"] * x["zero_groups"] / x["groups"] for x in layers if x["rank"] is None)
    rank = sum(x["rank"] or 0 for x in layers)
    measured = 100 * (
        1 - rank / sum(x["full_rank"] for x in layers) if rank else zero / sum(x["elements"] for x in layers)
    )
    assert run.delivered["structure"] == pytest.approx(measured)
    found = open_delivered(run.path)
    # what is delivered is what was measured, read off the file itself
    groups = espalier.regularize(found.model, penalty_of(strong))
    seen = espalier.structure(groups)
    assert 100 * getattr(seen, run.facts["structure"]) == pytest.approx(run.delivered["structure"])
    told: list[str] = []
    shrunk = shrink_run(run.path, tell=told.append)
    assert [line.split()[0] for line in told] == ["Shrinking", "Evaluating", "Evaluating"]
    assert shrunk.report.small.parameters <= shrunk.report.dense.parameters
    table = json.loads((run.path / "shrunk.json").read_text())
    qualities = {row["name"]: row["quality"] for row in table["rows"]}
    # a narrower prenet, whose dropout is on in the test, draws other masks
    drawn = strong.recipe.task == "speech"
    assert qualities["shrunk"] == pytest.approx(qualities["structured"], rel=1e-2 if drawn else 1e-3)


def penalty_of(job: Any) -> espalier.Penalty:
    return espalier.NuclearNorm(1.0) if job.recipe.penalty == "nuclear-norm" else espalier.GroupLasso(1.0)


METHODS = [(name, method) for name in cookbook.names() for method in list(cookbook.load(name).methods)[1:]]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_every_method_of_every_recipe_trains(name: str, method: str, tmp_path: Path) -> None:
    job = small.job(name, tmp_path, method=method, changes=("length=4", "milestones=[2]", "evaluate_every=2"))
    run = train(job, Silent())
    assert [look["step"] for look in run.looks()] == [2, 4]
    assert (run.looks()[0]["structured"] is None) == (method == "dense")


COSINE = ("methods.ramda.schedule=cosine", "methods.ramda.warmup=0.2")


@pytest.mark.parametrize(
    "changes", [("accumulate=2",), ("clip=0.1",), ("mixed_precision=bf16",), COSINE], ids=lambda c: c[0]
)
def test_what_the_loop_can_do_goes_on_to_the_bit_too(changes: tuple[str, ...], tmp_path: Path) -> None:
    whole = train(small.job("digits", tmp_path, changes=changes, out="whole"), Silent())
    cut = small.job("digits", tmp_path, changes=changes, out="cut")
    for step in (3, 11):
        with pytest.raises(Stopped):
            train(cut, StopAt(step, signal.SIGINT), resume=True)
    assert_same(whole, train(cut, Silent(), resume=True))


# torch imports its compiler where it compiles
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile with all but its compiler, which takes a minute."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(machine, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


ODD = ("batch=500", "compile=true")  # an epoch of digits ends in a batch of another shape


@compiles
def test_a_compiled_run_goes_on_to_the_bit_too(traced: None, tmp_path: Path) -> None:
    whole = train(small.job("digits", tmp_path, changes=ODD, out="whole"), Silent())
    # one graph, however often the model is measured in between, and whatever the last batch of an epoch has
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    cut = small.job("digits", tmp_path, changes=ODD, out="cut")
    with pytest.raises(Stopped):
        train(cut, StopAt(7))
    assert_same(whole, train(cut, Silent(), resume=True))
    assert whole.facts["settings"]["compile"]
    plain = train(small.job("digits", tmp_path, changes=ODD[:1], out="plain"), Silent())
    assert plain.facts["settings"]["compile"] is False
    (weights, _), (others, _) = outcome(whole), outcome(plain)
    for name in weights.keys() | others.keys():
        torch.testing.assert_close(weights[name], others[name])


@compiles
@pytest.mark.parametrize("changes", [("batch=500",), (*ODD, "mixed_precision=bf16")])
def test_what_is_compiled_is_part_of_what_a_run_is(changes: tuple[str, ...], traced: None, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(small.job("digits", tmp_path, changes=ODD), StopAt(2))
    with pytest.raises(Problem, match="holds another run"):
        train(small.job("digits", tmp_path, changes=changes), Silent(), resume=True)


@compiles
def test_compile_refuses_what_it_can_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = small.job("transformerxl-wt103", tmp_path, changes=("compile=true",))
    with pytest.raises(Problem, match="batches are all of one shape, and language is none"):
        train(words, Silent())

    def without_a_compiler(training: Training) -> Tensor:
        raise torch._dynamo.exc.BackendCompilerFailed(without_a_compiler, FileNotFoundError("no g++"), None)

    monkeypatch.setattr(Training, "step", without_a_compiler)
    with pytest.raises(Problem, match=r"^torch.compile failed, try --set compile=false: .*no g\+\+"):
        train(small.job("digits", tmp_path, changes=ODD), Silent())


def test_accumulated_parts_are_one_batch(tmp_path: Path) -> None:
    runs = []
    for k in (1, 4):
        job = small.job("mnist-logreg", tmp_path, method="rmda", changes=(f"accumulate={k}",), out=f"in-{k}")
        runs.append(train(job, Silent()))
    assert [[x["step"] for x in run.looks()] for run in runs] == [[5, 10, 15, 20]] * 2
    one, four = (safetensors.torch.load_file(run.model) for run in runs)
    for name in one:
        assert torch.allclose(one[name], four[name], atol=1e-6), name


def test_a_run_killed_at_any_moment_ends_the_same(tmp_path: Path) -> None:
    changes = ("length=100", "milestones=[30,60]", "evaluate_every=10", "save_minutes=0")  # a checkpoint at every step
    command = [sys.executable, "-m", "espalier.app.cli", "train", "digits", "--device", "cpu", "--resume"]
    command += [f"--set={change}" for change in (*small.SHORT, *small.NARROW["digits"], *changes)]
    # in a process like the others': sums depend on the number of threads
    subprocess.run([*command, "--out=whole"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    command += ["--out=killed"]
    saved, chance = tmp_path / "killed/checkpoint.pt", random.Random(0)
    for _ in range(2):
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (saved.exists() and saved.stat().st_mtime_ns != before):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        assert process.wait() == -signal.SIGKILL  # and did not end by itself before
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert_same(Run(tmp_path / "whole"), Run(tmp_path / "killed"))


def launched(where: Path, name: str, changes: tuple[str, ...], out: str) -> Run:
    """A run by two processes, started as `accelerate launch` starts them for several GPUs."""
    job = small.job(name, where, changes=changes)
    # standalone: it takes a free port, and keeps it
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += ["-m", "espalier.app.cli", "train", name, f"--data={job.data}", "--device=cpu", f"--out={out}"]
    command += [f"--set={change}" for change in (*small.SHORT, *small.NARROW[name], *changes)]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    run = read(where / out)
    assert run.facts["environment"]["processes"] == 2
    return run


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    # the same global batches; sums over processes round differently. A test split of 32 leaves 1 over at 31
    changes = ("length=12", "evaluate_every=6", "milestones=[6]", "save_minutes=0.0001", "eval_batch=31")
    one = train(small.job("mnist-logreg", tmp_path, changes=changes, out="one"), Silent())
    two = launched(tmp_path, "mnist-logreg", changes, "two")
    a, b = (safetensors.torch.load_file(run.model) for run in (one, two))
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6), name
    assert [x["step"] for x in two.looks()] == [6, 12]
    for x, y in zip(one.looks(), two.looks(), strict=True):
        assert y["weights"] == pytest.approx(x["weights"], rel=1e-4)
        assert y["train_loss"] == pytest.approx(x["train_loss"], rel=1e-4)


def test_two_processes_measure_what_they_deliver(tmp_path: Path) -> None:
    # batch norm's statistics are each process's own until they are shared
    run = launched(tmp_path, "digits", ("eval_batch=148",), "two")
    found = open_delivered(run.path)
    assert found.task(None).evaluate(found.model) == pytest.approx(
        {k: v for k, v in run.delivered.items() if k != "structure"}, rel=1e-4
    )


def test_perplexity_counts_words_not_windows(tmp_path: Path) -> None:
    job = small.job("transformerxl-wt103", tmp_path)
    data = open_data("text", job.data, device=torch.device("cpu"), options={"length": 50})
    task = open_task(job.recipe, data, torch.device("cpu"))
    model = task.build().eval()
    total = words = 0.0
    memory = None
    with torch.no_grad():
        for tokens, targets in data.test.batches(4):
            nll, memory = model(tokens, memory, targets)
            total, words = total + float(nll.double().sum()), words + targets.numel()
    assert words % (4 * 50)  # the last window is shorter, or this shows nothing
    assert task.evaluate(model)["perplexity"] == pytest.approx(math.exp(total / words), rel=1e-5)


def test_the_loss_of_speech_has_the_prenets_dropout(tmp_path: Path) -> None:
    job = small.job("tacotron2-ljspeech", tmp_path)
    data = open_data("speech", job.data, device=torch.device("cpu"), options=job.recipe.data.options)
    task = open_task(job.recipe, data, torch.device("cpu"))
    model = task.build()
    modes: list[tuple[bool, bool]] = []
    model.prenet.register_forward_pre_hook(lambda prenet, _: modes.append((prenet.training, model.decoder.training)))
    chance = torch.get_rng_state()
    loss = task.evaluate(model)["loss"]
    assert set(modes) == {(True, False)}
    assert task.evaluate(model)["loss"] == loss  # the same draw at every look
    assert torch.equal(torch.get_rng_state(), chance)  # and none of training's
    assert all(m.training for m in model.modules())
    with pytest.raises(RuntimeError, match="cut off"), task.in_use(model):
        raise RuntimeError("cut off")
    assert all(m.training for m in model.modules())
    plain = model.eval()(*next(iter(data.test.batches(len(data.test)))))[0]  # what is delivered has none
    assert plain.equal(model(*next(iter(data.test.batches(len(data.test)))))[0])


def test_what_is_delivered_has_no_denormal_numbers(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, method="proxgen")
    training = Training(job, Run(tmp_path / "run"), make_accelerator(job), Silent())
    name, p = next((name, p) for name, p in training.model.named_parameters() if p.dim() > 1)
    p.data[0, 0] = 1e-40
    assert p[0, 0].count_nonzero()
    with denormals_as_zeros():  # as while it trains
        deliver(training.run, training.accelerator, training.looker)
    delivered = safetensors.torch.load_file(training.run.model)[name]
    assert not delivered[0, 0].any()
    assert p[0, 0].count_nonzero()  # training's own are left alone
    assert torch.equal(delivered[1:], p[1:])


def test_masks_are_drawn_before_the_loss_which_draws_nothing(tmp_path: Path) -> None:
    """As a CUDA graph of it needs: what it drew on the host would be the same in every replay."""
    job = small.job("vit-mim-cifar10", tmp_path, method="dense")
    training = Training(job, Run(tmp_path), make_accelerator(job), Silent())
    batches = [next(training.batches) for _ in range(2)]
    assert not batches[0][1].equal(batches[1][1])
    before = torch.get_rng_state()
    losses = [float(training.task.loss(training.model, batch, [])[0].detach()) for batch in (*batches, batches[0])]
    assert torch.get_rng_state().equal(before)
    assert losses[0] == losses[2] != losses[1]
    training.task.evaluate(training.model)
    assert torch.get_rng_state().equal(before)


def test_a_training_takes_denormals_for_zeros_and_leaves_them_to_others(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {os.path.dirname(small.__file__)!r})
import small, torch
from espalier.app.loop import train
from espalier.app.progress import Silent
torch.set_num_threads(2)
def kept():
    return int((torch.full((1 << 22,), 1e-40) * 0.99).count_nonzero()) / (1 << 22)
class Watch(Silent):
    def step(self, step, loss):
        seen.add(kept())
seen = set()
train(small.job("mnist-logreg", Path({str(tmp_path)!r})), Watch())
print(seen, kept())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "{0.0} 1.0"


def test_memory_ends_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small.job("transformerxl-wt103", tmp_path, changes=("data.length=200", "evaluate_every=20"))
    seen: list[bool] = []
    real = Language.loss

    def watched(self: Language, model: torch.nn.Module, batch: tuple[Tensor, ...], carry: list[Tensor]) -> Any:
        if model.training:
            seen.append(bool(carry))
        return real(self, model, batch, carry)

    monkeypatch.setattr(Language, "loss", watched)
    run = train(job, Silent())
    assert len(json.loads((run.path / "words.json").read_text())) == run.facts["data"]["vocab"]
    epoch = round(20 / run.looks()[-1]["epoch"])
    assert 1 < epoch < 20
    assert seen == [i % epoch != 0 for i in range(20)]


def test_accumulation_does_not_change_how_long_a_run_is(tmp_path: Path) -> None:
    # 1500 digits are 6 parts of 250: one step and a half an epoch
    loaded = cookbook.load("digits", ["batch=1000", "accumulate=4", "length=10", "milestones=[4]", "model.width=2"])
    run = train(Job("digits", loaded.only("ramda"), "ramda", 0, tmp_path / "run", device="cpu"), Silent())
    assert run.looks()[-1]["step"] == 15
    assert run.looks()[-1]["epoch"] == pytest.approx(10)


def test_a_run_killed_before_it_had_begun_goes_on(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path)
    job.out.mkdir()
    (job.out / ".run.json.part").write_text("{")
    assert train(job, Silent(), resume=True).finished


def test_a_lost_model_is_delivered_again(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path)
    run = train(job, Silent())
    before = run.model.read_bytes()
    run.model.unlink()
    assert train(job, Silent(), resume=True).model.read_bytes() == before


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path)
    with pytest.raises(Stopped):
        train(job, StopAt(3))
    assert read(job.out).facts["status"] == "stopped"


def test_a_run_from_before_a_setting_existed_goes_on(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=("length=4", "milestones=[2]"))
    with pytest.raises(Stopped):
        train(job, StopAt(3))
    run = read(job.out)
    settings = run.facts["settings"]
    for new in ("compile", "recalibrate"):  # which has another value here than by default
        settings.pop(new)
    settings["methods"]["ramda"].pop("warmup")
    run.update(settings=settings)
    with pytest.raises(Problem, match="another run, with recalibrate = 20 instead of 2"):
        train(job, Silent(), resume=True)
    run.update(settings={**settings, "recalibrate": 2})
    assert train(job, Silent(), resume=True).finished


class Listener(StopAt):
    """Remembers what is said."""

    def __init__(self, step: int = -1) -> None:
        super().__init__(step)
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


def test_lost_evaluations_and_another_number_of_threads_are_said_at_resume(tmp_path: Path) -> None:
    whole = train(small.job("digits", tmp_path, out="whole"), Silent())
    job = small.job("digits", tmp_path)
    with pytest.raises(Stopped):
        train(job, StopAt(12))
    run = read(job.out)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text(lines[1])
    run.update(environment={**run.facts["environment"], "threads": 77})
    heard = Listener()
    finished = train(job, heard, resume=True)
    assert any("holds 1 of the 2 evaluations up to step 12: the others are lost" in line for line in heard.said)
    assert any(line.startswith("This run used 77 threads before and uses 1 now") for line in heard.said)
    assert outcome(finished)[1] == outcome(whole)[1][1:]
    assert finished.model.read_bytes() == whole.model.read_bytes()
    heard = Listener()
    finished.model.unlink()
    run.metrics.write_text("".join(whole.metrics.read_text().splitlines(keepends=True)))
    run.update(**{**read(run.path).facts, "sha256": {}})
    train(job, heard, resume=True)
    assert not any("evaluations" in line or "threads" in line for line in heard.said)


def test_an_evaluation_is_on_the_disk_before_a_checkpoint_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    run = Run(tmp_path)
    run.add({"step": 1, "weights": {}})
    assert synced == [run.metrics.stat().st_size]


def test_runs_on_other_data_are_not_taken_for_the_same(tmp_path: Path) -> None:
    job = small.job("mnist-logreg", tmp_path)
    train(job, Silent())
    other = replace(job, data=tiny.make("mnist", tmp_path / "elsewhere"))
    with pytest.raises(Problem, match=r"another run, with --data = .*data instead of .*elsewhere"):
        train(other, Silent(), resume=True)
    with pytest.raises(Problem, match=r"--data .*nowhere: there is no such directory"):
        train(replace(job, data=tmp_path / "nowhere"), Silent(), resume=True)


def test_only_a_dense_run_of_the_same_settings_stands_beside(tmp_path: Path) -> None:
    run = train(small.job("digits", tmp_path, out="ramda"), Silent())
    train(small.job("digits", tmp_path, method="dense", changes=("model.width=8",), out="wide"), Silent())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/run.json").write_text("[]")
    shrink_run(run.path)
    assert [x["name"] for x in json.loads((run.path / "shrunk.json").read_text())["rows"]] == ["structured", "shrunk"]
    train(small.job("digits", tmp_path, method="dense", out="dense"), Silent())
    shrink_run(run.path)
    rows = json.loads((run.path / "shrunk.json").read_text())["rows"]
    assert [x["name"] for x in rows] == ["dense", "structured", "shrunk"]
    assert rows[0]["parameters"] == rows[1]["parameters"] >= rows[2]["parameters"]


def test_latency_is_of_as_large_a_batch_as_wanted(tmp_path: Path) -> None:
    job = small.job("mnist-logreg", tmp_path)
    run = train(job, Silent())
    there = run.facts["data"]["test"]
    assert there > 16
    for batch, seen in ((None, 16), (5, 5), (10**9, there)):
        shrink_run(run.path, batch=batch)
        assert json.loads((run.path / "shrunk.json").read_text())["batch"] == seen
    assert f"Latency measured on cpu, batches of {there}." in write_report([run.path], tmp_path / "p.html").read_text()
    moved = job.data.rename(tmp_path / "elsewhere")
    with pytest.raises(Problem, match="name --data"):
        shrink_run(run.path, batch=5)
    shrink_run(run.path, batch=5, data=moved)


def test_other_penalties_report_too(tmp_path: Path) -> None:
    run = train(small.job("digits", tmp_path, changes=("penalty=l1", "methods.ramda.lam=0.01")), Silent())
    assert run.facts["structure"] == "element_sparsity"
    assert "zero weights" in write_report([run.path], tmp_path / "page.html").read_text()


def test_no_weight_decay_is_none(tmp_path: Path) -> None:
    # AdamW's own default is 0.01
    for name, method in (("vit-mim-cifar10", "dense"), ("mnist-logreg", "proxgen")):
        job = small.job(name, tmp_path, method=method)
        optimizer = make_optimizer(job.recipe, job.chosen, torch.nn.Linear(2, 2), job.recipe.plan(1))
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(small.job("digits", tmp_path, out="whole"), Silent())
    job = small.job("digits", tmp_path, changes=("save_minutes=0",), out="full")
    real = torch.save
    saves = 0

    def full(state: Any, file: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 7:
            file.write(b"half of it")
            raise OSError(28, os.strerror(28))
        real(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Problem, match=r"No space left on device.*last good one is kept"):
        train(job, Silent())
    monkeypatch.setattr(torch, "save", real)
    assert not list(job.out.glob(".*part"))
    assert torch.load(job.out / "checkpoint.pt", weights_only=True)["position"]["step"] == 6
    assert_same(whole, train(job, Silent(), resume=True))


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, method="proxsgd", changes=("methods.proxsgd.lr=1e30",))
    with pytest.raises(Problem, match=r"diverged.*smaller lr"):
        train(job, Silent())


def test_a_shortened_last_stage_still_ends_in_zeros(tmp_path: Path) -> None:
    # momentum 0.99 needs 10 000 steps for c to reach 1, and the last stage has 8
    job = small.job("mnist-logreg", tmp_path, changes=("methods.ramda.lam=0.05",))
    assert job.chosen.momentum == 0.99
    look = train(job, Silent()).looks()[-1]
    assert look["weights"]["structure"] == look["structured"]["structure"] > 0


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("method", "lam", "told"),
    [("ramda", 1e-12, True), ("proxsgd", 1e-12, True), ("ramda", 0.0, False), ("ramda", 1e-1, False)],
)
def test_a_run_whose_penalty_removed_nothing_says_so_at_its_end(
    method: str, lam: float, told: bool, tmp_path: Path
) -> None:
    # channels that are dead from the start would be removed by any λ, and this narrow network has some
    changes = (f"methods.{method}.lam={lam}", "model.width=16")
    progress = Told()
    train(small.job("digits", tmp_path, method=method, changes=changes), progress)
    lines = [line for line in progress.lines if "removed nothing" in line]
    assert len(lines) == told
    for line in lines:
        assert line.endswith(f"Try --set methods.{method}.lam=3e-12")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("method", ["ramda", "rmda"])
def test_dual_averaging_ends_in_zeros_under_any_schedule(method: str, schedule: str, tmp_path: Path) -> None:
    settings = (f"methods.{method}.lam=0.05", f"methods.{method}.schedule={schedule}", f"methods.{method}.warmup=0.2")
    job = small.job("mnist-logreg", tmp_path, method=method, changes=settings)
    run = train(job, Silent())
    look = run.looks()[-1]
    assert look["weights"]["structure"] == look["structured"]["structure"] > 0
    assert run.facts["momentum"] == job.chosen.momentum  # the end of the run does it, and not a smaller momentum
    # 20 steps, of which 4 are warm-up: the lr of the steps 5, 10 and 15
    left = {
        "cosine": [0.5 * (1 + math.cos(math.pi * n / 16)) for n in (0, 5, 10)],
        "linear": [1 - n / 16 for n in (0, 5, 10)],
        "constant": [1.0, 1.0, 1.0],
    }[schedule]
    seen = [x["lr"] / job.chosen.lr for x in run.looks()][:3]
    assert seen == pytest.approx(left, abs=1e-6)
