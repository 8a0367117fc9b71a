"""How structured a model is: read off the weights, never off the optimizer's state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from espalier.checks import refuse_dtensor
from espalier.groupings import as_grouping, partition_of
from espalier.optim.checkpoint import Group, named
from espalier.optim.emptied import Layer, StructureWarning, may_empty, too_strong, too_weak, warn_of_emptied
from espalier.optim.wrappers import unwrap
from espalier.penalties.base import Penalty, Structure
from espalier.tables import table

# as espalier.shrink takes them: a tensor, a tuple of arguments, or a dict of arguments by name
Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class LayerStructure:
    """The structure of one penalised tensor. Ranks are None where its groups are not matrices."""

    name: str
    shape: tuple[int, ...]
    groups: int
    zero_groups: int
    zero_elements: int
    rank: int | None = None
    full_rank: int | None = None

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class StructureReport:
    """The structure of all penalised tensors, each and together. Shares are between 0 and 1; print it for a table.

    Attributes:
        layers: one row for each penalised tensor.
        warnings: what is wrong with the structure, such as layers without any group left; one line each.
        parameters: of the model, None unless `structure` was given it.
        shrunk_parameters: what `shrink` would leave of them.
    """

    layers: tuple[LayerStructure, ...]
    warnings: tuple[str, ...] = ()
    parameters: int | None = None
    shrunk_parameters: int | None = None

    @property
    def _grouped(self) -> list[LayerStructure]:
        return [x for x in self.layers if x.rank is None]

    @property
    def weighted_group_sparsity(self) -> float:
        """The share of weights in groups that are zero: the paper's structured sparsity."""
        grouped = self._grouped
        zero = sum(x.elements * _share(x.zero_groups, x.groups) for x in grouped)
        return _share(zero, sum(x.elements for x in grouped))

    @property
    def group_sparsity(self) -> float:
        """The share of groups that are zero, large or small."""
        return _share(sum(x.zero_groups for x in self._grouped), sum(x.groups for x in self._grouped))

    @property
    def element_sparsity(self) -> float:
        """The share of single weights that are zero."""
        return _share(sum(x.zero_elements for x in self.layers), sum(x.elements for x in self.layers))

    @property
    def low_rank_level(self) -> float:
        """1 − Σ rank / Σ min(m, n) over the matrices of the nuclear norm, the paper's measure.

        A singular value counts toward the rank when it exceeds max(m, n) ε σ_max, ε of float32 or of the weights' own
        type where that is finer.
        """
        matrices = [x for x in self.layers if x.rank is not None]
        full = sum(x.full_rank or 0 for x in matrices)
        return 1 - sum(x.rank or 0 for x in matrices) / full if full else 0.0

    @property
    def removable(self) -> float | None:
        """The share of the parameters that `shrink` would remove; None unless `structure` was given the model."""
        if self.parameters is None or self.shrunk_parameters is None:
            return None
        return 1 - self.shrunk_parameters / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        rows = [
            (
                x.name,
                "×".join(map(str, x.shape)),
                f"{x.zero_groups} / {x.groups}" if x.rank is None else "–",
                f"{_share(x.zero_groups, x.groups):.1%}" if x.rank is None else "–",
                f"{_share(x.zero_elements, x.elements):.1%}",
                "–" if x.rank is None else f"{x.rank} / {x.full_rank}",
            )
            for x in self.layers
        ]
        head = ("layer", "shape", "zero groups", "share", "zero weights", "rank")
        return "\n".join((table(head, rows), "", *self._totals()))

    def _totals(self) -> Iterator[str]:
        shares = [f"zero weights {self.element_sparsity:.2%}"]
        if self._grouped:
            yield (
                f"{self.weighted_group_sparsity:.2%} of the penalised weights are in groups that are zero "
                "(weighted group sparsity)"
            )
            shares.insert(0, f"zero groups {self.group_sparsity:.2%}")
        if len(self._grouped) < len(self.layers):
            shares.append(f"low-rank level {self.low_rank_level:.2%}")
        yield ", ".join(shares)
        if self.removable is not None:
            change = f"{self.parameters:,} → {self.shrunk_parameters:,}"
            yield f"shrink would remove {self.removable:.1%} of the model's parameters ({change})"
        yield from (f"warning: {line}" for line in self.warnings)


@dataclass(frozen=True)
class Penalised:
    """A penalised parameter with the structure that it has now."""

    name: str
    tensor: Tensor
    penalty: Penalty
    structure: Structure
    groups: int

    @property
    def as_trained(self) -> Layer:
        zero, rank, full_rank = self.structure.zero, self.structure.rank, self.structure.full_rank
        full = rank is None or int(rank.min()) == full_rank
        return Layer(self.name, self.tensor, self.penalty, bool(zero.all()), full and not bool(zero.any()))


