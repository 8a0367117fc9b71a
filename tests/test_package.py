"""The package from outside: what it loads, what it offers, what it says about itself."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import espalier

PACKAGE = Path(espalier.__file__).parent
ROOT = Path(__file__).parent.parent
APART = ("app", "compact")  # load when called, and bring dependencies of their own
CORE = sorted(p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in APART)
OFFERED = {n: getattr(espalier, n) for n in dir(espalier) if not n.startswith("_")}
PUBLIC = {n: v for n, v in OFFERED.items() if not isinstance(v, types.ModuleType)}

# design.md fixes these
PROMISED = (
    "regularize",
    "RAMDA",
    "RMDA",
    "ProxSGD",
    "ProxGen",
    "ProxSSI",
    "StagewiseRestart",
    "structure",
    "StructureReport",
    "GroupLasso",
    "ProximalGradient",
    "shrink",
    "save",
    "load",
    "export",
)


def test_a_star_import_brings_all_that_is_public() -> None:
    assert set(espalier.__all__) == {*PUBLIC, "__version__"}
    brought: dict[str, object] = {}
    exec("from espalier import *", brought)
    assert set(espalier.__all__) <= brought.keys()


def test_import_loads_torch_and_the_standard_library_only() -> None:
    code = (
        "import sys, json; import torch; before = set(sys.modules); import espalier; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        # the code under test, and not another installation of it
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    loaded = json.loads(done.stdout)
    assert "espalier" in loaded
    assert {m.partition(".")[0] for m in loaded} - {"espalier", "torch"} - sys.stdlib_module_names == set()
    assert not any(m.startswith(tuple(f"espalier.{a}" for a in APART)) for m in loaded)


def imported(source: Path) -> set[str]:
    """The packages that a file imports, wherever in it; a relative import is one of espalier."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("espalier" if node.level else node.module or "")
    return found


def test_the_core_is_found() -> None:
    # the tests below pass on an empty list
    assert {"groupings.py", "base.py", "exact.py", "ramda.py"} <= {p.name for p in CORE}


@pytest.mark.parametrize("source", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_core_files_import_torch_and_the_standard_library_only(source: Path) -> None:
    imports = imported(source)
    foreign = {m.partition(".")[0] for m in imports} - {"torch", "espalier"} - sys.stdlib_module_names
    if "kernels" in source.parts:
        foreign -= {"triton"}  # where torch brings it
    assert foreign == set()
    if source != PACKAGE / "__init__.py":  # which may offer what loads when called
        assert not any(m.startswith(tuple(f"espalier.{a}" for a in APART)) for m in imports)


PLAIN_INSTALL = """
import importlib.metadata, re, sys, tempfile

def closure(names):
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", left.pop())[0]).lower()
        try:
            needs = importlib.metadata.requires(name) or [] if name not in found else []
        except importlib.metadata.PackageNotFoundError:  # for another system, by its marker
            continue
        found.add(name)
        left += [r for r in needs if "extra ==" not in r]
    return found

brought = closure(sys.argv[1:])
here = importlib.metadata.packages_distributions()
absent = {m for m, of in here.items() if not {re.sub(r"[-_.]+", "-", d).lower() for d in of} & brought} - {"espalier"}

class Installed:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, *more)

sys.meta_path[:] = map(Installed, sys.meta_path)
import torch, espalier
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
optimizer = espalier.RAMDA(espalier.regularize(model, espalier.GroupLasso(1e-3)))
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
with torch.no_grad():
    model[2].weight[:, 0] = 0
small = espalier.shrink(model, torch.ones(1, 4)).model
with tempfile.TemporaryDirectory() as folder:
    espalier.save(small, folder + "/small")
    espalier.load(folder + "/small", build=lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)))
"""


def test_a_plain_install_brings_all_that_training_shrinking_and_saving_need() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAIN_INSTALL, *declared],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    assert name in PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    value = PUBLIC[name]
    # getattr would find a base class's text, and a dataclass makes up "Name(field, ...)" where there is none
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text
    assert not text.startswith(f"{name}(")
    if inspect.isclass(value):
        for method, member in inspect.getmembers(value):
            if method.startswith("_") or not getattr(member, "__module__", "").startswith("espalier"):
                continue
            if inspect.isfunction(member):
                assert inspect.getdoc(member), f"{name}.{method}"
        for attribute, member in vars(value).items():
            if isinstance(member, property) and not attribute.startswith("_"):
                assert member.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_defined_in_espalier(name: str) -> None:
    # no typing, torch or dataclass helper has slipped out
    assert PUBLIC[name].__module__.startswith("espalier")
    assert PUBLIC[name].__name__ == name


def test_init_exports_one_name_a_line_and_none_that_is_private() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    exported = []
    later = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]  # what loads when called
    for node in [*tree.body, *later]:
        if isinstance(node, ast.ImportFrom):
            assert len(node.names) == 1, ast.unparse(node)
            (alias,) = node.names
            # `X as X` is what type checkers take for a re-export
            assert alias.asname == alias.name, ast.unparse(node)
            exported.append(alias.name)
    assert len(exported) == len(set(exported))
    assert [n for n in exported if n.startswith("_")] == ["__version__"]
    assert set(exported) - {"__version__"} == set(PUBLIC)


@pytest.mark.parametrize("package", ["penalties", "optim", "solvers"])
def test_what_a_subpackage_offers_is_public(package: str) -> None:
    offered = {
        n
        for n, v in vars(sys.modules[f"espalier.{package}"]).items()
        if inspect.isclass(v) and v.__module__.startswith("espalier.") and not n.startswith("_")
    }
    # what solvers return; nobody builds one
    assert offered - {"Solution"} <= set(PUBLIC)


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?((a|b|rc|\.dev)\d*)*", espalier.__version__)
    source = re.search(r'^path = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert source is not None
    assert f'__version__ = "{espalier.__version__}"' in (ROOT / source[1]).read_text(encoding="utf-8")


def test_the_installed_version() -> None:
    try:
        installed = importlib.metadata.version("torch-espalier")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch-espalier is not installed here, only on the path")
    assert installed == espalier.__version__


def test_type_checkers_are_told() -> None:
    assert (PACKAGE / "py.typed").is_file()
