"""Integer attributes change only where they are the number of channels, and then wherever they are."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.compact.attributes import set_attribute

QUICK = {"latency": False, "low_rank": False, "gather": "never"}


class Attention(nn.Module):
    """Four heads of eight, two of which nothing reads; `run` cuts the projections into heads and joins the outputs."""

    def __init__(self, run: Callable[..., Any], width: int = 32, **attributes: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(32, width) for _ in range(4))
        self.proj = nn.Linear(width, 32)
        self.run = run
        for name, value in attributes.items():
            setattr(self, name, value)
        with torch.no_grad():
            self.proj.weight[:, : width // 2] = 0

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def attend(
    s: Any, x: Tensor, cut: Callable[[Any, Tensor], Tensor], join: Callable[[Any, Tensor], Tensor], **options: Any
) -> Tensor:
    q, k, v = (cut(s, layer(x)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    y: Tensor = s.proj(join(s, F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)))
    return y


def cut_by(count: Callable[[Any], Any], rest: int | None = -1) -> Callable[[Any, Tensor], Tensor]:
    return lambda s, h: h.view(*h.shape[:2], count(s), rest)


def flat(s: Any, o: Tensor) -> Tensor:
    return o.flatten(2)


def by_heads(s: Any, x: Tensor) -> Tensor:
    return attend(s, x, cut_by(lambda s: s.heads), flat)


def window(s: Any, length: int, ahead: int) -> Tensor:
    i = torch.arange(length)
    return i[None] <= i[:, None] + ahead


@dataclass(frozen=True)
class Frozen:
    heads: int = 4
    lookahead: int = 4


class OfClass(Attention):
    n_heads = 4


class Derived(Attention):
    @property
    def heads(self) -> int:
        return self._h


def grouped(s: Any, x: Tensor) -> Tensor:
    q = cut_by(lambda s: s.num_heads)(s, s.q(x)).transpose(1, 2)
    again = s.num_heads // s.num_kv_heads
    k, v = (cut_by(lambda s: s.num_kv_heads)(s, layer(x)).transpose(1, 2) for layer in (s.k, s.v))
    k, v = (t[:, :, None].expand(-1, -1, again, -1, -1).flatten(1, 2) for t in (k, v))
    return s.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))


def gqa() -> nn.Module:
    model = Attention(grouped, num_heads=4, num_kv_heads=2)
    model.k, model.v = nn.Linear(32, 16), nn.Linear(32, 16)
    return model


def square(s: Any, h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], s.n_head, s.d_head)


# name: (model, what its attributes are afterwards)
CHANGED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "public": (lambda: Attention(by_heads, heads=4), {"heads": 2}),
    "any name": (lambda: Attention(lambda s, x: attend(s, x, cut_by(lambda s: s.n), flat), n=4, m=4), {"n": 2, "m": 4}),
    "private": (lambda: Attention(lambda s, x: attend(s, x, cut_by(lambda s: s._n), flat), _n=4), {"_n": 2}),
    "of the class": (lambda: OfClass(lambda s, x: attend(s, x, cut_by(lambda s: s.n_heads), flat)), {"n_heads": 2}),
    "property": (lambda: Derived(by_heads, _h=4), {"_h": 2}),
    "unflatten": (
        lambda: Attention(lambda s, x: attend(s, x, lambda s, h: h.unflatten(-1, (s.heads, 8)), flat), heads=4),
        {"heads": 2},
    ),
    "shape as a tuple": (
        lambda: Attention(lambda s, x: attend(s, x, lambda s, h: h.reshape((2, -1, s.heads, 8)), flat), heads=4),
        {"heads": 2},
    ),
    "shape + sizes": (
        lambda: Attention(
            lambda s, x: attend(s, x, lambda s, h: h.view(operator.add(h.shape[:-1], (s.heads, 8))), flat),
            heads=4,
        ),
        {"heads": 2},
    ),
    "on a configuration": (
        lambda: Attention(
            lambda s, x: attend(s, x, cut_by(lambda s: s.config.heads), flat), config=SimpleNamespace(heads=4, pad=4)
        ),
        {"config.heads": 2, "config.pad": 4},
    ),
    "on a frozen dataclass": (
        lambda: Attention(lambda s, x: attend(s, x, cut_by(lambda s: s.config.heads), flat), config=Frozen()),
        {"config.heads": 2, "config.lookahead": 4},
    ),
    "in a dict": (
        lambda: Attention(lambda s, x: attend(s, x, cut_by(lambda s: s.sizes["h"]), flat), sizes={"h": 4, "w": 4}),
        {"sizes.h": 2, "sizes.w": 4},
    ),
    "and their width": (
        lambda: Attention(
            lambda s, x: attend(s, x, cut_by(lambda s: s.heads), lambda s, o: o.reshape(*o.shape[:2], s.inner)),
            heads=4, inner=32, outer=32,
        ),
        {"heads": 2, "inner": 16, "outer": 32},
    ),
    "product": (
        lambda: Attention(
            lambda s, x: attend(s, x, cut_by(lambda s: s.heads), lambda s, o: o.reshape(2, -1, s.heads * s.dim)),
            heads=4, dim=8,
        ),
        {"heads": 2, "dim": 8},
    ),
    "product alone": (
        lambda: Attention(
            lambda s, x: attend(
                s, x, lambda s, h: h.view(*h.shape[:2], -1, s.dim), lambda s, o: o.reshape(2, -1, s.heads * s.dim)
            ),
            heads=4, dim=8,
        ),
        {"heads": 2, "dim": 8},
    ),
    "batch and heads": (
        lambda: Attention(
            lambda s, x: attend(
                s, x,
                lambda s, h: h.view(2, -1, s.heads, 8).transpose(1, 2).reshape(2 * s.heads, -1, 8)
                .view(2, s.heads, -1, 8).transpose(1, 2),
                flat,
            ),
            heads=4,
        ),
        {"heads": 2},
    ),
    "as many heads as entries": (
        lambda: Attention(lambda s, x: attend(s, x, square, flat), width=64, n_head=8, d_head=8),
        {"n_head": 4, "d_head": 8},
    ),
    "groups of heads": (gqa, {"num_heads": 2, "num_kv_heads": 1}),
    "a count beside": (
        lambda: Attention(
            lambda s, x: attend(s, x, cut_by(lambda s: s.heads), flat, attn_mask=window(s, x.shape[1], s.lookahead)),
            heads=4, lookahead=4,
        ),
        {"heads": 2, "lookahead": 4},
    ),
    "steps ahead": (
        lambda: Attention(lambda s, x: by_heads(s, x)[:, -s.steps_ahead :], heads=4, steps_ahead=4),
        {"heads": 2, "steps_ahead": 4},
    ),
    "a check of sizes": (
        lambda: Attention(lambda s, x: by_heads(s, x) if s.q(x).shape[2] == s.heads * 8 else x, heads=4),
        {"heads": 2},
    ),
    "not asked for": (
        lambda: Attention(lambda s, x: attend(s, x, cut_by(lambda s: -1, 8), flat), heads=4), {"heads": 4}
    ),
}  # fmt: skip


def value(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = model[part] if isinstance(model, dict) else getattr(model, part)
    return model


def agree(model: nn.Module, small: nn.Module, lengths: tuple[int, ...] = (1, 3, 9)) -> None:
    for n in lengths:
        x = torch.randn(2, n, 32, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(small(x), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CHANGED)
def test_heads_go_and_with_them_the_attribute_that_is_their_number(name: str) -> None:
    torch.manual_seed(0)
    build, attributes = CHANGED[name]
    model = build().double().eval()
    before = {k: value(model, k) for k in attributes}
    found = espalier.shrink(model, torch.randn(2, 3, 32, dtype=torch.float64), **QUICK)
    small = found.model
    assert small.proj.in_features == model.proj.in_features // 2
    agree(model, small)
    assert {k: value(small, k) for k in attributes} == attributes
    assert all(type(value(small, k)) is int for k in attributes)
    assert {k: value(model, k) for k in attributes} == before
    changed = {k: v for k, v in attributes.items() if v != before[k]}
    assert found.kept.attributes == {("", k): v for k, v in changed.items()}
    again = copy.deepcopy(model)
    for key, new in found.kept.attributes.items():
        set_attribute(again, key, new)
    assert {k: value(again, k) for k in attributes} == attributes


# in which an attribute is more than the number of heads
KEPT: dict[str, Callable[[], nn.Module]] = {
    "also frames": lambda: Attention(
        lambda s, x: attend(s, x, cut_by(lambda s: s.n), flat, attn_mask=window(s, x.shape[1], s.n)), n=4
    ),
    "also a slice": lambda: Attention(lambda s, x: by_heads(s, x)[:, -s.heads :], heads=4),
    "also a float": lambda: Attention(lambda s, x: by_heads(s, x) / s.heads, heads=4),
    "also a product": lambda: Attention(lambda s, x: by_heads(s, x * s.heads), heads=4),
    "also a branch": lambda: Attention(lambda s, x: by_heads(s, x if s.heads > 3 else x.flip(1)), heads=4),
    "a new tensor": lambda: Attention(lambda s, x: by_heads(s, x) + torch.zeros(s.heads, 8).numel(), heads=4),
    "product of equals": lambda: Attention(
        lambda s, x: attend(
            s, x, lambda s, h: h.view(*h.shape[:2], -1, s.b), lambda s, o: o.reshape(2, -1, s.a * s.b)
        ),
        width=64, a=8, b=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_an_attribute_that_is_more_than_a_number_of_heads_keeps_them(name: str) -> None:
    torch.manual_seed(0)
    model = KEPT[name]().double().eval()
    found = espalier.shrink(model, torch.randn(2, 3, 32, dtype=torch.float64), **QUICK)
    agree(model, found.model)
    assert found.model.proj.in_features == model.proj.in_features
    assert not found.kept.attributes
    assert "is read as more than a number of channels" in str(found.report)


class Two(nn.Module):
    """Layers that share their configuration lose as many heads each."""

    def __init__(self) -> None:
        super().__init__()
        config = SimpleNamespace(heads=4)
        run = lambda s, x: attend(s, x, cut_by(lambda s: s.config.heads), flat)  # noqa: E731
        self.a, self.b = Attention(run, config=config), Attention(run, config=config)
        with torch.no_grad():
            self.b.proj.weight.copy_(torch.randn(32, 32))
            self.b.proj.weight[:, :8] = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def test_layers_that_share_an_attribute_lose_as_many() -> None:
    torch.manual_seed(0)
    model = Two().double().eval()
    found = espalier.shrink(model, torch.randn(2, 3, 32, dtype=torch.float64), **QUICK)
    assert (found.model.a.proj.in_features, found.model.b.proj.in_features) == (24, 24)
    assert found.kept.attributes == {("a", "config.heads"): 3}
    assert model.a.config.heads == 4
    agree(model, found.model)


def test_what_the_model_keeps_of_a_followed_number_is_an_integer() -> None:
    class Caching(Attention):
        def forward(self, x: Tensor) -> Any:
            self.size, self.calls = self.heads * 8, self.calls + 1
            return super().forward(x)

    model = Caching(by_heads, heads=4, calls=0).double().eval()
    small = espalier.shrink(model, torch.randn(2, 3, 32, dtype=torch.float64), **QUICK).model
    again = pickle.loads(pickle.dumps({k: v for k, v in vars(small).items() if isinstance(v, int)}))
    assert {type(v) for v in again.values()} <= {int, bool}


def test_code_that_bears_no_followed_numbers_is_traced_without() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        if type(s.odd) is not int:
            raise TypeError("odd must be an int")
        return s.proj(s.q(x).relu())

    model = Attention(run, odd=3).double().eval()
    found = espalier.shrink(model, torch.randn(2, 3, 32, dtype=torch.float64), **QUICK)
    assert found.model.q.out_features == 16
