"""Random models, and a judge of `espalier.shrink` on them.

`pytest tests/test_random_models.py` runs a few. This runs any range, and prints each class of failure with its seeds:

    python tests/random_models.py --seeds 0:500

A model is described by a Spec, which is made from a seed. `--minimise` drops what a failure does not need.
"""

from __future__ import annotations

import argparse
import copy
import linecache
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import espalier
from random_blocks import FIRST, KINDS, SPATIAL, Part

# ------------------------------------------------------------------------------------------------ what a model is


@dataclass(frozen=True)
class Spec:
    """All that a random model is made from."""

    seed: int
    domain: str
    width: int
    blocks: tuple[tuple[str, int], ...]  # kinds, each with a seed of its own
    head: bool = True
    output: str = "tensor"
    aux: str = "none"  # what else it returns: a hidden tensor, or a second head
    given: str = "tensor"  # how inputs are passed
    batch: int = 2
    short: bool = False  # examples of few steps
    zeros: str = "dead"
    dtype: str = "float64"
    low_rank: bool = False
    gather: str = "never"
    training: bool = False  # the mode it is in when it is shrunk
    stepped: bool = False  # the optimizer has taken a step


OFTEN = {"attention": 4, "grouped_queries": 3, "recurrent": 4, "stateful": 2, "conv": 2, "separable": 2}


ZEROS = {"dead": 6, "unread": 2, "constant": 3, "rows and columns": 3, "entries": 1, "none": 1, "all": 1, "mixed": 4}


def spec_of(seed: int, kind: str | None = None) -> Spec:
    """The random model of a seed: the first of those drawn that runs on its own examples; of one block, if given."""
    for attempt in range(100):
        r = Random(f"{seed} {attempt}")
        domain = r.choices(("flat", "sequence", "tokens", "signal", "image", "volume"), (4, 6, 2, 2, 4, 1))[0]
        width, blocks, here = r.choice([4, 6, 8]), list[tuple[str, int]](), domain
        for _ in range(r.choice([1, 1, 2, 2, 3, 4])):
            moves = [k for k in KINDS[here] if k.startswith(("to_", "embedded"))]
            stays = [k for k in KINDS[here] if k not in moves]
            names = moves if moves and (not stays or r.random() < 0.2) else stays
            name = r.choices(names, [OFTEN.get(k, 1) for k in names])[0]
            blocks.append((name, r.randrange(10**6)))
            here = {"embedded": "sequence", "to_flat": "flat", "to_features": "flat", "to_signal": "signal",
                    "to_sequence": "sequence"}.get(name, here)  # fmt: skip
        found = Spec(
            seed=seed,
            domain=domain,
            width=width,
            blocks=tuple(blocks),
            head=r.random() < 0.6,
            output=r.choice(list(OUTPUTS)) if r.random() < 0.5 else "tensor",
            aux=r.choice(("none", "none", "hidden", "head")),
            given=r.choice(("tensor", "tuple", "dict", "keyword and more")),
            batch=r.choice((1, 2, 2, 2, 3, 4)),
            short=r.random() < 0.5,
            zeros=r.choices(list(ZEROS), list(ZEROS.values()))[0],
            dtype=r.choices(("float64", "float32", "bfloat16"), (7, 2, 1))[0],
            low_rank=r.random() < 0.2,
            gather=r.choice(("never", "never", "always", "always", "auto")),
            training=r.random() < 0.5,
            stepped=r.random() < 0.4,
        )
        if kind:
            domain = r.choice([d for d in KINDS if kind in KINDS[d]])
            found = replace(found, domain=domain, blocks=((kind, r.randrange(10**6)),))
        if found.aux != "none" and found.output == "tensor":
            found = replace(found, output="tuple")
        if runs(found):
            return found
    raise AssertionError(f"no model for seed {seed}")


