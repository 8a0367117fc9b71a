"""Whether a checkpoint fits the optimizer that is to load it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from espalier.optim.base import StructuredOptimizer

Group: TypeAlias = dict[str, Any]

# In a checkpoint these stand as text, to be compared; the objects are those of the optimizer that loads it.
OBJECTS = ("penalty", "grouping")


def named(group: Group, index: int) -> Iterator[tuple[Tensor, str]]:
    """The group's parameters with a name each, for messages and reports."""
    names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
    return zip(group["params"], names, strict=True)


def as_text(group: Group) -> dict[str, str | None]:
    """Penalty and grouping as a checkpoint holds them."""
    return {k: None if group[k] is None else repr(group[k]) for k in OBJECTS}


def check_fits(optimizer: StructuredOptimizer, groups: list[Group], state: dict[Any, Any]) -> None:
    """Raise where a checkpoint is of another penalty, method or model."""
    sizes, here_sizes = ([len(g["params"]) for g in gs] for gs in (groups, optimizer.param_groups))
    if sizes != here_sizes:
        raise ValueError(
            f"the checkpoint has parameter groups of sizes {sizes}, this optimizer of {here_sizes}. "
            "Build it with the groups that were saved."
        )
    method = type(optimizer).__name__
    for j, (saved, here) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        if saved.get("method") != method:
            raise ValueError(
                f"the checkpoint is of {saved.get('method', 'another optimizer')}, not of {method}. "
                "Load it into the optimizer that wrote it."
            )
        for k, expected in as_text(here).items():
            if saved.get(k) != expected:
                raise ValueError(
                    f"group {j} was saved with {k} {saved.get(k)} and has {expected} here. Build the optimizer "
                    f"with the saved {k}; to go on with another, change group['{k}'] after loading."
                )
        buffers = optimizer._buffers({**here, **saved})
        for key, (p, name) in zip(saved["params"], named(here, j), strict=True):
            if key not in state:
                continue
            expected_shapes = dict.fromkeys(optimizer.clock, ()) | {k: tuple(p.shape) for k in buffers}
            for k, shape in expected_shapes.items():
                if k not in state[key]:
                    raise ValueError(
                        f"the checkpoint has no {k!r} for {name}: it is not of {method}. "
                        "Load it into the optimizer that wrote it."
                    )
                if tuple(state[key][k].shape) != shape:
                    raise ValueError(
                        f"the checkpoint's {k!r} for {name} has shape {tuple(state[key][k].shape)}, expected {shape}. "
                        "Load it into the model that was saved."
                    )