def penalised(target: Optimizer | Iterable[Group]) -> list[Penalised]:
    found = []
    groups = target.param_groups if isinstance(target, Optimizer) else listed(target)
    for j, group in enumerate(groups):
        penalty: Penalty | None = group.get("penalty")
        if penalty is None:
            continue
        grouping = as_grouping(group.get("grouping") or penalty.default_grouping)
        for p, name in _with_names(group, j):
            refuse_dtensor(p, name, "structure()")
            groups_of_p = partition_of(grouping, p.shape)
            x = groups_of_p.split(p.detach())
            found.append(Penalised(name, p, penalty, penalty.structure(x, groups_of_p), groups_of_p.count))
    if not found:
        raise ValueError(
            "there is no penalised parameter to look at. Pass an Espalier optimizer, or the groups that "
            "espalier.regularize returned."
        )
    return found


def warned(target: Any, found: Iterable[Penalised], *, stacklevel: int) -> tuple[str, ...]:
    """Lines about what a penalty took too much or too little of, of which the user is also warned, once for each.

    Groups alone do not say what was trained, so that this is about optimizers of this package, wrapped ones too.
    """
    try:
        optimizer = unwrap(target)
    except TypeError:
        return ()
    trained = [
        x.as_trained for x in found if optimizer.state.get(x.tensor) and x.tensor.numel() and may_empty(x.penalty)
    ]
    warn_of_emptied(optimizer, trained, stacklevel=stacklevel + 1)
    return (*too_strong(trained), *too_weak(optimizer, trained))


def listed(groups: Iterable[Group]) -> list[Group]:
    """The groups, with parameters that can be walked more than once."""
    listed = [groups] if isinstance(groups, dict) or not isinstance(groups, Iterable) else list(groups)
    if isinstance(groups, dict) or not all(isinstance(g, dict) for g in listed):
        raise TypeError("pass an Espalier optimizer, or the groups that espalier.regularize returned.")
    return [{**g, "params": [p] if isinstance(p := g["params"], Tensor) else list(p)} for g in listed]


def _with_names(group: Group, index: int) -> Iterable[tuple[Tensor, str]]:
    params = list(group["params"])
    if params and isinstance(params[0], tuple):  # as regularize returns them: (name, parameter)
        return [(p, name) for name, p in params]
    return named({**group, "params": params}, index)


def structure(
    target: Optimizer | Iterable[Group], model: nn.Module | None = None, example_inputs: Inputs | None = None
) -> StructureReport:
    """The structure of the weights that an optimizer, or groups from `regularize`, penalise.

    Sparsity is not yet size: some zeros cannot be removed, and others take more with them. Give the model and example
    inputs, as for `shrink`, and the report says how many parameters `shrink` would leave. That shrinks a copy, without
    timing anything; with `gather` the real one may be smaller. The model stays as it is.

    Look inside `optimizer.structured()` to see the structured point of a dual averaging method. The report's warnings
    name trained layers that are zero as a whole, and say so if the run is over and nothing is zero. A
    `StructureWarning` says the same, once.
    """
    if (model is None) != (example_inputs is None):
        raise TypeError("give the model and example inputs together: structure(optimizer, model, example_inputs).")
    found = penalised(target)
    report = StructureReport(tuple(map(_measured, found)), warned(target, found, stacklevel=2))
    return report if model is None or example_inputs is None else _with_sizes(report, model, example_inputs)


def _with_sizes(report: StructureReport, model: nn.Module, example_inputs: Inputs) -> StructureReport:
    """The report, with what shrinking a copy of the model gives."""
    import espalier  # what shrinks loads when it is first asked for

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StructureWarning)  # the report has it
            sizes = espalier.shrink(model, example_inputs, gather="never", latency=False).report
    except espalier.ShrinkError as error:
        return replace(report, warnings=(*report.warnings, f"shrink refuses this model: {error}"))
    return replace(report, parameters=sizes.dense.parameters, shrunk_parameters=sizes.small.parameters)


def _measured(x: Penalised) -> LayerStructure:
    rank, full_rank = x.structure.rank, x.structure.full_rank
    return LayerStructure(
        name=x.name,
        shape=tuple(x.tensor.shape),
        groups=x.groups,
        zero_groups=int(x.structure.zero.sum()),
        zero_elements=x.tensor.numel() - int(x.tensor.count_nonzero()),
        rank=None if rank is None else int(rank.sum()),
        full_rank=None if full_rank is None else x.groups * full_rank,
    )