def runs(spec: Spec) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            out = dict(tensors(called(built(spec).model.eval(), examples(spec)[0])))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    return all(x.isfinite().all() for x in out.values() if x.is_floating_point()) and bool(out)


class Body(nn.Module):
    """A block: layers and attributes by name, and the function that runs them."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.run = part.run
        for name, value in part.parts.items():
            if isinstance(value, tuple) and value[0] == "buffer":
                self.register_buffer(name, value[1])
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Model(nn.Module):
    """Blocks one after the other, and what is made of the last one's output."""

    def __init__(self, steps: list[Body], heads: dict[str, nn.Module], output: str, aux: str, channels: int) -> None:
        super().__init__()
        self.steps, self.heads = nn.ModuleList(steps), nn.ModuleDict(heads)
        self.output, self.aux, self.channels = output, aux, channels

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Any:
        hidden = x
        for i, step in enumerate(self.steps):
            x = step(x)
            hidden = x if i == 0 else hidden
        last = x * scale
        y = self.heads["out"](last) if "out" in self.heads else last
        more = {"none": None, "hidden": hidden, "head": None}[self.aux]
        if self.aux == "head":
            more = self.heads["aux"](last)
        return OUTPUTS[self.output](self, y, more)


Pair = namedtuple("Pair", "y more")


@dataclass
class Record:
    y: Tensor
    more: Any


class Slots:
    __slots__ = ("more", "y")

    def __init__(self, y: Tensor, more: Any) -> None:
        self.y, self.more = y, more


class Registered(OrderedDict[str, Any]):
    """A pytree node without keys, as diffusers' outputs are."""


_pytree.register_pytree_node(
    Registered, lambda d: (list(d.values()), list(d)), lambda v, k: Registered(zip(k, v, strict=True))
)


def _left(self: Model, y: Tensor, more: Any) -> Tensor:
    self.left = y * 2 if more is None else more
    return y


def _left_list(self: Model, y: Tensor, more: Any) -> Tensor:
    self.left = [{"y": y.exp()}, more]
    return y


OUTPUTS: dict[str, Any] = {
    "tensor": lambda s, y, more: y,
    "tuple": lambda s, y, more: (y, more),
    "list": lambda s, y, more: [y, [more]],
    "dict": lambda s, y, more: {"y": y, "deep": {"more": more, "count": 3}},
    "ordered": lambda s, y, more: OrderedDict(y=y, more=more),
    "namedtuple": lambda s, y, more: Pair(y, more),
    "dataclass": lambda s, y, more: Record(y, more),
    "namespace": lambda s, y, more: SimpleNamespace(y=y, more=SimpleNamespace(z=more)),
    "beside": lambda s, y, more: (y.sum(), SimpleNamespace(boxes=y, more=more)),
    "slots": lambda s, y, more: Slots(y, more),
    "registered": lambda s, y, more: Registered(y=y, more=more),
    "normal": lambda s, y, more: (y, torch.distributions.Normal(y, 1 + y.abs())),
    "left": _left,
    "left list": _left_list,
    "arguments": lambda s, y, more: (y, y.argmax(-1), y.topk(1, -1).values, more),
}


@dataclass(frozen=True)
class Built:
    model: Model
    possible: int  # entries that consistent zeros make removable
    regroups: Any


