"""Whether a checkpoint fits the optimizer that is to load it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from espalier.optim.base import StructuredOptimizer

Group: TypeAlias = dict[str, Any]

# In a checkpoint these stand as text; the objects are those of the optimizer that loads it.
OBJECTS = ("penalty", "grouping", "solver")
# Of these, what must be the same there and here.
_COMPARED = ("penalty", "grouping")
# What a checkpoint has only now and then: the z that a restart left, and the weights if eval() took them away.
POINTS = ("last", "weight")
# Modules that wrappers put around a model, and so into the names of its parameters.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def named(group: Group, index: int) -> Iterator[tuple[Tensor, str]]:
    """The group's parameters with a name each, for messages and reports."""
    names = group.get("param_names")
    if not names or len(names) != len(group["params"]):  # DeepSpeed ZeRO puts one tensor in the place of many
        names = [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
    return zip(group["params"], names, strict=True)


def as_text(group: Group) -> dict[str, str | None]:
    """Penalty, grouping and solver as a checkpoint holds them."""
    return {k: v if v is None or isinstance(v, str) else repr(v) for k in OBJECTS for v in (group[k],)}


def order_by_name(saved: Group, here: Group, index: int) -> None:
    """Put a saved group's parameters into the order of the names here. Without names on both sides order counts."""
    theirs, ours = saved.get("param_names"), here.get("param_names")
    if not theirs or not ours:
        return
    # without what wrappers add, where names stay apart without it
    plain = [[_unwrapped(name) for name in names] for names in (theirs, ours)]
    if all(len(set(names)) == len(names) for names in plain):
        theirs, ours = plain
    if sorted(theirs) != sorted(ours):
        odd = sorted(set(theirs) ^ set(ours))
        raise ValueError(
            f"the parameters of group {index} were saved under other names; on one side only: {', '.join(odd[:5])}"
            f"{', …' if len(odd) > 5 else ''}. Build the optimizer with the names that were saved, or delete "
            "'param_names' from the checkpoint's groups to match parameters by their order."
        )
    # torch.distributed.checkpoint has names in place of numbers, and has matched by them already
    if theirs != ours and all(isinstance(key, int) for key in saved["params"]):
        if len(set(theirs)) < len(theirs):
            raise ValueError(
                f"parameters of group {index} share a name and were saved in another order. Give each its own name, or "
                "delete 'param_names' from the checkpoint's groups to match parameters by their order."
            )
        keys = dict(zip(theirs, saved["params"], strict=True))
        saved["params"] = [keys[name] for name in ours]


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


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
            if k in _COMPARED and saved.get(k) != expected:
                raise ValueError(
                    f"group {j} was saved with {k} {saved.get(k)} and has {expected} here. Build the optimizer "
                    f"with the saved {k}; to go on with another, change group['{k}'] after loading."
                )
        order_by_name(saved, here, j)
        buffers = optimizer._buffers({**here, **saved})
        for key, (p, name) in zip(saved["params"], named(here, j), strict=True):
            if key not in state:
                continue
            if saved.get("evaluating") and "weight" not in state[key]:
                raise ValueError(
                    f"the checkpoint was made after eval(), and the weights of {name} are missing from it. "
                    "torch.distributed.checkpoint leaves them out: call optimizer.train() before saving with it."
                )
            like_p = (*buffers, *(k for k in POINTS if k in state[key]))
            expected_shapes = dict.fromkeys(optimizer.clock, ()) | {k: tuple(p.shape) for k in like_p}
            for k, shape in expected_shapes.items():
                if k not in state[key]:
                    raise ValueError(
                        f"the checkpoint has no {k!r} for {name}: it is not of {method}. "
                        "Load it into the optimizer that wrote it."
                    )
                found = tuple(getattr(state[key][k], "shape", ()))  # a clock may be a plain number
                if found != shape:
                    raise ValueError(
                        f"the checkpoint's {k!r} for {name} has shape {found}, expected {shape}. "
                        "Load it into the model that was saved."
                    )
