"""Integer attributes of modules, such as num_heads, followed through one run to where the code uses them.

While a model is traced its integer attributes are numbers that remember their name, and arithmetic on them remembers,
too. An attribute may change only if it was used as the size of a dimension of channels; and whatever else the code made
of it, a comparison, a float, an argument of any other operation, must come out as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Key: TypeAlias = tuple[str, str]  # (module, attribute); an attribute of an object is written "config.num_heads"
Values: TypeAlias = Mapping[Key, int]

# how deep objects such as configurations are searched: module.config.text_config.num_heads
_DEPTH = 3
# what rewrite.fix_sizes keeps equal to the parameters' shapes
_SIZED = {
    "in_features", "out_features", "in_channels", "out_channels", "groups", "num_features", "embedding_dim",
    "num_parameters", "input_size", "hidden_size", "proj_size", "nx", "nf",
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """One use of attributes: `after` computes from the attributes' values what the code reads."""

    keys: Values  # the attributes, as they are now
    after: Callable[[Values], Any]
    expected: Any  # what was read; after shrinking the same, unless there are labels
    labels: Tensor | None = None  # of the channels that it is the number of: afterwards as many as stay
    key: Key | None = None  # the attribute, if it was used as it is


@dataclass
class Recorder:
    """All uses that one run has shown."""

    uses: list[Use] = field(default_factory=list)
    active: bool = False

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Within, the model's integer attributes are followed."""
        placed = []
        for where, k, key, old in list(_places(model)):
            seen = Seen.of(self, key, old)
            placed.append((where, k, seen, k in where))
            where[k] = seen
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for where, k, seen, own in placed:
                now = where.get(k)
                if now is seen and not own:  # it belongs to the class
                    del where[k]
                elif isinstance(now, Seen):  # the model's own code may have counted on
                    where[k] = int.__int__(now)


class Seen(int):
    """An attribute's value, or what arithmetic made of one."""

    recorder: Recorder
    keys: Values
    after: Callable[[Values], int]
    key: Key | None

    @classmethod
    def of(cls, recorder: Recorder, key: Key, value: int) -> Seen:
        made = cls(value)
        made.recorder, made.keys, made.key = recorder, {key: value}, key
        made.after = lambda values: values.get(key, value)
        return made

    def must_stay(self) -> None:
        """It was used as a number."""
        self.use(self.after, int.__int__(self))

    def is_size(self, labels: Tensor) -> None:
        """It was used as the size of a dimension with these channels."""
        if self.recorder.active:
            self.recorder.uses.append(Use(self.keys, self.after, int.__int__(self), labels.reshape(-1), self.key))

    def use(self, after: Callable[[Values], Any], expected: Any) -> None:
        if self.recorder.active:
            self.recorder.uses.append(Use(self.keys, after, expected))

    def __float__(self) -> float:
        self.must_stay()
        return float(int.__int__(self))

    def __int__(self) -> int:
        self.must_stay()
        return int.__int__(self)

    def __bool__(self) -> bool:
        self.use(lambda values: bool(self.after(values)), expected := int.__int__(self) != 0)
        return expected

    def __copy__(self) -> int:
        return self if self.recorder.active else int.__int__(self)

    def __deepcopy__(self, memo: Any) -> int:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)

    __hash__ = int.__hash__


def _after(x: Any) -> Callable[[Values], Any]:
    return x.after if isinstance(x, Seen) else lambda _: x


def _combined(op: Callable[[Any, Any], Any], a: Any, b: Any, plain: Any) -> Any:
    """a op b, of which the plain result is known; one of the two is followed."""
    here: Seen = a if isinstance(a, Seen) else b
    other = b if here is a else a
    if plain is NotImplemented:
        if not isinstance(other, Tensor | None | str):  # a Tensor's own operation is seen
            here.must_stay()
        return NotImplemented
    left, right = _after(a), _after(b)

    def after(values: Values) -> Any:
        return op(left(values), right(values))

    keys = {**here.keys, **(other.keys if isinstance(other, Seen) else {})}
    if not here.recorder.active:
        return plain
    if type(plain) is int:
        made = Seen(plain)
        made.recorder, made.keys, made.key, made.after = here.recorder, keys, None, after
        return made
    # that sizes are equal the shrunk model asks again, with its own sizes
    if not (op in (operator.eq, operator.ne) and not isinstance(other, Seen) and int.__int__(here) == other):
        here.recorder.uses.append(Use(keys, after, plain))
    return plain


