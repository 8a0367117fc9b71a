"""A penalty that took everything from a layer, or nothing from any: found, and said in words with what to try."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from espalier.optim.checkpoint import named
from espalier.penalties.base import Penalty

_NAMES = 3  # as many names a message lists
# the structured point may lose a layer for a while as long as lr is high, and a shortcut or a branch may go for good:
# on digits RAMDA ended at 99% after either
_UNLESS_GOOD = "If that lasts and the quality suffers, "


class StructureWarning(UserWarning):
    """A penalty set a whole layer to zero, or nothing at all: its λ does not fit the model or the run."""


@dataclass(frozen=True)
class Layer:
    """A penalised parameter that has been trained, and whether it is zero as a whole or has lost nothing."""

    name: str
    tensor: Tensor
    penalty: Penalty
    empty: bool
    untouched: bool = False


# The parameters that each optimizer has warned of, by identity. Not in the optimizer: copies of it begin anew.
_warned: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def may_empty(penalty: Penalty) -> bool:
    """Whether a penalty can set anything to zero: λ = 0 cannot."""
    return _lam(penalty) != 0


def too_strong(layers: Sequence[Layer]) -> tuple[str, ...]:
    """One line about the layers that are zero as a whole, or none. Every layer that may be so is among `layers`."""
    empty = [x for x in layers if x.empty]
    if not empty:
        return ()
    if len(empty) == len(layers):
        which = f"all {len(layers)} penalised layers" if len(layers) > 1 else layers[0].name
        return (f"every group of {which} is zero. {_UNLESS_GOOD}{_advice(empty, 'large', '/ 10', 0.1)}",)
    what = f"every group of {_listed([x.name for x in empty])} is zero"
    unless = "Unless the model has a path around a zero layer, its output does not depend on what comes before it"
    return (f"{what}. {unless}. {_UNLESS_GOOD}{_advice(empty, 'large', '/ 10', 0.1)}",)


def too_weak(optimizer: Optimizer, layers: Sequence[Layer]) -> tuple[str, ...]:
    """The line for a run that is over and whose penalty removed nothing, or none.

    That a run is over is known if the optimizer was told `total_steps`: c has then grown to 1.
    """
    if not layers or not all(x.untouched for x in layers):
        return ()
    # last, because `floor` may be a tensor on a device, which would be waited for
    if any(float(g.get("floor", 0.0)) < 1 for g in optimizer.param_groups if g.get("penalty") is not None):
        return ()
    which = f"the {len(layers)} penalised layers" if len(layers) > 1 else layers[0].name
    return (f"the run is over, and no group of {which} is zero: {_advice(layers, 'small', '× 3', 3)}",)


def warn_of_emptied(optimizer: Optimizer, layers: Sequence[Layer] | None = None, *, stacklevel: int) -> None:
    """Warn of layers that are zero as a whole, once for each parameter of an optimizer, and of a run without any zero.

    Without `layers` the optimizer's parameters are read if they are on the CPU. On a device that would wait for it, so
    there only what reads the structure anyway can tell.
    """
    layers = list(_trained(optimizer)) if layers is None else layers
    told = _warned.setdefault(optimizer, set())
    for line in too_weak(optimizer, layers) if id(optimizer) not in told else ():
        told.add(id(optimizer))
        warnings.warn(line, StructureWarning, stacklevel=stacklevel + 1)
    new = {id(x.tensor) for x in layers if x.empty} - told
    if not new:
        return
    told |= new
    all_gone = all(x.empty for x in layers)
    shown = layers if all_gone else [x for x in layers if id(x.tensor) in new or not x.empty]
    for line in too_strong(shown):
        warnings.warn(line, StructureWarning, stacklevel=stacklevel + 1)


def _trained(optimizer: Optimizer) -> Iterable[Layer]:
    found: list[tuple[str, Tensor, Penalty]] = []
    for j, group in enumerate(optimizer.param_groups):
        penalty: Penalty | None = group.get("penalty")
        if penalty is not None and may_empty(penalty):
            found += [(name, p, penalty) for p, name in named(group, j) if optimizer.state.get(p) and p.numel()]
    if any(p.device.type != "cpu" for _, p, _ in found):
        return
    for name, p, penalty in found:
        yield Layer(name, p, penalty, not p.detach().any())


def _lam(penalty: Penalty) -> float | None:
    """λ, which every penalty of this package and most of users' own keep under this name."""
    lam = vars(penalty).get("lam")
    return float(lam) if isinstance(lam, int | float) else None


def _advice(layers: Iterable[Layer], what: str, change: str, factor: float) -> str:
    penalties = {(type(x.penalty).__name__, lam) for x in layers if (lam := _lam(x.penalty)) is not None}
    if not penalties:
        return f"the penalty is too {'strong' if what == 'large' else 'weak'}."
    tries = ", ".join(f"{kind}({factor * lam:g})" for kind, lam in sorted(penalties))
    value = f"λ = {next(iter(penalties))[1]:g}" if len(penalties) == 1 else "λ"
    return f"{value} is too {what}. Try λ {change}: {tries}."


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    more = ", ..." if len(names) > _NAMES else ""
    return f"{len(names)} layers ({', '.join(names[:_NAMES])}{more})"
