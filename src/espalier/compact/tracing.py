"""Traces of a model: of copies, in eval mode and, if that does not use all of it, in training mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from espalier.compact.copies import ShrinkError, copied, for_a_run
from espalier.compact.examples import Call, cloned
from espalier.compact.plan import shared_folds, unused
from espalier.compact.runs import results
from espalier.compact.trace import Trace, Tracer
from espalier.compact.walk import left_behind


def trace_of(model: nn.Module, inputs: Call, ignore: Sequence[str], left: Collection[str]) -> Trace:
    """Of a copy, in eval mode; and in training mode too, if that may use layers which eval mode does not."""
    trace = _traced(for_a_run(model), inputs, ignore, left)
    if unused(trace) or _not_run(model, trace):
        try:
            trace = _traced(copied(model), inputs, ignore, left, training=True)
        except Exception as error:
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            trace.tell(
                "", f"some layers only training uses, and it fails on the examples, so that they may not fit: {why}"
            )
        for name in _not_run(model, trace):
            trace.tell(name.rpartition(".")[0] or name, "not run on the examples: code that runs it may not fit")
    trace.readers[:] = shared_folds(trace.readers)
    return trace


def _not_run(model: nn.Module, trace: Trace) -> list[str]:
    """Parameters and buffers that nothing has read."""
    run = {name for name, _ in trace.slots}
    held = (*model.named_parameters(), *model.named_buffers())
    return [name for name, x in held if x.dim() and x.is_floating_point() and name not in run]


def _traced(
    model: nn.Module, inputs: Call, ignore: Sequence[str], left: Collection[str], training: bool = False
) -> Trace:
    """What it leaves on its modules is a result: `left` by name, and all that hooks hold."""
    registered = {id(x): x for x in (*model.parameters(), *model.buffers())}
    tracer = Tracer(model, ignore)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it goes past the modules
    try:
        try:
            tracer.run(*cloned(inputs))
        except ShrinkError:
            raise
        except Exception:  # code may want integers that are nothing more
            tracer = Tracer(model, ignore, follow=False)
            tracer.run(*cloned(inputs))
        _pin_left(tracer, registered, left)
        if training:
            tracer.run_training(*cloned(inputs))
            _pin_left(tracer, registered, left)
    except ShrinkError:
        raise
    except Exception as error:
        where = tracer.place
        way_out = f" Leave that module alone by ignore=[{where!r}]."
        raise ShrinkError(
            f"the model could not be traced: {where or 'it'} failed with {type(error).__name__}: {error}."
            f"{way_out if where else ''}"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return tracer.trace


def _pin_left(tracer: Tracer, registered: Mapping[int, Tensor], left: Collection[str]) -> None:
    """Keep the channels of results that were left on modules."""
    model = tracer.model
    mine = {name: x for name, x in results(model, set(registered)).items() if name in left}
    for x in (*mine.values(), *(x for name, x in left_behind(model, hooks=True) if "_hooks" in name)):
        if id(x) not in registered:
            tracer.trace.units.pin(tracer.label(x))
