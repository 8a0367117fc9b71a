"""Lightning, Accelerate and transformers' Trainer train as a plain loop does; docs/frameworks.md has the same lines."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import espalier

# 10 epochs of 16 batches, with 4 batches accumulated to a step
EPOCHS, BATCH, ACCUMULATE = 10, 4, 4
STEPS = EPOCHS * 4
HALF = STEPS // 2

METHODS: dict[str, Callable[[Any], Any]] = {
    # c = 1 in (1/c)² = 16 steps
    "RAMDA": lambda groups: espalier.RAMDA(groups, lr=0.1, momentum=0.75),
    "RMDA": lambda groups: espalier.RMDA(groups, lr=2.0, momentum=0.75),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: espalier.WarmupCosine(optimizer, STEPS),
    "stages": lambda optimizer: espalier.StagewiseRestart(optimizer, [12, HALF]),
}
every_run = pytest.mark.parametrize(("method", "plan"), [("RAMDA", "cosine"), ("RMDA", "cosine"), ("RAMDA", "stages")])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def dataset() -> TensorDataset:
    """The class is the largest of the first three features; the other five say nothing."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH)


def parts(method: str, plan: str) -> tuple[Net, Any, Any]:
    model = Net()
    optimizer = METHODS[method](espalier.regularize(model, espalier.GroupLasso(0.02)))
    return model, optimizer, SCHEDULES[plan](optimizer)


def plain(method: str, plan: str, steps: int = STEPS) -> tuple[Net, Any, list[float]]:
    """A loop by hand; the model, its optimizer, and the sparsity of z at the end of each epoch."""
    model, optimizer, schedule = parts(method, plan)
    seen = []
    batches = [batch for _ in range(EPOCHS) for batch in loader()]
    for step in range(steps):
        for x, y in batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            (model(x, y)["loss"] / ACCUMULATE).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 4 == 0:
            with optimizer.structured():
                seen.append(espalier.structure(optimizer).group_sparsity)
    return model, optimizer, seen


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_is_the_plain_run(model: nn.Module, method: str, plan: str) -> None:
    expected, optimizer, seen = plain(method, plan)
    for p, q in zip(weights(model), weights(expected), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)
        assert torch.equal(p == 0, q == 0)
    assert 0 < espalier.structure(optimizer).group_sparsity == seen[-1] < 1


