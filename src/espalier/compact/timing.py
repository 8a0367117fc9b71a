"""Whether a layer in the place of another is faster, by measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.trace import Trace
from espalier.compact.verify import outputs

# what a layer must gain to be worth its place
_GAIN = 0.05

# What was measured in this process: layers that are alike are timed once, and a second look at one, which could only
# differ by noise, ends as the first did.
_measured: dict[tuple[object, ...], tuple[float, float]] = {}


def faster(
    trace: Trace, name: str, layer: nn.Module, made: nn.Module, shape: Sequence[int], doing: str, option: str
) -> tuple[float, float] | None:
    """Milliseconds of a layer and of the one made for it, on inputs of this shape, where that gains enough. If not, the
    trace is told what was not worth `doing`, and that `option` does it all the same."""
    like = next(layer.parameters())
    key = (repr(layer), repr(made), *shape, like.dtype, like.device, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _milliseconds(layer, made, torch.zeros(*shape).to(like))
    before, after = _measured[key]
    if after <= (1 - _GAIN) * before:
        return before, after
    trace.tell(name, f"{doing} gains less than {_GAIN:.0%} ({before:.3g} ms, then {after:.3g}): {option} does it")
    return None


def _milliseconds(plain: nn.Module, made: nn.Module, x: Tensor) -> tuple[float, float]:
    """Both layers, turn by turn."""
    times: tuple[list[float], list[float]] = ([], [])
    wait = torch.cuda.synchronize if x.is_cuda else time.perf_counter
    with torch.no_grad():
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end or len(times[0]) < 5:
            for layer, taken in zip((plain, made), times, strict=True):
                wait()
                start = time.perf_counter()
                layer(x)
                wait()
                taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def input_shapes(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, torch.Size]:
    """The largest that each module is given first, when the model runs on these."""
    shapes: dict[str, torch.Size] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            shapes[name] = max(shapes.get(name, args[0].shape), args[0].shape, key=torch.Size.numel)

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        for name, module in model.named_modules()
    ]
    try:
        outputs(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes
