"""A model with other layers in place of its own, where it bears them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from espalier.compact.examples import Call
from espalier.compact.gather import gather_cells, gather_inputs
from espalier.compact.layout import Given
from espalier.compact.plan import Plan
from espalier.compact.report import GatherRow, LowRankRow
from espalier.compact.rewrite import Kept, Product, products, put_products
from espalier.compact.timing import faster
from espalier.compact.trace import Trace
from espalier.compact.verify import Difference, ShrinkError, check


@dataclass
class Made:
    """A model with layers in place of others."""

    small: nn.Module
    kept: Kept
    difference: Difference
    gathers: list[GatherRow]
    ranks: list[LowRankRow]


def replaced(
    original: nn.Module, small: nn.Module, trace: Trace, found: Plan, kept: Kept, difference: Difference,
    trials: Sequence[Call], slack: float,
    gather: str, inputs: Mapping[str, Given], align: int, low_rank: str, rank_tol: float,
) -> Made:  # fmt: skip
    """With layers that select their inputs, and products of low rank; without, where the model does not bear it."""
    made = Made(small, kept, difference, [], [])
    for selections in ((gather_cells, gather_inputs), (gather_inputs,)) if gather != "never" else ():
        model, its = copy.deepcopy(small), copy.deepcopy(kept)
        rows = [row for select in selections for row in select(model, trace, found, its, gather, align, inputs)]
        if not rows:
            break
        try:
            checked = _checked(original, model, rows, trials, slack)
        except Exception as error:
            trace.kept.setdefault("", f"some layers select nothing, for otherwise: {str(error).splitlines()[0]}")
        else:
            made = Made(model, its, checked, rows, [])
            break
    if low_rank == "never":
        return made
    pay = products(made.small, trace, rank_tol)
    if low_rank == "auto":
        pay = [timed for each in pay if (timed := _worthwhile(each, made.small, trace, inputs)) is not None]
    return _factored(original, made, pay, trace, trials, slack, rank_tol)


def _worthwhile(product: Product, model: nn.Module, trace: Trace, inputs: Mapping[str, Given]) -> Product | None:
    """With the milliseconds of the one layer and of the two, where these are faster; else the trace knows."""
    row, reader = product.row, product.reader
    layer: Any = model.get_submodule(product.place)
    given = inputs.get(row.name, reader.given).of(layer.weight.shape[1], reader.dim)
    doing = f"has rank {row.rank}; making it two layers"
    times = faster(trace, row.name, layer, product.layers, given, doing, 'low_rank="always"')
    return times and replace(product, row=replace(row, ms_before=times[0], ms_after=times[1]))


def _factored(
    original: nn.Module, made: Made, pay: list[Product], trace: Trace, trials: Sequence[Call], slack: float,
    rank_tol: float,
) -> Made:  # fmt: skip
    """With products for layers of low rank: all that the model bears, in halves until what it does not is alone."""
    waiting = [pay]
    while waiting:
        some = waiting.pop()
        if not some:
            continue
        model, its = copy.deepcopy(made.small), copy.deepcopy(made.kept)
        ranks = [*made.ranks, *put_products(model, some, its)]
        try:
            checked = _checked(original, model, ranks, trials, slack + 10 * rank_tol * len(ranks))
        except Exception as error:
            if len(some) > 1:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                trace.tell(some[0].row.name, f"stays one layer, for otherwise: {str(error).splitlines()[0]}")
        else:
            made = replace(made, small=model, kept=its, difference=checked, ranks=ranks)
    return made


def _checked(
    original: nn.Module, model: nn.Module, rows: Sequence[GatherRow | LowRankRow], trials: Sequence[Call], slack: float
) -> Difference:
    """The outputs compared, of a model that calls the layers put in: one that keeps its own in a list beside goes on
    calling these, and computes the same, but not when it is loaded."""
    names = [row.name for row in rows]
    with _called(original, names) as before, _called(model, names) as after:
        difference = check(original, model, trials, slack=slack)
    for name in names:
        if name in before and name not in after:
            raise ShrinkError(f"the model calls {name} by another name than this")
    return difference


@contextmanager
def _called(model: nn.Module, names: Iterable[str]) -> Iterator[set[str]]:
    """Which of these modules are called within."""
    seen: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: seen.add(name)) for name in names
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