def built(spec: Spec) -> Built:
    """The dense model with its zeros; the same bits each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        steps, parts, here, width = [], [], spec.domain, spec.width
        for name, seed in spec.blocks:
            torch.manual_seed(seed)
            part = KINDS[here][name](Random(seed), width, SPATIAL.get(here, 0))
            steps.append(Body(part))
            parts.append((part, seed))
            here, width = part.domain or here, part.width or width
        torch.manual_seed(spec.seed)
        nd = SPATIAL[here]

        def head(n: int) -> nn.Module:
            return [nn.Conv1d, nn.Conv2d, nn.Conv3d][nd - 1](width, n, 1) if nd else nn.Linear(width, n)

        heads = ({"out": head(3)} if spec.head else {}) | ({"aux": head(2)} if spec.aux == "head" else {})
        model = Model(steps, heads, spec.output, spec.aux, width).to(getattr(torch, spec.dtype))
        model.train(spec.training)

        def zeros() -> int:
            with torch.no_grad():
                return put_zeros(model, parts, spec)

        return Built(model, zeros(), zeros)


def put_zeros(model: Model, parts: list[tuple[Part, int]], spec: Spec) -> int:
    """Write the zeros; how many entries consistent ones take."""
    zero: dict[str, Tensor] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    r, g = Random(spec.seed), torch.Generator().manual_seed(spec.seed)
    if spec.low_rank:
        for p in [p for p in model.parameters() if p.dim() == 2 and min(p.shape) > 2][:3]:
            u, values, v = torch.linalg.svd(p.double(), full_matrices=False)
            steep = 0.1 if spec.dtype == "bfloat16" else 0.0
            values = values[0] * torch.tensor([max(steep, 1e-30) ** min(i, 9) for i in range(len(values))]).double()
            p.copy_(u @ torch.diag(values) @ v)
    for i, (part, seed) in enumerate(parts):
        own = Random(seed)
        for family in part.families:
            how = own.choice(("dead", "unread", "constant", "none")) if spec.zeros == "mixed" else spec.zeros
            if how not in ("dead", "unread", "constant", "all"):
                continue
            n = family.count if how == "all" and own.random() < 0.7 else own.randrange(1, max(2, family.count * 3 // 4))
            for unit in own.sample(range(family.count), min(n, family.count)):
                for slot in family.slots:
                    if (how == "unread" and slot.role != "column") or (how == "constant" and slot.role != "row"):
                        continue
                    name = f"steps.{i}.{slot.name}"
                    if name not in named:
                        continue
                    index = [b * family.count * slot.size + unit * slot.size + k + slot.offset
                             for b in range(slot.blocks) for k in range(slot.size)]  # fmt: skip
                    mask = zero.setdefault(name, torch.zeros_like(named[name], dtype=torch.bool))
                    mask.index_fill_(slot.dim, torch.tensor(index), True)
    if spec.zeros in ("rows and columns", "mixed"):
        for name, p in model.named_parameters():
            if p.dim() > 1 and r.random() < 0.4:
                dim = r.randrange(2)
                index = torch.tensor(r.sample(range(p.shape[dim]), p.shape[dim] // 2), dtype=torch.int64)
                p.index_fill_(dim, index, 0)
                bias = named.get(name.removesuffix("weight") + "bias")
                if dim == 0 and bias is not None and r.random() < 0.5:
                    bias.index_fill_(0, index, 0)
    if spec.zeros == "entries":
        for p in model.parameters():
            p.mul_((torch.rand(p.shape, generator=g) < 0.5).to(p.dtype))
    for name, mask in zero.items():
        named[name].masked_fill_(mask, 0)
    return sum(int(mask.sum()) for mask in zero.values()) if spec.zeros in ("dead", "all") else 0


# ------------------------------------------------------------------------------------------------ inputs, outputs

SIZES: dict[str, list[tuple[int, ...]]] = {
    "flat": [()], "sequence": [(5,), (6,), (9,), (1,), (4,)], "tokens": [(5,), (6,), (9,), (1,), (4,)],
    "signal": [(8,), (9,), (12,), (7,)], "image": [(8, 6), (8, 7), (9, 6), (11, 13), (7, 7)],
    "volume": [(4, 4, 4), (5, 4, 4), (4, 4, 5), (5, 5, 5)],
}  # fmt: skip


def examples(spec: Spec) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs: the examples' own first, then fresh ones of the same size, then ones of other sizes."""
    g = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)
    first, *others = SIZES[spec.domain]
    first = (3,) if spec.short and len(first) == 1 and spec.domain != "signal" else first
    made = []
    other_batches = [b for b in (1, 3, 5) if b != spec.batch]
    wanted = [(spec.batch, first), (spec.batch, first), *((b, first) for b in other_batches)]
    wanted += [(b, size) for size, b in zip(others, (spec.batch, 1, 3, 2), strict=False)]
    for batch, size in wanted:
        if spec.domain == "tokens":
            x = torch.randint(0, 11, (batch, *size), generator=g)
        else:
            shape = (batch, spec.width, *size) if spec.domain in FIRST else (batch, *size, spec.width)
            x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        scale = (torch.rand((), generator=g, dtype=torch.float64) + 0.5).to(dtype)
        made.append({
            "tensor": ((x,), {}), "tuple": ((x,), {}), "dict": ((), {"x": x}),
            "keyword and more": ((), {"x": x, "scale": scale}),
        }[spec.given])  # fmt: skip
    return made


