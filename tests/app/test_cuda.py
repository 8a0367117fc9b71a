"""The app on a GPU: above all, a run of replayed steps is the run of steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, raise_signal

import pytest
import safetensors.torch
import small
import torch
from torch import Tensor

from espalier.app import graph
from espalier.app.deliver import shrink_run
from espalier.app.errors import Problem, Stopped
from espalier.app.loop import Training, train
from espalier.app.machine import make_accelerator
from espalier.app.progress import Silent
from espalier.app.run import Job, Run, begin

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Two runs of one network otherwise differ by rounding, which training makes more of."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class FakeGraph:
    """Does again on a CPU what was done while it was recorded, which by itself had no effect."""

    recording: FakeGraph | None = None
    replays = 0

    def replay(self) -> None:
        type(self).replays += 1
        self.work()  # type: ignore[attr-defined]

    @classmethod
    @contextmanager
    def recorded(cls, made: FakeGraph, **_: object) -> Iterator[None]:
        cls.recording = made
        try:
            yield
        finally:
            cls.recording = None


def test_full_batches_are_replayed_after_a_warm_up_and_others_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeGraph.recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    done: list[float] = []

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        loss = torch.zeros(())

        def work() -> None:
            done.append(float(batch[0].sum()))
            loss.copy_(batch[0].sum())

        if FakeGraph.recording is None:
            work()
        else:
            FakeGraph.recording.work = work  # type: ignore[attr-defined]
        return loss

    replay = graph.Replay(step)
    sizes = [2, 4, 4, 4, 4, 2, 4, 3, 4]  # each epoch's last batch is smaller
    losses = [float(replay((torch.full((size,), float(i)),))) for i, size in enumerate(sizes)]
    assert done == losses == [float(i * size) for i, size in enumerate(sizes)]
    assert FakeGraph.replays == 4  # of the nine three were to warm up, and two more are smaller


def test_gradients_of_replays_are_there_until_they_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeGraph.recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    p, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))

    def differentiate(batch: tuple[Tensor, ...]) -> Tensor:
        assert p.grad is None
        p.grad = gradient = torch.full((3,), torch.nan)
        loss = torch.zeros(())

        def work() -> None:
            gradient.copy_(batch[0].sum().expand(3))
            loss.copy_(batch[0].sum())

        if FakeGraph.recording is None:
            work()
        else:
            FakeGraph.recording.work = work  # type: ignore[attr-defined]
        return loss

    replay = graph.Replay(differentiate, [p, unused])
    for i, size in enumerate([4, 4, 4, 4, 3, 4, 4]):
        loss = replay((torch.full((size,), float(i)),))
        assert p.grad is not None
        assert p.grad.tolist() == [float(loss)] * 3 == [float(i * size)] * 3
        assert unused.grad is None
        p.grad = None
    assert replay.graph is not None


def on_gpu(where: Path, *, method: str, changes: tuple[str, ...] = (), out: str) -> Job:
    """Tiny VGG19 on 64 images; a batch of 24 leaves 16 for each epoch's last."""
    changes = ("batch=24", "length=40", "milestones=[12,24]", *changes)
    return replace(small.job("vgg19-cifar10", where, method=method, changes=changes, out=out), device="cuda")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "method", ["ramda", "rmda", "proxsgd", "proxgen", "proxssi", "dense", "adamw", "waits", "nuclear"]
)
def test_a_run_of_replays_ends_like_one_of_steps(method: str, precision: str, tmp_path: Path) -> None:
    """Through stages, smaller batches and looks at the structured point."""
    # learning rates that float32 has exactly, for a graph's are such
    adamw = "methods.adamw={optimizer: adamw, lr: 0.0009765625}"
    ramda = "optimizer: ramda, lr: 0.0078125, lam: 0.001, momentum: 0.75"
    waits = f"methods.waits={{{ramda}, solver: {{name: pg}}}}"  # the optimizer's step
    nuclear = f"methods.nuclear={{{ramda}}}"
    changes = (adamw, waits, nuclear, f"penalty={'nuclear-norm' if method == 'nuclear' else 'group-lasso'}")
    changes = (*changes, "methods.dense.lr=0.125", "gamma=0.5", f"mixed_precision={precision}")
    ends = []
    for graphs in (True, False):
        job = on_gpu(tmp_path, method=method, changes=(*changes, f"cuda_graph={graphs}"), out=str(graphs))
        run = train(job, Silent())
        ends.append((safetensors.torch.load_file(run.model), run.looks()[-1]))
    (replayed, last), (stepped, also_last) = ends
    assert last["train_loss"] == pytest.approx(also_last["train_loss"], rel=1e-3)
    for name, value in replayed.items():
        assert torch.allclose(value.float(), stepped[name].float(), rtol=1e-2, atol=1e-3), name


