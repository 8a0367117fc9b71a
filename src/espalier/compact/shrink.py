"""From exact structure to a smaller model that computes the same."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from espalier.checks import check_number
from espalier.compact.asked import check_given, first_run, of_batch, random_run
from espalier.compact.copies import ShrinkError, copied
from espalier.compact.denormals import denormal
from espalier.compact.examples import Call, Inputs, as_given
from espalier.compact.nothing import nothing_left
from espalier.compact.optimizer import carried_over
from espalier.compact.plan import Care, Plan, plan, tell_zeros
from espalier.compact.probe import found_for, record
from espalier.compact.replaced import replaced
from espalier.compact.report import ShrinkReport, measure
from espalier.compact.rewrite import Kept, remove
from espalier.compact.runs import dependent, kept_random
from espalier.compact.search import most
from espalier.compact.sizes import other_sizes
from espalier.compact.timing import inputs_given
from espalier.compact.trace import Trace
from espalier.compact.tracing import trace_of
from espalier.compact.training import Training
from espalier.compact.verify import Difference, check
from espalier.optim.emptied import StructureWarning

# what rounding a bias that takes up constants may change, in float32
_FOLDED = 1e-6
# numbers of channels that convolutions on a GPU are fast with: see docs/performance.md
_ALIGN_ON_CUDA = 8
# Of half precision it is eps / 8. That cuts what rounding adds to a product of two Gaussian matrices, up to 0.12 eps of
# the largest singular value for 64 to 1024 rows, and changes outputs as much as rounding the weights does: by 1.6e-3 in
# bfloat16 if 60 of 256 singular values are 1 and the others at the tolerance.
_RANK_TOL = {torch.float32: 1e-6, torch.float64: 1e-13}


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
    low_rank: bool | Literal["auto", "always", "never"] = "always",
    rank_tol: float | None = None,
    align: int | None = None,
    ignore: Sequence[str] = (),
    also: Sequence[Inputs] = (),
    timed: Inputs | None = None,
    latency: bool = True,
    inplace: bool = False,
) -> Shrunk:
    """Remove what a model does not need, and check that it computes the same.

    Outputs are compared on the examples, on random inputs like them, and at other sizes that the model takes: other
    batches, and lengths and images of one more, one less, one alone and, if they are little, twice as many. At most 20
    runs find out which. All that the model returns or leaves on its modules is compared, each time from a fresh copy,
    and a second call, too, if the first changes the model's state. What is handed out was never run. If something
    differs, more channels are kept, and the report says which and why.

    model: it is left as it is, unless `inplace`, and only copies of it are run. Its outputs are those of eval mode, and
        only these stay the same: batch norm's statistics are constants there. Denormal numbers among weights (not
        float16's) count as zeros, where outputs differ by no more than rounding then.
    example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. The model is run on them, once, to
        see what becomes of each channel; where its code branches, what holds is the branch taken here.
    gather: where a layer does not read some channels that others read, let it select its inputs: "auto" where that was
        faster on this device with these inputs, by measurement.
    low_rank: make two layers of a Linear or convolution of rank r where r (m + n) < m n; "auto" where they were faster,
        too, as with `gather`; True and False are "always" and "never". `rank_tol` says which singular values count,
        relative to the largest. Unless given it is 1e-6 in float32, 1e-13 in float64, and eps / 8 in types of half
        precision (1e-3 in bfloat16, 1.2e-4 in float16). The report bounds what was cut off.
    align: keep numbers of channels at multiples of this, by keeping some that are not needed. Unless given it is 8 on a
        CUDA device, where the few more channels cost less than an odd number, and 1 elsewhere.
    ignore: names of modules to leave alone, with the channels that they read.
    also: more inputs to compare the outputs on, beside the examples and random ones like them.
    timed: what FLOPs, latency and the gain of what is "auto" are measured with, if not with the examples: a batch as it
        is served, on which the models run for that alone. Outputs are not compared on it.
    """
    inputs = as_given(example_inputs)
    served = inputs if timed is None else as_given(timed)
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    if isinstance(also, Tensor | Mapping):
        raise TypeError("also is a list of inputs, each as example_inputs are: put it into [ ].")
    factors = ("always" if low_rank else "never") if isinstance(low_rank, bool) else low_rank
    check_given(model, (inputs, served), {"gather": gather, "low_rank": factors}, align, ignore)
    align = align or (_ALIGN_ON_CUDA if any(p.is_cuda for p in model.parameters()) else 1)
    coarsest = _coarsest(model)
    rank_tol = _RANK_TOL.get(coarsest, torch.finfo(coarsest).eps / 8) if rank_tol is None else rank_tol
    check_number("rank_tol", rank_tol, high=1.0)
    try:
        with kept_random(model):
            return _shrunk(
                model, inputs, served if timed is not None else None, [as_given(x) for x in also],
                ignore, gather, align, factors, rank_tol, latency, inplace,
            )  # fmt: skip
    except (ShrinkError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ShrinkError(f"the model cannot be shrunk: {type(error).__name__}: {error}") from error


def _shrunk(
    model: nn.Module, inputs: Call, served: Call | None, also: Sequence[Call], ignore: Sequence[str],
    gather: str, align: int, factors: str, rank_tol: float, latency: bool, inplace: bool,
) -> Shrunk:  # fmt: skip
    """`shrink` of what was checked. Only copies are run, and none of them is handed out."""
    dense = dict(model.named_parameters(remove_duplicate=False))
    modes = {name: m.training for name, m in model.named_modules()}
    original = copied(model).eval()
    first = first_run(original, inputs, "example inputs")
    layers = {}
    if served is not None:
        first_run(original, served, "inputs to time it with")
        layers = inputs_given(original, served)
    runs = [(inputs, first), *random_run(original, inputs)]
    left = dependent([given for given, _ in runs], [seen.left for _, seen in runs], original)
    left |= of_batch(original, inputs, first, left)
    trials = [*(given for given, _ in runs), *also, *other_sizes(original, inputs)]
    trace_of(original, inputs, ignore, left)  # it must be possible before anything is removed
    original = _without_denormals(original, trials, ignore)
    slack = 0.0 if _coarsest(model) == torch.float64 else _FOLDED
    removed = _removed(original, inputs, trials, ignore, left, align, slack)
    trace = removed.trace
    made = replaced(
        original, removed.small, trace, removed.found, removed.kept, removed.difference, trials, slack, gather, layers,
        align, factors, rank_tol,
    )  # fmt: skip
    tell_zeros(trace, removed.found, [row.name for row in made.gathers])
    if first.changed:
        trace.tell("", _carried(first.changed))
    try:
        report = measure(
            original, made.small, served or inputs, made.difference, _reasons(trace, align), made.ranks, made.gathers,
            latency,
        )  # fmt: skip
    except Exception as error:
        if served is None:
            raise
        why = "its code may take another branch than on the examples; take these as examples"
        raise ShrinkError(f"the shrunk model fails on `timed`, where {why}: {type(error).__name__}: {error}") from error
    lines, constant = nothing_left(original, [given for given, _ in runs])
    for line in lines if constant else ():
        warnings.warn(line, StructureWarning, stacklevel=3)
    report = replace(report, warnings=(*lines, *_about_saving(model, made.kept)))
    _restore(made.small, modes)
    record(made.small, *found_for(original, inputs), made.kept.attributes)
    if inplace:
        model.__dict__.update({k: v for k, v in made.small.__dict__.items() if k != "training"})
    return Shrunk(model if inplace else made.small, report, made.kept, dense)


def _about_saving(model: nn.Module, kept: Kept) -> tuple[str, ...]:
    """Where a library's own way to save a model would lose what was done."""
    if not hasattr(type(model), "save_pretrained") or not (kept.index or kept.gone):
        return ()
    return (
        "save_pretrained writes the dense model's configuration, so that from_pretrained refuses the weights or "
        "computes something else: use espalier.save and espalier.load",
    )


