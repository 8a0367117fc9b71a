"""Which channels leave."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from espalier.compact.attributes import Key, Use
from espalier.compact.trace import Reader, Trace
from espalier.compact.units import RIGID


@dataclass(frozen=True)
class Plan:
    """Which units stay."""

    roots: Tensor
    live: Tensor  # by root
    attributes: dict[Key, int] = field(default_factory=dict)  # those that change

    def stays(self, labels: Tensor) -> Tensor:
        return self.live[self.roots[labels]]

    def index(self, labels: Tensor) -> Tensor:
        """Where those stand that stay."""
        return self.stays(labels).nonzero().flatten()

    def reads(self, reader: Reader) -> Tensor:
        """The columns of a product that matter to what stays of its rows."""
        return (reader.nonzero[self.stays(reader.rows)] & ~reader.folds).any(0)


Slot: TypeAlias = tuple[str, int]  # a parameter and one of its dimensions


def heads_slot(attention: str) -> Slot:
    """What stands for the heads of an nn.MultiheadAttention."""
    return f"{attention}.heads", 0


@dataclass(frozen=True)
class Care:
    """How much to leave alone.

    folds: whether constants are folded into biases. Another size of the input may show that they are none.
    allowed: the slots that may lose channels; None for all.
    """

    folds: bool = True
    allowed: frozenset[Slot] | None = None


def plan(trace: Trace, align: int, care: Care) -> Plan:
    """A unit stays if the model's output depends on it, or if a layer needs the number."""
    if not care.folds:
        trace.readers[:] = [replace(r, folds=r.folds & False) for r in trace.readers]
    if care.allowed is not None:
        units = {**trace.slots, **{heads_slot(name): unit for name, (_, unit) in trace.heads.items()}}
        for slot in units.keys() - care.allowed:
            trace.units.pin(units[slot])
    _together(trace)
    _keep_unused(trace)
    while True:
        found = _found(trace, align)
        attributes, wrong = _attributes(trace, found)
        if not wrong:
            return replace(found, attributes=attributes)
        for use in wrong:
            _keep(trace, use)


def _found(trace: Trace, align: int) -> Plan:
    roots = trace.units.roots()
    live = torch.zeros(len(roots), dtype=torch.bool)
    live[RIGID] = True
    found = Plan(roots, live)
    _spread(trace, found)
    _round(trace, found, align)
    return found


def unused(trace: Trace) -> dict[Slot, Tensor]:
    """Units that the outputs would not depend on if every weight were nonzero: what was run does not use them."""
    roots = trace.units.roots()
    used = Plan(roots, torch.zeros(len(roots), dtype=torch.bool))
    used.live[RIGID] = True
    _spread(trace, used, dense=True)
    rest = {slot: labels[~used.stays(labels)] for slot, labels in trace.slots.items()}
    return {slot: labels for slot, labels in rest.items() if len(labels)}


def _keep_unused(trace: Trace) -> None:
    for (name, _), labels in unused(trace).items():
        trace.units.pin(labels)
        trace.tell(name.rpartition(".")[0] or name, "not used in eval mode, and kept for training")


def _together(trace: Trace) -> None:
    """As many channels must stay wherever one attribute is their number."""
    sized = defaultdict(list)
    for use in trace.uses:
        if use.key is not None and use.labels is not None:
            sized[use.key].append(use.labels)
    trace.equal += [vectors for vectors in sized.values() if len(vectors) > 1]


def _attributes(trace: Trace, found: Plan) -> tuple[dict[Key, int], list[Use]]:
    """The attributes that change with the numbers of channels, and the uses that this would make wrong."""
    after: dict[Key, int] = {}
    for use in trace.uses:
        if use.key is not None and use.labels is not None:
            after[use.key] = int(found.stays(use.labels).sum())
    for use in trace.uses:
        if use.labels is not None and use.key is None and not after.keys() & use.keys.keys():
            after |= _factor(use, found)
    wrong = []
    for use in trace.uses:
        expected = use.expected if use.labels is None else int(found.stays(use.labels).sum())
        try:
            right = use.after(after) == expected
        except ArithmeticError:  # such as a division by what is zero now
            right = False
        if not right:
            wrong.append(use)
    before = {key: value for use in trace.uses for key, value in use.keys.items()}
    return {key: n for key, n in after.items() if n != before[key]}, wrong


