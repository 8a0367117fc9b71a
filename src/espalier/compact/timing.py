"""Whether a layer in the place of another is faster, by measurement."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.copies import for_a_run
from espalier.compact.layout import Given, channels_last
from espalier.compact.report import FOR_TIME
from espalier.compact.trace import Trace
from espalier.compact.verify import outputs

# what a layer must gain to be worth its place
_GAIN = 0.05

# What was measured in this process: layers that are alike are timed once, and a second look at one, which could only
# differ by noise, ends as the first did.
_measured: dict[tuple[object, ...], tuple[float, float]] = {}


def faster(
    trace: Trace, name: str, layer: nn.Module, made: nn.Module, given: Given, doing: str, option: str
) -> tuple[float, float] | None:
    """Milliseconds of a layer and of the one made for it, on what they are given, where that gains enough. If not, the
    trace is told what was not worth `doing`, and that `option` does it anyway."""
    like = next(layer.parameters())
    lie = tuple(map(channels_last, layer.parameters()))
    key = (repr(layer), repr(made), lie, given, like.dtype, like.device, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _milliseconds(for_a_run(layer), for_a_run(made), given.zeros(like))
    before, after = _measured[key]
    if after <= (1 - _GAIN) * before:
        return before, after
    gain = "is slower here" if after > before else f"gains less than {_GAIN:.0%}"
    trace.tell(name, f"{doing} {gain} ({before:.3g} ms, then {after:.3g}): {option} {FOR_TIME}")
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


def inputs_given(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Given]:
    """The largest that each module is given first, when the model runs on these."""
    found: dict[str, Given] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and not x.is_nested:
            seen = Given.like(x)
            found[name] = max(found.get(name, seen), seen, key=lambda given: math.prod(given.shape))

    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        outputs(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
