"""Load a model that was saved, around the original code."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from espalier.compact.layout import channels_last, to_channels_last
from espalier.compact.manifest import (
    MANIFEST,
    PROBE,
    SAME_CODE,
    SAVE_AGAIN,
    TENSORS,
    Manifest,
    bad,
    digest,
    integers,
    own_modules,
    place_of,
    read,
    tensor_slots,
)
from espalier.compact.probe import NoProbe, Probe, compare, made, record

_OWN = vars(nn.Module()).keys()


def _read_file(file: Path, length: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file of this length and digest."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, though the manifest beside it does. {SAVE_AGAIN}")
    if (size := file.stat().st_size) != length:
        kind = "truncated" if size < length else "changed"
        bad(file, f"{kind}: {size} bytes where the manifest says {length}", SAVE_AGAIN)
    if (found := digest(file)) != sha256:
        bad(file, f"changed since it was saved: its SHA-256 is {found}", SAVE_AGAIN)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: not valid safetensors ({error}). {SAVE_AGAIN}") from error


def _read_tensors(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a directory, as its manifest says they are."""
    file = path / TENSORS
    loaded = _read_file(file, manifest.bytes, manifest.sha256)
    expected = {n: e for n, e in manifest.tensors.items() if "same" not in e}
    if differing := sorted(expected.keys() ^ loaded.keys()):
        where = "missing" if differing[0] in expected else "unexpected"
        bad(file, f"tensor {differing[0]!r} is {where}", SAVE_AGAIN)
    for name, entry in expected.items():
        tensor = loaded[name]
        here = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        there = f"{entry['dtype']} {entry['shape']}"
        if here != there:
            bad(file, f"tensor {name!r} is {here}, and the manifest says {there}", SAVE_AGAIN)
    # copies: those of load_file lie in the mapped file, unaligned and gone with it
    return {n: t.clone() for n, t in loaded.items()}


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with `module` at `name`; at the root that is the module itself."""
    if not name:
        return module
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = module
    return model


def _restore_modules(model: nn.Module, modules: dict[str, dict[str, Any]], file: Path) -> nn.Module:
    """The model with our own modules where the manifest has them, and modules shared as they were."""
    own, seen = own_modules(), set[nn.Module]()
    dense = dict(model.named_modules(remove_duplicate=False))
    for name, module in dense.items():
        if "same" in modules.get(name, {"same": ""}):
            continue
        if module in seen:  # shared in the code and no longer in what was saved
            model = _put(model, name, copy.deepcopy(module))
        seen.add(module)
    for name, entry in modules.items():
        try:
            module = model.get_submodule(entry.get("same", name))
            model = _put(model, name, module)
        except AttributeError:
            bad(file, f"the saved model has a module {name!r}, and what build made has none", SAME_CODE)
        if "same" in entry:
            continue
        if "kind" in entry and type(module) is not own.get(entry["kind"]):
            try:
                module = own[entry["kind"]].empty(module, **entry["spec"])
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{file}: module {name!r}, a {type(module).__name__}, cannot be made a {entry['kind']} of "
                    f"{entry.get('spec')} ({error}). {SAME_CODE}"
                ) from error
            model = _put(model, name, module)
        if type(module).__name__ != entry["type"]:
            what = f"module {name!r}" if name else "the model"
            bad(file, f"{what} is a {entry['type']}, and build made a {type(module).__name__}", SAME_CODE)
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in modules:
            reason = f"build made a module {name!r} ({type(module).__name__}), and the saved model has none"
            bad(file, reason, SAME_CODE)
    return model


def _restore_attributes(model: nn.Module, modules: dict[str, dict[str, Any]], file: Path) -> None:
    """Widths, numbers of heads and the like: only integers, and only in place of integers."""
    for name, entry in modules.items():
        module = model.get_submodule(name)
        for key, value in entry.get("attributes", {}).items():
            new = tuple(value) if isinstance(value, list) else value
            old = vars(module).get(key, getattr(type(module), key, None))
            taken = key in module._parameters or key in module._buffers or key in module._modules
            if old is None and key[:1] == "_" and key not in _OWN and integers(new):
                continue  # what a run has left
            if taken or not key or key in _OWN or not integers(new) or not (old is None or integers(old)):
                bad(file, f"attribute {key!r} of module {name!r} is {old!r} and cannot become {new!r}", SAME_CODE)
            if old != new:
                setattr(module, key, new)


def _restore_changed(model: nn.Module, modules: dict[str, dict[str, Any]], file: Path) -> None:
    """Integers in objects that modules hold, such as config.num_heads."""
    for name, entry in modules.items():
        for path, new in entry.get("changed", {}).items():
            place = place_of(model, name, path)
            if place is None or type(new) is not int:
                bad(file, f"{path!r} of module {name!r} is no integer that can become {new!r}", SAME_CODE)
            where, key = place
            where[key] = new


def _check_probe(model: nn.Module, path: Path, entry: dict[str, Any], file: Path) -> None:
    """Raise if the model computes something else than the saved one did."""
    tensors = _read_file(path / PROBE, entry["bytes"], entry["sha256"])
    names = [f"output.{i}" for i in range(len(entry["outputs"]))]
    if missing := [name for name in names if name not in tensors]:
        bad(path / PROBE, f"tensor {missing[0]!r} is missing", SAVE_AGAIN)
    try:
        given = made(entry["inputs"], tensors)
    except (ValueError, NoProbe) as error:
        raise ValueError(f"{file}: the probe's inputs cannot be made: {error}. {SAVE_AGAIN}") from error
    places = [place for place, _ in entry["outputs"]]
    outputs = {place: tensors[name].double() for place, name in zip(places, names, strict=True)}
    wanted = Probe(outputs, dict(entry["outputs"]), entry["dtype"])
    if why := compare(model, given, wanted):
        raise ValueError(
            f"{path}: the loaded model does not compute what the saved one did: {why}. {SAME_CODE} "
            "load(path, build, probe=False) loads it without this check."
        )


def _restore_tensors(model: nn.Module, manifest: Manifest, values: dict[str, Tensor], file: Path) -> None:
    """Each parameter and buffer at its new shape, tied as they were."""
    slots = {name: (module, leaf) for name, module, leaf in tensor_slots(model)}
    for name, (module, leaf) in slots.items():
        old = getattr(module, leaf)
        if name in manifest.absent:
            # setattr and not the dictionary below it: an LSTM keeps a list of its weights
            setattr(module, leaf, None)
        elif name not in manifest.tensors:
            if old is not None:
                bad(file, f"tensor {name!r} is missing, which what build made has", SAME_CODE)
        elif name in values and old is not None and leaf in module._parameters:
            new = values[name].shape
            if len(new) != old.dim() or any(a > b for a, b in zip(new, old.shape, strict=True)):
                reason = f"parameter {name!r} is {list(new)}, which no part of build's {list(old.shape)} is"
                bad(file, reason, SAME_CODE)
    for name, entry in manifest.tensors.items():
        if name not in slots:
            bad(file, f"tensor {name!r} is unexpected: what build made has none of that name", SAME_CODE)
        module, leaf = slots[name]
        source = entry.get("same", name)
        if source not in values:
            bad(file, f"tensor {name!r} is said to be {source!r}, which is not there", SAVE_AGAIN)
        value, tied = values[source], isinstance(values[source], nn.Parameter)
        built = getattr(module, leaf)
        if not tied and isinstance(built, Tensor) and channels_last(built):  # files know no layout
            value = to_channels_last(value)
        if leaf in module._parameters and not tied:
            value = values[source] = nn.Parameter(value, manifest.tensors[source]["requires_grad"])
        elif leaf in module._buffers and tied:
            value = value.detach()
        setattr(module, leaf, value)


def load(path: str | os.PathLike[str], build: Callable[[], nn.Module] | nn.Module, *, probe: bool = True) -> nn.Module:
    """The model that `save` wrote, on the CPU and in eval mode. Nothing in the files is executed.

    Args:
        path: the directory that `save` wrote.
        build: makes the model from its original code, at its full size: a class or function without arguments, or such
            a model, of which a copy is taken.
        probe: run a copy of the model on the inputs that were stored with it, in float64 where it runs in it, and raise
            if its outputs are not those that were stored. A copy in float64 needs twice the memory of the model.

    Raises:
        ValueError: the files are damaged, are not of this code, or the model computes something else than the saved one
            did.
    """
    path = Path(path)
    manifest = read(path)
    values = _read_tensors(path, manifest)
    model = copy.deepcopy(build) if isinstance(build, nn.Module) else build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build must make a torch.nn.Module, and made a {type(model).__name__}.")
    changed = [(name, path) for name, entry in manifest.modules.items() for path in entry.get("changed", {})]
    if changed:
        model = copy.deepcopy(model)  # an object such as a configuration may be the caller's
    file = path / MANIFEST
    model = _restore_modules(model, manifest.modules, file)
    _restore_attributes(model, manifest.modules, file)
    _restore_changed(model, manifest.modules, file)
    _restore_tensors(model, manifest, values, file)
    entry = manifest.probe or {}
    if probe and "inputs" in entry:
        _check_probe(model, path, entry, file)
    if entry:
        record(model, entry.get("spec"), entry.get("left_out", "its inputs were given to save"), changed)
    return model.eval()