# -------------------------------------------------------------------------------------------------------- Accelerate


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Its settings are the process's: other tests have their own."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@every_run
@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate(method: str, plan: str, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)

    def prepared() -> tuple[Any, ...]:
        model, optimizer, schedule = parts(method, plan)
        prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader(), schedule)
        return prepared

    def train(model: Any, optimizer: Any, batches: Any, schedule: Any, epochs: int) -> list[float]:
        seen = []
        for _ in range(epochs):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x, y)["loss"])
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            with espalier.structured(optimizer):
                seen.append(espalier.structure(optimizer).group_sparsity)
        return seen

    first = prepared()
    seen = train(*first, EPOCHS // 2)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    second = prepared()
    accelerator.load_state(str(tmp_path))
    seen += train(*second, EPOCHS // 2)
    model, optimizer, _, schedule = second
    assert seen == plain(method, plan)[2]
    assert schedule.scheduler.last_epoch == STEPS
    assert_is_the_plain_run(model, method, plan)
    optimizer.eval()  # Accelerate hands both on
    optimizer.train()
    assert espalier.unwrap(optimizer) is optimizer.optimizer


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_schedule_takes_what_accelerate_has_wrapped() -> None:
    from accelerate import Accelerator

    model, optimizer, _ = parts("RAMDA", "stages")
    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare(optimizer)
    schedule = espalier.StagewiseRestart(wrapped, [1], gamma=0.5)
    monitor = espalier.StructureMonitor(wrapped)
    model(*loader().dataset[:8])["loss"].backward()
    with espalier.unwrap(wrapped).diagnostics() as report:
        wrapped.step()
    assert report.solves
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["ramp"]
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert monitor.look().groups
    with pytest.raises(TypeError, match="not SGD"):
        espalier.unwrap(accelerator.prepare(torch.optim.SGD(model.parameters())))


# ---------------------------------------------------------------------------------------------------------- Lightning


@every_run
# Lightning's own: it advises more workers for the data, and uses a class that torch has renamed
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_lightning(method: str, plan: str, tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.schedule = parts(method, plan)
            self.seen: list[float] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.model(*batch)["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            self.sparsity = espalier.structure(self.optimizer).group_sparsity

        def on_validation_epoch_end(self) -> None:
            self.seen.append(self.sparsity)

        def configure_optimizers(self) -> Any:
            return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    class EvaluateStructured(lightning.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            for optimizer in trainer.optimizers:
                optimizer.eval()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            for optimizer in trainer.optimizers:
                optimizer.train()

    def fit(epochs: int, resume: Path | None = None) -> Module:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accumulate_grad_batches=ACCUMULATE,
            callbacks=[EvaluateStructured()],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, loader(), loader(), ckpt_path=resume, weights_only=True)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        return module

    first = fit(EPOCHS // 2)
    module = fit(EPOCHS, tmp_path / "run.ckpt")
    assert [*first.seen, *module.seen] == plain(method, plan)[2]
    assert_is_the_plain_run(module.model, method, plan)


def test_methods_reach_the_optimizer_through_lightnings_wrapper() -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model, optimizer, _ = plain("RAMDA", "stages", steps=HALF - 1)
    wrapped = LightningOptimizer(optimizer)
    with optimizer.structured():
        z = weights(model)
    wrapped.restart()
    with espalier.structured(wrapped):
        assert all(map(torch.equal, weights(model), z))
        with pytest.raises(RuntimeError, match="inside structured"):
            optimizer.step()
    with wrapped.structured():
        assert all(map(torch.equal, weights(model), z))
    assert wrapped.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert "last" in wrapped.state_dict()["state"][0]
    model(*loader().dataset[:8])["loss"].backward()
    with wrapped.diagnostics() as report:
        optimizer.step()
    assert report.solves
    assert espalier.unwrap(wrapped) is optimizer


# ------------------------------------------------------------------------------------------------ transformers' Trainer


@every_run
@pytest.mark.usefixtures("fresh_accelerate")
def test_transformers_trainer(method: str, plan: str, tmp_path: Path) -> None:
    """It evaluates at the structured point without a line of the user's, and saves it as the model."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # so that a plain loop can be compared with it
        def _get_train_sampler(self, *args: Any, **settings: Any) -> Any:
            return SequentialSampler(dataset())

    def train(directory: Path, resume: Path | None = None, steps: int = STEPS) -> tuple[Net, Any, list[float]]:
        model, optimizer, schedule = parts(method, plan)
        seen: list[float] = []

        def metrics(_: Any) -> dict[str, float]:
            seen.append(espalier.structure(optimizer).group_sparsity)
            return {"sparsity": seen[-1]}

        arguments = TrainingArguments(
            output_dir=str(directory),
            max_steps=STEPS,
            gradient_accumulation_steps=ACCUMULATE,
            per_device_train_batch_size=BATCH,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=HALF,
            max_grad_norm=0,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            label_names=["labels"],
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=dataset(),
            eval_dataset=dataset(),
            data_collator=lambda rows: {
                "x": torch.stack([x for x, _ in rows]),
                "labels": torch.stack([y for _, y in rows]),
            },
            compute_metrics=metrics,
            optimizers=(optimizer, schedule),
        )
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        assert schedule.last_epoch == STEPS
        trainer.optimizer.train()  # it leaves after an evaluation
        return model, optimizer, seen

    whole, _, seen = train(tmp_path / "whole")
    halfway = tmp_path / "whole" / f"checkpoint-{HALF}"
    resumed, _, rest = train(tmp_path / "resumed", halfway)
    assert all(map(torch.equal, weights(whole), weights(resumed)))  # to the bit
    assert seen == plain(method, plan)[2]
    assert rest == seen[-len(rest) :]
    assert_is_the_plain_run(whole, method, plan)


# ------------------------------------------------------------------------------------------- ZeroRedundancyOptimizer


def _zero(rank: int, directory: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    model, alone = Net(), Net()
    groups = espalier.regularize(model, espalier.L1(0.02))
    unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups]  # it takes no names
    pairs = (
        ZeroRedundancyOptimizer(unnamed, espalier.RMDA, lr=2.0, momentum=0.75),
        espalier.RMDA(espalier.regularize(alone, espalier.L1(0.02)), lr=2.0, momentum=0.75),
    )
    schedules = [espalier.StagewiseRestart(optimizer, [4, 8]) for optimizer in pairs]
    batch = dataset()[:16]
    for _ in range(12):
        for net, optimizer, schedule in zip((model, alone), pairs, schedules, strict=True):
            optimizer.zero_grad()
            net(*batch)["loss"].backward()
            optimizer.step()
            schedule.step()
        before = weights(model)
        with espalier.structured(pairs[0]), pairs[1].structured():
            assert all(map(torch.allclose, weights(model), weights(alone)))
            assert not all(map(torch.equal, weights(model), before))
        assert all(map(torch.equal, weights(model), before))
        assert all(map(torch.allclose, weights(model), weights(alone)))
    dist.destroy_process_group()


# torch's own: its module of ZeroRedundancyOptimizer compiles scripts
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_rank_of_zero_sees_the_whole_structured_point(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_zero, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    ends = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert ends == [0, 0]
