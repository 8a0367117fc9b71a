"""What shrinking gained: parameters, bytes, FLOPs and latency, each layer and all together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from espalier.compact.copies import for_a_run
from espalier.compact.costs import flops_of, latency_of
from espalier.compact.runs import settled
from espalier.compact.verify import Difference
from espalier.tables import table

# ends the reason of a layer that was kept only because its smaller form would not be faster
FOR_TIME = "does it anyway"


@dataclass(frozen=True)
class Sizes:
    """Of a layer or a model; `bytes` are those of parameters and buffers, `ms` is None where it was not measured."""

    parameters: int = 0
    bytes: int = 0
    flops: int = 0
    ms: float | None = None


@dataclass(frozen=True)
class LayerSizes:
    """A layer of the dense model, and what stands under its name in the shrunk one."""

    name: str
    dense: Sizes
    small: Sizes

    @property
    def changed(self) -> bool:
        a, b = self.dense, self.small
        return (a.parameters, a.bytes, a.flops) != (b.parameters, b.bytes, b.flops)


@dataclass(frozen=True)
class LowRankRow:
    """A layer that became two: its rank, the bound on what that changed, and its latency before and after."""

    name: str
    rank: int
    bound: float
    ms_before: float | None = None
    ms_after: float | None = None


@dataclass(frozen=True)
class GatherRow:
    """A layer that selects its inputs: how many it is given and reads, and its latency without and with that. A cell's
    own units are among its inputs."""

    name: str
    given: int
    read: int
    ms_before: float | None = None
    ms_after: float | None = None


@dataclass(frozen=True)
class ShrinkReport:
    """What shrinking did. Ratios are those of the shrunk model to the dense one; print it for tables.

    Attributes:
        dense, small: the whole models.
        layers: by the names of the dense model; what replaces a layer is summed up under its name.
        difference: of their outputs.
        removed, kept: what went and what could not go, one line each.
        low_rank, gathers: the layers that were replaced.
        warnings: layers that are zero as a whole; whether the output no longer depends on the input; a library's way to
            save models that does not know of shrinking.
    """

    dense: Sizes
    small: Sizes
    layers: tuple[LayerSizes, ...]
    difference: Difference | None = None
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    low_rank: tuple[LowRankRow, ...] = ()
    gathers: tuple[GatherRow, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parameters_ratio(self) -> float:
        return _ratio(self.small.parameters, self.dense.parameters)

    @property
    def bytes_ratio(self) -> float:
        return _ratio(self.small.bytes, self.dense.bytes)

    @property
    def flops_ratio(self) -> float:
        return _ratio(self.small.flops, self.dense.flops)

    @property
    def latency_ratio(self) -> float | None:
        """None where latency was not measured."""
        if self.small.ms is None or self.dense.ms is None:
            return None
        return _ratio(self.small.ms, self.dense.ms)

    def __str__(self) -> str:
        latency = self.latency_ratio
        total = [
            ("parameters", f"{self.dense.parameters:,}", f"{self.small.parameters:,}", f"{self.parameters_ratio:.1%}"),
            ("bytes", f"{self.dense.bytes:,}", f"{self.small.bytes:,}", f"{self.bytes_ratio:.1%}"),
            ("FLOPs", f"{self.dense.flops:,}", f"{self.small.flops:,}", f"{self.flops_ratio:.1%}"),
            ("ms", _ms(self.dense.ms), _ms(self.small.ms), "–" if latency is None else f"{latency:.1%}"),
        ]
        parts = [table(("model", "dense", "shrunk", "ratio"), total)]
        rows = [
            (
                x.name or "(model)",
                _change(x.dense.parameters, x.small.parameters),
                _change(x.dense.bytes, x.small.bytes),
                _change(x.dense.flops, x.small.flops),
                f"{_ms(x.dense.ms)} → {_ms(x.small.ms)}",
            )
            for x in self.layers
            if x.changed
        ]
        if rows:
            parts.append(table(("layer", "parameters", "bytes", "FLOPs", "ms"), rows))
        if self.low_rank:
            made = [(x.name, x.rank, f"{x.bound:.1e}", _ms(x.ms_before), _ms(x.ms_after)) for x in self.low_rank]
            parts.append(table(("low rank", "rank", "bound", "ms before", "ms after"), made))
        if self.gathers:
            selected = [(x.name, x.given, x.read, _ms(x.ms_before), _ms(x.ms_after)) for x in self.gathers]
            parts.append(table(("gather", "from", "to", "ms before", "ms after"), selected))
        for head, lines in (("removed", self.removed), ("kept", self.kept), ("warnings", self.warnings)):
            if lines:
                parts.append("\n".join((f"{head}:", *(f"  {line}" for line in lines))))
        if self.small.parameters == self.dense.parameters:
            why = "See what was kept, and why. " if self.kept else ""
            hint = (
                "Where no channel is zero for all that read it: λ may be too small yet;\n"
                "and while RAMDA and RMDA train, only their structured point has zeros (optimizer.structured())."
            )
            slower = any(FOR_TIME in line for line in self.kept)
            parts.append(f"Nothing was removed. {why}{'' if slower else hint}".strip())
        if self.difference is not None:
            parts.append(str(self.difference))
        return "\n\n".join(parts)


def _ratio(small: float, dense: float) -> float:
    return small / dense if dense else 1.0


def _ms(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}"


def _change(before: int, after: int) -> str:
    return f"{before:,} → {after:,}"


def measure(
    dense: nn.Module,
    small: nn.Module,
    inputs: tuple[Any, ...],
    difference: Difference | None = None,
    kept: Sequence[str] = (),
    low_rank: Sequence[LowRankRow] = (),
    gathers: Sequence[GatherRow] = (),
    latency: bool = True,
    *,
    removed: Sequence[str] = (),
    seconds: float = 1.0,
) -> ShrinkReport:
    """Measure both models in eval mode on these inputs, and report it with what the caller knows.

    Latency takes about `seconds`; only one run each where the models are slower than that, and then none by layer.
    """
    names = _Names(dense)
    dense, small = for_a_run(dense), for_a_run(small)  # what runs leave on them is thrown away
    with settled(dense, small):
        stored = [_stored(m) for m in (dense, small)]
        flops = [flops_of(m, inputs) for m in (dense, small)]
        total, ms = latency_of((dense, small), inputs, seconds) if latency else ((None, None), ({}, {}))
    by_layer = [
        {key: names.summed(values) for key, values in (*stored[i].items(), ("flops", flops[i]), ("ms", ms[i]))}
        for i in range(2)
    ]

    def sizes(i: int, name: str) -> Sizes:
        found = by_layer[i]
        parameters, size, count = (int(found[key].get(name, 0)) for key in ("parameters", "bytes", "flops"))
        return Sizes(parameters, size, count, found["ms"].get(name))

    def whole(i: int) -> Sizes:
        parameters, size, count = (int(sum(x.values())) for x in (*stored[i].values(), flops[i]))
        return Sizes(parameters, size, count, total[i])

    rows = (LayerSizes(name, sizes(0, name), sizes(1, name)) for name in names.all)
    layers = tuple(x for x in rows if any((x.dense.parameters, x.dense.bytes, x.dense.flops)) or x.changed)
    return ShrinkReport(
        whole(0),
        whole(1),
        layers,
        difference,
        tuple(removed),
        tuple(kept),
        tuple(low_rank),
        tuple(gathers),
    )


class _Names:
    """The layer of the dense model that a module of the shrunk one belongs to."""

    def __init__(self, dense: nn.Module) -> None:
        modules = dict(dense.named_modules())
        self.all = dict.fromkeys(modules)
        # attention reads the weights of its out_proj without calling it
        self._layers = {
            n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention) or next(m.children(), None) is None
        }

    def of(self, name: str) -> str:
        parts = name.split(".")
        above = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return next((n for n in above if n in self._layers), [n for n in above if n in self.all][-1])

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for name, value in values.items():
            sums[self.of(name)] += value
        return dict(sums)


def _stored(model: nn.Module) -> dict[str, dict[str, float]]:
    """Parameters and bytes of each module by itself; what is shared counts once, where it is met first."""
    parameters: dict[str, float] = {}
    size: dict[str, float] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        held = own + [b for b in module.buffers(recurse=False) if id(b) not in seen]
        seen.update(map(id, held))
        parameters[name] = sum(p.numel() for p in own)
        size[name] = sum(t.numel() * t.element_size() for t in held)
    return {"parameters": parameters, "bytes": size}
