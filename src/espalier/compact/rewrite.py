"""Make a model smaller by a plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from espalier.compact.attention import HeadAttention
from espalier.compact.attributes import Key, set_attribute
from espalier.compact.cells import CELLS, GatherCell
from espalier.compact.layers import Gather, LowRank, factor
from espalier.compact.layout import select
from espalier.compact.plan import Plan
from espalier.compact.report import LowRankRow
from espalier.compact.trace import Reader, Trace, get


@dataclass
class Kept:
    """What stayed of each parameter: an index for every dimension that lost something."""

    index: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # dense name: name in the smaller model
    gone: set[str] = field(default_factory=set)  # parameters that have no counterpart
    attributes: dict[Key, int] = field(default_factory=dict)  # that changed, by attributes.set_attribute

    def narrow(self, name: str, dim: int, index: Tensor) -> None:
        """A further selection from what stayed."""
        dims = self.index.setdefault(name, {})
        dims[dim] = dims[dim][index] if dim in dims else index


def remove(model: nn.Module, trace: Trace, plan: Plan, kept: Kept) -> bool:
    """Take the units that do not stay out of a model; whether there were any."""
    removed = False
    for reader in trace.readers:
        fold(model, reader, ~plan.stays(reader.columns), trace)
    for (name, dim), labels in trace.slots.items():
        index = plan.index(labels)
        if len(index) < len(labels):
            removed = True
            kept.narrow(name, dim, index)
            _assign(model, name, select(get(model, name), dim, index.to(get(model, name).device)))
    for name, labels in trace.gathers.items():
        _select_anew(model, name, plan.stays(labels))
    kept.attributes |= plan.attributes
    for key, value in plan.attributes.items():
        set_attribute(model, key, value)
    for module in model.modules():
        fix_sizes(module)
    for name, (heads, unit) in trace.heads.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        if len(heads) < attention.num_heads and not plan.stays(unit).any() and not hooked(attention):
            kept.gone |= {f"{name}.{p}" for p, _ in attention.named_parameters()}
            model.set_submodule(name, HeadAttention.from_dense(attention, heads))
            removed = True
    return removed


def fold(model: nn.Module, reader: Reader, dropped: Tensor, trace: Trace | None = None) -> None:
    """Add to a layer's bias what the constants among the dropped columns gave."""
    columns = dropped & reader.folds & (reader.values != 0)
    if not columns.any():
        return
    weight = get(model, reader.weight)
    w = weight.detach().transpose(0, 1) if reader.transposed else weight.detach()
    w = w.flatten(2).sum(2, dtype=torch.float64) if w.dim() > 2 else w.double()
    columns = columns.to(w.device)
    shift = w[:, columns] @ reader.values.to(w)[columns]
    if reader.bias is not None:
        bias = get(model, reader.bias)
        with torch.no_grad():
            bias.copy_(bias.double() + shift)
        return
    assert reader.module is not None
    layer: Any = model.get_submodule(reader.module)
    layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
    if trace is not None:
        trace.slots[f"{reader.module}.bias", 0] = reader.rows


@dataclass(frozen=True)
class Product:
    """Two layers for one of low rank."""

    row: LowRankRow
    reader: Reader  # the layer, as it was traced
    place: str  # where it is
    layers: LowRank


def products(model: nn.Module, trace: Trace, rtol: float) -> list[Product]:
    """Those that pay."""
    found = []
    readers: dict[str, Reader] = {}
    for reader in trace.readers:
        if reader.module:
            readers.setdefault(reader.module, reader)
    for name, reader in readers.items():
        place = f"{name}.layer" if isinstance(model.get_submodule(name), Gather) else name
        layer: Any = model.get_submodule(place)
        if hooked(layer) or (made := factor(layer, rtol)) is None:
            continue
        # zero rows and columns lower the rank, too: a product would only do the work of a selection
        matrix = layer.weight.flatten(1) != 0
        layers, bound = made
        rank = layers.spec()["rank"]
        if rank < min(matrix.any(0).sum(), matrix.any(1).sum()):
            found.append(Product(LowRankRow(name, rank, bound), reader, place, layers))
    return found


def put_products(model: nn.Module, chosen: Sequence[Product], kept: Kept) -> list[LowRankRow]:
    """Into the model, where the layers were."""
    for each in chosen:
        model.set_submodule(each.place, copy.deepcopy(each.layers))
        kept.gone |= {f"{each.row.name}.weight", f"{each.row.name}.bias"}
    return [each.row for each in chosen]


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which one in its place would not have."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Wherever the model has this tensor."""
    old = get(model, name)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad)
    for module in model.modules():
        for leaf, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is old:
                setattr(module, leaf, value)


def _select_anew(model: nn.Module, name: str, stays: Tensor) -> None:
    """Indices count what stayed of the channels that they select from."""
    index = get(model, name).cpu()
    index = (stays.cumsum(0) - 1)[index[stays[index]]]
    _assign(model, name, index.to(get(model, name).device))
    module: Any = model.get_submodule(name.rpartition(".")[0])
    if name.endswith(".input_index"):
        module.input_size = int(stays.sum())


def fix_sizes(module: nn.Module) -> None:
    """Attributes that repeat the shape of a parameter."""
    layer: Any = module
    if isinstance(module, nn.Linear):
        layer.out_features, layer.in_features = module.weight.shape
    elif isinstance(module, _ConvTransposeNd):
        layer.in_channels, layer.out_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, _ConvNd):
        outputs, inputs = module.weight.shape[:2]
        if module.groups > 1:
            layer.groups = module.groups * outputs // module.out_channels
        layer.out_channels, layer.in_channels = outputs, inputs * module.groups
    elif isinstance(module, _NormBase):
        sized = next((x for x in (module.weight, module.running_mean) if x is not None), None)
        if sized is not None:
            layer.num_features = len(sized)
    elif isinstance(module, nn.Embedding):
        layer.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        layer.num_parameters = len(module.weight)
    elif type(module) in (nn.LSTM, nn.GRU, nn.RNN):  # a subclass may have other weights
        gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
        layer.input_size, layer.hidden_size = layer.weight_ih_l0.shape[1], layer.weight_hh_l0.shape[0] // gates
        layer.flatten_parameters()
    elif isinstance(module, GatherCell):
        layer.hidden_size = len(module.weight_hh) // module.gates
    elif type(module) in CELLS:  # a subclass may have other weights
        layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], layer.weight_hh.shape[1]
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers: a Linear, columns first
        layer.nx, layer.nf = layer.weight.shape
