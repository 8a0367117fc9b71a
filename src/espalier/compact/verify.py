"""Whether a shrunk model computes what the dense one does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from espalier.compact.examples import call, cloned

ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


"""Differences that rounding may make, relative to the largest entry of an output."""


class ShrinkError(RuntimeError):
    """A shrunk model does not compute what the dense one does."""


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


@contextmanager
def settled(*models: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and the random numbers that would have come next; afterwards all is as it was."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    cuda = {t.device for model in models for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(d.index for d in cuda)), torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for m, training in modes:  # not m.train(): models override it
            m.training = training


def _named(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating and complex tensors of what a model returns, each with its place."""
    for keys, leaf in tree_flatten_with_path(output)[0]:
        here = path + keystr(keys)
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() or leaf.is_complex():
                yield here, leaf
        # what pytree does not know: subclasses of dict and tuple, dataclasses
        elif isinstance(leaf, Mapping):
            for k, v in leaf.items():
                yield from _named(v, f"{here}[{k!r}]")
        elif isinstance(leaf, tuple | list):
            for i, v in enumerate(leaf):
                yield from _named(v, f"{here}[{i}]")
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for f in fields(leaf):
                yield from _named(getattr(leaf, f.name), f"{here}.{f.name}")


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The floating tensors that the model returns in eval mode, in order."""
    return list(_run(model, inputs).values())


def _run(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    with settled(model):
        return dict(_named(call(model, cloned(inputs))))


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


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _precision(dtypes: set[torch.dtype]) -> tuple[torch.dtype, float]:
    """The coarsest of the types, and what it allows."""
    real = {d.to_real() if d.is_complex else d for d in dtypes}
    dtype = max(real, key=lambda d: ALLOWED.get(d, 2e-2))
    return dtype, ALLOWED.get(dtype, 2e-2)


def _error(a: Tensor, b: Tensor) -> tuple[float, float, str]:
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


def _compare(
    dense: nn.Module, small: nn.Module, args: tuple[Any, ...], index: int
) -> tuple[dict[str, Tensor], list[Comparison]]:
    with _Narrowed() as narrowed:
        a = _run(dense, args)
    b = _run(small, args)
    if not a:
        raise ValueError(
            f"{type(dense).__name__} returns no floating tensor, so nothing of what it computes can be compared."
        )
    held = {t.dtype for t in _tensors(dense) if _floating(t)} | narrowed.dtypes
    found = []
    for name in dict.fromkeys((*a, *b)):
        dtype, allowed = _precision(held | {x[name].dtype for x in (a, b) if name in x})
        if name not in a or name not in b:
            error, scale, reason = math.inf, 0.0, f"only the {'dense' if name in a else 'shrunk'} model returns it"
        else:
            error, scale, reason = _error(a[name], b[name])
        found.append(Comparison(name, index, dtype, error, scale, allowed, reason))
    return a, found


def _double(x: Any) -> Any:
    kinds = {True: torch.complex128, False: torch.float64}
    return tree_map_only(
        Tensor, lambda t: t.to(kinds[t.is_complex()]) if t.is_floating_point() or t.is_complex() else t, x
    )


def difference(dense: nn.Module, small: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> Difference:
    """Both models in eval mode on each of the inputs, in their own dtype and, where they run in it, in float64.

    In float64 a wrong removal stays and rounding goes. There the dense model's own rounding is seen, too: in their own
    dtype the two may differ by four times as much where that is more than `ALLOWED`, as it is with TF32.
    """
    found: list[Comparison] = []
    skipped: str | None = None
    wide: tuple[nn.Module, nn.Module] | None = None
    floats = {t.dtype for t in (*_tensors(dense), *tree_leaves(list(inputs))) if _floating(t)}
    if floats != {torch.float64}:
        try:
            wide = copy.deepcopy(dense).double(), copy.deepcopy(small).double()
        except Exception as e:
            skipped = f"{type(e).__name__}: {e}"
    for i, args in enumerate(inputs):
        a, own = _compare(dense, small, args, i)
        if wide is not None:
            try:
                truth, exact = _compare(*wide, _double(args), i)
            except Exception as e:
                skipped, wide = f"{type(e).__name__}: {e}", None
            else:
                own = [_with_rounding(c, a, truth) for c in own]
                found += exact
                if all(c.dtype is not torch.float64 for c in exact):
                    skipped = f"the model itself rounds to {_short(exact[0].dtype)}"
        found += own
    return Difference(tuple(found), skipped)


def _with_rounding(c: Comparison, a: dict[str, Tensor], truth: dict[str, Tensor]) -> Comparison:
    """The comparison with room for the error that the dense model itself makes."""
    if c.output not in a or c.output not in truth:
        return c
    rounding = _error(truth[c.output], a[c.output])[0]
    if not math.isfinite(rounding):
        return c
    return Comparison(c.output, c.inputs, c.dtype, c.error, c.scale, max(c.allowed, 4 * rounding), c.reason)


def check(dense: nn.Module, small: nn.Module, inputs: Sequence[tuple[Any, ...]], slack: float = 0.0) -> Difference:
    """`difference`, or ShrinkError where it is more than rounding, and than `slack`: what rounding of stored numbers,
    or a low rank, may change."""
    found = difference(dense, small, inputs)
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