def as_user(given: tuple[tuple[Any, ...], dict[str, Any]], spec: Spec) -> Any:
    args, kwargs = given
    return kwargs or (args[0] if spec.given == "tensor" else args)


def called(model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = copy.deepcopy(given)
    return model(*args, **kwargs)


def doubled(given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, given)


def tensors(x: Any, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """All tensors in a value, by an independent walk: into containers and objects, not into modules."""
    if isinstance(x, Tensor):
        yield path, x
        return
    if id(x) in seen or isinstance(x, nn.Module | type | str | bytes | int | float | None) or callable(x):
        return
    seen = seen | {id(x)}
    if isinstance(x, Mapping):
        inside = [(repr(k), v) for k, v in x.items()]
    elif isinstance(x, list | tuple | set):
        inside = [(str(i), v) for i, v in enumerate(x)]
    elif is_dataclass(x):
        inside = [(f.name, getattr(x, f.name)) for f in fields(x)]
    else:
        slots = [s for kind in type(x).__mro__ for s in getattr(kind, "__slots__", ())]
        inside = [(s, getattr(x, s)) for s in slots if hasattr(x, s)] + list(getattr(x, "__dict__", {}).items())
    for key, value in inside:
        yield from tensors(value, f"{path}.{key}", seen)


def computed(model: nn.Module, given: Any, times: int = 2) -> dict[str, Tensor]:
    """What a model returns and leaves on its modules, from the state that it is in, and once more after that."""
    model = copy.deepcopy(model).eval()
    found: dict[str, Tensor] = {}
    for time_ in range(times):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found |= tensors(called(model, given), f"call {time_}: output")
        for name, module in model.named_modules():
            if isinstance(module, Body | Model):
                own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
                found |= tensors(own, f"call {time_}: left on {name or 'the model'}")
                found |= tensors(dict(module._buffers), f"call {time_}: buffer of {name}")
        found = {k: v.detach().clone() for k, v in found.items()}
    return found


# ------------------------------------------------------------------------------------------------ judging


@dataclass(frozen=True)
class Failure:
    kind: str
    detail: str

    @property
    def key(self) -> str:
        text = f"{self.kind}: {self.detail.splitlines()[0]}"
        text = re.sub(r"/\S+", "PATH", re.sub(r"output[.\w]*", "output", text))
        return re.sub(r"(?<!float)(?<!float\d)\d[\d.e+-]*", "#", text)[:170]


@dataclass
class Verdict:
    spec: Spec
    failures: list[Failure]
    refused: str | None = None
    done: bool = False  # it was shrunk
    before: int = 0
    after: int = 0
    possible: int = 0
    sizes: int = 0  # inputs that were compared
    trained: bool = False
    seconds: float = 0.0


class Raised(Exception):
    """What a piece of the library raised."""


def deliberate(error: BaseException) -> bool:
    """Raised by a line of the library that says `raise`, in words, and not by something below it or by accident."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return "espalier" in frame.filename and line.startswith("raise") and bool(str(error).strip())


def described(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "espalier" in f.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {where}: {(str(error).splitlines() or [''])[0][:110]}"


def frozen(x: Any, seen: frozenset[int] = frozenset()) -> Any:
    """A value as something that can be compared: tensors to the bit."""
    if isinstance(x, Tensor):
        bits = x.detach().contiguous().reshape(-1).view(torch.uint8) if x.numel() else x
        return "tensor", str(x.dtype), tuple(x.shape), bits.numpy().tobytes()
    if isinstance(x, bool | int | float | str | bytes | None):
        return x
    if id(x) in seen:
        return "cycle"
    seen = seen | {id(x)}
    if isinstance(x, Mapping):
        return tuple((repr(k) if not isinstance(k, str) else k, frozen(v, seen)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return tuple(frozen(v, seen) for v in x)
    if isinstance(x, nn.Module) or callable(x):
        return type(x).__name__
    return type(x).__name__, frozen(dict(getattr(x, "__dict__", {})), seen)


def state(model: nn.Module, parameters: bool) -> dict[str, Any]:
    """All that a model holds: attributes, buffers, hooks, modes, and its parameters if wanted."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_parameters" and not parameters:
                continue
            found[f"{name}.{key}"] = frozen(value)
    return found


def error_of(a: Tensor, b: Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point():
        return float((a != b).any())
    a, b = a.double(), b.double()
    if not a.isfinite().all():
        return 0.0 if torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5)) else float("inf")
    largest = float(a.abs().max())
    return float((a - b).abs().max()) / largest if largest else float((a - b).abs().max())


def perturbed(model: nn.Module, eps: float, seed: int) -> nn.Module:
    """The model with the rounding that storing its numbers makes."""
    model = copy.deepcopy(model)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + eps * (torch.rand(p.shape, generator=g, dtype=torch.float64) * 2 - 1))
    return model


