"""Layers that a shrunk model has and a dense one has not: a selection of inputs, a product of two layers."""

from __future__ import annotations

from typing import Any, Self, TypeGuard

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from espalier.checks import check_number
from espalier.compact.layout import channels_last, select

# A symbolic trace can't know how a tensor lies: it keeps this call as one, and needs the package wherever it runs.
torch.fx.wrap("select")

_INPUTS, _OUTPUTS = ("in_features", "in_channels"), ("out_features", "out_channels")


def _factors(layer: nn.Module) -> TypeGuard[nn.Linear | _ConvNd]:
    # Exactly these: a subclass may compute something else, or be read past its forward, as MultiheadAttention does.
    exact = type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return exact and (not isinstance(layer, _ConvNd) or layer.groups == 1)


class Gather(nn.Module):
    """layer(x[index along dim]): a layer that reads only some of the channels it is given."""

    index: Tensor

    def __init__(self, layer: nn.Module, dim: int, index: Tensor) -> None:
        super().__init__()
        if index.dim() != 1 or index.dtype != torch.int64:
            raise ValueError(f"index must be a vector of int64, not {index.dtype} of shape {tuple(index.shape)}.")
        self.layer, self.dim = layer, dim
        self.register_buffer("index", index)
        self.training = layer.training

    @classmethod
    def empty(cls, layer: nn.Module, dim: int, entries: int) -> Self:
        """Around a dense layer, selecting `entries` inputs that are not known yet."""
        return cls(layer, dim, torch.zeros(entries, dtype=torch.int64))

    def spec(self) -> dict[str, int]:
        """What `empty` needs."""
        return {"dim": self.dim, "entries": len(self.index)}

    def __getattr__(self, name: str) -> Any:
        """The layer's number of outputs, which other code may ask for."""
        return getattr(self.layer, name) if name in _OUTPUTS else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(select(x, self.dim, self.index))
        return y

    def extra_repr(self) -> str:
        return f"dim={self.dim}, entries={len(self.index)}"


class LowRank(nn.Module):
    """second(first(x)): a Linear or convolution of low rank as the product of two, the first without bias."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.training = first.training

    @classmethod
    def empty(cls, layer: nn.Module, rank: int) -> Self:
        """In place of a dense layer, with values that are not known yet."""
        if not _factors(layer):
            raise ValueError(f"a {type(layer).__name__} has no low-rank form: only Linear and ungrouped ConvNd have.")
        # on meta: the usual initialisation would draw random numbers that nobody asked for
        like: dict[str, Any] = {"device": "meta", "dtype": layer.weight.dtype}
        bias = layer.bias is not None
        first: nn.Module
        second: nn.Module
        if isinstance(layer, nn.Linear):
            first = nn.Linear(layer.in_features, rank, bias=False, **like)
            second = nn.Linear(rank, layer.out_features, bias=bias, **like)
        else:
            kind: Any = type(layer)
            window = {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "padding_mode")}
            first = kind(layer.in_channels, rank, layer.kernel_size, bias=False, **window, **like)
            second = kind(rank, layer.out_channels, 1, bias=bias, **like)
        made = cls(first, second).to_empty(device=layer.weight.device).train(layer.training)
        if channels_last(layer.weight):
            whole: Any = made
            whole.to(memory_format=torch.channels_last if layer.weight.dim() == 4 else torch.channels_last_3d)
        return made

    def spec(self) -> dict[str, int]:
        """What `empty` needs."""
        weight = self.second.weight
        assert isinstance(weight, Tensor)
        return {"rank": weight.shape[1]}

    def __getattr__(self, name: str) -> Any:
        """The numbers of inputs and outputs, which other code may ask for."""
        part = "first" if name in _INPUTS else "second" if name in _OUTPUTS else None
        return super().__getattr__(name) if part is None else getattr(getattr(self, part), name)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def factor(layer: nn.Linear | _ConvNd, rtol: float) -> tuple[LowRank, float] | None:
    """The layer as a product, and the bound ‖W − W_r‖₂ = σ_{r+1}; None where that has no fewer weights.

    W is the weight as an m × n matrix, one row an output; r counts the singular values beyond rtol σ₁. The product pays
    when r (m + n) < m n. A zero layer, a grouped or transposed convolution and one with NaN or Inf stay as they are.
    """
    check_number("rtol", rtol, high=1.0)
    if not _factors(layer):
        return None
    w = layer.weight.detach().to(torch.float64).flatten(1)
    m, n = w.shape
    if m == 0 or n == 0 or not w.isfinite().all():
        return None
    s = torch.linalg.svdvals(w)  # half of the time of the vectors, which most layers do without
    r = int((s > rtol * s[0]).sum())
    if r == 0 or r * (m + n) >= m * n:
        return None
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    root = s[:r].sqrt()
    product = LowRank.empty(layer, r)
    with torch.no_grad():
        for part, value in ((product.first, root[:, None] * vh[:r]), (product.second, u[:, :r] * root)):
            assert isinstance(part.weight, nn.Parameter)
            part.weight.copy_(value.reshape(part.weight.shape))
            part.weight.requires_grad_(layer.weight.requires_grad)
        if layer.bias is not None:
            assert isinstance(product.second.bias, nn.Parameter)
            product.second.bias.copy_(layer.bias)
            product.second.bias.requires_grad_(layer.bias.requires_grad)
    # r (m + n) < m n leaves r < min(m, n), so there is always a next singular value
    return product, s[r].item()
