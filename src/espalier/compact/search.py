"""How much a model can lose: all that the trace suggests, or as much of it as passes the check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from espalier.compact.plan import Care, Plan, Slot, heads_slot
from espalier.compact.trace import Trace
from espalier.compact.units import Units

# How many smaller models are tried at most. Each is traced and checked, which takes a few runs of the model.
_TRIES = 32


class Found(Protocol):
    """A smaller model that passed its check, and how it was traced."""

    trace: Trace


T = TypeVar("T", bound=Found)
Region = frozenset[Slot]


def most(attempt: Callable[[Care], T], seen: Callable[[], tuple[Trace, Plan]]) -> T:
    """The result of `attempt` with as little care as it needs.

    attempt: makes and checks a smaller model, or raises.
    seen: traces the model and plans without care.

    Where the code does not follow its layers only the channels to blame stay: they are found in halves.
    """
    try:
        return attempt(Care())
    except Exception as error:
        failure = error
    try:
        found = attempt(Care(folds=False))
    except Exception:
        return _in_halves(attempt, seen)
    found.trace.tell("", f"keeps channels that are constants, because without them: {_line(failure)}")
    return found


def _in_halves(attempt: Callable[[Care], T], seen: Callable[[], tuple[Trace, Plan]]) -> T:
    best, allowed, blamed = attempt(Care(False, frozenset())), frozenset[Slot](), list[tuple[Region, str]]()
    waiting = [part for part in reversed(_regions(*seen())) if part]
    for _ in range(_TRIES):
        if not waiting:
            break
        some = waiting.pop()
        try:
            best = attempt(Care(False, allowed.union(*some)))
        except Exception as error:
            if len(some) > 1:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                blamed.append((some[0], _line(error)))
        else:
            allowed = allowed.union(*some)
    blamed += [(region, "this was not tried") for some in waiting for region in some]
    try:
        best = attempt(Care(True, allowed))
    except Exception:
        best.trace.tell("", "keeps channels that are constants: folding them into biases changes the outputs")
    for region, why in blamed:
        best.trace.tell(_first(best.trace, region), f"keeps its channels, because without them: {why}")
    return best


def _regions(trace: Trace, found: Plan) -> list[list[Region]]:
    """What would leave, in parts that can leave each by itself: first those that nothing speaks against, then those
    that pass through sizes which may be written in the code."""
    sets = Units(list(range(len(found.roots))))

    def gone(labels: Tensor) -> Tensor:
        roots = torch.unique(found.roots[labels])
        dead: Tensor = roots[~found.live[roots]]
        return dead

    together: Iterable[Tensor] = (torch.cat([v.reshape(-1) for v in vectors]) for vectors in trace.equal)
    for labels in (*trace.slots.values(), *together):
        units = gone(labels)
        sets.join(units[:1].expand_as(units), units)
    parts: dict[Any, set[Slot]] = defaultdict(set)
    for slot, labels in trace.slots.items():
        if len(units := gone(labels)):
            parts[sets.find(int(units[0]))].add(slot)
    for name, (_, unit) in trace.heads.items():
        if not found.stays(unit).any():
            parts[name].add(heads_slot(name))
    risky = {sets.find(unit) for labels in trace.risky for unit in gone(labels).tolist()}
    return [[frozenset(part) for key, part in parts.items() if (key in risky) == late] for late in (False, True)]


def _first(trace: Trace, region: Region) -> str:
    """The module whose channels these are, as a rule: the one that makes them."""
    order = {slot: i for i, slot in enumerate(trace.slots)}
    name, _ = min(region, key=lambda slot: (slot[1] != 0, order.get(slot, len(order))))
    return name.rpartition(".")[0] or name


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
