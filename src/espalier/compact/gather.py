"""Layers that select their inputs, where others need the channels that they do not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from espalier.compact.cells import GatherCell
from espalier.compact.layers import Gather
from espalier.compact.layout import Given, select
from espalier.compact.plan import Plan
from espalier.compact.report import GatherRow
from espalier.compact.rewrite import Kept, fix_sizes, fold, hooked
from espalier.compact.timing import faster
from espalier.compact.trace import Reader, Trace


def gather_inputs(
    model: nn.Module, trace: Trace, plan: Plan, kept: Kept, gather: str, align: int, inputs: Mapping[str, Given]
) -> list[GatherRow]:  # fmt: skip
    """Where it pays, or always: name, inputs before and after, milliseconds before and after. Layers are timed with
    such inputs, or else with such as were traced."""
    rows: list[GatherRow] = []
    for reader in trace.readers:
        if not reader.module:  # nothing can stand in the place of the model itself
            continue
        here = plan.index(reader.columns)
        read = _rounded(plan.reads(reader)[here], align)
        if bool(read.all()):
            continue
        index = read.nonzero().flatten()
        layer: Any = model.get_submodule(reader.module)
        if hooked(layer):
            continue
        smaller = copy.deepcopy(layer)
        _take_up(smaller, reader, plan, here, read)
        dim = 0 if reader.transposed else 1
        weight = nn.Parameter(select(layer.weight.detach(), dim, index.to(layer.weight.device)))
        smaller.weight = weight.requires_grad_(layer.weight.requires_grad)
        fix_sizes(smaller)
        parent = model.get_submodule(reader.module.rpartition(".")[0])
        inside = isinstance(parent, Gather) and reader.module.endswith(".layer")
        made = Gather(smaller, reader.dim, index.to(layer.weight.device))
        if not inside and _bytes(made) >= _bytes(layer):
            continue
        given = inputs.get(reader.module, reader.given).of(len(here), reader.dim)
        found = GatherRow(reader.module, len(here), len(index))
        row = found if inside or gather == "always" else _worthwhile(found, layer, made, given, trace)
        if row is None:
            continue
        kept.narrow(reader.weight, dim, index)
        if inside:
            assert isinstance(parent, Gather)
            parent.index = parent.index[index.to(parent.index.device)]
            model.set_submodule(reader.module, smaller)
        else:
            model.set_submodule(reader.module, made)
            for leaf in ("weight", "bias"):
                kept.renamed[f"{reader.module}.{leaf}"] = f"{reader.module}.layer.{leaf}"
        rows.append(row)
    return rows


def gather_cells(
    model: nn.Module, trace: Trace, plan: Plan, kept: Kept, gather: str, align: int, inputs: Mapping[str, Given]
) -> list[GatherRow]:  # fmt: skip
    """Recurrent cells, which select from their inputs and from their own units."""
    rows = []
    for name, readers in trace.cells.items():
        cell: Any = model.get_submodule(name)
        reads = [_rounded(plan.reads(r)[plan.index(r.columns)], align) for r in readers]
        if not name or hooked(cell) or all(bool(r.all()) for r in reads):
            continue
        indices = [r.nonzero().flatten() for r in reads]
        made = GatherCell(cell, *indices)
        if _bytes(made) >= _bytes(cell):
            continue
        given = inputs.get(name, readers[0].given).of(cell.input_size, -1)
        found = GatherRow(name, sum(map(len, reads)), sum(map(len, indices)))
        selects = isinstance(cell, GatherCell)
        row = found if selects or gather == "always" else _worthwhile(found, cell, made, given, trace)
        if row is None:
            continue
        for reader, index in zip(readers, indices, strict=True):
            kept.narrow(reader.weight, 1, index)
        model.set_submodule(name, made)
        rows.append(row)
    return rows


def _bytes(module: nn.Module) -> int:
    """With the indices of a selection."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def _worthwhile(row: GatherRow, layer: nn.Module, made: nn.Module, given: Given, trace: Trace) -> GatherRow | None:
    """With the milliseconds of both layers, where the one that selects is the faster; else the trace knows."""
    doing = f"reads {row.read} of {row.given} channels; selecting them"
    times = faster(trace, row.name, layer, made, given, doing, 'gather="always"')
    return times and replace(row, ms_before=times[0], ms_after=times[1])


def _rounded(read: Tensor, align: int) -> Tensor:
    """At least one, and a multiple."""
    read = read.clone()
    missing = min(len(read), -(-max(1, int(read.sum())) // align) * align) - int(read.sum())
    read[(~read).nonzero().flatten()[:missing]] = True
    return read


def _take_up(layer: nn.Module, reader: Reader, plan: Plan, here: Tensor, read: Tensor) -> None:
    """The constants that are no longer read, into the bias."""
    part = Reader(
        "weight", "bias" if getattr(layer, "bias", None) is not None else None, plan.index(reader.rows), here,
        reader.nonzero, reader.folds[here], reader.values[here], reader.transposed, "",
    )  # fmt: skip
    fold(layer, part, ~read)
