"""A step as a CUDA graph: recorded once and then replayed, so that small networks don't wait for the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Parameter

from espalier.app.recipe import Method, Recipe, Solver

Batch = tuple[Tensor, ...]

WARM_UP = 3  # steps before the recording, in which kernels are compiled and states made


def replayable(recipe: Recipe, accelerator: Accelerator, alike: bool, structured: bool) -> bool:
    """Whether a training's steps can be recorded and replayed."""
    alone = accelerator.num_processes == recipe.accumulate == 1 and accelerator.scaler is None
    recordable = structured or not recipe.skip_nonfinite  # torch's optimizers ask the host whether to skip
    return recipe.cuda_graph and accelerator.device.type == "cuda" and alone and alike and recordable


def optimizer_waits(recipe: Recipe, method: Method) -> bool:
    """Whether a structured optimizer's step may wait for the device, as the nuclear norm's does: then it can't be
    recorded."""
    return recipe.penalty == "nuclear-norm" or method.solver != Solver()


class Replay:
    """Calls `step` on a batch, and after a few of one shape replays what it did, with the next batch in its place.

    What the step reads and writes must stay where it is: weights, statistics, the optimizer's state and its learning
    rate, which has to be a tensor. A batch of another shape than the recorded one is stepped plainly. The recorded
    step keeps its memory to itself, and plain steps and evaluation have theirs.

    Where the step leaves gradients to the caller, who takes them away after using them, the parameters are named.
    """

    def __init__(self, step: Callable[[Batch], Tensor], parameters: Iterable[Parameter] = ()) -> None:
        self.step = step
        self.parameters = list(parameters)
        self.gradients: list[Tensor | None] = []
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.shapes: list[torch.Size] = []
        self.inputs: Batch = ()
        self.loss = torch.empty(0)

    def __call__(self, batch: Batch) -> Tensor:
        """One step; the loss, which the next step overwrites."""
        shapes = [x.shape for x in batch]
        if self.graph is None and self.seen >= WARM_UP and shapes == self.shapes:
            self._record(batch)
        if self.graph is None:
            self.seen, self.shapes = self.seen + 1, shapes
        if self.graph is None or shapes != self.shapes:
            return self.step(batch)
        for here, new in zip(self.inputs, batch, strict=True):
            here.copy_(new, non_blocking=True)
        self.graph.replay()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        return self.loss

    def _record(self, batch: Batch) -> None:
        """Recording runs nothing: the first replay is this batch's step."""
        self.inputs = tuple(x.clone() for x in batch)
        gc.collect()  # another run's graph must not end in the middle
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.inputs[0].device)  # type: ignore[no-untyped-call]
        # of this thread alone: a data loader's may ask for memory meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.loss = self.step(self.inputs)
        self.gradients = [p.grad for p in self.parameters]
        self.graph = graph
