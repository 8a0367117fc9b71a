"""Find the tensors in what a model is given, what it returns and what it leaves on its modules."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import functools
import numbers
import pathlib
import random
import re
import threading
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, ItemsView, Iterator, KeysView, Mapping, Set, ValuesView
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

T = TypeVar("T")

# what holds no tensor, and need not be opened
_PLAIN = (
    *(types.NoneType, numbers.Number, str, bytes, bytearray, type, enum.Enum, range, slice, types.EllipsisType),
    *(types.NotImplementedType, types.ModuleType, types.GenericAlias, types.CodeType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.finfo, torch.iinfo),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, pathlib.PurePath, re.Pattern, random.Random, type(threading.Lock()), type(threading.RLock())),
)
_SIMPLE = {types.NoneType, bool, int, float, str}
_EMPTY = {dict, OrderedDict, list, set, tuple}
# what every module has: no results but those in closures of hooks
_OWN = vars(nn.Module()).keys()
_HOOKS = {name for name in _OWN if "hooks" in name}


def leaves(
    values: Any, path: str = "", own: Container[nn.Module] | None = None, *, caches: bool = False
) -> Iterator[tuple[str, Any]]:
    """The tensors in nested values, each with its place, in an order that equal values share.

    Mappings, sequences, nodes of pytree, closures and the attributes of any object are opened, each object once. A leaf
    that is not a tensor is an array of NumPy, or an object that cannot be opened, such as a generator. Modules are
    opened only if `own` is given and does not contain them. Caches of keys and values are opened only if `caches`: they
    hold as many heads as the model has, and it alone reads them.
    """
    seen: dict[int, Any] = {}  # it also keeps objects alive, so that no id is used twice
    waiting = [(path, values)]
    while waiting:
        path, x = waiting.pop()
        if isinstance(x, Tensor):
            yield path, x
        elif type(x) not in _SIMPLE and not isinstance(x, _PLAIN) and id(x) not in seen:
            seen[id(x)] = x
            if (isinstance(x, nn.Module) and (own is None or x in own)) or (not caches and _is_cache(x)):
                continue
            inside = _opened(x)
            if inside is None:
                yield path, x
            else:
                waiting += [(path + key, value) for key, value in reversed(inside)]


def _is_cache(x: Any) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(x).__mro__)


def _opened(x: Any) -> list[tuple[str, Any]] | None:
    """What an object consists of; None if that cannot be seen."""
    attributes = _attributes(x)
    if isinstance(x, Mapping):
        items = [(f"[{key!r}]", value) for key, value in x.items()]
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        items = [(f".{key}", value) for key, value in zip(x._fields, x, strict=False)]
    elif isinstance(x, tuple | list | deque | KeysView | ValuesView | ItemsView):
        items = [(f"[{i}]", value) for i, value in enumerate(x)]
    elif isinstance(x, Set):
        # the order of its tensors is not that of another model's
        return None if any(True for _ in leaves(list(x))) else []
    elif isinstance(x, types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial):
        items = _of_function(x)
    elif isinstance(x, weakref.ref):
        items = [("()", x())]
    elif attributes is not None:
        return [(f".{key}", value) for key, value in attributes.items()]
    elif type(x) in SUPPORTED_NODES:
        items = [(f"[{i}]", value) for i, value in enumerate(SUPPORTED_NODES[type(x)].flatten_fn(x)[0])]
    else:
        return [] if type(x) is object else None
    known = {id(value) for _, value in items}
    return items + [(f".{key}", value) for key, value in (attributes or {}).items() if id(value) not in known]


def _attributes(x: Any) -> dict[str, Any] | None:
    """By name, from the instance's dictionary and its slots; None if it can have no attributes."""
    slotted = [vars(kind) for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    members = [k for kind in slotted for k, v in kind.items() if isinstance(v, types.MemberDescriptorType)]
    found = {key: getattr(x, key) for key in members if hasattr(x, key)}  # a slot may be empty
    held = getattr(x, "__dict__", None)
    if isinstance(held, dict):
        return found | held
    return found if slotted else None


def _of_function(x: Any) -> list[tuple[str, Any]]:
    """What a function, method or partial brings along."""
    if isinstance(x, functools.partial):
        return [(".func", x.func), (".args", x.args), (".keywords", x.keywords)]
    if isinstance(x, types.MethodType):
        return [(".__self__", x.__self__), (".__func__", x.__func__)]
    if isinstance(x, types.BuiltinFunctionType):
        return [(".__self__", x.__self__)]
    names = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
    cells = [(f".{name}", cell) for name, cell in names]
    full = [(name, cell.cell_contents) for name, cell in cells if not _empty(cell)]
    return [*full, (".__defaults__", x.__defaults__), (".__kwdefaults__", x.__kwdefaults__)]


def _empty(cell: types.CellType) -> bool:
    try:
        return bool(cell.cell_contents is cell)
    except ValueError:
        return True


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors, wherever they are, but those of modules."""
    return (x for _, x in leaves(values) if isinstance(x, Tensor))


def mapped(values: T, change: Callable[[Tensor], Tensor]) -> T:
    """A deep copy with other tensors."""
    memo: dict[int, Any] = {id(x): change(x) for _, x in leaves(values, caches=True) if isinstance(x, Tensor)}
    return copy.deepcopy(values, memo)


def left_behind(model: nn.Module, *, hooks: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Tensors among the attributes of modules that are neither parameters nor buffers, each with its place.

    hooks: with those in the closures of hooks, which copies of the model share.
    """
    registered = {id(x) for x in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = type(value) in _SIMPLE or (type(value) in _EMPTY and not value)
            if plain or (key in _OWN and not (hooks and key in _HOOKS)):
                continue
            for path, x in leaves(value, f"{name}.{key}" if name else key):
                if isinstance(x, Tensor) and id(x) not in registered:
                    yield path, x