FLOOR = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 8e-3}


def compared(dense: nn.Module, small: nn.Module, spec: Spec, index: int, given: Any) -> Iterator[Failure]:
    """Float64 copies agree; in their own type, shapes and types do."""
    where = "the examples" if index == 0 else "new inputs" if index == 1 else "another size"
    try:
        a = computed(dense, given)
    except Exception:
        return  # the dense model does not take this size
    if not all(x.isfinite().all() for x in a.values() if x.is_floating_point()):
        return
    try:
        b = computed(small, given)
    except Exception as error:
        yield Failure(f"the small model fails on {where}", described(error))
        return
    for key in a.keys() | b.keys():
        buffer = "buffer of" in key
        if key not in a or key not in b:
            if not buffer:
                yield Failure(f"{where}: one model alone has", key)
        elif a[key].dtype != b[key].dtype:
            yield Failure(f"{where}: dtype", f"{key} is {b[key].dtype}, not {a[key].dtype}")
        elif a[key].shape != b[key].shape and not buffer:
            yield Failure(f"{where}: shape", f"{key} is {tuple(b[key].shape)}, not {tuple(a[key].shape)}")
    if spec.dtype != "float64":
        dense, small, given = copy.deepcopy(dense).double(), copy.deepcopy(small).double(), doubled(given)
        a, b = computed(dense, given), computed(small, given)
    eps = torch.finfo(getattr(torch, spec.dtype)).eps
    noise = [computed(perturbed(dense, eps, s), given) for s in (0, 1)] if spec.dtype != "float64" else []
    for key in a.keys() & b.keys():
        if a[key].shape != b[key].shape or (not a[key].is_floating_point() and spec.dtype != "float64"):
            continue
        error = error_of(a[key], b[key])
        if error <= FLOOR[spec.dtype]:
            continue
        if not noise:
            noise = [computed(perturbed(dense, eps, s), given) for s in (0, 1)]
        allowed = max(FLOOR[spec.dtype], 50 * max(error_of(a[key], n[key]) for n in noise))
        if error > allowed:
            yield Failure(f"wrong on {where} in a {spec.dtype} model", f"{key} (error {error:.1e})")


