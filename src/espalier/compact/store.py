"""Save a model without pickle: its tensors as safetensors, its form as JSON."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from espalier._version import __version__
from espalier.compact.examples import Inputs, as_given
from espalier.compact.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    PROBE,
    TENSORS,
    VERSION,
    Manifest,
    digest,
    integers,
    own_modules,
    place_of,
    read,
    tensor_slots,
)
from espalier.compact.probe import RECORD, NoProbe, made, probed, spec_of

# what every module has, which is no size
_OWN = vars(nn.Module()).keys()


def _describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The modules of a manifest."""
    own, first, modules = own_modules(), dict[nn.Module, str](), dict[str, dict[str, Any]]()
    for name, module in model.named_modules(remove_duplicate=False):
        if module in first:
            modules[name] = {"same": first[module]}
            continue
        first[module] = name
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) has extra state, which is no tensor. Move it into buffers."
            )
        sizes = {k: v for k, v in vars(module).items() if k and k not in _OWN and integers(v)}
        modules[name] = {"type": type(module).__name__, "attributes": sizes}
        if changed := _changed(model, name, module):
            modules[name]["changed"] = changed
        for kind, cls in own.items():
            if type(module) is cls:
                modules[name] |= {"kind": kind, "spec": module.spec()}
    return modules


def _changed(model: nn.Module, name: str, module: nn.Module) -> dict[str, int]:
    """The attributes of objects that shrink has changed for this module, such as config.num_heads."""
    found = {}
    for path in vars(module).get(RECORD, {}).get("changed", ()):
        if (place := place_of(model, name, path)) is not None:
            where, key = place
            found[path] = where[key]
    return found


def _check_storable(name: str, tensor: Tensor) -> None:
    """Raise where a tensor has no values, or none that safetensors can hold."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise ValueError(f"{name!r} is not initialised yet. Run the model once before it is saved.")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values. Load the model's weights before saving.")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot hold. Convert it first."
        )


def _memory(tensor: Tensor) -> object:
    """Equal for tensors that are the same numbers in the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.shape, tensor.stride(), tensor.dtype)


def _packed(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous and alone in its memory: on CUDA the weights of an LSTM are slices of one storage."""
    packed = tensor.detach().cpu().contiguous()
    whole = packed.untyped_storage().nbytes() == packed.numel() * packed.element_size()
    return packed if whole else packed.clone()


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """An empty directory on the same file system, for what is to be renamed to `path` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    """Raise where saving would destroy something that is not ours."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file, and a model is saved as a directory. Give another path.")
    if not (there := {p.name for p in path.iterdir()}):
        return
    try:
        ours = there <= {TENSORS, PROBE, MANIFEST} and bool(read(path))
    except (ValueError, FileNotFoundError):
        ours = False
    if not ours:
        raise FileExistsError(
            f"{path} holds files that espalier.save did not write: {', '.join(sorted(there)[:4])}. "
            "Give another path, or empty it."
        )


def _probe(model: nn.Module, example_inputs: Inputs | None, file: Path) -> dict[str, Any] | None:
    """Its entry in the manifest; the file is written. None if there are no inputs to run the model on."""
    from safetensors.torch import save_file

    record = vars(model).get(RECORD, {})
    if example_inputs is None and "why" not in record:
        return None
    spec, tensors = None, dict[str, Tensor]()

    def put(x: Tensor) -> list[Any]:
        _check_storable("an input", x)
        tensors[name := f"input.{len(tensors)}"] = _packed(x)
        return ["tensor", name]

    try:
        if example_inputs is not None:
            given = as_given(example_inputs)
        elif (spec := record["spec"]) is None:
            raise NoProbe(record["why"])
        else:
            given = made(spec)
        inputs = spec_of([*given], put)
        found = probed(model, given)
    except (NoProbe, ValueError) as error:
        if example_inputs is not None:
            raise ValueError(f"no probe can be stored with these example_inputs: {error}.") from error
        warnings.warn(
            f"the model is saved without a probe, because {error}: load cannot see whether it computes the same. "
            "Give save example_inputs.",
            UserWarning,
            stacklevel=3,
        )
        return {"left_out": str(error)}
    tensors |= {f"output.{i}": x for i, x in enumerate(found.outputs.values())}
    save_file(tensors, file)
    file.chmod(0o666 & file.parent.stat().st_mode)
    return {
        "bytes": file.stat().st_size,
        "sha256": digest(file),
        "inputs": inputs,
        "spec": spec,
        "outputs": [[name, shape] for name, shape in found.shapes.items()],
        "dtype": found.dtype,
    }


def check_module(model: object) -> None:
    """Raise where this is no model but what `shrink` gave."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module such as shrunk.model, not a {type(model).__name__}.")


def save(model: nn.Module, path: str | os.PathLike[str], example_inputs: Inputs | None = None) -> None:
    """Write a model as a directory of safetensors files and a JSON manifest, which `load` reads.

    The directory appears complete or not at all. One that `save` wrote before is replaced, any other that is not empty
    is refused. Tied weights are written once. What is neither tensor nor integer attribute comes from the code.

    A probe is stored beside: inputs, and at most 4096 entries of each output that the model gives on the CPU. `load`
    runs the model on it. Its inputs are random, with the shapes of those that `shrink` was given and the mean and
    deviation, or the smallest and largest entry, of each; none of your data is written. A model that takes no such
    inputs, or has random outputs, is saved without a probe, and a warning says so. A model that did not come from
    `shrink` has a probe only if `example_inputs` are given.

    Args:
        model: such as `shrunk.model`.
        path: of the directory.
        example_inputs: for the probe, as they are: these are written to disk. A tensor, a tuple of arguments or a dict
            of keyword arguments, together at most 2**20 entries.
    """
    from safetensors.torch import save_file

    check_module(model)
    path = Path(path).resolve()
    _check_replaceable(path)
    tensors, packed, first = dict[str, dict[str, Any]](), dict[str, Tensor](), dict[object, str]()
    absent = []
    for name, module, leaf in tensor_slots(model):
        tensor = getattr(module, leaf)
        if tensor is None:
            absent.append(name)
            continue
        _check_storable(name, tensor)
        if (memory := _memory(tensor)) in first:
            tensors[name] = {"same": first[memory]}
            continue
        first[memory] = name
        packed[name] = _packed(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = {"shape": list(tensor.shape), "dtype": dtype, "requires_grad": tensor.requires_grad}
    modules = _describe(model)
    with scratch_beside(path) as scratch:
        new = scratch / path.name
        new.mkdir()
        save_file(packed, new / TENSORS)
        # safetensors lets the owner alone read what it writes
        (new / TENSORS).chmod(0o666 & new.stat().st_mode)
        manifest = Manifest(
            format=FORMAT,
            version=VERSION,
            espalier=__version__,
            model=type(model).__name__,
            bytes=(new / TENSORS).stat().st_size,
            sha256=digest(new / TENSORS),
            modules=modules,
            tensors=tensors,
            absent=absent,
            probe=_probe(model, example_inputs, new / PROBE),
        )
        (new / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
        if path.exists():
            old = scratch / "old"
            path.rename(old)
            try:
                new.rename(path)
            except OSError:
                old.rename(path)
                raise
        else:
            new.rename(path)