def _follow(name: str, op: Callable[[Any, Any], Any], reflected: bool) -> None:
    of_int = getattr(int, name)

    def method(self: Seen, other: Any) -> Any:
        own = int.__int__(self)
        theirs = int.__int__(other) if isinstance(other, Seen) else other
        if isinstance(theirs, float):
            plain = op(theirs, own) if reflected else op(own, theirs)
        else:
            plain = of_int(own, theirs)
        return _combined(op, other, self, plain) if reflected else _combined(op, self, other, plain)

    setattr(Seen, name, method)


def _number(name: str) -> None:
    """What else can be done with an integer is not followed: its value must stay."""
    of_int = getattr(int, name)

    def method(self: Seen, *others: Any) -> Any:
        self.must_stay()
        return of_int(int.__int__(self), *others)

    setattr(Seen, name, method)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    _follow(f"__{_name}__", getattr(operator, _name), reflected=False)
    _follow(f"__r{_name}__", getattr(operator, _name), reflected=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _follow(f"__{_name}__", getattr(operator, _name), reflected=False)

for _name in ("neg", "pos", "abs", "invert", "round", "divmod", "and", "or", "xor", "lshift", "rshift"):
    _number(f"__{_name}__")
for _name in ("divmod", "and", "or", "xor", "lshift", "rshift"):
    _number(f"__r{_name}__")


def followed(*values: Any) -> list[Seen]:
    """All followed numbers among arguments, those of slices too."""
    found = []
    for x in tree_leaves(values):
        if isinstance(x, Seen):
            found.append(x)
        elif isinstance(x, slice):
            found += followed(x.start, x.stop, x.step)
    return found


def held_by(module: nn.Module) -> list[Seen]:
    """All followed numbers that a module, or one of its own, can read."""
    found, met = list[Seen](), set[int]()

    def search(inside: Mapping[str, Any], depth: int) -> None:
        for v in inside.values():
            if isinstance(v, Seen):
                found.append(v)
            elif depth and id(v) not in met and (deeper := _inside(v)) is not None:
                met.add(id(v))
                search(dict(deeper), depth - 1)

    for each in module.modules():
        search(vars(each), _DEPTH)
    return found


def set_attribute(model: nn.Module, key: Key, value: int) -> None:
    """Past __setattr__: configurations may be frozen."""
    module, path = key
    *way, last = path.split(".")
    where = vars(model.get_submodule(module))
    for part in way:
        found = where[part]
        where = found if isinstance(found, dict) else vars(found)
    where[last] = value


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Key, int]]:
    """Where integer attributes are: the dict, the name in it, their key and value; each once."""
    own = vars(nn.Module()).keys()
    met: set[int] = set()
    for name, module in model.named_modules():
        if type(module).__module__.split(".")[0] == "torch" or type(module).__module__.startswith("espalier.compact"):
            continue
        sized = any(cls.__module__.startswith("torch.nn.modules.") for cls in type(module).__mro__ if cls not in _BASES)
        skip = own | (_SIZED if sized or type(module).__name__ == "Conv1D" else set())
        held = {k: v for k, v in vars(module).items() if k not in skip}
        yield from _integers(vars(module), held, name, "", met, _DEPTH)
        for cls in type(module).__mro__:
            if cls.__module__.split(".")[0] == "torch":
                break
            for k, v in vars(cls).items():
                if type(v) is int and not k.startswith("__") and k not in vars(module):
                    yield vars(module), k, (name, k), v


_BASES = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _integers(
    where: dict[str, Any], held: Mapping[Any, Any], name: str, path: str, met: set[int], depth: int
) -> Iterator[tuple[dict[str, Any], str, Key, int]]:
    for k, v in held.items():
        if not isinstance(k, str) or "." in k:
            continue
        if type(v) is int:
            yield where, k, (name, path + k), v
        elif depth and id(v) not in met and (inside := _inside(v)) is not None:
            met.add(id(v))
            yield from _integers(inside, dict(inside), name, f"{path}{k}.", met, depth - 1)


def _inside(x: Any) -> dict[str, Any] | None:
    """The attributes of an object, or the entries of a dict."""
    if isinstance(x, dict):
        return x
    known = isinstance(x, nn.Module | Tensor | type | FunctionType | MethodType | BuiltinFunctionType | ModuleType)
    if known or type(x).__module__.split(".")[0] in ("torch", "builtins"):
        return None
    inside = getattr(x, "__dict__", None)
    return inside if isinstance(inside, dict) else None
