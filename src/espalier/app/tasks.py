"""What a task makes of a batch: a loss to train on, and what to measure it by."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from espalier.app.data import Data
from espalier.app.errors import Problem, one_line
from espalier.app.models import MODELS
from espalier.app.models.simmim import PATCH, random_mask, simmim_loss
from espalier.app.recipe import Recipe

Batch = tuple[Tensor, ...]
Carry = list[Tensor]

# of speech that the model is traced and timed with: each takes the same steps, and tracing sees them all
FRAMES_SHOWN = 50


def build(recipe: Recipe, facts: Mapping[str, Any]) -> nn.Module:
    """The recipe's model; what it leaves open and the data know (classes, vocabulary) comes from the data's facts."""
    builder = MODELS[recipe.model.name]
    known = {k: v for k, v in facts.items() if k in inspect.signature(builder).parameters}
    options = {**known, **recipe.model.options}
    for k, fact in known.items():
        if options[k] != fact:
            raise Problem(f"model.{k} is {options[k]}, and {recipe.data.name} has {k} {fact}: leave model.{k} out")
    try:
        return builder(**options)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise Problem(f"the model {recipe.model.name} can't be built from {options}: {one_line(error)}") from error


class Task(ABC):
    """A task on its data, in one of `world` processes."""

    metric: ClassVar[str] = "loss"
    better: ClassVar[str] = "min"
    shown: ClassVar[int] = 2  # examples that the model is traced and timed with
    alike: ClassVar[bool] = False  # each batch is the same work, and none waits for the device

    def __init__(self, recipe: Recipe, data: Data, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        self.rank, self.world = rank, world

    def build(self) -> nn.Module:
        """The recipe's model, on the device."""
        return build(self.recipe, self.data.facts).to(self.device)

    def drawn(self, batch: Batch) -> Batch:
        """A batch of the data with what chance adds to it, on the host: a recorded loss can't draw there."""
        return batch

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """The loss of a batch as `drawn` gives it, and what the next batch needs of it."""

    def meters(self) -> dict[str, Metric]:
        """What evaluation gathers, by name."""
        # not MeanMetric: without its check for NaN, which waits for the device, it forgets the weights
        return {k: SumMetric(nan_strategy="disable").to(self.device) for k in ("loss", "count")}

    def score(self, model: nn.Module, batch: Batch, carry: Carry, meters: dict[str, Metric]) -> Carry:
        """Enter one batch into the meters."""
        loss, carry = self.loss(model, self.drawn(batch), carry)
        self.enter(loss, batch, meters)
        return carry

    def enter(self, loss: Tensor, batch: Batch, meters: dict[str, Metric]) -> None:
        """Count a batch's mean loss for as many as it is over."""
        meters["loss"].update(loss * self.weight(batch))
        meters["count"].update(self.weight(batch))

    def weight(self, batch: Batch) -> int:
        """How many examples the mean over a batch is over."""
        return len(batch[0])

    def results(self, meters: dict[str, Metric]) -> dict[str, float]:
        """What the meters show, over all processes."""
        found = {k: float(meter.compute()) for k, meter in meters.items()}
        count = found.pop("count")
        return {**found, "loss": found["loss"] / count}

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """The model in eval mode, and afterwards in its own."""
        training = model.training
        model.eval()
        try:
            yield
        finally:
            model.train(training)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The model's quality on the test split, in eval mode."""
        meters, carry = self.meters(), Carry()
        size = min(self.recipe.eval_batch or self.recipe.batch, max(self.world, len(self.data.test)))
        while 0 < len(self.data.test) % size < self.world:  # each process gets some of the last batch, too
            size -= 1
        with self.in_use(model):
            for batch in self.data.test.batches(size, rank=self.rank, world=self.world):
                carry = self.score(model, batch, carry, meters)
        return self.results(meters)

    def try_out(self, model: nn.Module, accelerator: Accelerator) -> None:
        """Find out before anything is written whether model, data and task fit; no random number is used up."""
        recipe = self.recipe
        # each process takes part in what it does
        batch = next(iter(self.data.train.batches(max(2, self.world), rank=self.rank, world=self.world)))
        try:
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices), torch.no_grad(), accelerator.autocast():
                model.eval()
                self.loss(model, self.drawn(batch), Carry())
        except Problem:
            raise
        except Exception as error:
            what = f"the model {recipe.model.name} can't do the task {recipe.task} on {recipe.data.name}"
            raise Problem(f"{what}: {one_line(error)}") from error
        finally:
            model.train()

    def examples(self, count: int | None = None) -> Batch:
        """Inputs to trace the model with."""
        return self.arguments(next(iter(self.data.test.batches(min(count or self.shown, len(self.data.test))))))

    def arguments(self, batch: Batch) -> Batch:
        """What the model is called with for a batch."""
        return batch[:1]


