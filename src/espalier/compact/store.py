"""A model on disk without pickle: its tensors as safetensors and its form as JSON, around the original code."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from espalier._version import __version__
from espalier.compact.layers import Gather, LowRank

FORMAT, VERSION = "espalier", 1
TENSORS, MANIFEST = "model.safetensors", "manifest.json"
# what safetensors can hold
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}


@dataclass(frozen=True)
class Manifest:
    """The form of a model, read off the model itself. The second name of a module or tensor is `{"same": first}`."""

    format: str
    version: int
    espalier: str
    model: str  # class of the root
    bytes: int  # of the tensors file
    sha256: str
    modules: dict[str, dict[str, Any]]  # type, attributes; kind and spec of our own
    tensors: dict[str, dict[str, Any]]  # shape, dtype, requires_grad
    absent: list[str]  # names that are None, such as the bias of a layer without one


def _own() -> dict[str, Any]:
    """Our own modules by kind. Each has `spec()`, and `empty(dense, **spec)` makes it from the dense module."""
    from espalier.compact.attention import HeadAttention

    return {"gather": Gather, "low_rank": LowRank, "head_attention": HeadAttention}


def _integers(value: object) -> bool:
    """An int or a tuple of ints, and no bool or enumeration."""
    return type(value) is int or (isinstance(value, tuple) and value != () and all(type(v) is int for v in value))


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and attribute of each parameter and buffer; buffers that a state dict omits are cut all the same."""
    for prefix, module in model.named_modules():
        for leaf in (*module._parameters, *module._buffers):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf


def _describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The modules of a manifest."""
    own, first, modules = _own(), dict[nn.Module, str](), dict[str, dict[str, Any]]()
    for name, module in model.named_modules(remove_duplicate=False):
        if module in first:
            modules[name] = {"same": first[module]}
            continue
        first[module] = name
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) has extra state, which is no tensor. Move it into buffers."
            )
        public = {k: v for k, v in vars(module).items() if k[0] != "_" and k != "training" and _integers(v)}
        modules[name] = {"type": type(module).__name__, "attributes": public}
        for kind, cls in own.items():
            if type(module) is cls:
                modules[name] |= {"kind": kind, "spec": module.spec()}
    return modules


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
        ours = there <= {TENSORS, MANIFEST} and bool(_read(path))
    except (ValueError, FileNotFoundError):
        ours = False
    if not ours:
        raise FileExistsError(
            f"{path} holds files that espalier.save did not write: {', '.join(sorted(there)[:4])}. "
            "Give another path, or empty it."
        )


def check_module(model: object) -> None:
    """Raise where this is no model but what `shrink` gave."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module such as shrunk.model, not a {type(model).__name__}.")


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model as a directory of two files, safetensors and a JSON manifest; `load` reads it.

    The directory appears complete or not at all. One that `save` wrote before is replaced, any other that is not empty
    is refused. Tied weights are written once. What is neither tensor nor integer attribute comes from the code.
    """
    from safetensors.torch import save_file

    check_module(model)
    path = Path(path).resolve()
    _check_replaceable(path)
    tensors, packed, first = dict[str, dict[str, Any]](), dict[str, Tensor](), dict[object, str]()
    absent = []
    for name, module, leaf in _slots(model):
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
            sha256=_hash(new / TENSORS),
            modules=modules,
            tensors=tensors,
            absent=absent,
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


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bad(path: Path, reason: str, way_out: str) -> NoReturn:
    raise ValueError(f"{path}: {reason}. {way_out}")


SAVE_AGAIN = "Copy or save the model again."
SAME_CODE = "Pass the code that built the model before it was shrunk."


def _complete(entries: dict[str, Any], form: dict[str, type]) -> bool:
    """Whether each entry of a manifest's table has these fields, or another name."""
    return all(
        isinstance(e, dict)
        and (isinstance(e.get("same"), str) or all(type(e.get(k)) is kind for k, kind in form.items()))
        for e in entries.values()
    )


