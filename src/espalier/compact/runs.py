"""One run of a model, from a fresh copy: what it returns, and what it leaves on its modules."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.compact.copies import ShrinkError, for_a_run, same_numbers
from espalier.compact.examples import call, cloned
from espalier.compact.walk import leaves, left_behind, tensors_in

# what every module has, but hooks that a call may put in place
_UNCHANGED = vars(nn.Module()).keys() - {"_forward_hooks", "_forward_pre_hooks"}


@dataclass(frozen=True)
class Run:
    """Tensors by their places.

    Attributes:
        returned: what the model returned.
        left: what it left in attributes, and in place of buffers.
        second: what it returned when it was called once more, if that was asked and the first call changed its state.
        changed: the attributes that the first call changed, if a second one was asked.
    """

    returned: dict[str, Tensor]
    left: dict[str, Tensor]
    second: dict[str, Tensor] | None
    changed: tuple[str, ...]


@contextmanager
def settled(*models: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and the random numbers that would have come next; afterwards all is as it was."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    try:
        with kept_random(*models), torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for m, training in modes:  # not m.train(): models override it
            m.training = training


@contextmanager
def kept_random(*models: nn.Module) -> Iterator[None]:
    """Torch draws the same random numbers afterwards."""
    cuda = {t.device for model in models for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with torch.random.fork_rng(devices=sorted(d.index for d in cuda)):
        yield


def run(model: nn.Module, inputs: tuple[Any, ...], *, again: bool = True) -> Run:
    """A copy of the model in eval mode on these inputs.

    again: call it twice if the first call changes its state, and it takes a second one.
    """
    model = for_a_run(model)
    registered = [*model.parameters(), *model.buffers()]  # alive, so that no id is used twice
    with settled(model):
        before = _state(model) if again else {}
        returned = named(call(model, cloned(inputs)), model)
        left = results(model, {id(x) for x in registered})
        after = _state(model) if again else {}
        changed = tuple(name for name in before | after if before.get(name) != after.get(name))
        if not changed:
            return Run(returned, left, None, ())
        # the second call may write into what the first one gave
        returned, left = ({name: x.detach().clone() for name, x in found.items()} for found in (returned, left))
        second = _second(model, inputs)
    return Run(returned, left, second, changed)


def _second(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor] | None:
    try:
        return named(call(model, cloned(inputs)), model)
    except Exception:  # whoever streams may need other inputs now
        return None


def named(output: Any, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of what a model returns, each with its place."""
    found: dict[str, Tensor] = {}
    for path, x in leaves(output, own=set(model.modules())):
        if isinstance(x, Tensor):
            found[path] = x
        elif isinstance(x, _arrays()):
            if x.dtype.kind in "biufc":  # not those of strings
                found[path] = torch.as_tensor(sys.modules["numpy"].array(x))
        else:
            raise ShrinkError(
                f"the model returns a {type(x).__name__}{f' as {path}' if path else ''}. Tensors in it cannot be seen, "
                "and so not be compared. Return a tensor, or a list, dict or object of tensors."
            )
    return found


def _arrays() -> Any:
    """NumPy's, if it was loaded."""
    numpy: Any = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray, numpy.generic)


def results(model: nn.Module, registered: set[int]) -> dict[str, Tensor]:
    """What a run has left on modules: tensors in attributes, and new ones in place of buffers."""
    found = dict(left_behind(model))
    return found | {name: x for name, x in model.named_buffers() if id(x) not in registered}


def _state(model: nn.Module) -> dict[str, Any]:
    """What tells that a model has changed, by attribute."""
    found: dict[str, Any] = {}
    for name, x in (*left_behind(model), *model.named_buffers()):
        found[name] = id(x), 0 if x.is_inference() else x._version
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _UNCHANGED:
                continue
            place = f"{name}.{key}" if name else key
            if isinstance(value, int | float | str | None):
                found[place] = "NaN" if isinstance(value, float) and math.isnan(value) else value
            elif isinstance(value, list | dict | set):
                found[place] = len(value)
    return found


def dependent(given: Sequence[tuple[Any, ...]], left: Sequence[Mapping[str, Tensor]], before: nn.Module) -> set[str]:
    """Names of what differs between inputs of equal shapes: results, and no caches that depend on sizes alone.

    If no two inputs are alike, all that is not on the model `before` any run counts.
    """
    by_shape: dict[tuple[object, ...], list[Mapping[str, Tensor]]] = {}
    for inputs, found in zip(given, left, strict=True):
        shapes = tuple((x.shape, x.dtype) for x in tensors_in(inputs))
        by_shape.setdefault(shapes, []).append(found)
    if not any(len(alike) > 1 for alike in by_shape.values()):
        held = dict(left_behind(before))
        by_shape = {(i,): [held, found] for i, found in enumerate(left)}
    names: set[str] = set()
    for first, *others in by_shape.values():
        for other in others:
            names |= {
                name
                for name in first.keys() | other.keys()
                if name not in first or name not in other or not same_numbers(first[name], other[name])
            }
    return names