def _factor(use: Use, found: Plan) -> dict[Key, int]:
    """Of a size such as num_heads · head_dim, the factor that is the number of what leaves as a whole."""
    assert use.labels is not None
    blocks = torch.unique(found.roots[use.labels])
    counts = [key for key, value in use.keys.items() if value == len(blocks)]
    return {counts[0]: int(found.live[blocks].sum())} if len(counts) == 1 else {}


def _keep(trace: Trace, wrong: Use) -> None:
    """The channels whose number would have to change what was read here."""
    for use in trace.uses:
        if use.labels is not None and (use is wrong or use.keys.keys() & wrong.keys.keys()):
            trace.units.pin(use.labels)
    for module, name in wrong.keys:
        trace.tell(module, f"{name} is read as more than a number of channels, so it stays, and they do")


def tell_zeros(trace: Trace, found: Plan, selecting: Collection[str]) -> None:
    """Why zero columns that are left could not leave. Layers that select their inputs need no reason, and what was told
    already is one."""
    told = {*selecting, *trace.kept}
    for reader in trace.readers:
        module, _, leaf = reader.weight.rpartition(".")
        zeros = ~reader.nonzero.any(0)
        if module in told or not zeros.any():
            continue
        if leaf.startswith("weight_hh"):
            why = "a hidden unit leaves only if every gate and every layer that reads it drops it"
        elif bool((found.roots[reader.columns[zeros]] == RIGID).all()):
            why = "they read inputs of the model, or channels that must stay"
        else:
            why = "other layers read these channels, or equal numbers must stay"
        trace.tell(module, f"{int(zeros.sum())} of {len(zeros)} columns of {leaf} are zero, but {why}")


def shared_folds(readers: list[Reader]) -> Iterator[Reader]:
    """A weight that is read in several places has one bias for all of them: it takes up no constant but zero."""
    times = Counter(r.weight for r in readers)
    biases = Counter(r.bias for r in readers)
    for r in readers:
        alone = times[r.weight] == 1 and (r.bias is None or biases[r.bias] == 1)
        yield r if alone else replace(r, folds=r.folds & (r.values == 0), module=None)


def _spread(trace: Trace, found: Plan, dense: bool = False) -> None:
    """From what stays to all that it reads. Units that are not reached are dead, including those in cycles.

    dense: as if no weight were zero.
    """
    roots, live = found.roots, found.live
    before = -1
    while before != (before := int(live.sum())):
        for reader in reversed(trace.readers):
            read = found.stays(reader.rows).any() if dense else found.reads(reader)
            live[roots[reader.columns[read.expand(len(reader.columns))]]] = True
        for needing, needed in trace.needs:
            if found.stays(needing).any():
                live[roots[needed]] = True


def _round(trace: Trace, found: Plan, align: int) -> None:
    """Let more units stay where layers need equal numbers, one channel at least, or multiples. These are not read:
    what they hold does not matter, so that nothing else must stay for them."""
    before = -1
    while before != (before := int(found.live.sum())):
        for vectors in trace.equal:
            most = max(int(found.stays(v).sum()) for v in vectors)
            for v in vectors:
                _revive(found, v, most)
        for labels in trace.slots.values():
            stay = max(1, int(found.stays(labels).sum()))
            _revive(found, labels, min(len(labels), math.ceil(stay / align) * align))


def _revive(found: Plan, labels: Tensor, count: int) -> None:
    missing = count - int(found.stays(labels).sum())
    for unit in labels.tolist() if missing > 0 else ():
        root = found.roots[unit]
        if not found.live[root]:
            found.live[root] = True
            if int(found.stays(labels).sum()) >= count:
                return
