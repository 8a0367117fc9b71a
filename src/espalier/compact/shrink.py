"""From exact structure to a smaller model that computes the same."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from espalier.checks import check_number
from espalier.compact.gather import gather_inputs
from espalier.compact.layers import Gather, factor
from espalier.compact.optimizer import carried_over
from espalier.compact.plan import Plan, plan, shared_folds
from espalier.compact.report import LowRankRow, ShrinkReport, measure
from espalier.compact.rewrite import Kept, remove
from espalier.compact.trace import Trace, Tracer, tensors_in
from espalier.compact.verify import ShrinkError, check, outputs, random_like

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]

# what rounding a bias that takes up constants may change, in float32
_FOLDED = 1e-6


class Untraceable(ShrinkError):
    """The model fails on its example inputs."""


@dataclass(frozen=True)
class Shrunk:
    """A smaller model, how it compares with the dense one, and what stayed of each parameter."""

    model: nn.Module
    report: ShrinkReport
    kept: Kept = field(repr=False)
    dense: dict[str, nn.Parameter] = field(repr=False)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer of the same kind for the smaller model, with the state of what stayed.

        Training goes on as it would on the dense model if what was removed stayed at zero: group weights remain those
        of the dense layers' sizes. Layers that became two of low rank, or attention with fewer heads, start anew and
        without a penalty.
        """
        return carried_over(optimizer, self.model, self.kept, self.dense)

    def __str__(self) -> str:
        return str(self.report)


def shrink(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    gather: Literal["auto", "always", "never"] = "auto",
    low_rank: bool = True,
    rank_tol: float = 1e-6,
    align: int = 1,
    ignore: Sequence[str] = (),
    also: Sequence[Inputs] = (),
    latency: bool = True,
    inplace: bool = False,
) -> Shrunk:
    """Remove what a model does not need, and check that it computes the same.

    model: it is left as it is, unless `inplace`. Its outputs are those of eval mode, and only these stay the same:
        batch norm's statistics are constants there.
    example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. The model is run on them, once, to
        see what becomes of each channel; where its code branches, what holds is the branch taken here.
    gather: where a layer does not read some channels that others read, let it select its inputs: "auto" where that was
        faster on this device with these inputs, by measurement.
    low_rank: make two layers of a Linear or convolution of rank r where r (m + n) < m n. `rank_tol` says which singular
        values count, relative to the largest; the report bounds what was cut off.
    align: keep numbers of channels at multiples of this, such as 8, 16 or 32, by keeping some that are not needed.
    ignore: names of modules to leave alone, with the channels that they read.
    also: more inputs to compare the outputs on, beside the examples and random ones like them.
    """
    args = as_arguments(model, example_inputs)
    _check(model, args, gather, align, ignore)
    check_number("rank_tol", rank_tol, high=1.0)
    dense = dict(model.named_parameters(remove_duplicate=False))
    with _evaluating(model) as modes:
        trials = [args, *_random(model, args), *(as_arguments(model, inputs) for inputs in also)]
        slack = 0.0 if all(p.dtype == torch.float64 for p in model.parameters()) else _FOLDED
        for careful in (False, True):
            small, kept = copy.deepcopy(model), Kept()
            try:
                trace, found = _remove(small, args, ignore, align, careful, kept)
                difference = check(model, small, trials, slack=slack)
                break
            except Untraceable:
                raise
            except Exception:
                # sizes written in the model's code do not follow its layers: keep the channels that go through them
                if careful:
                    raise
        gathers = gather_inputs(small, trace, found, kept, gather, align)
        ranks = _factor(small, trace, kept, rank_tol) if low_rank else []
        if gathers or ranks:
            difference = check(model, small, trials, slack=slack + 10 * rank_tol * len(ranks))
        report = measure(model, small, args, difference, _reasons(trace), ranks, gathers, latency)
    _restore(small, modes)
    if inplace:
        _become(model, small)
        small = model
    return Shrunk(small, report, kept, dense)


