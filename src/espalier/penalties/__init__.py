"""ψ: one class a file."""

from espalier.penalties.base import Penalty as Penalty
from espalier.penalties.group_lasso import GroupLasso as GroupLasso
from espalier.penalties.group_mcp import GroupMCP as GroupMCP
from espalier.penalties.l1 import L1 as L1
from espalier.penalties.nuclear_norm import NuclearNorm as NuclearNorm
from espalier.penalties.sparse_group_lasso import SparseGroupLasso as SparseGroupLasso
