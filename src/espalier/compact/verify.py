"""Whether a shrunk model computes what the dense one does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier.compact.copies import ShrinkError as ShrinkError
from espalier.compact.copies import copied
from espalier.compact.examples import OtherSizes
from espalier.compact.runs import Run, dependent, run
from espalier.compact.runs import settled as settled
from espalier.compact.walk import mapped, tensors_in

# differences that rounding may make, relative to the largest entry of an output
ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# the share of whole numbers, such as classes, that ties may decide
_DECIDED = 1e-2


@dataclass(frozen=True)
class Comparison:
    """One output of the dense model, a, and of the shrunk one, b, on one of the inputs.

    Attributes:
        output: its place in what the model returns, such as `.logits` or `[0]`.
        inputs: which of the inputs, from 0 on.
        dtype: what the models ran in.
        error: max |a − b| / max |a|; infinite where shapes differ, or the places of NaN and Inf.
        scale: max |a|.
        allowed: the error that rounding may make.
        reason: why the error is infinite.
    """

    output: str
    inputs: int
    dtype: torch.dtype
    error: float
    scale: float
    allowed: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        what = self.reason or f"max |a − b| / max |a| = {self.error:.2e}, max |a| = {self.scale:.2e}"
        where = f"output {self.output or 'of the model'} on inputs {self.inputs}"
        return f"{where} in {_short(self.dtype)}: {what} ({self.allowed:.0e} allowed)"


@dataclass(frozen=True)
class Difference:
    """All comparisons; `skipped` says why there is none in float64, where there is none."""

    comparisons: tuple[Comparison, ...]
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The one nearest to what is allowed, or furthest beyond it."""
        return max(self.comparisons, key=lambda c: c.error / c.allowed)

    @property
    def largest(self) -> float:
        """The largest error in any dtype."""
        return max(c.error for c in self.comparisons)

    @property
    def exact(self) -> float | None:
        """The largest error in float64: what is left of it without rounding."""
        return max((c.error for c in self.comparisons if c.dtype is torch.float64), default=None)

    def __str__(self) -> str:
        dtypes = dict.fromkeys(c.dtype for c in self.comparisons)
        worst = [max((c for c in self.comparisons if c.dtype is d), key=lambda c: c.error) for d in dtypes]
        text = ", ".join(f"{c.error:.1e} in {_short(c.dtype)}" for c in worst)
        return f"largest difference {text}" + (f" (not compared in float64: {self.skipped})" if self.skipped else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The floating tensors that the model returns in eval mode, in order."""
    return [x for x in run(model, inputs, again=False).returned.values() if _inexact(x)]


class _Narrowed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which types results are rounded to: .float() in a float64 model, bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        widths = [t.dtype.itemsize for t in tree_leaves((args, kwargs)) if _floating(t)]
        if widths:
            self.dtypes |= {t.dtype for t in tree_leaves(out) if _floating(t) and t.dtype.itemsize < max(widths)}
        return out


def _floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def precision(dtypes: set[torch.dtype]) -> tuple[torch.dtype, float]:
    """The coarsest of the types, and what it allows."""
    real = {d.to_real() if d.is_complex else d for d in dtypes}
    dtype = max(real, key=lambda d: ALLOWED.get(d, 2e-2))
    return dtype, ALLOWED.get(dtype, 2e-2)


def error_of(a: Tensor, b: Tensor) -> tuple[float, float, str]:
    """max |a − b| / max |a|, max |a|, and why the first is infinite where it is."""
    if a.shape != b.shape:
        return math.inf, 0.0, f"of shape {tuple(b.shape)}, not {tuple(a.shape)}"
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = (x.detach().to_dense().cpu().to(wide) for x in (a, b))
    finite = a.isfinite()
    scale = float(a[finite].abs().max()) if finite.any() else 0.0
    same = (a == b) | (a.isnan() & b.isnan())  # infinities have a sign
    if not (same | (finite & b.isfinite())).all():
        return math.inf, scale, "NaN or infinite in other places than the dense model's"
    largest = float((a - b)[finite].abs().max()) if finite.any() else 0.0
    if largest == 0.0:
        return 0.0, scale, ""
    if scale == 0.0:
        return math.inf, scale, f"up to {largest:.2e} where the dense model gives zeros"
    return largest / scale, scale, ""


def dense_run(dense: nn.Module, args: tuple[Any, ...]) -> tuple[Run, set[torch.dtype]]:
    """What the dense model does, and which types it rounds to."""
    with _Narrowed() as narrowed:
        found = run(dense, args)
    if not any(map(_inexact, found.returned.values())):
        raise ValueError(
            f"{type(dense).__name__} returns no floating tensor, so nothing of what it computes can be compared."
        )
    return found, {t.dtype for t in _tensors(dense) if _floating(t)} | narrowed.dtypes


def _compare(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], index: int, held: set[torch.dtype], suffix: str = ""
) -> list[Comparison]:
    """Of the tensors of one run, or those left by it."""
    found = []
    for name in dict.fromkeys((*a, *b)):
        both = [x[name] for x in (a, b) if name in x]
        exact = not any(map(_inexact, both))
        dtype, allowed = (both[0].dtype, _DECIDED) if exact else precision(held | {x.dtype for x in both})
        if len(both) < 2:
            error, scale, reason = math.inf, 0.0, f"only the {'dense' if name in a else 'shrunk'} model has it"
        elif both[0].dtype != both[1].dtype:
            error, scale, reason = math.inf, 0.0, f"of {_short(both[1].dtype)}, not {_short(both[0].dtype)}"
        else:
            error, scale, reason = _share(both[0], both[1], held) if exact else error_of(*both)
        if not exact or error > allowed:
            found.append(Comparison(name + suffix, index, dtype, error, scale, allowed, reason))
    return found


def _share(a: Tensor, b: Tensor, held: set[torch.dtype]) -> tuple[float, float, str]:
    """The share of whole numbers that differ in float64. In other types near ties fall as rounding lets them."""
    if a.shape != b.shape:
        return math.inf, 0.0, f"of shape {tuple(b.shape)}, not {tuple(a.shape)}"
    if held != {torch.float64} or not a.numel():
        return 0.0, 0.0, ""
    share = float((a != b).double().mean())
    return share, 0.0, f"{share:.0%} of its entries differ"


def doubled(x: Any) -> Any:
    kinds = {True: torch.complex128, False: torch.float64}
    return mapped(x, lambda t: t.detach().to(kinds[t.is_complex()]) if _inexact(t) else t)


def difference(
    dense: nn.Module, small: nn.Module, inputs: Sequence[tuple[Any, ...]], stop_at: float = math.inf
) -> Difference:
    """Both models in eval mode on each of the inputs, in their own dtype and, where they run in it, in float64.

    Each run begins with a fresh copy. What depends on the inputs is compared: all that models return, what they leave
    on their modules and, if a call changes their state, what they return at a second one. In float64 a wrong removal
    stays and rounding goes. There the dense model's own rounding is seen, too: in their own dtype the two may differ by
    four times as much where that is more than `ALLOWED`, as it is with TF32. Other sizes
    are run in float64 only if the model is of half precision, or differs.

    stop_at: leave out further inputs once something differs by so much more than is allowed.
    """
    found: list[Comparison] = []
    skipped: str | None = None
    wide: tuple[nn.Module, nn.Module] | None = None
    floats = {t.dtype for t in (*_tensors(dense), *tensors_in(list(inputs))) if _floating(t)}
    if floats != {torch.float64}:
        try:
            wide = copied(dense).double(), copied(small).double()
        except Exception as e:
            skipped = f"{type(e).__name__}: {e}"
    coarse = max((torch.finfo(d).eps for d in floats), default=0.0) > torch.finfo(torch.float32).eps
    left: dict[int, tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]] = {}
    for i, args in enumerate(inputs):
        a, held = dense_run(dense, args)
        b = run(small, args, again=a.second is not None)
        own = _both(a, b, i, held)
        left[i] = a.left, b.left, held
        # another way at another size shows in float32, too, which is the faster
        if wide and (coarse or not isinstance(args, OtherSizes) or not all(c.ok for c in own)):
            try:
                truth, rounded = dense_run(wide[0], doubled(args))
                exact = _both(truth, run(wide[1], doubled(args), again=truth.second is not None), i, rounded)
            except Exception as e:
                skipped = f"{type(e).__name__}: {e}"
            else:
                own = [_with_rounding(c, a.returned, truth.returned) for c in own]
                found += exact
                if all(c.dtype is not torch.float64 for c in exact):
                    skipped = f"the model itself rounds to {_short(exact[0].dtype)}"
        found += own
        if any(c.error > c.allowed + stop_at for c in found):
            break
    names = dependent([inputs[i] for i in left], [a_left for a_left, _, _ in left.values()], dense)
    for i, (*both_left, held) in left.items():
        a_left, b_left = ({name: x for name, x in each.items() if name in names} for each in both_left)
        found += _compare(a_left, b_left, i, held, ", left on the model,")
    return Difference(tuple(found), skipped)


def _both(a: Run, b: Run, index: int, held: set[torch.dtype]) -> list[Comparison]:
    """What two models return at the first call, and at the second one if the dense model takes one."""
    found = _compare(a.returned, b.returned, index, held)
    if a.second is not None:
        found += _compare(a.second, b.second or {}, index, held, " of the second call")
    return found


def _with_rounding(c: Comparison, a: dict[str, Tensor], truth: dict[str, Tensor]) -> Comparison:
    """The comparison with room for the error that the dense model itself makes."""
    if c.output not in a or c.output not in truth:
        return c
    rounding = error_of(truth[c.output], a[c.output])[0]
    if not math.isfinite(rounding):
        return c
    return Comparison(c.output, c.inputs, c.dtype, c.error, c.scale, max(c.allowed, 4 * rounding), c.reason)


def check(dense: nn.Module, small: nn.Module, inputs: Sequence[tuple[Any, ...]], slack: float = 0.0) -> Difference:
    """`difference`, or ShrinkError where it is more than rounding, and than `slack`: what rounding of stored numbers,
    or a low rank, may change."""
    found = difference(dense, small, inputs, slack)
    found = replace(found, comparisons=tuple(replace(c, allowed=c.allowed + slack) for c in found.comparisons))
    if not found.ok:
        bad = [c for c in found.comparisons if not c.ok]
        exact = [c for c in found.comparisons if c.dtype is torch.float64]
        verdict = (
            f"They were not compared in float64 ({found.skipped})."
            if not exact
            else "In float64 they agree: it is rounding that differs by so much."
            if all(c.ok for c in exact)
            else "It is not rounding: they differ in float64."
        )
        lines = "\n".join(f"  {c}" for c in bad[:8])
        more = f"\n  and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ShrinkError(f"the shrunk model does not compute what the dense one does. {verdict}\n{lines}{more}")
    return found
