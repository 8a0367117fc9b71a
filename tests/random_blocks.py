"""The blocks that random models are made of: plain code as users write it, one function a kind.

A block is made by `kind(r, w, nd)` from a random.Random, a width and the number of spatial dimensions. It returns a
Part: the function that runs it, its layers and attributes, and the families of channels that can leave it as a whole.
The file is long because it is a table: each row is a kind, and none knows of another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# the domains of a tensor: (B, W); (B, T, W); (B, W, L), (B, W, H, W), (B, W, D, H, W)
SPATIAL = {"flat": 0, "sequence": 0, "signal": 1, "image": 2, "volume": 3}
LAST, FIRST = ("flat", "sequence"), ("signal", "image", "volume")


@dataclass(frozen=True)
class Slot:
    """Where a family's units lie along a dimension of a parameter: unit i is `size` entries in each of `blocks`."""

    name: str
    dim: int
    role: str  # row, bias or column
    size: int = 1
    blocks: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Family:
    count: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Part:
    run: Callable[..., Any]
    parts: dict[str, Any]
    families: list[Family] = field(default_factory=list)
    width: int | None = None  # of what it returns, if not that of what it is given
    domain: str | None = None  # of what it returns, if not the same


KINDS: dict[str, dict[str, Callable[..., Part]]] = {}


def block(*domains: str) -> Callable[[Callable[..., Part]], Callable[..., Part]]:
    def put(kind: Callable[..., Part]) -> Callable[..., Part]:
        for domain in domains:
            KINDS.setdefault(domain, {})[kind.__name__] = kind
        return kind

    return put


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.softplus, torch.relu, lambda x: x,
    lambda x: F.relu(x, inplace=True), lambda x: x.tanh_(), lambda x: x * (x > 0), lambda x: x.clamp(min=0),
    lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.masked_fill(x < 0, 0.0), lambda x: x.abs().add_(1).log(),
]  # fmt: skip


def rows(name: str, bias: bool = True, **at: int) -> tuple[Slot, ...]:
    weight = Slot(f"{name}.weight", 0, "row", **at)
    return (weight, Slot(f"{name}.bias", 0, "bias", **at)) if bias else (weight,)


def columns(name: str, dim: int = 1, **at: int) -> tuple[Slot, ...]:
    return (Slot(f"{name}.weight", dim, "column", **at),)


def family(count: int, *slots: tuple[Slot, ...]) -> list[Family]:
    return [Family(count, sum(slots, ()))]


def pair(r: Random, w: int, h: int) -> dict[str, Any]:
    return {"a": nn.Linear(w, h), "b": nn.Linear(h, w)}


def hidden(r: Random) -> int:
    return r.choice([6, 8, 9, 12, 16])


# --------------------------------------------------------------------------------- on the last dimension: plain


@block(*LAST)
def mlp(r: Random, w: int, nd: int) -> Part:
    h, act, residual = hidden(r), r.choice(ACTIVATIONS), r.random() < 0.4
    drop = nn.Dropout(0.3)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.b(s.drop(act(s.a(x))))
        return x + y if residual else y

    return Part(run, {**pair(r, w, h), "drop": drop}, family(h, rows("a"), columns("b")))


@block(*LAST)
def inplace(r: Random, w: int, nd: int) -> Part:
    h, how = hidden(r), r.randrange(7)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how == 0:
            y += 1
            y *= 0.5
        elif how == 1:
            y[..., 2] = 1.5
        elif how == 2:
            y[..., :3] += y[..., 3:6]
        elif how == 3:
            y[0] = y[0] * 2
        elif how == 4:
            z = y.view(-1)
            z.add_(1)
        elif how == 5:
            z = torch.empty_like(y)
            z[..., ::2] = y[..., ::2]
            z[..., 1::2] = -y[..., 1::2]
            y = z
        else:
            y.relu_().mul_(2).sub_(0.1)
            torch.add(y, 1.0, out=y)
        return s.b(y)

    return Part(run, pair(r, w, h), family(h, rows("a"), columns("b")))