@pytest.mark.usefixtures("deterministic")
@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("method", ["ramda", "dense", "adamw"])
def test_a_run_of_replays_stops_and_goes_on(method: str, tmp_path: Path) -> None:
    class StopAt20(Silent):
        def step(self, step: int, loss: Tensor) -> None:
            if step == 20:
                raise_signal(SIGTERM)

    changes = ("methods.adamw={optimizer: adamw, lr: 1e-3, schedule: cosine}",)
    whole = train(on_gpu(tmp_path, method=method, changes=changes, out="whole"), Silent())
    cut = on_gpu(tmp_path, method=method, changes=changes, out="cut")
    with pytest.raises(Stopped):
        train(cut, StopAt20())
    resumed = train(cut, Silent(), resume=True)
    a, b = whole.looks()[-1], resumed.looks()[-1]
    assert a["step"] == b["step"] == 40
    assert a["lr"] == pytest.approx(b["lr"])
    assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-2)


@pytest.mark.gpu
@needs_a_gpu
def test_what_can_be_replayed_is(tmp_path: Path) -> None:
    def replays(method: str, *changes: str) -> bool:
        job = on_gpu(tmp_path, method=method, changes=changes, out="-".join((method, *changes)))
        training = Training(job, begin(job, resume=False), make_accelerator(job), Silent())
        for _ in range(8):
            training.step()
        return training.replay is not None and training.replay.graph is not None

    assert replays("ramda")
    assert replays("dense")
    assert replays("proxssi")
    assert not replays("ramda", "cuda_graph=false")
    assert not replays("ramda", "accumulate=2")
    assert not replays("ramda", "mixed_precision=fp16")
    assert replays("ramda", "methods.ramda.solver.name=pg")  # but for the optimizer's step
    assert replays("ramda", "penalty=nuclear-norm")


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.gpu
@needs_a_gpu
def test_a_compiled_step_is_replayed(tmp_path: Path) -> None:
    losses = []
    for compiled, graphs in ((True, True), (True, False), (False, False)):
        changes = (f"compile={compiled}", f"cuda_graph={graphs}")
        job = on_gpu(tmp_path, method="ramda", changes=changes, out=f"{compiled}-{graphs}")
        training = Training(job, begin(job, resume=False), make_accelerator(job), Silent())
        losses.append([float(training.step()) for _ in range(12)])
        assert (training.replay is not None and training.replay.graph is not None) == graphs
    replayed, compiled_only, plain = losses
    assert replayed == pytest.approx(compiled_only, rel=1e-3)
    assert replayed[:3] == pytest.approx(plain[:3], rel=0.03)  # later the compiler's rounding has grown too far


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("method", ["ramda", "proxsgd", "dense"])
def test_masked_images_are_replayed_with_the_masks_of_steps(method: str, tmp_path: Path) -> None:
    losses = []
    for graphs in (True, False):
        job = small.job("vit-mim-cifar10", tmp_path, method=method, changes=(f"cuda_graph={graphs}",), out=str(graphs))
        job = replace(job, device="cuda")
        training = Training(job, begin(job, resume=False), make_accelerator(job), Silent())
        losses.append([float(training.step()) for _ in range(12)])
        assert (training.replay is not None and training.replay.graph is not None) == graphs
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_cpu_steps_plainly(tmp_path: Path) -> None:
    job = small.job("vgg19-cifar10", tmp_path)
    training = Training(job, Run(tmp_path), make_accelerator(job), Silent())
    assert training.replay is None
    assert isinstance(training.optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_gpus_checkpoint_goes_on_on_a_cpu(optimizer: str, tmp_path: Path) -> None:
    """There the learning rate is a tensor, and the step fused and capturable."""
    job = small.job("digits", tmp_path, method="dense", changes=(f"methods.dense={{optimizer: {optimizer}, lr: 0.5}}",))
    training = Training(job, Run(tmp_path), make_accelerator(job), Silent())
    training.step()
    saved = training.optimizer.state_dict()
    saved["param_groups"][0].update(lr=torch.tensor(0.25), fused=True, capturable=True)
    training.optimizer.load_state_dict(saved)
    (group,) = training.optimizer.param_groups
    assert group["lr"] == 0.25
    assert isinstance(group["lr"], float)
    assert not group["fused"]
    assert optimizer == "sgd" or not group["capturable"]
    training.step()
    training.schedule.step()
    assert isinstance(group["lr"], float)


@pytest.mark.gpu
@needs_a_gpu
def test_a_model_is_shrunk_and_timed_on_a_gpu(tmp_path: Path) -> None:
    run = train(on_gpu(tmp_path, method="ramda", changes=("methods.ramda.lam=0.02",), out="run"), Silent())
    shrunk = shrink_run(run.path, device=torch.device("cuda"))
    assert all(p.is_cuda for p in shrunk.model.parameters())
    assert json.loads((run.path / "shrunk.json").read_text())["device"] == "cuda"


def test_a_run_may_go_on_without_graphs_and_may_be_older_than_they(tmp_path: Path) -> None:
    job = small.job("digits", tmp_path, changes=("length=4", "milestones=[2]", "evaluate_every=2"))
    assert "cuda_graph" not in train(job, Silent()).facts["settings"]
    without = small.job("digits", tmp_path, changes=("length=4", "milestones=[2]", "evaluate_every=2", "cuda_graph=no"))
    assert train(without, Silent(), resume=True).finished


def test_full_memory_is_a_problem_with_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Training, "_step_on", full)
    with pytest.raises(Problem, match=r"memory is full at step 0: try a smaller batch, --set accumulate=2"):
        train(small.job("digits", tmp_path), Silent())