def judged(spec: Spec) -> Verdict:
    """Shrink the model of a spec and look for anything wrong; that an odd model is warned of is right."""
    with warnings.catch_warnings(action="ignore"):
        return _judged(spec)


def _judged(spec: Spec) -> Verdict:
    started = time.perf_counter()
    verdict = Verdict(spec, [])
    fail = verdict.failures
    dense = built(spec)
    model, verdict.possible = dense.model, dense.possible
    given = examples(spec)
    verdict.before = sum(p.numel() for p in model.parameters())
    optimizer = _optimizer(dense, spec, given[0])
    pristine = copy.deepcopy(model)
    before, rng = (state(model, True), [id(p) for p in model.parameters()]), torch.get_rng_state()
    options: dict[str, Any] = {"latency": False, "gather": spec.gather}
    try:
        shrunk = espalier.shrink(model, as_user(given[0], spec), **options)
    except (espalier.ShrinkError, TypeError, ValueError) as error:
        verdict.refused = described(error)
        if "cannot be shrunk: " in str(error) or "a fault of the rule" in str(error):
            fail.append(Failure("a fault inside, told as a refusal", described(error)))
        if not deliberate(error):
            fail.append(Failure("bare exception", described(error)))
        shrunk = None
    except Exception as error:
        fail.append(Failure("bare exception", described(error)))
        shrunk = None
    after = (state(model, True), [id(p) for p in model.parameters()])
    if before != after:
        changed = sorted(k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k))
        fail.append(Failure("the dense model was changed", ", ".join(changed)[:120] or "its parameters are others"))
    if not torch.equal(rng, torch.get_rng_state()):
        fail.append(Failure("random state", "shrink() changed torch's global random state"))
    if shrunk is not None:
        small = shrunk.model
        verdict.done = True
        verdict.after = sum(p.numel() for p in small.parameters())
        fail += _carries_state(pristine, small)
        for i, inputs in enumerate(given):
            found = list(compared(pristine, small, spec, i, inputs))
            fail += found[:2]
            verdict.sizes += 1
            if found:
                break
        fail += _round_trip(pristine, small, given[0])
        fail += _trains(pristine, shrunk, optimizer, given[0], verdict)
    verdict.seconds = time.perf_counter() - started
    return verdict


def _loss(out: Any) -> Tensor | None:
    found = [x for _, x in tensors(out) if x.is_floating_point() and x.requires_grad]
    return sum((x.float().square().mean() for x in found), torch.zeros(())) if found else None


