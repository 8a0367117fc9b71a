"""FLOPs and latency of models, each layer and all together."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from espalier.compact.examples import call, cloned


@contextmanager
def _attributed(model: nn.Module, clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """By how much the clock goes on in each module by itself, its children left out."""
    spent: dict[str, float] = defaultdict(float)
    running: list[list[float]] = []  # start, and what children took, of each module that is in its forward

    def enter(module: nn.Module, args: Any) -> None:
        running.append([clock(), 0.0])

    def leave(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            start, inner = running.pop()
            took = clock() - start
            spent[name] += took - inner
            if running:
                running[-1][1] += took

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave(name)).remove)
        yield spent


def _recurrence(x: Sequence[int], *weights: Any, **_: Any) -> int:
    """FLOPs of a fused recurrent layer from the shapes of its arguments: each step multiplies by each matrix."""
    matrices = weights[:2] if isinstance(weights[0], torch.Size) else weights[0]  # oneDNN's layer, cuDNN's stack
    weights_each_step: int = sum(math.prod(w) for w in matrices if len(w) == 2)
    return 2 * math.prod(x[:-1]) * weights_each_step


# FlopCounterMode has no formula for these
_RECURRENCE = {torch.ops.aten.mkldnn_rnn_layer: _recurrence, torch.ops.aten._cudnn_rnn: _recurrence}


def flops_of(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, float]:
    """FLOPs of each module by itself."""
    # here, for it takes half a second to import
    from torch.utils.flop_counter import FlopCounterMode

    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # FlopCounterMode sees no product of matrices in fused attention
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # nor does it bear views of parameters, such as an initial state for every example, made without gradients
        for p in model.parameters():
            stack.callback(p.requires_grad_, p.requires_grad)
            p.requires_grad_(False)
        counter = stack.enter_context(FlopCounterMode(display=False, custom_mapping=_RECURRENCE))
        spent = stack.enter_context(_attributed(model, counter.get_total_flops))
        call(model, cloned(inputs))
    return spent


Pair = tuple[float | None, float | None]


def latency_of(
    models: tuple[nn.Module, nn.Module], inputs: tuple[Any, ...], seconds: float
) -> tuple[Pair, tuple[dict[str, float], dict[str, float]]]:
    """Milliseconds of both models, and of each of their modules by itself: medians of runs in turn."""
    tensors = (t for t in (*models[0].parameters(), *tree_leaves(inputs)) if isinstance(t, Tensor))
    device = next((t.device for t in tensors), torch.device("cpu"))

    def clock() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() * 1e3

    begun = clock()
    given = [cloned(inputs) for _ in models]

    def runs(share: float) -> Iterator[int]:
        """In turn, and every other time in reverse; at least once each, at most 100 times."""
        for turn in range(100):
            yield from ((0, 1), (1, 0))[turn % 2]
            if clock() - begun > share * seconds * 1e3:
                return

    times: tuple[list[float], list[float]] = ([], [])
    for i in runs(0.7):
        start = clock()
        call(models[i], given[i])
        times[i].append(clock() - start)
    # the first run warms up
    total = [median(t[1:] or t) for t in times]
    layers: tuple[dict[str, list[float]], dict[str, list[float]]] = (defaultdict(list), defaultdict(list))
    if clock() - begun < 0.9 * seconds * 1e3:
        for i in runs(1.0):
            with _attributed(models[i], clock) as spent:
                call(models[i], given[i])
            for name, ms in spent.items():
                layers[i][name].append(ms)
    medians = [{name: median(ms[1:] or ms) for name, ms in found.items()} for found in layers]
    return (total[0], total[1]), (medians[0], medians[1])