def as_arguments(model: nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """Example inputs in the order of the model's forward."""
    if not isinstance(inputs, Mapping):
        return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    bound = inspect.signature(model.forward).bind(**inputs)
    bound.apply_defaults()
    if any(bound.kwargs.values()):
        raise ValueError(f"{', '.join(bound.kwargs)} can only be given by name: wrap the model in one that does.")
    return bound.args


def _random(model: nn.Module, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Random inputs, if the model takes them: lengths and indices may not be just any."""
    drawn = random_like(args, 0)
    try:
        outputs(model, drawn)
    except Exception:
        return []
    return [drawn]


def _check(model: nn.Module, args: tuple[Any, ...], gather: str, align: int, ignore: Sequence[str]) -> None:
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{kind} is compiled by TorchScript: shrink the model that it was made from.")
    if hasattr(model, "_orig_mod"):
        raise TypeError("the model is compiled: shrink the one given to torch.compile, and compile the result.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"the model is wrapped in {kind}: shrink model.module.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {kind}.")
    if gather not in ("auto", "always", "never"):
        raise ValueError(f'gather must be "auto", "always" or "never", not {gather!r}.')
    check_number("align", align, low=1)
    names = {name for name, _ in model.named_modules()}
    for name in ignore:
        if name not in names:
            raise ValueError(f"ignore names {name!r}, and the model has no such module.")
    devices = {p.device for p in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(f"the model is on several devices, {', '.join(sorted(map(str, devices)))}: move it to one.")
    for x in tensors_in(args):
        if devices and x.device not in devices:
            raise ValueError(f"an example input is on {x.device}, the model on {devices.pop()}: move one of them.")
    for name, module in model.named_modules():
        if module.__dict__.get("forward") is not None:
            raise TypeError(f"{name or 'the model'} has a forward of its own on the instance, which a copy shares: "
                            "define it in the class.")  # fmt: skip


def _remove(
    model: nn.Module, args: tuple[Any, ...], ignore: Sequence[str], align: int, careful: bool, kept: Kept
) -> tuple[Trace, Plan]:
    """Until nothing more can go: a grouped convolution of one group is an ordinary one."""
    reasons: dict[str, str] = {}
    while True:
        trace = _trace(model, args, ignore)
        reasons |= trace.kept
        found = plan(trace, align, careful)
        if not remove(model, trace, found, kept):
            trace.kept |= reasons
            return trace, found


def _trace(model: nn.Module, args: tuple[Any, ...], ignore: Sequence[str]) -> Trace:
    tracer = Tracer(model, ignore)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it goes past the modules
    try:
        trace = tracer.run(args)
    except Exception as error:
        where = tracer.place or "the model"
        raise Untraceable(
            f"the model could not be traced: {where} failed on the example inputs with {type(error).__name__}: "
            f"{error}. If the model runs on them outside shrink, leave that module alone by ignore=[{where!r}]."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    trace.readers[:] = shared_folds(trace.readers)
    return trace


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[dict[str, bool]]:
    modes = {name: m.training for name, m in model.named_modules()}
    model.eval()
    try:
        yield modes
    finally:
        _restore(model, modes)


def _restore(model: nn.Module, modes: dict[str, bool]) -> None:
    """The modes that modules had before; what replaces one has its."""
    for name, module in model.named_modules():
        while name not in modes:
            name = name.rpartition(".")[0]
        module.training = modes[name]


def _factor(model: nn.Module, trace: Trace, kept: Kept, rtol: float) -> list[LowRankRow]:
    """Two layers for each of low rank."""
    rows = []
    for name in dict.fromkeys(reader.module for reader in trace.readers if reader.module):
        place = f"{name}.layer" if isinstance(model.get_submodule(name), Gather) else name
        layer: Any = model.get_submodule(place)
        if (made := factor(layer, rtol)) is not None:
            model.set_submodule(place, made[0])
            kept.gone |= {f"{name}.weight", f"{name}.bias"}
            rows.append(LowRankRow(name, made[0].spec()["rank"], made[1]))
    return rows


def _reasons(trace: Trace) -> tuple[str, ...]:
    return tuple(f"{name or 'the model'}: {why}" for name, why in trace.kept.items())


def _become(model: nn.Module, small: nn.Module) -> None:
    """Let a model be what its smaller copy is."""
    model.__dict__.update({k: v for k, v in small.__dict__.items() if k != "training"})
