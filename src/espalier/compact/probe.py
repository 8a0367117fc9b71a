"""Inputs and outputs that are stored with a model, so that loading it shows whether it still computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from espalier.compact.copies import copied, same_numbers
from espalier.compact.examples import Call
from espalier.compact.runs import kept_random, run
from espalier.compact.sizes import resized, sizes_of_batch
from espalier.compact.verify import ALLOWED, dense_run, doubled, error_of, precision
from espalier.compact.walk import mapped, tensors_in

# An attribute that shrink leaves on a model for save: "spec" of random inputs, "why" there is none, and on each module
# "changed", paths to integers in its objects. It is made of lists: a model that was only cut needs no Espalier to be
# unpickled.
RECORD = "_espalier"
# of a nested value: its kind and what that needs
Spec: TypeAlias = list[Any]

# entries of inputs, all together, and of each output
_MOST_GIVEN, _MOST_KEPT = 2**20, 2**12
# parameters of models that are run in float64
_MOST_WIDE = 2**28
# other processors and libraries round otherwise
_ROOM = {torch.float64: 1e3, torch.float32: 10.0}


def record(model: nn.Module, spec: Spec | None, why: str, changed: Iterable[tuple[str, str]]) -> None:
    """Leave on a model what save needs. changed: modules and paths to integers in their objects."""
    for name, path in changed:
        own = vars(model.get_submodule(name))
        paths = own.get(RECORD, {}).get("changed", [])
        own[RECORD] = {"changed": [*paths, *([path] if "." in path and path not in paths else [])]}
    vars(model)[RECORD] = {**vars(model).get(RECORD, {}), "spec": spec, "why": why}


class NoProbe(Exception):
    """Why a model has none."""


@dataclass(frozen=True)
class Probe:
    """What a model gave.

    Attributes:
        outputs: entries of each, in float64, by their places.
        shapes: of the outputs.
        dtype: the coarsest that the run rounded to.
    """

    outputs: dict[str, Tensor]
    shapes: dict[str, list[int]]
    dtype: str


def spec_of(values: Any, of_tensor: Callable[[Tensor], Spec]) -> Spec:
    """What nested values consist of."""
    if isinstance(values, Tensor):
        return of_tensor(values.detach())
    if isinstance(values, Mapping) and all(isinstance(k, str) for k in values):
        return ["dict", [[k, spec_of(v, of_tensor)] for k, v in values.items()]]
    if type(values) in (tuple, list):
        return [type(values).__name__, [spec_of(v, of_tensor) for v in values]]
    if values is None or type(values) in (bool, int, float):
        return ["plain", values]
    raise NoProbe(f"an input is a {type(values).__name__}")


def like(x: Tensor, *, drawn: bool = True) -> Spec:
    """How to draw numbers like these: no entry is told, but mean and deviation, or the smallest and largest.

    drawn: without it, integers are all the largest: lengths may need an order, and indices may not be just any.
    """
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise NoProbe(f"an input is a {x.layout} tensor")
    kind, shape = str(x.dtype).removeprefix("torch."), list(x.shape)
    if x.is_floating_point() or x.is_complex():
        wide = torch.view_as_real(x).double() if x.is_complex() else x.double()
        if not x.numel() or not wide.isfinite().all():  # a mask of infinities
            return ["normal", kind, shape, 0.0, 0.0]
        std, mean = torch.std_mean(wide, correction=0)
        return ["normal", kind, shape, float(mean), float(std)]
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    return ["integers", kind, shape, low if drawn else high, high]


def made(spec: Spec, tensors: Mapping[str, Tensor] | None = None) -> Call:
    """Arguments and keyword arguments by their spec: the same ones at each call."""
    try:
        args, kwargs = _made(spec, tensors or {}, torch.Generator().manual_seed(0))
        return tuple(args), dict(kwargs)
    except (AttributeError, KeyError, TypeError, ArithmeticError, RuntimeError, RecursionError) as error:
        raise ValueError(f"no inputs can be made by this description ({error})") from error


def _made(spec: Spec, tensors: Mapping[str, Tensor], generator: torch.Generator) -> Any:
    match spec:
        case ["dict", items]:
            return {k: _made(v, tensors, generator) for k, v in items}
        case ["tuple", items]:
            return tuple(_made(v, tensors, generator) for v in items)
        case ["list", items]:
            return [_made(v, tensors, generator) for v in items]
        case ["normal" | "integers", _, shape, *_] if math.prod(shape) > _MOST_GIVEN:
            raise NoProbe(f"an input has {math.prod(shape):,} entries, and {_MOST_GIVEN:,} are stored at most")
        case ["normal", kind, shape, mean, std]:
            dtype = getattr(torch, kind)
            parts = [mean + std * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
            return (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype)
        case ["integers", kind, shape, low, high]:
            return torch.randint(low, high + 1, shape, generator=generator).to(getattr(torch, kind))
        case ["tensor", name]:
            return tensors[name]
        case ["plain", value]:
            return value
    raise ValueError(f"{spec!r} describes no input")


def found_for(model: nn.Module, inputs: Call) -> tuple[Spec | None, str]:
    """A spec of random inputs that the model takes, a batch of two if it takes that, or why there is none."""
    elsewhere = any(x.device.type != "cpu" for x in (*model.parameters(), *model.buffers()))
    on_cpu = copied(model).cpu() if elsewhere else model
    why = "the model takes no random inputs"
    for sizes in (sizes_of_batch(inputs, 2), {}):
        for drawn in (True, False):
            try:
                spec = spec_of([*resized(inputs, sizes)], partial(like, drawn=drawn))
                given = made(spec)
                _check_size(given)
                run(on_cpu, given, again=False)
            except NoProbe as reason:
                why = str(reason)
            except Exception:
                continue
            else:
                return spec, ""
    return None, why


def _check_size(given: Call) -> None:
    if (n := sum(x.numel() for x in tensors_in(given))) > _MOST_GIVEN:
        raise NoProbe(f"the inputs have {n:,} entries, and {_MOST_GIVEN:,} are stored at most")


def probed(model: nn.Module, given: Call) -> Probe:
    """What the model gives in eval mode on the CPU, in float64 if it runs in it and is not too large."""
    _check_size(given)
    failure: Exception | None = None
    for wide in (True, False):
        if wide and sum(p.numel() for p in model.parameters()) > _MOST_WIDE:
            continue
        try:
            small = copied(model).cpu().eval()
            return _probed(small.double() if wide else small, mapped(doubled(given) if wide else given, Tensor.cpu))
        except NoProbe:
            raise
        except Exception as error:
            failure = failure or error
    raise NoProbe(f"the model fails on them with {type(failure).__name__}: {failure}")


def _probed(model: nn.Module, given: Call) -> Probe:
    runs = []
    for seed in (0, 1):
        with kept_random():
            torch.manual_seed(seed)
            runs.append(dense_run(model, given))
    (first, rounded), (again, _) = runs
    if not all(same_numbers(x, again.returned[name]) for name, x in first.returned.items()):
        raise NoProbe("the model's outputs are random")
    floating = {name: x for name, x in first.returned.items() if x.is_floating_point() or x.is_complex()}
    dtype, _ = precision(rounded | {x.dtype for x in floating.values()})
    outputs = {name: _entries(x) for name, x in floating.items()}
    return Probe(outputs, {name: [*x.shape] for name, x in floating.items()}, str(dtype).removeprefix("torch."))


def _entries(x: Tensor) -> Tensor:
    """At most `_MOST_KEPT`, at equal distances."""
    x = x.detach().to_dense()
    flat = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
    count = min(len(flat), _MOST_KEPT)
    return flat[torch.linspace(0, len(flat) - 1, count).round().long()] if count else flat


def compare(model: nn.Module, given: Call, wanted: Probe) -> str:
    """How the model differs from one that gave these outputs; nothing if it does not."""
    try:
        found = probed(model, given)
    except NoProbe as error:
        return str(error)
    if found.shapes != wanted.shapes:
        name = next(k for k in (*wanted.shapes, *found.shapes) if found.shapes.get(k) != wanted.shapes.get(k))
        return f"output{name} has the shape {found.shapes.get(name)}, not {wanted.shapes.get(name)}"
    dtype = max((getattr(torch, p.dtype) for p in (found, wanted)), key=lambda d: ALLOWED.get(d, 1.0))
    allowed = ALLOWED.get(dtype, 2e-2) * _ROOM.get(dtype, 2.0)
    for name, entries in wanted.outputs.items():
        gap, _, reason = error_of(entries, found.outputs[name])
        if gap > allowed:
            by = reason or f"by {gap:.1e} of its largest entry, and rounding allows {allowed:.0e}"
            return f"output{name} differs {by}"
    return ""
