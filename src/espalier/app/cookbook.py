"""Where recipes come from: the package's own and a person's YAML files, with changes from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from espalier.app.errors import Problem, one_line, short, shown
from espalier.app.recipe import Method, Paper, Recipe, Solver, Strict, nearest


def names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("espalier.app") / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML of a recipe that comes with the package, or of a file."""
    if name.endswith((".yaml", ".yml")):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Problem(f"can't read the recipe {name}: {getattr(error, 'strerror', error)}") from None
    if name not in names():
        raise Problem(f"no recipe {name!r}{nearest(name, names())}; a file of your own ends in .yaml")
    return (resources.files("espalier.app") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


# what YAML's constructors raise besides: of dates, numbers and words that are none, and of what is nested too deep
UNREADABLE = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MOST_VALUES = 10_000  # of a recipe, aliases unfolded; the longest of the package has 150


class _Once(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is given twice, of which YAML takes the last, and aliases that unfold without end."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise Problem(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice")
            seen.add((key.tag, key.value))
        return node


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node holds, those that aliases name included."""
    line = f"line {node.start_mark.line + 1}"
    if known.setdefault(id(node), -1) > 0:
        return known[id(node)]
    known[id(node)] = 0
    parts: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    total = 1
    for part in parts:
        if known.get(id(part)) == 0:
            raise Problem(f"{line}: an alias names what it is itself a part of")
        total += _count(part, known)
    if total > MOST_VALUES:
        raise Problem(f"{line}: with its aliases it holds more than {MOST_VALUES:,} values")
    known[id(node)] = total
    return total


def load(name: str, changes: Iterable[str] = ()) -> Recipe:
    """A recipe by name or file, with `key=value` changes; a dotted key reaches inside."""
    written = text(name)
    try:
        raw = yaml.load(written, _Once)
    except Problem as problem:
        raise Problem(f"{name}, {problem}") from None
    except UNREADABLE as error:
        raise Problem(f"{name} is not YAML: {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise Problem(f"{name} is no recipe: it must hold keys and values, such as title: ...")
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign or not key:
            raise Problem(f"--set {short(change, 80)}: write key=value, such as --set scale=0.1")
        _put(raw, key, value)
    return parse(raw, name)


def parse(raw: Mapping[str, Any], name: str) -> Recipe:
    """The recipe that plain values make, or a Problem that names the first wrong one."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise Problem(f"{name}: {short(_first(error), 600)}") from None
    except (ArithmeticError, RecursionError) as error:
        raise Problem(f"{name}: a value is too large or nested too deep ({one_line(error)})") from None


def _put(raw: dict[str, Any], dotted: str, value: str) -> None:
    at = raw
    said = f"--set {short(f'{dotted}={value}', 80)}"
    *path, last = dotted.split(".")
    for i, key in enumerate(path):
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            inside = short(".".join(path[: i + 1]), 80)
            raise Problem(f"{said}: {inside} is a plain value, with nothing inside")
        at = inner
    try:
        at[last] = yaml.load(value, _Once)
    except Problem as problem:
        raise Problem(f"{said}: {problem}") from None
    except UNREADABLE:
        raise Problem(f"{said}: the value is not YAML") from None


def _first(error: ValidationError) -> str:
    """One line for the first thing that is wrong."""
    found = error.errors()[0]
    where = ".".join(shown(key).strip("'") for key in found["loc"])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return f"no key is called {where!r}{nearest(str(found['loc'][-1]), _keys(found['loc']))}"
    if found["type"] == "missing":
        return f"the key {where!r} is missing"
    if found["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}={shown(found['input'])}: {message[:1].lower()}{message[1:]}"


def _keys(loc: tuple[int | str, ...]) -> Iterable[str]:
    """The keys that are known at the place of an unknown one."""
    inner: dict[str, type[Strict]] = {"methods": Method, "paper": Paper}
    kind = inner.get(str(loc[0]), Recipe) if len(loc) > 1 else Recipe
    return (Solver if "solver" in loc[:-1] else kind).model_fields