def _optimizer(dense: Built, spec: Spec, given: Any) -> Any:
    """An optimizer of the dense model, if it can be trained, with the state of one step if wanted."""
    model = dense.model
    try:
        groups = espalier.regularize(model, espalier.GroupLasso(1e-4))
        optimizer = espalier.RAMDA(groups, lr=1e-4)
        if not spec.stepped:
            return optimizer
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        trial = copy.deepcopy(model)  # what it leaves on modules is left on a copy
        with torch.random.fork_rng(devices=[]):
            loss = _loss(called(trial.train(), given))
        if loss is None:
            return optimizer
        loss.backward()
        for p, q in zip(model.parameters(), trial.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(kept)
        dense.regroups()
    except (RuntimeError, ValueError):
        for p in model.parameters():
            p.grad = None
        return None
    return optimizer


def _carries_state(dense: nn.Module, small: nn.Module) -> Iterator[Failure]:
    """The small model holds what the dense one held before it was run, integers and shapes aside."""
    modules = dict(dense.named_modules())
    for name, module in small.named_modules():
        if not isinstance(module, Body | Model):
            continue
        old = modules[name]
        a, b = vars(old), vars(module)
        for key in a.keys() | b.keys():
            if key in ("_parameters", "_modules", "training") or "espalier" in key:
                continue
            if key == "_buffers":
                for k in a[key].keys() | b[key].keys():
                    x, y = a[key].get(k), b[key].get(k)
                    if (x is None) != (y is None) or (x is not None and x.shape == y.shape and frozen(x) != frozen(y)):
                        yield Failure("state of the examples", f"buffer {k} of a {_kind(dense, name)}")
                continue
            x, y = (frozen(v.get(key, "absent")) for v in (a, b))
            if x != y and not (isinstance(x, int) and isinstance(y, int)) and key != "config":
                yield Failure("state of the examples", f"attribute {key} of a {_kind(dense, name)}")
        if hasattr(module, "calls") and module.calls != 0:
            yield Failure("state of the examples", "attribute calls")
    for name, module in small.named_modules():
        if name in modules and len(module._forward_hooks) != len(modules[name]._forward_hooks):
            yield Failure("state of the examples", "hooks")
        if name in modules and module.training != modules[name].training:
            yield Failure("mode", "training of a module is another than the dense one's")


def _kind(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name)
    return module.run.__qualname__.split(".")[0] if isinstance(module, Body) else type(module).__name__


def _round_trip(dense: nn.Module, small: nn.Module, given: Any) -> Iterator[Failure]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            espalier.save(copy.deepcopy(small), Path(folder) / "saved")
            again = espalier.load(Path(folder) / "saved", build=dense)
        except Exception as error:
            yield Failure("save and load", described(error))
            return
    try:
        a, b = computed(small, given), computed(again, given)
    except Exception as error:
        yield Failure("a loaded model fails", described(error))
        return
    for key in a.keys() | b.keys():
        if key not in a or key not in b or a[key].shape != b[key].shape:
            yield Failure("a loaded model differs", key)
        elif error_of(a[key], b[key]) > (1e-12 if a[key].dtype is torch.float64 else 1e-5):
            yield Failure("a loaded model differs", f"{key} by {error_of(a[key], b[key]):.1e}")


def _trains(dense: nn.Module, shrunk: Any, optimizer: Any, given: Any, verdict: Verdict) -> Iterator[Failure]:
    """Where the dense model can be trained, so can the small one, with outputs of the same shapes."""
    small = shrunk.model
    seeded = torch.random.fork_rng(devices=[])
    with seeded:
        try:
            torch.manual_seed(0)
            trial = copy.deepcopy(dense).train()
            out = called(trial, given)
            loss = _loss(out)
            if loss is None:
                return
            loss.backward()
            if not loss.isfinite():
                return
        except (RuntimeError, ValueError):
            return
        shapes = {k: v.shape for k, v in tensors(out)}
        try:
            torch.manual_seed(0)
            out = called(copy.deepcopy(small).train(), given)
        except Exception as error:
            if not _says_so(shrunk, optimizer):
                yield Failure("the small model does not run in training mode", described(error))
            return
        if shapes != {k: v.shape for k, v in tensors(out)}:
            yield Failure("training mode", "outputs have other shapes than the dense model's")
        if optimizer is None:
            return
        try:
            own = shrunk.optimizer(optimizer)
            small.train()
            for _ in range(2):
                loss = _loss(called(small, given))
                if loss is None:
                    return
                loss.backward()
                own.step()
                own.zero_grad()
        except Exception as error:
            yield Failure("shrunk.optimizer", described(error))
            return
        verdict.trained = True
        if not all(p.isfinite().all() for p in small.parameters()):
            yield Failure("shrunk.optimizer", "weights are not finite after two steps")


def _says_so(shrunk: Any, optimizer: Any) -> bool:
    """Whether the report or the optimizer tells that training cannot go on, and why."""
    try:
        if optimizer is not None:
            shrunk.optimizer(optimizer)
    except (ValueError, espalier.ShrinkError) as error:
        return deliberate(error) and "eval" in str(error)
    return False


# ------------------------------------------------------------------------------------------------ minimal failures


def minimised(spec: Spec, key: str) -> Spec:
    """The smallest spec that fails in the same way, by dropping one thing at a time."""

    def fails(trial: Spec) -> bool:
        return runs(trial) and any(f.key == key for f in judged(trial).failures)

    plain = {f.name: f.default for f in fields(Spec) if f.name not in ("seed", "domain", "width", "blocks")}
    plain["zeros"] = "none"
    again = True
    while again:
        again = False
        for i in range(len(spec.blocks)):
            trial = replace(spec, blocks=spec.blocks[:i] + spec.blocks[i + 1 :])
            try:
                ok = fails(trial)
            except KeyError:  # a block that the domain does not have
                ok = False
            if ok:
                spec, again = trial, True
                break
    for name, value in plain.items():
        if getattr(spec, name) != value and fails(replace(spec, **{name: value})):
            spec = replace(spec, **{name: value})
    return spec


def compact(spec: Spec) -> str:
    """A spec in one line, without what is as usual."""
    usual = {f.name: f.default for f in fields(Spec)}
    shown = {f.name: getattr(spec, f.name) for f in fields(Spec)}
    return f"Spec({', '.join(f'{k}={v!r}' for k, v in shown.items() if v != usual[k])})"


# ------------------------------------------------------------------------------------------------ command line


def summary(verdicts: list[Verdict]) -> str:
    done = [v for v in verdicts if v.done]
    possible = [v for v in done if v.possible]
    smaller = [v for v in done if v.after < v.before]
    wrong = [v for v in verdicts if any(f.kind.startswith(("wrong", "the small model fails")) for f in v.failures)]
    lost = sum(v.after < v.before for v in possible)
    gone = sum(min(v.before - v.after, v.possible) for v in possible)
    return (
        f"{len(verdicts)} models: {len(done)} shrunk, {len(verdicts) - len(done)} refused or failed; "
        f"{len(wrong)} compute something else; {sum(bool(v.failures) for v in verdicts)} with any failure; "
        f"{sum(v.sizes for v in done)} comparisons. {len(smaller)} lost something; "
        f"of {len(possible)} with consistent zeros {lost} did, {gone} of {sum(v.possible for v in possible)} "
        f"entries. {sum(v.trained for v in done)} trained on. {sum(v.seconds for v in verdicts):.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0:60", help="a range, as 0:500")
    parser.add_argument("--minimise", action="store_true", help="drop what a class's first failure does not need")
    parser.add_argument("--kind", choices=sorted({k for kinds in KINDS.values() for k in kinds}), help="of one block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = options.seeds.partition(":")
    verdicts = []
    for seed in range(int(first), int(last or int(first) + 1)):
        verdicts.append(judged(spec_of(seed, options.kind)))
        if sys.stderr.isatty() and seed % 10 == 0:
            print(f"\r{seed}", end="", file=sys.stderr)
    found: dict[str, list[Verdict]] = {}
    for v in verdicts:
        for key in dict.fromkeys(f.key for f in v.failures):
            found.setdefault(key, []).append(v)
    for key, those in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(those):4}  {key}\n      seeds {', '.join(str(v.spec.seed) for v in those[:8])}")
        least = min(those, key=lambda v: len(v.spec.blocks)).spec
        print(f"      {compact(minimised(least, key) if options.minimise else least)}")
    refused: dict[str, list[str]] = {}
    for v in verdicts:
        if v.refused:
            refused.setdefault(Failure("refused", v.refused).key, []).append(str(v.spec.seed))
    for key, seeds in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):4}  {key}\n      seeds {', '.join(seeds[:8])}")
    print(summary(verdicts))
    sys.exit(any(v.failures for v in verdicts))


if __name__ == "__main__":
    main()
