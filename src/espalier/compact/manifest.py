"""What a saved model says of its form, and reading that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from espalier._version import __version__
from espalier.compact.cells import GatherCell
from espalier.compact.layers import Gather, LowRank

FORMAT, VERSION = "espalier", 2


TENSORS, PROBE, MANIFEST = "model.safetensors", "probe.safetensors", "manifest.json"


# what safetensors can hold
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}


SAVE_AGAIN = "Copy or save the model again."


SAME_CODE = "Pass the code that built the model before it was shrunk."


@dataclass(frozen=True)
class Manifest:
    """The form of a model, read off the model itself. The second name of a module or tensor is `{"same": first}`."""

    format: str
    version: int
    espalier: str
    model: str  # class of the root
    bytes: int  # of the tensors file
    sha256: str
    modules: dict[str, dict[str, Any]]  # type, attributes and "changed" in objects; kind and spec of our own
    tensors: dict[str, dict[str, Any]]  # shape, dtype, requires_grad
    absent: list[str]  # names that are None, such as the bias of a layer without one
    # bytes and sha256 of its file, inputs, spec, outputs and dtype; or left_out, a reason; None if nobody asked
    probe: dict[str, Any] | None = None


def own_modules() -> dict[str, Any]:
    """Our own modules by kind. Each has `spec()`, and `empty(dense, **spec)` makes it from the dense module."""
    from espalier.compact.attention import HeadAttention

    return {"gather": Gather, "gather_cell": GatherCell, "low_rank": LowRank, "head_attention": HeadAttention}


def tensor_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and attribute of each parameter and buffer; buffers that a state dict omits are cut all the same."""
    for prefix, module in model.named_modules():
        for leaf in (*module._parameters, *module._buffers):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf


def place_of(model: nn.Module, module: str, path: str) -> tuple[dict[str, Any], str] | None:
    """Where an integer attribute of an object is, such as config.num_heads: the dict that holds it, and its name."""
    *way, last = path.split(".")
    where: Any = vars(model.get_submodule(module))
    for part in way:
        found = where.get(part)
        if isinstance(found, nn.Module | Tensor | type | ModuleType):
            return None
        where = found if isinstance(found, dict) else getattr(found, "__dict__", None)
        if not isinstance(where, dict):
            return None
    return (where, last) if type(where.get(last)) is int else None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bad(path: Path, reason: str, way_out: str) -> NoReturn:
    raise ValueError(f"{path}: {reason}. {way_out}")


def _complete(entries: dict[str, Any], form: dict[str, type]) -> bool:
    """Whether each entry of a manifest's table has these fields, or another name."""
    return all(
        isinstance(e, dict)
        and isinstance(e.get("kind", ""), str)
        and isinstance(e.get("changed", {}), dict)
        and (isinstance(e.get("same"), str) or all(type(e.get(k)) is kind for k, kind in form.items()))
        for e in entries.values()
    )


def _complete_probe(entry: object) -> bool:
    if not isinstance(entry, dict):
        return entry is None
    if "left_out" in entry:
        return isinstance(entry["left_out"], str)
    form = {"bytes": int, "sha256": str, "inputs": list, "outputs": list, "dtype": str}
    pairs = entry.get("outputs")
    return (
        all(type(entry.get(k)) is kind for k, kind in form.items())
        and entry["dtype"] in {str(kind).removeprefix("torch.") for kind in DTYPES}
        and isinstance(pairs, list)
        and all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], list) for p in pairs)
    )


def read(path: Path) -> Manifest:
    """The manifest of a directory, its form checked."""
    file = path / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the directory that espalier.save wrote.")
    if not path.is_dir():
        bad(path, "a file, not a directory", "Give the directory that espalier.save wrote.")
    if not file.is_file():
        bad(file, "there is no such file, so this is no saved model", "Give the directory that espalier.save wrote.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error}). {SAVE_AGAIN}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        bad(file, "not a manifest of Espalier", "Give the directory that espalier.save wrote.")
    if raw.get("version") not in range(1, VERSION + 1):
        reason = (
            f"format version {raw.get('version')!r}, and this is Espalier {__version__}, which reads up to {VERSION}"
        )
        bad(file, reason, f"Load it with Espalier {raw.get('espalier')}.")
    kinds = {"str": str, "int": int}
    for field in fields(Manifest)[:-1]:
        kind = kinds.get(str(field.type), list if str(field.type).startswith("list") else dict)
        if type(raw.get(field.name)) is not kind:
            bad(file, f"{field.name!r} is missing or not a {kind.__name__}", SAVE_AGAIN)
    if not _complete(raw["modules"], {"type": str, "attributes": dict}):
        bad(file, "an entry of 'modules' is not complete", SAVE_AGAIN)
    if not _complete(raw["tensors"], {"shape": list, "dtype": str, "requires_grad": bool}):
        bad(file, "an entry of 'tensors' is not complete", SAVE_AGAIN)
    if not _complete_probe(raw.get("probe")):
        bad(file, "'probe' is not complete", SAVE_AGAIN)
    found: dict[str, Any] = {f.name: raw.get(f.name) for f in fields(Manifest)}
    return Manifest(**found)


def integers(value: object) -> bool:
    """An int or a tuple of ints, and no bool or enumeration."""
    return type(value) is int or (isinstance(value, tuple) and value != () and all(type(v) is int for v in value))
