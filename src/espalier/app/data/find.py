"""Looks for a data set under the directory that was given as --data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from espalier.app.data.catalogue import SETS
from espalier.app.data.source import DataSet
from espalier.app.errors import Problem


@dataclass(frozen=True)
class Described:
    """One line of `espalier data`: where a set is, or what is missing, and how to lay it out."""

    name: str
    what: str
    found: Path | None
    # empty where the set was found, and where no directory was given
    missing: str
    layout: str
    page: str
    needs_directory: bool


def describe(root: Path | None) -> list[Described]:
    """Every data set, and whether it is under `root`."""
    return [_describe(each, root) for each in SETS.values()]


def _describe(each: DataSet, root: Path | None) -> Described:
    found, missing = None, ""
    if root is not None and each.folders:
        try:
            found = locate(each, root)
        except Problem as problem:
            missing = str(problem)
    return Described(each.name, each.what, found, missing, each.layout, each.page, bool(each.folders))


def locate(wanted: DataSet, root: Path | None) -> Path:
    """The directory that holds the set: a folder of `root` named after it, or `root` itself."""
    if root is None:
        raise Problem(
            f"data set {wanted.name} needs its files: give --data DIR (`espalier data` says how to lay DIR out)"
        )
    if not root.is_dir():
        raise Problem(f"--data {root}: there is no such directory; {wanted.way_out}")
    named = [root / folder for folder in wanted.folders if (root / folder).is_dir()]
    for directory in named:
        if not wanted.missing(directory):
            return directory
    _refuse_another(wanted, root)
    if not wanted.missing(root):
        return root
    for directory in named:
        _refuse_another(wanted, directory)
    raise Problem(_what_is_missing(wanted, named[0] if named else root))


def _refuse_another(wanted: DataSet, directory: Path) -> None:
    here = [each for each in SETS.values() if each.folders and each.claims(directory)]
    # MNIST and Fashion-MNIST have the same files: if the directory has the name of one, it is that one
    here = [each for each in here if Path(os.path.realpath(directory)).name in each.folders] or here
    if here and wanted not in here:
        names = " or ".join(each.name for each in here)
        raise Problem(f"{directory} holds {names}, not {wanted.name}; {wanted.way_out}")


def _what_is_missing(wanted: DataSet, directory: Path) -> str:
    missing = wanted.missing(directory)
    some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"{directory} has no {some} of data set {wanted.name}; {wanted.way_out}"
