"""A model as a file that runs without its code, checked by running it."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from espalier.compact.store import check_module, save, scratch_beside

if TYPE_CHECKING:
    from torch.export import ExportedProgram

FORMATS = ("onnx", "pt2", "safetensors")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
RTOL = 1e-4
# protobuf refuses files of 2 GiB, so the weights of larger models go into a second one
ONE_FILE = 2**31 - 2**27

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def _arguments(example_inputs: Any) -> Inputs:
    """Positional and named arguments of the model."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)), {}


def _plain(output: Any) -> Any:
    """Mappings as dictionaries and named tuples as tuples, so that a file needs no class of the model's to be read."""
    if isinstance(output, Mapping):
        return {k: _plain(v) for k, v in output.items()}
    if isinstance(output, tuple):
        return tuple(map(_plain, output))
    return [_plain(v) for v in output] if isinstance(output, list) else output


def _tensors(tree: Any) -> list[Tensor]:
    return [x.detach().cpu() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


@contextmanager
def _ready(model: nn.Module) -> Iterator[None]:
    """In eval mode, with plain outputs and without the fused attention, which other runtimes do not have."""
    modes = [(m, m.training) for m in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    hook = model.register_forward_hook(lambda module, args, output: _plain(output))
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        hook.remove()
        for module, training in modes:
            module.training = training


def _doubled(inputs: Inputs) -> Inputs:
    """Twice the batch, which is the first dimension of the first tensor and of those that agree with it."""
    doubled: Inputs = pytree.tree_map(lambda x: torch.cat((x, x)) if _batched(x, inputs) else x, inputs)
    return doubled


def _batched(x: Any, inputs: Inputs) -> bool:
    sizes = [t.shape[0] for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == sizes[0]


def _traced(model: nn.Module, inputs: Inputs, dynamic_batch: bool) -> ExportedProgram:
    """The model's graph, for a batch of any size where `dynamic_batch`."""
    shapes = None
    if dynamic_batch:
        inputs = _doubled(inputs)  # torch would take a batch of 1 for a constant
        batch = torch.export.Dim("batch")
        by_position, by_name = pytree.tree_map(lambda x: {0: batch} if _batched(x, inputs) else None, inputs)
        shapes = by_position or by_name
    return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=False)


def _write(program: ExportedProgram, file: Path, format: str) -> None:
    if format == "pt2":
        with file.open("wb") as stream:  # given a name, torch insists on its ending
            torch.export.save(program, stream)
        return
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    torch.onnx.export(program, (), file, dynamo=True, verbose=False, external_data=size > ONE_FILE)


def _run(program: ExportedProgram, file: Path, format: str, cases: list[Inputs]) -> list[list[Tensor]]:
    """What the file computes."""
    if format == "pt2":
        with file.open("rb") as stream:
            module = torch.export.load(stream).module()
        return [_tensors(module(*args, **kwargs)) for args, kwargs in cases]
    runtime = importlib.import_module("onnxruntime")  # ships no types
    session = runtime.InferenceSession(os.fspath(file), providers=["CPUExecutionProvider"])
    read = {x.name for x in session.get_inputs()}
    names = program.graph_signature.user_inputs
    outputs = []
    for case in cases:
        given = zip(names, pytree.tree_leaves(case), strict=True)
        feed = {n: x.detach().cpu().numpy() for n, x in given if n in read and isinstance(x, Tensor)}
        outputs.append([torch.as_tensor(y) for y in session.run(None, feed)])
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> tuple[float, float]:
    """The largest difference relative to the largest output, and what rounding allows."""
    if [x.shape for x in expected] != [x.shape for x in found]:
        raise RuntimeError(f"outputs of shapes {[[*x.shape] for x in found]}, not {[[*x.shape] for x in expected]}")
    floating = [torch.finfo(x.dtype).eps for x in expected if x.is_floating_point()]
    scale = max((x.double().nan_to_num(0, 0, 0).abs().max().item() for x in expected if x.numel()), default=0.0)
    worst = 0.0
    for x, y in zip(expected, found, strict=True):
        gap = torch.where(x == y, 0.0, (x.double() - y.double()).abs())  # ∞ − ∞ is none
        worst = max(worst, gap.nan_to_num(math.inf).max().item()) if gap.numel() else worst
    return worst / (scale or 1.0), max(RTOL, 10 * max(floating, default=0.0))


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any,
    format: str | None = None,
    dynamic_batch: bool = True,
) -> Path:
    """Write the model, in eval mode, as a file that runs without its code, and return the path.

    `format` is that of the path's suffix unless given.
    `"onnx"` and `"pt2"` (torch.export) are checked by running the file, with onnxruntime and with torch, on the example
    inputs: what differs by more than 1e-4 of the largest output raises and leaves no file. `"safetensors"` is `save`.
    `example_inputs` are a tensor, a sequence of arguments or a mapping of named ones. With `dynamic_batch` the file
    takes any size of their first dimension.
    """
    check_module(model)
    path = Path(path)
    by_suffix = path.suffix[1:] if path.suffix[1:] in FORMATS else None
    format = format or by_suffix
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}.")
    if by_suffix and by_suffix != format:
        raise ValueError(f"{path.name} has the suffix of {by_suffix}, and format is {format!r}: change one of them.")
    if format == "safetensors":
        save(model, path)
        return path
    if format == "onnx" and (missing := [p for p in PACKAGES if importlib.util.find_spec(p) is None]):
        raise ImportError(f'ONNX needs {" and ".join(missing)}: pip install "torch-espalier[onnx]"')
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, and {format} is a file. Give the name of a file in it.")
    inputs = _arguments(example_inputs)
    dynamic_batch = dynamic_batch and any(isinstance(x, Tensor) and x.dim() for x in pytree.tree_leaves(inputs))
    cases = [inputs, _doubled(inputs)] if dynamic_batch else [inputs]
    kind = type(model).__name__
    # torch warns of its own inner workings here, and of copies that the trace makes
    with scratch_beside(path) as scratch, _ready(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = scratch / path.name
        expected = [_tensors(model(*args, **kwargs)) for args, kwargs in cases]
        try:
            program = _traced(model, inputs, dynamic_batch)
            _write(program, file, format)
        except Exception as error:
            way_out = "Try dynamic_batch=False." if dynamic_batch else "Another format may do."
            raise RuntimeError(f"{kind} cannot be exported as {format}: {error}\n{way_out}") from error
        try:
            found = _run(program, file, format, cases)
            for x, y in zip(expected, found, strict=True):
                gap, allowed = _difference(x, y)
                if gap > allowed:
                    raise RuntimeError(f"it differs from the model by {gap:.1e} of the largest output")
        except Exception as error:
            raise RuntimeError(
                f"the {format} file of {kind} failed its check and was not written to {path}: {error}. "
                f"Export in float32 and on the CPU, or choose another of {', '.join(FORMATS)}."
            ) from error
        for part in scratch.iterdir():  # the file, and of large ONNX models their weights
            part.replace(path.with_name(part.name))
    return path
