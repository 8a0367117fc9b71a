"""Modules that are traced as one: recurrent layers and cells, attention, and our own Gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from espalier.compact.attention import HeadAttention
from espalier.compact.cells import CELLS, Cell, GatherCell
from espalier.compact.layers import Gather
from espalier.compact.layout import Given, select
from espalier.compact.rules.products import columns_of, constants_of, give
from espalier.compact.trace import Reader, Tracer
from espalier.compact.walk import tensors_in

Forward: TypeAlias = Callable[..., Any]
ModuleRule: TypeAlias = Callable[[Tracer, str, Any, Forward, tuple[Any, ...], dict[str, Any]], Any]


def _recurrent(
    tracer: Tracer, name: str, module: nn.RNNBase, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with torch._C.DisableTorchFunction():
        out = forward(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        hx = args[1] if len(args) > 1 else kwargs.get("hx")
        columns = columns_of(tracer, x, -1) if isinstance(x, Tensor) else None
        if columns is None or module.proj_size or hx is not None:
            why = (
                "packed input" if not isinstance(x, Tensor) else "a projection" if module.proj_size else "a given state"
            )
            tracer.leave(name, module, [args, kwargs], why)
        else:
            _units(tracer, name, module, x, columns, out)
    return out


def _units(tracer: Tracer, name: str, module: nn.RNNBase, x: Tensor, columns: Tensor, out: Any) -> None:
    """A unit's gates go with it; it is read by all units of its layer, and by the next one."""
    constant, values = constants_of(tracer, x, -1)
    directions = ["", "_reverse"] if module.bidirectional else [""]
    layers = []
    for layer in range(module.num_layers):
        units = []
        for direction in directions:
            suffix = f"_l{layer}{direction}"
            here = tracer.slot(f"{name}.weight_hh{suffix}", 1)
            units.append(here)
            _gates(tracer, name, suffix, here, columns, here, constant, values, module.bias)
        layers.append(units)
        columns = torch.cat(units)
        constant, values = torch.zeros(len(columns), dtype=torch.bool), torch.zeros(len(columns), dtype=x.dtype)
    # one hidden_size for all of them
    tracer.trace.equal.append([u for units in layers for u in units])
    output, states = out
    never = torch.zeros(len(columns), dtype=torch.bool)
    give(tracer, output, -1, columns, never)
    each = torch.stack([u for units in layers for u in units])
    for state in states if isinstance(states, tuple) else (states,):
        tracer.set(state, each.unsqueeze(1) if state.dim() == 3 else each)


def _gates(
    tracer: Tracer, name: str, suffix: str, units: Tensor, columns: Tensor, own: Tensor, constant: Tensor,
    values: Tensor, bias: bool, shape: tuple[int, ...] = (),
) -> tuple[Reader, Reader]:  # fmt: skip
    """The matrices of a layer or cell, whose rows are its units' gates: one reads inputs, one the units themselves."""
    readers = []
    for kind, read in (("ih", columns), ("hh", own)):
        weight = f"{name}.weight_{kind}{suffix}"
        w = tracer.parameter(weight)
        rows = tracer.slot(weight, 0, units.repeat(w.shape[0] // len(units)))
        known_bias = f"{name}.bias_{kind}{suffix}" if bias else None
        if known_bias:
            tracer.slot(known_bias, 0, rows)
        read = tracer.slot(weight, 1, read)
        still = constant if kind == "ih" else torch.zeros(len(read), dtype=torch.bool)
        known = values if kind == "ih" else torch.zeros(len(read), dtype=w.dtype)
        takes = bias and w.dtype in (torch.float32, torch.float64)
        folds = still & ((known == 0) | takes)
        readers.append(Reader(weight, known_bias, rows, read, (w != 0).cpu(), folds, known, given=Given(shape)))
    tracer.trace.readers += readers
    return readers[0], readers[1]


def _cell(
    tracer: Tracer,
    name: str,
    module: Cell | GatherCell,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A cell is called at every step. Its units are those of the state that it is given and gives."""
    with torch._C.DisableTorchFunction():
        out = forward(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        state = list(tensors_in([args[1:], kwargs.get("hx")]))
        columns, *given = (columns_of(tracer, t, -1) for t in (x, *state))
        weights = [tracer.name(w) for w in (module.weight_ih, module.weight_hh)]
        if columns is None or None in given:
            tracer.leave(name, module, [args, kwargs], "channels in another dimension than it reads")
            return out
        if not all(w and tracer.owner(w) for w in weights):
            tracer.leave(name, module, [args, kwargs], "weights that are shared, or computed")
            return out
        for t in (x, *state):
            if known := tracer.name(t):
                tracer.refuse(known)
        # the rows of one gate after another: those of the first
        units = tracer.slot(f"{name}.weight_hh", 0)[: module.hidden_size]
        for h, its in zip(state, given, strict=True):
            if not tracer.tracked(h):
                tracer.trace.kept.setdefault(f"{name}'s units", "their state cannot lose any")
            assert its is not None
            tracer.trace.units.join(its, units)
        read, own = columns, units
        if isinstance(module, GatherCell):
            tracer.trace.gathers |= {f"{name}.input_index": columns, f"{name}.unit_index": units}
            read, own = columns[module.input_index.cpu()], units[module.unit_index.cpu()]
        read = tracer.slot(f"{name}.weight_ih", 1, read)
        if name not in tracer.trace.cells:
            # at another step an input may be another constant, or none
            none = torch.zeros(len(read), dtype=torch.bool)
            values = torch.zeros(len(read), dtype=x.dtype)
            readers = _gates(
                tracer, name, "", units, read, own, none, values, module.bias_ih is not None, tuple(x.shape)
            )
            tracer.trace.cells[name] = readers
        for h in tensors_in(out):
            give(tracer, h, -1, units, torch.zeros(len(units), dtype=torch.bool))
    return out


def _attention(
    tracer: Tracer,
    name: str,
    module: nn.MultiheadAttention,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with torch._C.DisableTorchFunction():
        out = forward(*args, **kwargs)
        tracer.leave(name, module, [args, kwargs], "attention keeps its width")
        width = module.out_proj.weight.shape[1] // module.num_heads
        read = (module.out_proj.weight != 0).any(0).reshape(-1, width).any(1)
        # weights that the model gives or uses are means over all heads
        # one for all of its calls
        unit = tracer.trace.heads[name][1] if name in tracer.trace.heads else tracer.trace.units.new(1)
        if out[1] is not None:
            tracer.set(out[1], unit.reshape([1] * out[1].dim()))
        if module.bias_k is None and module.bias_v is None and not module.add_zero_attn:
            tracer.trace.heads[name] = read.nonzero().flatten().tolist() or [0], unit
    return out


def _gather(
    tracer: Tracer, name: str, module: Gather, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    (x,) = args
    with torch._C.DisableTorchFunction():
        columns = columns_of(tracer, x, module.dim)
        if columns is None:
            tracer.pin([x], "channels in another dimension than it selects")
            columns = tracer.label(x).flatten()[:0]
        tracer.trace.gathers[f"{name}.index"] = columns
        tag, index = tracer.tag(x), module.index.cpu()
        selected = select(x, module.dim, module.index)
        tracer.set(selected, *(t.index_select(module.dim, index) for t in (tag.label, tag.constant)))
    return module.layer(selected)


MODULE_RULES: tuple[tuple[tuple[type, ...], ModuleRule], ...] = (
    ((nn.LSTM, nn.GRU, nn.RNN), _recurrent),
    ((*CELLS, GatherCell), _cell),
    ((nn.MultiheadAttention, HeadAttention), _attention),
    ((Gather,), _gather),
)
