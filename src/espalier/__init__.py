"""Espalier trains networks that come out exactly structured. This is the whole public API."""

import typing

from espalier._version import __version__ as __version__
from espalier.groupings import Element as Element
from espalier.groupings import Grouping as Grouping
from espalier.groupings import Heads as Heads
from espalier.groupings import Input as Input
from espalier.groupings import Layout as Layout
from espalier.groupings import Matrix as Matrix
from espalier.groupings import Output as Output
from espalier.measure import StructureReport as StructureReport
from espalier.measure import structure as structure
from espalier.monitor import StructureMonitor as StructureMonitor
from espalier.optim import RAMDA as RAMDA
from espalier.optim import RMDA as RMDA
from espalier.optim import ProxGen as ProxGen
from espalier.optim import ProxSGD as ProxSGD
from espalier.optim import ProxSSI as ProxSSI
from espalier.optim import StagewiseRestart as StagewiseRestart
from espalier.optim import WarmupCosine as WarmupCosine
from espalier.optim import structured as structured
from espalier.optim import unwrap as unwrap
from espalier.optim.emptied import StructureWarning as StructureWarning
from espalier.partition import Partition as Partition
from espalier.penalties import L1 as L1
from espalier.penalties import GroupLasso as GroupLasso
from espalier.penalties import GroupMCP as GroupMCP
from espalier.penalties import NuclearNorm as NuclearNorm
from espalier.penalties import Penalty as Penalty
from espalier.penalties import SparseGroupLasso as SparseGroupLasso
from espalier.regularize import Rule as Rule
from espalier.regularize import regularize as regularize
from espalier.solvers import ClosedForm as ClosedForm
from espalier.solvers import DouglasRachford as DouglasRachford
from espalier.solvers import Exact as Exact
from espalier.solvers import NewtonRaphson as NewtonRaphson
from espalier.solvers import ProximalGradient as ProximalGradient
from espalier.solvers import Solver as Solver
from espalier.solvers import Tolerance as Tolerance
from espalier.subproblem import Subproblem as Subproblem

__all__ = [
    "L1",
    "RAMDA",
    "RMDA",
    "ClosedForm",
    "DouglasRachford",
    "Element",
    "Exact",
    "GroupLasso",
    "GroupMCP",
    "Grouping",
    "Heads",
    "Input",
    "Layout",
    "Matrix",
    "NewtonRaphson",
    "NuclearNorm",
    "Output",
    "Partition",
    "Penalty",
    "ProxGen",
    "ProxSGD",
    "ProxSSI",
    "ProximalGradient",
    "Rule",
    "ShrinkError",
    "Shrunk",
    "Solver",
    "SparseGroupLasso",
    "StagewiseRestart",
    "StructureMonitor",
    "StructureReport",
    "StructureWarning",
    "Subproblem",
    "Tolerance",
    "WarmupCosine",
    "__version__",
    "export",
    "load",
    "regularize",
    "save",
    "shrink",
    "structure",
    "structured",
    "unwrap",
]

_COMPACT = ("ShrinkError", "Shrunk", "export", "load", "save", "shrink")
if typing.TYPE_CHECKING:
    from espalier.compact import ShrinkError as ShrinkError
    from espalier.compact import Shrunk as Shrunk
    from espalier.compact import export as export
    from espalier.compact import load as load
    from espalier.compact import save as save
    from espalier.compact import shrink as shrink


def __getattr__(name: str) -> object:
    # these load when they are first asked for
    if name in _COMPACT:
        from espalier import compact

        return getattr(compact, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_COMPACT]
