"""What is asked of shrink: whether model, inputs and options fit, and first runs of the dense model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from espalier.compact.copies import ShrinkError, copied, same_numbers
from espalier.compact.examples import Call, random_like
from espalier.compact.runs import Run, run
from espalier.compact.sizes import resized, sizes_of_batch
from espalier.compact.walk import tensors_in


def check_given(
    model: nn.Module, inputs: Sequence[Call], when: Mapping[str, str], align: int | None, ignore: Sequence[str]
) -> None:
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{kind} is compiled by TorchScript: shrink the model that it was made from.")
    if hasattr(model, "_orig_mod"):
        raise TypeError("the model is compiled: shrink the one given to torch.compile, and compile the result.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"the model is wrapped in {kind}: shrink model.module.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {kind}.")
    for option, value in when.items():
        if value not in ("auto", "always", "never"):
            raise ValueError(f'{option} must be "auto", "always" or "never", not {value!r}.')
    if align is not None and (not isinstance(align, int) or align < 1):
        raise ValueError(f"align must be a whole number, 1 or more, not {align!r}.")
    names = {name for name, _ in model.named_modules()}
    for name in ignore:
        if name not in names:
            raise ValueError(f"ignore names {name!r}, and the model has no such module.")
    devices = {p.device for p in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(f"the model is on several devices, {', '.join(sorted(map(str, devices)))}: move it to one.")
    for x in tensors_in(inputs):
        if devices and x.device not in devices:
            raise ValueError(f"an input is on {x.device}, the model on {devices.pop()}: move one of them.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{name} is compiled by TorchScript, and cannot be looked into: use the module it was made of."
            )
        if module.__dict__.get("forward") is not None:
            raise TypeError(f"{name or 'the model'} has a forward of its own on the instance, which a copy shares: "
                            "define it in the class.")  # fmt: skip


def first_run(original: nn.Module, inputs: Call, given: str) -> Run:
    """A run that shows whether the model can be run on copies that share its parameters."""
    for name, p in original.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ShrinkError(f"{name} is not initialised yet: run the model once before it is shrunk.")
    tried = copied(original)
    try:
        found = run(tried, inputs)
    except ShrinkError:
        raise
    except Exception as error:
        raise ShrinkError(f"the model itself fails on the {given}: {type(error).__name__}: {error}") from error
    for (name, p), q in zip(original.named_parameters(), tried.parameters(), strict=True):
        if not same_numbers(p, q):
            raise ShrinkError(
                f"the model writes into its parameter {name} when it runs in eval mode: make it a buffer."
            )
    return found


def random_run(model: nn.Module, inputs: Call) -> list[tuple[Call, Run]]:
    """Random inputs and what becomes of them, if the model takes them: lengths and indices may not be just any."""
    drawn = random_like(inputs, 0)
    try:
        return [(drawn, run(model, drawn, again=False))]
    except Exception:
        return []


def of_batch(original: nn.Module, inputs: Call, first: Run, left: Collection[str]) -> set[str]:
    """Names of what is left on modules and varies with the batch alone: a result, though the same for all inputs."""
    if first.left.keys() <= set(left):
        return set()
    n = next((len(x) for x in tensors_in(inputs) if x.dim()), 0)
    other = resized(inputs, sizes_of_batch(inputs, 2 if n == 1 else 1))
    try:
        found = run(original, other, again=False).left
    except Exception:
        return set()
    return {name for name, x in first.left.items() if name in found and found[name].shape != x.shape}