class Classification(Task):
    """Images and their classes."""

    metric = "accuracy"
    better = "max"
    shown = 16
    alike = True

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.recipe.label_smoothing), carry

    def meters(self) -> dict[str, Metric]:
        accuracy = MulticlassAccuracy(self.data.facts["classes"], average="micro", validate_args=False)
        return {**super().meters(), "accuracy": accuracy.to(self.device)}

    def score(self, model: nn.Module, batch: Batch, carry: Carry, meters: dict[str, Metric]) -> Carry:
        images, labels = batch
        logits = model(images)
        self.enter(F.cross_entropy(logits, labels), batch, meters)
        meters["accuracy"].update(logits, labels)
        return carry

    def results(self, meters: dict[str, Metric]) -> dict[str, float]:
        found = super().results(meters)
        return {**found, "accuracy": 100 * found["accuracy"]}


class Language(Task):
    """The next word of a text, with the memory of the segment before."""

    metric = "perplexity"

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        tokens, targets = batch
        nll, memory = model(tokens, carry or None, targets)
        return nll.mean(), memory

    def weight(self, batch: Batch) -> int:
        return batch[1].numel()

    def results(self, meters: dict[str, Metric]) -> dict[str, float]:
        found = super().results(meters)
        return {**found, "perplexity": math.exp(min(found["loss"], 700.0))}

    def arguments(self, batch: Batch) -> Batch:
        return batch[0][:, :16].contiguous(), None, batch[1][:, :16].contiguous()  # type: ignore[return-value]


class Speech(Task):
    """The mel spectrogram of a text, before and after the postnet, and where it ends."""

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        _, _, mel, lengths = batch
        before, after, gate, _ = model(*batch)
        frames = torch.arange(mel.shape[2], device=mel.device)
        ended = (frames >= lengths[:, None] - 1).to(gate.dtype)  # from the last frame on
        loss = F.mse_loss(before, mel) + F.mse_loss(after, mel) + F.binary_cross_entropy_with_logits(gate, ended)
        return loss, carry

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """The prenet's dropout stays on, as when the model speaks: it knows no frames without it (after 100 steps of a
        small one the test loss is 8.1 without and 3.8 with it). The same draw each time, and none of training's."""
        cuda = self.device.type == "cuda"
        with super().in_use(model), torch.random.fork_rng([self.device] if cuda else []):
            (torch.cuda if cuda else torch.default_generator).manual_seed(0)
            model.get_submodule("prenet").train()
            yield

    def arguments(self, batch: Batch) -> Batch:
        text, text_lengths, mel, lengths = batch
        return text, text_lengths, mel[:, :, :FRAMES_SHOWN].contiguous(), lengths.clamp(max=FRAMES_SHOWN)


class MaskedImages(Task):
    """Hidden patches of images, to be painted in."""

    alike = True

    def drawn(self, batch: Batch) -> Batch:
        return self._masked(batch[0], torch.default_generator)

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        images, mask = batch
        return simmim_loss(model(images, mask), images, mask), carry

    def score(self, model: nn.Module, batch: Batch, carry: Carry, meters: dict[str, Metric]) -> Carry:
        # the same patches at every look, and none of training's random numbers
        images, mask = self._masked(batch[0], torch.Generator().manual_seed(len(batch[0])))
        loss, carry = self.loss(model, (images, mask), carry)
        self.enter(loss, batch, meters)
        return carry

    def _masked(self, images: Tensor, generator: torch.Generator) -> Batch:
        patches = (images.shape[-1] // self.recipe.model.options.get("patch", PATCH)) ** 2
        return images, random_mask(len(images), patches, self.recipe.mask_ratio, generator, images.device)

    def arguments(self, batch: Batch) -> Batch:
        return self._masked(batch[0], torch.Generator().manual_seed(0))


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "language": Language,
    "speech": Speech,
    "masked-images": MaskedImages,
}


def open_task(recipe: Recipe, data: Data, device: torch.device, rank: int = 0, world: int = 1) -> Task:
    """The recipe's task."""
    return TASKS[recipe.task](recipe, data, device, rank, world)
