"""Where a data set comes from: its form on disk, how it is found there, and the options a recipe may give it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from espalier.app.data.base import Data
from espalier.app.errors import Problem, shown

T = TypeVar("T")
LARGEST = 10**12


@dataclass(frozen=True)
class DataSet(ABC):
    """A data set that can be asked for by name."""

    name: str
    what: str
    # how to lay its files out, in words, and the page they come from
    layout: str
    page: str
    # folders of the directory given as --data in which it is looked for, before the directory itself
    folders: tuple[str, ...]

    @abstractmethod
    def missing(self, directory: Path) -> list[str]:
        """The files (as the layout names them) that are not in the directory: empty where the set is there."""

    @abstractmethod
    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        """The data set read from a directory that misses nothing."""

    def claims(self, directory: Path) -> bool:
        """Whether the files in the directory can be taken for this set and for no set of another form."""
        return not self.missing(directory)

    @property
    def way_out(self) -> str:
        """How to get the set and lay it out."""
        return f"get it from {self.page} and lay it out as {self.layout} (`espalier data` shows all sets)"


@dataclass(frozen=True)
class NoOptions:
    """The options of a set that has none."""


def parse(kind: type[T], options: Mapping[str, Any], name: str) -> T:
    """The options of a set as its dataclass: every name known, every value of the default's type."""
    known = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in known:
            raise Problem(f"data set {name} has no option '{key}': it takes {', '.join(known) or 'none'}")
        expected = type(known[key])
        whole_as_real = expected is float and type(value) is int
        if type(value) is not expected and not whole_as_real:
            raise Problem(
                f"data.{key} is {shown(value)}: data set {name} expects {expected.__name__}, such as {known[key]!r}"
            )
        if isinstance(value, int) and abs(value) > LARGEST:
            raise Problem(f"data.{key} is {shown(value)}: data set {name} expects at most {LARGEST}")
    return kind(**options)


def at_least(name: str, key: str, value: float, least: float) -> None:
    """Refuse an option that is too small."""
    if value < least:
        raise Problem(f"data.{key} is {value}: data set {name} expects at least {least}")