@block(*LAST)
def glu(r: Random, w: int, nd: int) -> Part:
    h, how = 2 * r.choice([4, 5, 8]), r.randrange(6)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how == 0:
            u, v = y.chunk(2, -1)
        elif how == 1:
            u, v = y.split(h // 2, dim=-1)
        elif how == 2:
            u, v = y[..., : h // 2], y[..., h // 2 :]
        elif how == 3:
            u, v = y.unflatten(-1, (2, h // 2)).unbind(-2)
        elif how == 4:
            u, v = y[..., ::2], y[..., 1::2]
        else:
            return s.b(F.glu(y, -1))
        return s.b(u * torch.sigmoid(v))

    step = {"blocks": 1, "size": 2} if how == 4 else {"blocks": 2}
    return Part(run, {"a": nn.Linear(w, h), "b": nn.Linear(h // 2, w)}, family(h // 2, rows("a", **step), columns("b")))


@block(*LAST)
def shared(r: Random, w: int, nd: int) -> Part:
    h, how, act = hidden(r), r.randrange(3), r.choice(ACTIVATIONS)
    parts = {**pair(r, w, h), "c": nn.Linear(h, h)}
    if how == 1:
        parts["d"] = parts["c"]
    if how == 2:
        parts["d"] = nn.Linear(h, h)
        parts["d"].weight = parts["c"].weight

    def run(s: Any, x: Tensor) -> Tensor:
        y = act(s.c(act(s.a(x))))
        y = act((s.c if how == 0 else s.d)(y))
        return s.b(y)

    slots = (rows("a"), rows("c"), columns("c"), columns("b"))
    return Part(run, parts, family(h, *slots, *((rows("d"),) if how == 2 else ())))


@block(*LAST)
def tied(r: Random, w: int, nd: int) -> Part:
    """An autoencoder with the weight of its encoder."""
    h, how, act = hidden(r), r.randrange(3), r.choice(ACTIVATIONS)
    a = nn.Linear(w, h)
    parts: dict[str, Any] = {"a": a, "c": nn.Parameter(torch.zeros(w))}

    def run(s: Any, x: Tensor) -> Tensor:
        y = act(s.a(x))
        if how == 0:
            return F.linear(y, s.a.weight.t(), s.c)
        if how == 1:
            return y @ s.a.weight + s.c
        return torch.addmm(s.c, y.flatten(0, -2), s.a.weight).view_as(x)

    return Part(run, parts, family(h, rows("a")))


@block(*LAST)
def products(r: Random, w: int, nd: int) -> Part:
    """Parameters read by operations other than linear."""
    h, how = hidden(r), r.randrange(6)
    parts = {"a": nn.Linear(w, h), "b": nn.Linear(h, w)}
    up, down = nn.Parameter(parts["a"].weight.detach().clone()), nn.Parameter(parts["b"].weight.detach().clone())

    def run(s: Any, x: Tensor) -> Tensor:
        if how == 0:
            return (x @ s.up.T).relu() @ s.down.T
        if how == 1:
            return torch.einsum("...h,wh->...w", torch.einsum("...w,hw->...h", x, s.up).relu(), s.down)
        if how == 2:
            return torch.tensordot(torch.tensordot(x, s.up, ([-1], [1])).relu(), s.down, ([-1], [1]))
        if how == 3:
            return F.linear(F.linear(x, s.up * 2).relu(), s.down)
        if how == 4:
            return torch.matmul(torch.matmul(x, s.up.transpose(0, 1)).tanh(), s.down.mT)
        return F.linear(F.linear(x, s.up, s.shift).relu(), s.down)

    dead = (Slot("up", 0, "row"), Slot("down", 1, "column"))
    shift = nn.Parameter(torch.randn(h))
    more = (Slot("shift", 0, "bias"),) if how == 5 else ()
    return Part(run, {"up": up, "down": down, **({"shift": shift} if how == 5 else {})}, family(h, dead, more))


@block("flat", "sequence")
def experts(r: Random, w: int, nd: int) -> Part:
    """Ensembles and mixtures: weights of three dimensions."""
    h, e, how = r.choice([6, 8]), r.choice([2, 3]), r.randrange(3)
    up, down = nn.Parameter(torch.randn(e, w, h) / w**0.5), nn.Parameter(torch.randn(e, h, w) / h**0.5)

    def run(s: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, w)
        if how == 0:
            y = torch.bmm(torch.bmm(flat.expand(e, -1, -1), s.up).relu(), s.down)
        elif how == 1:
            y = torch.einsum("enh,ehw->enw", torch.einsum("nw,ewh->enh", flat, s.up).relu(), s.down)
        else:
            y = torch.stack([(flat @ s.up[i]).relu() @ s.down[i] for i in range(e)])
        return (y * s.gate(flat).softmax(-1).t()[..., None]).sum(0).view_as(x)

    parts = {"up": up, "down": down, "gate": nn.Linear(w, e)}
    return Part(run, parts, family(h, (Slot("up", 2, "row"), Slot("down", 1, "column"))))


@block(*LAST)
def indexed(r: Random, w: int, nd: int) -> Part:
    h, how = hidden(r), r.randrange(7)
    order = list(range(h))
    r.shuffle(order)
    some = order[: h - 2]

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        if how == 0:
            y = y[..., order]
        elif how == 1:
            y = y[..., s.order]
        elif how == 2:
            y = y.index_select(-1, s.order)
        elif how == 3:
            y = y[..., some]
        elif how == 4:
            y = y.flip(-1).roll(1, -1)
        elif how == 5:
            y = torch.take_along_dim(y, s.order.expand(y.shape), -1)
        else:
            y = y.narrow(-1, 1, h - 3)
        return s.b(y)

    n = {3: h - 2, 6: h - 3}.get(how, h)
    parts = {"a": nn.Linear(w, h), "b": nn.Linear(n, w), "order": ("buffer", torch.tensor(order))}
    dead = family(h, rows("a")) if n < h else []
    return Part(run, parts, dead)


@block(*LAST)
def branches(r: Random, w: int, nd: int) -> Part:
    h, how = hidden(r), r.randrange(7)

    def run(s: Any, x: Tensor) -> Tensor:
        u, v = s.a(x).relu(), s.c(x).tanh()
        if how == 0:
            return s.b(torch.cat([u, v], -1))
        if how == 1:
            return s.b(torch.stack([u, v]).sum(0))
        if how == 2:
            return s.b(torch.stack([u, v], -1).flatten(-2))
        if how == 3:
            return s.b(torch.maximum(u, v))
        if how == 4:
            return s.b(torch.where(u > v, u, v))
        if how == 5:
            return s.b(torch.stack([u, v], -1).amax(-1))
        return s.b(u * v + u)

    n = 2 * h if how in (0, 2) else h
    parts = {"a": nn.Linear(w, h), "c": nn.Linear(w, h), "b": nn.Linear(n, w)}
    at = {0: {"blocks": 2}, 2: {"size": 2}}.get(how, {})
    return Part(run, parts, family(h, rows("a"), rows("c"), columns("b", **at)))


@block(*LAST)
def chunks(r: Random, w: int, nd: int) -> Part:
    """Split, chunk and unbind along channels, with a layer for each of them."""
    n, how = r.choice([2, 3]), r.randrange(4)
    h = n * r.choice([4, 5])

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        if how == 0:
            cut = y.chunk(n, -1)
        elif how == 1:
            cut = y.split([h // n] * n, -1)
        elif how == 2:
            cut = y.unflatten(-1, (n, -1)).unbind(-2)
        else:
            cut = y.tensor_split(n, dim=-1)
        return sum(layer(z) for layer, z in zip(s.outs, cut, strict=True))

    outs = nn.ModuleList(nn.Linear(h // n, w) for _ in range(n))
    return Part(run, {"a": nn.Linear(w, h), "outs": outs}, family(h, rows("a")))


@block(*LAST)
def normed(r: Random, w: int, nd: int) -> Part:
    h, how = 8, r.choice(["layer", "root", "own", "batch", "group", "unit", "instance", "own_layer"])
    norm: nn.Module = {
        "layer": nn.LayerNorm(h), "root": nn.RMSNorm(h), "batch": nn.BatchNorm1d(h), "group": nn.GroupNorm(2, h),
        "instance": nn.InstanceNorm1d(h, affine=True),
    }.get(how, nn.Identity())  # fmt: skip
    if how == "batch":
        norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr,operator]
        norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr,operator]

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how in ("batch", "group", "instance"):
            z = y.transpose(1, 2) if y.dim() == 3 else y[..., None] if how == "instance" else y
            z = s.norm(z)
            y = z.transpose(1, 2) if y.dim() == 3 else z[..., 0] if how == "instance" else z
        elif how == "own":
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * s.scale
        elif how == "own_layer":
            y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * s.scale
        elif how == "unit":
            y = F.normalize(y, dim=-1)
        else:
            y = s.norm(y)
        return s.b(y.relu())

    parts = {**pair(r, w, h), "norm": norm, "scale": nn.Parameter(torch.rand(h) + 0.5)}
    dead = family(h, rows("a"), columns("b"))
    return Part(run, parts, dead)


@block(*LAST)
def scaled(r: Random, w: int, nd: int) -> Part:
    """What depends on how many channels there are."""
    h, how = hidden(r), r.randrange(12)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).tanh()
        if how == 0:
            y = y * y.shape[-1] ** -0.5
        elif how == 1:
            y = y / y.size(-1)
        elif how == 2:
            y = y - y.mean(-1, keepdim=True)
        elif how == 3:
            y = y.softmax(-1)
        elif how == 4:
            y = y / math.sqrt(s.a.out_features)
        elif how == 5:
            y = y * torch.arange(y.shape[-1], device=y.device, dtype=y.dtype)
        elif how == 6:
            y = y * s.alpha if y.shape[-1] > 7 else y
        elif how == 7:
            y = y.cumsum(-1)
        elif how == 8:
            y = y + s.a.weight.mean()
        elif how == 9:
            y = y + s.a.weight.square().sum() + len(s.a.weight)
        elif how == 10:
            y = F.layer_norm(y, y.shape[-1:])
        else:
            y = y * (y.numel() / x.numel())
        return s.b(y)

    return Part(run, {**pair(r, w, h), "alpha": 0.5}, family(h, rows("a"), columns("b")))


@block(*LAST)
def unseen(r: Random, w: int, nd: int) -> Part:
    """Operations that are compiled or mapped."""
    h, how = hidden(r), r.randrange(4)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how == 0:
            y = scripted(y)
        elif how == 1:
            y = torch.vmap(torch.tanh)(y)
        elif how == 2:
            y = torch.vmap(lambda z: z * 2 + 1, in_dims=-1, out_dims=-1)(y)
        else:
            y = torch.fft.rfft(y, dim=1).real if y.dim() == 3 else torch.fft.ifft(torch.fft.fft(y, dim=0), dim=0).real
        y = s.b(y)
        return F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1])) if y.dim() == 3 else y

    return Part(run, pair(r, w, h), family(h, rows("a"), columns("b")))


@block(*LAST)
def sized(r: Random, w: int, nd: int) -> Part:
    """Branches on sizes of the data."""
    h, how = hidden(r), r.randrange(9)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        n = x.shape[1] if x.dim() == 3 else x.shape[0]
        if how == 0 and n % 2:
            y = y + 1
        if how == 1 and x.shape[0] > 2:
            y = y * s.c(x)
        if how == 2 and x.dim() == 3 and n % 2:
            y = F.pad(y, (0, 0, 0, 1))
        if how == 3:
            y = torch.cat([y, s.c(x)]) if n > 3 else torch.cat([y, y])
            y = y.unflatten(0, (2, -1)).sum(0)
        if how == 4 and n == 1:
            return s.b(s.c(x))
        if how == 5:
            for _ in range(n):
                y = y.tanh() + s.shift
        if how == 7 and n % 2 == 0:
            y = y / s.a.out_features
        if how == 8 and n > 5:
            y = F.layer_norm(y, y.shape[-1:])
        if how == 6 and x.dim() == 3:
            y = y - y.mean(1, keepdim=True) if n < 6 else y - y[:, :1]
        y = s.b(y.relu())
        return y.mean(1, keepdim=True) + x if y.dim() == 3 and y.shape[1] != x.shape[1] else y

    parts = {**pair(r, w, h), "c": nn.Linear(w, h), "shift": nn.Parameter(torch.randn(h))}
    bias = (Slot("shift", 0, "bias"),)
    return Part(run, parts, family(h, rows("a"), rows("c"), bias, columns("b")))


@block(*LAST)
def reparametrized(r: Random, w: int, nd: int) -> Part:
    h, how = hidden(r), r.randrange(3)
    parts = pair(r, w, h)
    if how == 0:
        parts["a"] = nn.utils.parametrizations.weight_norm(parts["a"])
    elif how == 1:
        parts["b"] = nn.utils.parametrizations.weight_norm(parts["b"])
    else:
        parts["a"] = nn.utils.parametrizations.spectral_norm(parts["a"])
    up = "a.parametrizations.weight.original" + {0: "0", 2: ""}.get(how, "")
    down = "b.parametrizations.weight.original1"
    row = (Slot("a.weight" if how == 1 else up, 0, "row"), Slot("a.bias", 0, "bias"))
    column = (Slot(down if how == 1 else "b.weight", 1, "column"),)
    return Part(lambda s, x: s.b(s.a(x).relu()), parts, family(h, row, column))


@block(*LAST)
def routed(r: Random, w: int, nd: int) -> Part:
    """Rows chosen by what is in them."""
    h, how = hidden(r), r.randrange(5)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).tanh()
        chosen = x.sum(-1) > 0
        if how == 0:
            y[chosen] = s.c(x[chosen])
        elif how == 1:
            y = y.masked_fill(~chosen[..., None], 0.25)
        elif how == 2:
            y = torch.where(chosen[..., None], y, s.c(x))
        elif how == 3:
            y = torch.zeros_like(y).masked_scatter(chosen[..., None].expand_as(y), s.c(x[chosen]))
        else:
            flat = y.flatten(0, -2)
            at = torch.arange(len(flat)).flip(0)
            y = torch.zeros_like(flat).index_add_(0, at, flat).view_as(y)
        return s.b(y)

    parts = {**pair(r, w, h), "c": nn.Linear(w, h)}
    return Part(run, parts, family(h, rows("a"), rows("c"), columns("b")))


@block("sequence")
def translated(r: Random, w: int, nd: int) -> Part:
    """An encoder whose last state a decoder starts from."""
    h, kind = r.choice([5, 6, 8]), r.choice(["LSTM", "GRU"])
    attends = r.random() < 0.5
    parts = {"e": getattr(nn, kind)(w, h, batch_first=True), "d": getattr(nn, kind)(w, h, batch_first=True),
             "b": nn.Linear(2 * h if attends else h, w)}  # fmt: skip

    def run(s: Any, x: Tensor) -> Tensor:
        seen, state = s.e(x)
        y, _ = s.d(x.flip(1), state)
        if attends:
            weights = torch.bmm(y, seen.transpose(1, 2)).softmax(-1)
            y = torch.cat([y, torch.bmm(weights, seen)], -1)
        return s.b(y)

    g = {"LSTM": 4, "GRU": 3}[kind]
    slots: tuple[Slot, ...] = ()
    for name in "ed":
        slots += tuple(Slot(f"{name}.{k}_l0", 0, "row" if k[0] == "w" else "bias", blocks=g)
                       for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))  # fmt: skip
        slots += (Slot(f"{name}.weight_hh_l0", 1, "column"),)
    return Part(run, parts, family(h, slots, columns("b", blocks=2 if attends else 1)))


@block("flat")
def vae(r: Random, w: int, nd: int) -> Part:
    h, z = hidden(r), 4
    parts = {"e": nn.Linear(w, h), "mu": nn.Linear(h, z), "lv": nn.Linear(h, z), "d": nn.Linear(z, w)}

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.e(x).relu()
        mu = s.mu(y)
        if s.training:
            mu = mu + s.lv(y).exp() * torch.randn_like(mu)
        return s.d(mu)

    return Part(run, parts, family(h, rows("e"), columns("mu"), columns("lv")))


@block(*LAST)
def auxiliary(r: Random, w: int, nd: int) -> Part:
    """A head that training alone uses, and layers that nothing uses."""
    h = hidden(r)
    parts = {**pair(r, w, h), "aux": nn.Linear(h, 3), "never": nn.Linear(w, h)}

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        return s.b(y) + s.aux(y).sum(-1, keepdim=True) if s.training else s.b(y)

    return Part(run, parts, family(h, rows("a"), columns("b"), columns("aux")))


@block(*LAST)
def buffers(r: Random, w: int, nd: int) -> Part:
    h, how = hidden(r), r.randrange(5)
    mask = torch.ones(h)
    mask[: h // 3] = 0
    given = mask if how < 2 else torch.randn(h)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how in (0, 3):
            y = y * s.m
        elif how == 1:
            y = y.masked_fill(s.m == 0, 0.0)
        elif how == 2:
            y = (y - s.m) / s.m.abs().sum()
        else:
            y = y + s.m[None]
        return s.b(y.relu())

    return Part(run, {**pair(r, w, h), "m": ("buffer", given)}, family(h, rows("a"), columns("b")))


@block(*LAST)
def containers(r: Random, w: int, nd: int) -> Part:
    h, n, how = hidden(r), r.choice([1, 2, 3]), r.randrange(3)
    if how == 0:
        body: Any = nn.Sequential(nn.Linear(w, h), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(h, w))
        return Part(lambda s, x: s.body(x), {"body": body}, family(h, rows("body.0"), columns("body.3")))
    if how == 1:
        layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(w, h), "down": nn.Linear(h, w)}) for _ in range(n))
        gains = nn.ParameterList([nn.Parameter(torch.rand(w)) for _ in range(n)])

        def run(s: Any, x: Tensor) -> Tensor:
            for layer, gain in zip(s.layers, s.gains, strict=True):
                x = x + gain * layer["down"](F.gelu(layer["up"](x)))
            return x

        dead = [f for i in range(n) for f in family(h, rows(f"layers.{i}.up"), columns(f"layers.{i}.down"))]
        return Part(run, {"layers": layers, "gains": gains}, dead)
    parts = {**pair(r, w, h), "mid": nn.Identity(), "act": nn.PReLU(h if nd == 0 and r.random() < 0.3 else 1)}

    def plain(s: Any, x: Tensor) -> Tensor:
        y = s.mid(s.a(x))
        y = s.act(y.flatten(0, -2)).view_as(y)
        return s.b(y)

    return Part(plain, parts, family(h, rows("a"), columns("b")))


class Gained(nn.Linear):
    """A layer of the user's own, by inheritance."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Centred(nn.Linear):
    """Weight standardization: each weight depends on its whole row."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-3), self.bias)


class Adapted(nn.Module):
    """A low rank beside a weight, as LoRA has it."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(n, m), nn.Linear(n, 2, bias=False), nn.Linear(2, m, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


@block(*LAST)
def wrapped(r: Random, w: int, nd: int) -> Part:
    """Layers under hooks, inheritance, adapters, functional calls and checkpoints."""
    h, how = hidden(r), r.randrange(9)
    kind = {0: Gained, 1: Centred, 2: Adapted}.get(how, nn.Linear)
    a, b = kind(w, h), kind(h, w)
    if how == 3:
        a.register_forward_hook(lambda m, args, out: out * 2 + 1)
    if how == 4:
        b.register_forward_pre_hook(lambda m, args: (args[0].relu() - 0.5,))

    def run(s: Any, x: Tensor) -> Tensor:
        if how == 5:
            y = torch.func.functional_call(s.a, {k: v * 2 for k, v in s.a.named_parameters()}, (x,))
        elif how == 6:
            return checkpoint(lambda z: s.b(s.a(z).relu()), x, use_reentrant=False)
        elif how == 7:
            return F.linear(F.linear(x, s.a.weight[: h - 2], s.a.bias[: h - 2]).relu(), s.b.weight[:, : h - 2])
        elif how == 8:
            with torch.no_grad():
                s.a.weight.clamp_(-0.3, 0.3)
            y = s.a(x)
        else:
            y = s.a(x)
        return s.b(y.relu())

    dead = family(h, rows("a"), columns("b"))
    if how == 2:
        dead = family(h, rows("a.base"), rows("a.up", bias=False), columns("b.base"), columns("b.down"))
    return Part(run, {"a": a, "b": b}, dead)


# --------------------------------------------------------------------------------- state in eval


@block(*LAST)
def stateful(r: Random, w: int, nd: int) -> Part:
    h = hidden(r)
    how = r.choice([
        "counter", "silent", "calls", "init", "history", "seen", "last", "stream", "cached", "average", "hook", "ema",
        "lazy buffer", "inplace buffer",
    ])  # fmt: skip
    parts: dict[str, Any] = pair(r, w, h)
    if how in ("counter", "silent"):
        parts["n"] = ("buffer", torch.zeros(()))
    if how == "calls":
        parts["calls"] = 0
    if how in ("init", "stream", "last", "hook", "lazy buffer"):
        parts["kept"] = None
    if how in ("history", "seen"):
        parts["kept"] = []
    if how == "cached":
        parts["kept"] = {}
    if how in ("average", "ema", "inplace buffer"):
        parts["mean"] = ("buffer", torch.zeros(h))

    def run(s: Any, x: Tensor) -> Tensor:
        if how in ("counter", "silent"):
            s.n += 1
            x = x + s.n if how == "counter" else x
        if how == "calls":
            s.calls += 1
            x = x + s.calls
        if how == "init":
            if s.kept is None:
                s.kept = x.detach().abs().mean() + 1
            x = x / s.kept
        if how == "lazy buffer":
            if s.kept is None:
                del s.kept
                s.register_buffer("kept", x.detach().abs().mean() + 1)
            x = x / s.kept
        if how == "hook" and s.kept is None:
            s.kept = True
            s.a.register_forward_hook(lambda m, args, out: out * 2)
        if how == "seen":
            s.kept.append(x.detach())
        if how == "stream":
            before, s.kept = s.kept, x.detach()
            x = x + before if before is not None and before.shape == x.shape else x
        if how == "cached":
            n = x.shape[-2]
            if n not in s.kept:
                s.kept[n] = torch.arange(n, dtype=x.dtype)[:, None] / n
            x = x + s.kept[n]
        y = s.a(x).relu()
        if how == "last":
            s.kept = y
        if how == "history":
            s.kept.append(y.detach())
        if how == "average":
            s.mean = 0.9 * s.mean + 0.1 * y.detach().flatten(0, -2).mean(0)
            y = y + s.mean
        if how == "inplace buffer":
            s.mean.mul_(0.9).add_(y.detach().flatten(0, -2).mean(0), alpha=0.1)
            y = y + s.mean
        if how == "ema" and s.training:
            s.mean.lerp_(y.detach().flatten(0, -2).mean(0), 0.1)
        return s.b(y)

    return Part(run, parts, family(h, rows("a"), columns("b")))


# --------------------------------------------------------------------------------- attention


def _counted(r: Random, heads: int, name: str) -> tuple[dict[str, Any], Callable[[Any], int]]:
    """A count kept in one of the ways that users keep it in, and how it is read."""
    how = r.randrange(4)
    if how == 0:
        return {name: heads}, lambda s: getattr(s, name)
    if how == 1:
        return {f"_{name}": heads}, lambda s: getattr(s, f"_{name}")
    if how == 2:
        return {"config": SimpleNamespace(**{name: heads})}, lambda s: getattr(s.config, name)
    return {}, lambda s: heads


@block("sequence")
def attention(r: Random, w: int, nd: int) -> Part:
    heads, d = r.choice([(2, 4), (4, 4), (4, 3), (2, 5), (8, 8)])
    inner = heads * d
    fused = r.choice(["three", "three", "chunk", "split", "unbind", "sizes"])
    core = r.choice(["sdpa", "matmul", "einsum", "bmm", "causal", "heads last"])
    merge, width = r.randrange(3), r.choice(["-1", "d", "attr"])
    extra = r.choice([None, "lookahead", "steps_ahead", "n_heads_ahead"])
    name = r.choice(["num_heads", "n_head", "heads", "h", "num_attention_heads"])
    counts, count = _counted(r, heads, name)
    parts: dict[str, Any] = {"proj": nn.Linear(inner, w), **counts}
    if width == "attr":
        parts["head_dim"] = d
    if extra:
        parts[extra] = heads
    if fused == "three":
        parts |= {k: nn.Linear(w, inner) for k in "qkv"}
        dead = family(heads, *(rows(k, size=d) for k in "qkv"), columns("proj", size=d))
    else:
        parts["qkv"] = nn.Linear(w, 3 * inner)
        dead = family(heads, rows("qkv", blocks=3, size=d), columns("proj", size=d))

    def run(s: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        size = {"-1": -1, "d": d, "attr": getattr(s, "head_dim", d)}[width]
        if fused == "three":
            q, k, v = (layer(x) for layer in (s.q, s.k, s.v))
        elif fused == "chunk":
            q, k, v = s.qkv(x).chunk(3, dim=-1)
        elif fused == "split":
            q, k, v = s.qkv(x).split(inner, dim=2)
        elif fused == "sizes":
            q, k, v = torch.split(s.qkv(x), [inner, inner, inner], dim=-1)
        if fused == "unbind":
            q, k, v = s.qkv(x).reshape(b, n, 3, count(s), size).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (y.view(b, n, count(s), size).transpose(1, 2) for y in (q, k, v))
        mask = None
        if extra in ("lookahead", "n_heads_ahead"):
            i = torch.arange(n)
            mask = i[None] <= i[:, None] + getattr(s, extra)
        if core in ("sdpa", "causal", "heads last"):
            causal = core == "causal" and mask is None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        elif core == "matmul":
            weights = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = weights if mask is None else weights.masked_fill(~mask, float("-inf"))
            y = weights.softmax(-1) @ v
        elif core == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)
            weights = weights if mask is None else torch.where(mask, weights, torch.tensor(-1e9, dtype=x.dtype))
            y = torch.einsum("bhij,bhjd->bhid", weights.softmax(-1), v)
        else:
            q, k, v = (z.reshape(b * z.shape[1], n, -1) for z in (q, k, v))
            weights = torch.bmm(q * q.size(-1) ** -0.5, k.transpose(1, 2))
            weights = weights if mask is None else weights + torch.zeros_like(weights).masked_fill(~mask, -1e9)
            y = torch.bmm(weights.softmax(-1), v).view(b, -1, n, v.shape[-1])
        y = y.transpose(1, 2)
        y = y.reshape(b, n, -1) if merge == 0 else y.flatten(2) if merge == 1 else y.reshape(b, n, inner)
        y = s.proj(y)
        if extra == "steps_ahead":
            y = y + torch.arange(getattr(s, extra)).to(y).sum()
        return x + y

    return Part(run, parts, dead)


@block("sequence")
def grouped_queries(r: Random, w: int, nd: int) -> Part:
    kv, each, d = r.choice([(2, 2, 4), (2, 1, 4), (4, 2, 3), (2, 2, 2), (1, 4, 4)])
    heads, how, kept = kv * each, r.randrange(3), r.randrange(4)
    rope = r.random() < 0.3
    parts: dict[str, Any] = {
        "q": nn.Linear(w, heads * d), "k": nn.Linear(w, kv * d), "v": nn.Linear(w, kv * d), "o": nn.Linear(heads * d, w)
    }  # fmt: skip
    if kept == 0:
        parts |= {"num_heads": heads, "num_kv_heads": kv}
    elif kept == 1:
        parts |= {"_n_heads": heads, "_n_kv": kv, "_rep": each}
    elif kept == 2:
        parts["config"] = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv, head_dim=d)

    def counts(s: Any) -> tuple[int, int, int]:
        if kept == 0:
            return s.num_heads, s.num_kv_heads, s.num_heads // s.num_kv_heads
        if kept == 1:
            return s._n_heads, s._n_kv, s._rep
        if kept == 2:
            c = s.config
            return c.num_attention_heads, c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        return -1, -1, each

    def run(s: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        hq, hk, times = counts(s)
        q = s.q(x).view(b, n, hq, d).transpose(1, 2)
        k, v = (layer(x).view(b, n, hk, d).transpose(1, 2) for layer in (s.k, s.v))
        if rope:
            angle = torch.arange(n, dtype=x.dtype)[:, None] * torch.ones(d, dtype=x.dtype)
            q, k = (z * angle.cos() + z.roll(1, -1) * angle.sin() for z in (q, k))
        if how == 0:
            k, v = (z.repeat_interleave(times, dim=1) for z in (k, v))
        elif how == 1:
            k, v = (z[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=how == 2)
        return s.o(y.transpose(1, 2).reshape(b, n, -1))

    big, small = {"size": d * each}, {"size": d}
    return Part(run, parts, family(kv, rows("q", **big), rows("k", **small), rows("v", **small), columns("o", **big)))


@block("sequence")
def torch_attention(r: Random, w: int, nd: int) -> Part:
    heads = r.choice([n for n in (1, 2, 4) if w % n == 0])
    how, f = r.randrange(4), hidden(r)
    if how < 2:
        m: nn.Module = nn.MultiheadAttention(w, heads, batch_first=True, bias=r.random() < 0.7)

        def run(s: Any, x: Tensor) -> Tensor:
            return s.m(x, x, x, need_weights=how == 1)[0] + x

        return Part(run, {"m": m})
    if how == 2:
        m = nn.TransformerEncoderLayer(w, heads, f, batch_first=True, norm_first=r.random() < 0.5)
        return Part(lambda s, x: s.m(x), {"m": m}, family(f, rows("m.linear1"), columns("m.linear2")))
    m = nn.TransformerDecoderLayer(w, heads, f, batch_first=True)
    return Part(lambda s, x: s.m(x, x.flip(1)), {"m": m}, family(f, rows("m.linear1"), columns("m.linear2")))


# --------------------------------------------------------------------------------- recurrent


@block("sequence")
def recurrent(r: Random, w: int, nd: int) -> Part:
    kind = r.choice(["LSTM", "LSTM", "GRU", "RNN"])
    h, layers, both = r.choice([5, 6, 8]), r.choice([1, 1, 2]), r.random() < 0.3
    proj = r.choice([0, 0, 3]) if kind == "LSTM" else 0
    first, given, packed = r.random() < 0.7, r.choice(["no", "no", "zeros", "learned", "input"]), r.random() < 0.25
    reads, bias = r.choice(["all", "last", "state", "both"]), r.random() < 0.8
    more = {"proj_size": proj} if proj else {}
    m = getattr(nn, kind)(w, h, layers, bidirectional=both, batch_first=first, bias=bias, **more)
    width, rows_ = (proj or h) * (1 + both), layers * (1 + both)
    parts = {"m": m, "b": nn.Linear(width * (2 if reads == "both" else 1), w)}
    if given == "learned":
        parts["h0"] = nn.Parameter(torch.randn(rows_, 1, proj or h))
    if given == "input":
        parts["start"] = nn.Linear(w, proj or h)

    def run(s: Any, x: Tensor) -> Tensor:
        batch, n = x.shape[:2]
        state: Any = None
        if given == "zeros":
            state = x.new_zeros(rows_, batch, proj or h)
        elif given == "learned":
            state = s.h0.expand(-1, batch, -1).contiguous()
        elif given == "input":
            state = s.start(x.mean(1)).tanh().expand(rows_, -1, -1).contiguous()
        if state is not None and kind == "LSTM":
            state = (state, x.new_zeros(rows_, batch, h))
        y = x if first else x.transpose(0, 1)
        if packed:
            lengths = torch.tensor([max(1, n - i) for i in range(batch)])
            y = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=first)
        y, state = s.m(y) if state is None else s.m(y, state)
        if packed:
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=first, total_length=n)
        y = y if first else y.transpose(0, 1)
        end = (state[0] if kind == "LSTM" else state).view(layers, 1 + both, batch, -1)[-1].transpose(0, 1).flatten(1)
        if reads == "all":
            return s.b(y)
        if reads == "last":
            return s.b(y[:, -1:]) + x
        if reads == "state":
            return s.b(end)[:, None] + x
        return s.b(torch.cat([y, end[:, None].expand(-1, n, -1)], -1))

    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    dead: list[Family] = []
    if layers == 1:
        names = [("weight_ih_l0", "row"), ("weight_hh_l0", "row")]
        names += [("bias_ih_l0", "bias"), ("bias_hh_l0", "bias")] if bias else []
        made = tuple(Slot(f"m.{name}", 0, role, blocks=gates) for name, role in names)
        out = columns("b") + (columns("b", offset=width) if reads == "both" else ())
        if proj:
            dead += family(h, made, (Slot("m.weight_hr_l0", 1, "column"),))
            dead += family(proj, (Slot("m.weight_hr_l0", 0, "row"), Slot("m.weight_hh_l0", 1, "column")), out)
        else:
            dead += family(h, made, (Slot("m.weight_hh_l0", 1, "column"),), out)
    return Part(run, parts, dead)


@block("sequence")
def unrolled(r: Random, w: int, nd: int) -> Part:
    """Cells and recurrences written by hand."""
    h, how, zero, stacked = (
        r.choice([5, 6, 8]),
        r.choice(["lstm", "gru", "rnn", "own", "gated"]),
        r.randrange(4),
        r.random() < 0.5,
    )
    cells = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
    parts: dict[str, Any] = {"b": nn.Linear(h, w)}
    if how in cells:
        parts["c"] = cells[how](w, h)
        gates = {"lstm": 4, "gru": 3, "rnn": 1}[how]
        made = tuple(Slot(f"c.{k}", 0, "row" if k[0] == "w" else "bias", blocks=gates)
                     for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))  # fmt: skip
        made += (Slot("c.weight_hh", 1, "column"),)
        dead = family(h, made, columns("b"))
    else:
        parts |= {"i": nn.Linear(w, h), "u": nn.Linear(h, h, bias=False), "size": h}
        gated = {"g": nn.Linear(w, h)} if how == "gated" else {}
        parts |= gated
        dead = family(h, rows("i"), rows("u", bias=False), *(rows(g) for g in gated), columns("u"), columns("b"))

    def start(s: Any, x: Tensor) -> Tensor:
        if zero == 0:
            return x.new_zeros(x.shape[0], h)
        if zero == 1:
            return torch.zeros(x.shape[0], s.b.in_features, dtype=x.dtype)
        if zero == 2 and how not in cells:
            return torch.zeros_like(s.i(x[:, 0]))
        return torch.zeros(x.shape[0], getattr(s, "size", h)).to(x)

    def run(s: Any, x: Tensor) -> Tensor:
        y = start(s, x)
        cell = torch.zeros_like(y)
        made = []
        for t in range(x.shape[1]):
            now = x[:, t]
            if how == "lstm":
                y, cell = s.c(now, (y, cell))
            elif how in cells:
                y = s.c(now, y)
            elif how == "own":
                y = torch.tanh(s.i(now) + s.u(y))
            else:
                gate = s.g(now).sigmoid()
                y = gate * y + (1 - gate) * torch.tanh(s.i(now) + s.u(y))
            made.append(y if stacked else s.b(y))
        return s.b(torch.stack(made, 1)) if stacked else torch.stack(made, dim=1)

    return Part(run, parts, dead)


# --------------------------------------------------------------------------------- convolutions


CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
BATCH = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
INSTANCE = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


def batch_norm(nd: int, n: int) -> nn.Module:
    norm = BATCH[nd - 1](n)
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 1.5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm


@block(*FIRST)
def conv(r: Random, w: int, nd: int) -> Part:
    """Convolutions with a norm between them."""
    h, act, kind = (
        r.choice([6, 8, 12]),
        r.choice(ACTIVATIONS),
        r.choice(["none", "batch", "batch", "group", "instance", "last"]),
    )
    mode = r.choice(["zeros", "zeros", "circular", "reflect", "replicate"]) if nd < 3 else "zeros"
    residual, dilation, bias = r.random() < 0.4, r.choice([1, 1, 2]), r.random() < 0.7
    a = CONVS[nd - 1](w, h, 3, padding=dilation, dilation=dilation, padding_mode=mode, bias=bias)
    norm = {
        "batch": lambda: batch_norm(nd, h), "group": lambda: nn.GroupNorm(2, h), "last": lambda: nn.LayerNorm(h),
        "instance": lambda: INSTANCE[nd - 1](h, affine=r.random() < 0.5, track_running_stats=r.random() < 0.3),
    }.get(kind, nn.Identity)()  # fmt: skip
    parts = {"a": a, "norm": norm, "b": CONVS[nd - 1](h, w, r.choice([1, 3]), padding="same")}

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        y = s.norm(y.movedim(1, -1)).movedim(-1, 1) if kind == "last" else s.norm(y)
        y = s.b(act(y))
        return x + y if residual else y

    mid = rows("norm") if kind in ("batch", "group", "last") else ()
    return Part(run, parts, family(h, rows("a", bias), mid, columns("b")))


@block(*FIRST)
def separable(r: Random, w: int, nd: int) -> Part:
    """Depthwise and grouped."""
    how, act = r.randrange(4), r.choice(ACTIVATIONS)
    h = 8
    groups = {0: h, 1: h, 2: 2, 3: 4}[how]
    middle = CONVS[nd - 1](h, 2 * h if how == 1 else h, 3, padding=1, groups=groups, stride=r.choice([1, 1, 2]))
    n = 2 * h if how == 1 else h
    parts = {"a": CONVS[nd - 1](w, h, 1), "m": middle, "b": CONVS[nd - 1](n, w, 1), "norm": batch_norm(nd, n)}

    def run(s: Any, x: Tensor) -> Tensor:
        return s.b(act(s.norm(s.m(act(s.a(x))))))

    size = 2 if how == 1 else 1
    if groups == h:
        dead = family(h, rows("a"), rows("m", size=size), rows("norm", size=size), columns("b", size=size))
    else:
        each = h // groups  # whole groups go
        dead = family(
            groups, rows("a", size=each), rows("m", size=each), rows("norm", size=each), columns("b", size=each)
        )
    return Part(run, parts, dead)


@block(*FIRST)
def transposed(r: Random, w: int, nd: int) -> Part:
    h, stride, groups = 8, r.choice([1, 2]), r.choice([1, 1, 2, 8])
    how = r.randrange(2)
    kernel = stride + r.choice([0, 1])
    a: nn.Module = CONVS[nd - 1](w, h, kernel, stride=stride)
    b: nn.Module = TRANSPOSED[nd - 1](h, h, kernel, stride=stride, groups=groups, output_padding=0)
    parts = {"a": a, "b": b, "c": CONVS[nd - 1](h, w, 1)}

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.b(s.a(x).relu())
        return s.c(y.tanh() if how else y)

    if groups == 1:
        dead = family(h, rows("a"), columns("b", dim=0))
        dead += family(h, (Slot("b.weight", 1, "row"), Slot("b.bias", 0, "bias")), columns("c"))
    else:
        each = h // groups
        slots = (Slot("b.weight", 0, "row", size=each), Slot("b.bias", 0, "bias", size=each))
        dead = family(groups, rows("a", size=each), slots, columns("c", size=each))
    return Part(run, parts, dead)


@block(*FIRST)
def padded(r: Random, w: int, nd: int) -> Part:
    """What is padded, by itself or where a size is odd."""
    h, how = 8, r.randrange(5)
    value = r.choice([0.0, 0.5])
    b = CONVS[nd - 1](h, w, 2, 2) if how < 2 else CONVS[nd - 1](h, w, 3)
    parts = {"a": CONVS[nd - 1](w, h, 1), "b": b}

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        if how == 0 and y.shape[-1] % 2:
            y = F.pad(y, (0, 1) * nd)
        elif how == 1:
            y = F.pad(y, [k for n in reversed(y.shape[2:]) for k in (0, n % 2)])
        elif how == 2:
            y = F.pad(y, (1, 1) * nd, value=value)
        elif how == 3:
            y = F.pad(y, (1, 1) * nd, mode="replicate")
        elif how == 4:
            y = F.pad(y.relu(), (2, 0) * nd)
        return s.b(y)

    return Part(run, parts, family(h, rows("a"), columns("b")))


@block(*FIRST)
def pooled(r: Random, w: int, nd: int) -> Part:
    """Pooling, resampling and other spatial moves."""
    h, how = 8, r.randrange(9)
    pools = [(F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d), (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
             (F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d)]  # fmt: skip
    largest, mean, to = pools[nd - 1]

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x).relu()
        if how == 0:
            y = largest(y, 2)
        elif how == 1:
            y = mean(y, 3, 1, 1)
        elif how == 2:
            y = to(y, 2)
        elif how == 3:
            y = F.interpolate(y, scale_factor=2, mode="nearest")
        elif how == 4:
            y = y * torch.sigmoid(to(s.g(y), 1))
        elif how == 5:
            y = y.flip(-1).roll(1, -1)
        elif how == 6:
            y = y.amax(-1, keepdim=True) + y.std(-1, keepdim=True)
        elif how == 7:
            y = F.max_pool2d(y, 2, 1, ceil_mode=True) if nd == 2 else y - y.mean(tuple(range(2, 2 + nd)), keepdim=True)
        else:
            y = torch.cat([y, x.repeat(1, 2, *[1] * nd)[:, :h]], 1)[:, :h] + y
        return s.b(y)

    parts = {"a": CONVS[nd - 1](w, h, 1), "b": CONVS[nd - 1](h, w, 1)}
    if how == 4:
        parts["g"] = CONVS[nd - 1](h, h, 1)
    more = (rows("g"), columns("g")) if how == 4 else ()
    return Part(run, parts, family(h, rows("a"), *more, columns("b")))


@block(*FIRST)
def dense_block(r: Random, w: int, nd: int) -> Part:
    n, k = r.choice([2, 3]), 4
    layers = nn.ModuleList(CONVS[nd - 1](w + i * k, k, 3, padding=1) for i in range(n))
    how = r.randrange(3)

    def run(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        if how == 1 and nd == 2 and x.shape[1] % 4 == 0:
            x = F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)
        if how == 2 and x.shape[1] % 2 == 0:  # channels shuffled between groups
            x = x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return s.b(x)

    first = r.randrange(1, n + 1)
    slots = rows(f"layers.{first - 1}") + columns("b", offset=w + (first - 1) * k)
    for i in range(first, n):
        slots += columns(f"layers.{i}", offset=w + (first - 1) * k)
    parts = {"layers": layers, "b": CONVS[nd - 1](w + n * k, w, 1)}
    return Part(run, parts, family(k, slots) if how == 0 else [])


@block(*FIRST)
def flipped(r: Random, w: int, nd: int) -> Part:
    """Channels last in the code: ConvNeXt's block."""
    h = hidden(r)
    parts = {"d": CONVS[nd - 1](w, w, 3, padding=1, groups=w), "norm": nn.LayerNorm(w), **pair(r, w, h)}
    parts["gamma"] = nn.Parameter(torch.rand(w))

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.norm(s.d(x).movedim(1, -1))
        return x + (s.gamma * s.b(F.gelu(s.a(y)))).movedim(-1, 1)

    return Part(run, parts, family(h, rows("a"), columns("b")))


# --------------------------------------------------------------------------------- from one domain to another


@block("tokens")
def embedded(r: Random, w: int, nd: int) -> Part:
    how = r.randrange(6)
    parts: dict[str, Any] = {"e": nn.Embedding(11, w, padding_idx=0 if how == 1 else None)}
    if how == 5:
        parts["e"].max_norm = 1.0  # it writes into its weight as it runs
    if how in (2, 3):
        parts["p"] = nn.Embedding(16, w)
    if how == 4:
        parts["f"] = nn.Linear(w, w)

    def run(s: Any, x: Tensor) -> Tensor:
        y = s.e.weight[x] if how == 0 else s.e(x)
        if how == 2:
            y = y + s.p(torch.arange(x.shape[1]))
        if how == 3:
            y = y + s.p.weight[: x.shape[1]]
        return s.f(y.relu()) if how == 4 else y

    dead = family(w, columns("e"), columns("f")) if how == 4 else []
    return Part(run, parts, dead, domain="sequence")


@block("sequence")
def to_flat(r: Random, w: int, nd: int) -> Part:
    how = r.randrange(4)

    def run(s: Any, x: Tensor) -> Tensor:
        return x.mean(1) if how == 0 else x[:, -1] if how == 1 else x.amax(dim=1) if how == 2 else x.sum(1) / x.shape[1]

    return Part(run, {}, domain="flat")


@block("sequence")
def to_signal(r: Random, w: int, nd: int) -> Part:
    return Part(lambda s, x: x.transpose(1, 2), {}, domain="signal")


@block(*FIRST)
def to_sequence(r: Random, w: int, nd: int) -> Part:
    n = r.choice([4, 8])
    how = r.randrange(2)
    parts = {"patch": CONVS[nd - 1](w, n, 2, 2)} if how else {}

    def run(s: Any, x: Tensor) -> Tensor:
        return (s.patch(x) if how else x).flatten(2).transpose(1, 2)

    return Part(run, parts, width=n if how else w, domain="sequence")


@block(*FIRST)
def to_features(r: Random, w: int, nd: int) -> Part:
    how = r.randrange(4)
    pool = [nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d][nd - 1]
    parts = {"pool": pool(2 if how == 1 else 1)} if how < 2 else {}
    n = w * 2**nd if how == 1 else w

    def run(s: Any, x: Tensor) -> Tensor:
        if how == 0:
            return s.pool(x).flatten(1)
        if how == 1:
            return s.pool(x).reshape(x.shape[0], -1)
        return x.mean(tuple(range(2, 2 + nd))) if how == 2 else x.flatten(2).sum(-1)

    return Part(run, parts, width=n, domain="flat")
