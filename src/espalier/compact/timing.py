"""Whether a layer in the place of another is faster, by measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.verify import outputs

# what a layer must gain to be worth its place
_GAIN = 0.95


def faster(
    layer: nn.Module, made: nn.Module, shape: Sequence[int], what: str, option: str
) -> tuple[float, float] | str:
    """Milliseconds of a layer and of the one made for it, on inputs of this shape, where that is the faster; or else
    why not. `what` says what was made, `option` which option makes it all the same."""
    weight = next(layer.parameters())
    # measured before, and not worth it: a second look may only differ by noise
    remembered = vars(layer).setdefault("_not_faster", {})
    asked = (what, *shape, str(weight.device))
    if asked in remembered:
        return str(remembered[asked])
    before, after = _milliseconds(layer, made, torch.zeros(*shape).to(weight))
    if after <= _GAIN * before:
        return before, after
    why = f"{what} was not faster ({before:.3g} ms without, {after:.3g} with): {option} does it"
    remembered[asked] = why
    return why


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
    """What each module is given first when the model runs on these."""
    shapes: dict[str, torch.Size] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            shapes.setdefault(name, args[0].shape)

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