def _read(path: Path) -> Manifest:
    """The manifest of a directory, its form checked."""
    file = path / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the directory that espalier.save wrote.")
    if not path.is_dir():
        _bad(path, "a file, not a directory", "Give the directory that espalier.save wrote.")
    if not file.is_file():
        _bad(file, "there is no such file, so this is no saved model", "Give the directory that espalier.save wrote.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error}). {SAVE_AGAIN}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        _bad(file, "not a manifest of Espalier", "Give the directory that espalier.save wrote.")
    if raw.get("version") != VERSION:
        reason = f"format version {raw.get('version')!r}, and this is Espalier {__version__}, which reads {VERSION}"
        _bad(file, reason, f"Load it with Espalier {raw.get('espalier')}.")
    kinds = {"str": str, "int": int}
    for field in fields(Manifest):
        kind = kinds.get(str(field.type), list if str(field.type).startswith("list") else dict)
        if type(raw.get(field.name)) is not kind:
            _bad(file, f"{field.name!r} is missing or not a {kind.__name__}", SAVE_AGAIN)
    if not _complete(raw["modules"], {"type": str, "attributes": dict}):
        _bad(file, "an entry of 'modules' is not complete", SAVE_AGAIN)
    if not _complete(raw["tensors"], {"shape": list, "dtype": str, "requires_grad": bool}):
        _bad(file, "an entry of 'tensors' is not complete", SAVE_AGAIN)
    return Manifest(**{f.name: raw[f.name] for f in fields(Manifest)})


def _read_tensors(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a directory, as its manifest says they are."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / TENSORS
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, though the manifest beside it does. {SAVE_AGAIN}")
    if (size := file.stat().st_size) != manifest.bytes:
        kind = "truncated" if size < manifest.bytes else "changed"
        _bad(file, f"{kind}: {size} bytes where the manifest says {manifest.bytes}", SAVE_AGAIN)
    if (found := _hash(file)) != manifest.sha256:
        _bad(file, f"changed since it was saved: its SHA-256 is {found}", SAVE_AGAIN)
    try:
        loaded = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: not valid safetensors ({error}). {SAVE_AGAIN}") from error
    expected = {n: e for n, e in manifest.tensors.items() if "same" not in e}
    if differing := sorted(expected.keys() ^ loaded.keys()):
        where = "missing" if differing[0] in expected else "unexpected"
        _bad(file, f"tensor {differing[0]!r} is {where}", SAVE_AGAIN)
    for name, entry in expected.items():
        tensor = loaded[name]
        here = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        there = f"{entry['dtype']} {entry['shape']}"
        if here != there:
            _bad(file, f"tensor {name!r} is {here}, and the manifest says {there}", SAVE_AGAIN)
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
    own, seen = _own(), set[nn.Module]()
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
            _bad(file, f"the saved model has a module {name!r}, and what build made has none", SAME_CODE)
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
            _bad(file, f"{what} is a {entry['type']}, and build made a {type(module).__name__}", SAME_CODE)
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in modules:
            reason = f"build made a module {name!r} ({type(module).__name__}), and the saved model has none"
            _bad(file, reason, SAME_CODE)
    return model


def _restore_attributes(model: nn.Module, modules: dict[str, dict[str, Any]], file: Path) -> None:
    """Widths, numbers of heads and the like: only integers, and only in place of integers."""
    for name, entry in modules.items():
        module = model.get_submodule(name)
        for key, value in entry.get("attributes", {}).items():
            new = tuple(value) if isinstance(value, list) else value
            old = vars(module).get(key, getattr(type(module), key, None))
            taken = key in module._parameters or key in module._buffers or key in module._modules
            if taken or key[:1] in ("_", "") or not _integers(new) or not (old is None or _integers(old)):
                _bad(file, f"attribute {key!r} of module {name!r} is {old!r} and cannot become {new!r}", SAME_CODE)
            if old != new:
                setattr(module, key, new)


def _restore_tensors(model: nn.Module, manifest: Manifest, values: dict[str, Tensor], file: Path) -> None:
    """Each parameter and buffer at its new shape, tied as they were."""
    slots = {name: (module, leaf) for name, module, leaf in _slots(model)}
    for name, (module, leaf) in slots.items():
        old = getattr(module, leaf)
        if name in manifest.absent:
            # setattr and not the dictionary below it: an LSTM keeps a list of its weights
            setattr(module, leaf, None)
        elif name not in manifest.tensors:
            if old is not None:
                _bad(file, f"tensor {name!r} is missing, which what build made has", SAME_CODE)
        elif name in values and old is not None and leaf in module._parameters:
            new = values[name].shape
            if len(new) != old.dim() or any(a > b for a, b in zip(new, old.shape, strict=True)):
                reason = f"parameter {name!r} is {list(new)}, which no part of build's {list(old.shape)} is"
                _bad(file, reason, SAME_CODE)
    for name, entry in manifest.tensors.items():
        if name not in slots:
            _bad(file, f"tensor {name!r} is unexpected: what build made has none of that name", SAME_CODE)
        module, leaf = slots[name]
        source = entry.get("same", name)
        if source not in values:
            _bad(file, f"tensor {name!r} is said to be {source!r}, which is not there", SAVE_AGAIN)
        value, tied = values[source], isinstance(values[source], nn.Parameter)
        if leaf in module._parameters and not tied:
            value = values[source] = nn.Parameter(value, manifest.tensors[source]["requires_grad"])
        elif leaf in module._buffers and tied:
            value = value.detach()
        setattr(module, leaf, value)


def load(path: str | os.PathLike[str], build: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """The model that `save` wrote, on the CPU and in eval mode.

    `build` makes the model from its original code, at its full size: a class or function without arguments, or such a
    model, of which a copy is taken. Nothing in the files is executed.
    """
    path = Path(path)
    manifest = _read(path)
    values = _read_tensors(path, manifest)
    model = copy.deepcopy(build) if isinstance(build, nn.Module) else build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build must make a torch.nn.Module, and made a {type(model).__name__}.")
    file = path / MANIFEST
    model = _restore_modules(model, manifest.modules, file)
    _restore_attributes(model, manifest.modules, file)
    _restore_tensors(model, manifest, values, file)
    return model.eval()
