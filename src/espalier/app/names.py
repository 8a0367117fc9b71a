"""What methods and measures are called, wherever they are shown."""

from __future__ import annotations

METHODS = {
    "dense": "dense",
    "ramda": "RAMDA",
    "rmda": "RMDA",
    "proxsgd": "ProxSGD",
    "proxgen": "ProxGen",
    "proxssi": "ProxSSI",
}
# by penalty: the attribute of a StructureReport that says how far it got
MEASURES = {
    "group-lasso": "weighted_group_sparsity",
    "nuclear-norm": "low_rank_level",
    "l1": "element_sparsity",
}
STRUCTURES = {
    "weighted_group_sparsity": "weighted group sparsity",
    "low_rank_level": "low-rank level",
    "element_sparsity": "zero weights",
}
EXPLAINED = {
    "weighted_group_sparsity": "the share of weights in groups that are exactly zero",
    "low_rank_level": "1 − Σ rank / Σ full rank over the layers",
    "element_sparsity": "the share of single weights that are exactly zero",
}


def method(name: str) -> str:
    """A method as the paper writes it; a recipe's own name stays as it is."""
    return METHODS.get(name, name)