def _carried(changed: Sequence[str]) -> str:
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return f"a call in eval mode changes its state ({names}): each comparison began with the state that was given"


@dataclass
class _Removed:
    """A model without the channels that are not needed, which passed its check."""

    small: nn.Module
    trace: Trace
    found: Plan
    kept: Kept
    difference: Difference


def _removed(
    original: nn.Module, inputs: Call, trials: Sequence[Call], ignore: Sequence[str], left: Collection[str],
    align: int, slack: float,
) -> _Removed:  # fmt: skip
    """Without the channels that are not needed, and with those that the model's code needs all the same."""

    training = Training(original, inputs)

    def attempt(care: Care) -> _Removed:
        small, kept = copied(original), Kept()
        trace, found = _remove(small, inputs, ignore, left, align, care, kept)
        training.check(small)
        return _Removed(small, trace, found, kept, check(original, small, trials, slack=slack))

    def seen() -> tuple[Trace, Plan]:
        trace = trace_of(original, inputs, ignore, left)
        return trace, plan(trace, align, Care())

    return most(attempt, seen)


def _coarsest(model: nn.Module) -> torch.dtype:
    """Of the types that its parameters have."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def _without_denormals(model: nn.Module, trials: Sequence[Call], ignore: Sequence[str]) -> nn.Module:
    """The model with zeros for denormal weights, where outputs bear it."""
    left = {id(p) for name in ignore for p in model.get_submodule(name).parameters()}
    tiny = {name: here for name, p in model.named_parameters() if id(p) not in left and (here := denormal(p)).any()}
    if not tiny:
        return model
    flushed = copied(model)
    with torch.no_grad():
        for name, here in tiny.items():
            flushed.get_parameter(name).masked_fill_(here, 0)
    try:
        check(model, flushed, trials)
    except Exception:  # weights that are divided by their own norm
        return model
    return flushed


def _remove(
    model: nn.Module, inputs: Call, ignore: Sequence[str], left: Collection[str], align: int, care: Care, kept: Kept
) -> tuple[Trace, Plan]:
    """Until nothing more can go: a grouped convolution of one group is an ordinary one. The model is not run."""
    reasons: list[tuple[str, str]] = []
    while True:
        trace = trace_of(model, inputs, ignore, left)
        found = plan(trace, align, care)
        reasons += trace.kept.items()
        if not remove(model, trace, found, kept):
            trace.kept.clear()
            for name, why in reasons:
                trace.tell(name, why)
            return trace, found


def _restore(model: nn.Module, modes: dict[str, bool]) -> None:
    """The modes that modules had before; what replaces one has its."""
    for name, module in model.named_modules():
        while name not in modes:
            name = name.rpartition(".")[0]
        module.training = modes[name]


def _reasons(trace: Trace, align: int) -> tuple[str, ...]:
    reasons = tuple(f"{name or 'the model'}: {why}" for name, why in trace.kept.items())
    rounded = f"channels that make their numbers multiples of {align}: align=1 for the fewest"
    return (*reasons, rounded) if align > 1 else reasons
