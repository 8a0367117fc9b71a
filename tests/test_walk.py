"""Tensors are found in whatever holds them, and what cannot be opened is told."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from espalier.compact.walk import leaves, left_behind, mapped, tensors_in

X = torch.arange(3.0)
Pair = namedtuple("Pair", ["left", "right"])


class Slots:
    __slots__ = ("__hidden", "empty", "x")

    def __init__(self) -> None:
        self.x, self.__hidden = 1, X


class Below(Slots):
    __slots__ = "more"

    def __init__(self) -> None:
        super().__init__()
        self.more = [X]


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Tagged(dict[str, Any]):
    pass


class Unkeyed(OrderedDict[str, Any]):
    """A node of pytree without keys, as the outputs of diffusers are."""


_pytree.register_pytree_node(
    Unkeyed, lambda d: (list(d.values()), list(d)), lambda v, k: Unkeyed(zip(k, v, strict=True))
)


def with_attribute() -> Tagged:
    found = Tagged(a=1)
    found.b = X  # type: ignore[attr-defined]
    return found


def cycle() -> list[Any]:
    found: list[Any] = [X]
    found.append({"again": found})
    return found


def deep() -> list[Any]:
    found = [X]
    for _ in range(5000):
        found = [found]  # type: ignore[list-item]
    return found


class Plain:
    x = None


KEPT, REFERRED = SimpleNamespace(x=X), Plain()
REFERRED.x = X  # type: ignore[assignment]
HOLDERS: dict[str, tuple[Any, list[str] | None]] = {
    "tensor": (X, [""]),
    "nested": ({"a": [X, (X, None)], "b": 3}, ["['a'][0]", "['a'][1][0]"]),
    "named tuple": (Pair(1, X), [".right"]),
    "return type of torch": (torch.max(X[None], 1), ["[0]", "[1]"]),
    "packed": (nn.utils.rnn.pack_sequence([X]), [".data", ".batch_sizes"]),
    "plain object": (SimpleNamespace(boxes=X), [".boxes"]),
    "slots": (Below(), [".more[0]", "._Slots__hidden"]),
    "dataclass": (Frozen(X), [".x"]),
    "subclass of dict": (with_attribute(), [".b"]),
    "pytree without keys": (Unkeyed(sample=X), ["['sample']"]),
    "other containers": (
        [deque([X]), UserDict(a=X), UserList([X])],
        ["[0][0]", "[1]['a']", "[1].data['a']", "[2].data[0]"],
    ),
    "views of a dict": ([{"a": X}.values(), {"a": X}.items()], ["[0][0]", "[1][0][1]"]),
    "closure": (lambda: X + KEPT.x, []),  # globals are no part of it
    "default": (lambda x=X: x, [".__defaults__[0]"]),
    "partial": (functools.partial(torch.add, X), [".args[0]"]),
    "bound method": (SimpleNamespace(x=X).__eq__, None),
    "bound to a list": ([X].append, [".__self__[0]"]),
    "weak reference": (weakref.ref(REFERRED), ["().x"]),
    "distribution": (torch.distributions.Normal(X, X + 1), [".loc", ".scale"]),
    "the same twice": ([KEPT, KEPT, X], ["[0].x", "[2]"]),
    "cycle": (cycle(), ["[0]"]),
    "deep": (deep(), ["[0]" * 5001]),
    "nothing": ([None, 1, 2.0, True, "x", torch.float32, torch.device("cpu"), {1, 2}, int, object(), range(3)], []),
    "set": ({X}, None),
    "generator": ((x for x in [X]), None),
    "map": (map(abs, [X]), None),
    "iterator": (iter([X]), None),
    "module": (nn.Linear(2, 2), []),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_are_found_wherever_they_are(kind: str) -> None:
    held, places = HOLDERS[kind]
    found = list(leaves(held))
    if places is None:
        (what,) = [x for _, x in found if not isinstance(x, Tensor)] or [None]
        assert what is not None
    else:
        assert [path for path, _ in found] == places
        assert len(list(tensors_in(held))) == len(places)


def test_modules_are_opened_unless_they_are_the_models_own() -> None:
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [x is other.weight for _, x in leaves([own, other], own={own})] == [True, False]


def test_a_copy_with_other_tensors_leaves_what_was_given() -> None:
    given = [KEPT, X, {"a": (X, 3)}]
    made: Any = mapped(given, lambda x: x + 1)
    assert torch.equal(made[0].x, X + 1)
    assert made[0].x is made[1] is made[2]["a"][0]
    assert made[2]["a"][1] == 3
    assert KEPT.x is X


def test_what_modules_hold_beside_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 3))
    assert list(left_behind(model)) == []
    model[0].aux = {"last": [X]}
    model.whole = X
    seen: dict[str, Tensor] = {"x": X}
    model[0].register_forward_hook(lambda *_: seen.clear())
    assert [path for path, _ in left_behind(model)] == ["whole", "0.aux['last'][0]"]
    assert any(path.endswith(".seen['x']") for path, _ in left_behind(model, hooks=True))
