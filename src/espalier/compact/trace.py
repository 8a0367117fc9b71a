"""Run a model once and see which channels of which tensors are which units.

Every tensor has a label: a tensor of units in its shape, mostly expanded from one dimension. Where an operation only
moves data, the same operation on the label says where the channels went; where it works entry by entry, the labels of
its operands are joined; where it is not known, all that it reads must stay. A mask of the same kind says which entries
are the same number for every input of the model; the number is in the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.weak import WeakIdKeyDictionary

from espalier.compact.attributes import Recorder, Use, held_by
from espalier.compact.layout import Given
from espalier.compact.running import named_on, replaced_forward
from espalier.compact.units import RIGID, Units
from espalier.compact.walk import tensors_in


@dataclass(frozen=True)
class Tag:
    """Which unit each entry of a tensor belongs to, and whether it is a constant; both in the tensor's shape."""

    label: Tensor
    constant: Tensor


@dataclass(frozen=True)
class Reader:
    """A matrix product: its rows are channels that it makes, its columns those that it reads."""

    weight: str
    bias: str | None
    rows: Tensor  # units
    columns: Tensor
    nonzero: Tensor  # rows × columns
    folds: Tensor  # columns that are constants which its bias can take up
    values: Tensor  # of these
    transposed: bool = False  # its weight has columns first
    module: str | None = None  # the Linear or convolution that the weight belongs to, if nothing else reads it
    given: Given = field(default_factory=Given)
    dim: int = -1  # of its input, that the columns read


@dataclass
class Trace:
    """What one run has shown."""

    units: Units = field(default_factory=Units)
    slots: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (parameter, dimension): its units
    readers: list[Reader] = field(default_factory=list)
    needs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # while one of the first lives, so do the second
    equal: list[list[Tensor]] = field(default_factory=list)  # as many must stay of each
    uses: list[Use] = field(default_factory=list)  # of modules' integer attributes
    gathers: dict[str, Tensor] = field(default_factory=dict)  # by index, the labels of what it selects from
    cells: dict[str, tuple[Reader, Reader]] = field(default_factory=dict)  # those that read inputs, and their own units
    heads: dict[str, tuple[list[int], Tensor]] = field(default_factory=dict)  # those read, and a unit of the weights'
    risky: list[Tensor] = field(default_factory=list)  # units that go through sizes which may be written in the code
    kept: dict[str, str] = field(default_factory=dict)  # where channels had to stay, and why

    def tell(self, name: str, why: str) -> None:
        """One more reason for what stays there, or several."""
        reasons = dict.fromkeys((*filter(None, self.kept.get(name, "").split("; ")), *why.split("; ")))
        self.kept[name] = "; ".join(reasons)


class Tracer(TorchFunctionMode):
    """Runs a model and fills a Trace."""

    def __init__(self, model: nn.Module, ignore: Sequence[str], *, follow: bool = True) -> None:
        """follow: whether to see what the code does with the integer attributes of modules."""
        super().__init__()
        self.model, self.trace, self._follow = model, Trace(), follow
        self._ignore = set(ignore)
        self._tags: Any = WeakIdKeyDictionary()
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._names: dict[int, str] = {}
        for name, x in tensors:
            self._names.setdefault(id(x), name)
        self._owners: dict[str, set[str]] = {}  # modules that a parameter belongs to
        for name, x in tensors:
            self._owners.setdefault(self._names[id(x)], set()).add(name.rpartition(".")[0])
        self._stack: list[str] = []
        self.noting = False  # whether an operation is being noted, with all that it calls
        self._unseen = _Unseen(self)
        self.slotted: set[str] = set()  # parameters that an operation gave channels to

    # ------------------------------------------------------------------------------------------------ running

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
        """The model's outputs must not change: all that reaches them stays."""
        from espalier.compact.modules import MODULE_RULES

        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.enter_context(named_on(module, self._stack, name))
                rule = next((rule for kinds, rule in MODULE_RULES if type(module) in kinds), None)
                # a forward of their own may do anything
                odd = rule is None and isinstance(module, nn.RNNBase | nn.MultiheadAttention)
                inside = any(
                    name.startswith(f"{ignored}.") or not ignored for ignored in self._ignore if name != ignored
                )
                if not inside and (name in self._ignore or rule is not None or odd):
                    stack.enter_context(replaced_forward(module, self._as_one(name, module, rule)))
            if self._follow:
                stack.enter_context(Recorder(self.trace.uses).following(self.model))
            stack.enter_context(self)
            stack.enter_context(self._unseen)
            stack.enter_context(torch.no_grad())
            out = self.model(*args, **kwargs)
        for x in tensors_in(out):
            self.trace.units.pin(self.label(x))
        return self.trace

    def run_training(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
        """What training mode does beside: layers that eval does not use are read like others then."""
        first, read = len(self.trace.readers), {r.weight for r in self.trace.readers}
        for module in self.model.modules():  # not model.train(): models override it
            module.training = True
        self.run(args, kwargs)
        self.trace.readers[:] = [
            r if i < first else replace(r, folds=r.folds & False)
            for i, r in enumerate(self.trace.readers)
            if i < first or r.weight not in read
        ]
        return self.trace

    def _as_one(self, name: str, module: nn.Module, rule: Any) -> Callable[..., Any]:
        """A module's forward with a rule of its own, or with none."""
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if rule is not None and name not in self._ignore:
                return rule(self, name, module, forward, args, kwargs)
            with torch._C.DisableTorchFunction():
                out = forward(*args, **kwargs)
                self.leave(name, module, [args, kwargs], "left alone")
            return out

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from espalier.compact import rules

        if self.noting:
            return func(*args, **(kwargs or {}))
        self.noting = True
        # in operations that are noted, and in the rules, there is nothing more to see
        seeing = _get_current_dispatch_mode() is self._unseen
        try:
            with _pop_mode_temporarily() if seeing else nullcontext():
                return rules.apply(self, func, args, kwargs or {})
        finally:
            self.noting = False

    @property
    def place(self) -> str:
        """The module whose code is being run."""
        return self._stack[-1] if self._stack else ""

    # ------------------------------------------------------------------------------------------------ tags

    def tag(self, x: Tensor) -> Tag:
        found: Tag | None = self._tags.get(x)
        if found is None or found.label.shape != x.shape:
            label = torch.zeros((), dtype=torch.int64).expand(x.shape)
            return Tag(label, torch.zeros((), dtype=torch.bool).expand(x.shape))
        # what was pinned since is rigid
        short = shortest(found.label)
        rooted = self.trace.units.rooted(short)
        return found if rooted is short else Tag(rooted.expand(x.shape), found.constant)

    def label(self, x: Tensor) -> Tensor:
        return self.tag(x).label

    def set(self, x: Any, label: Tensor, constant: Tensor | None = None) -> None:
        if constant is None:
            constant = torch.zeros((), dtype=torch.bool).expand(label.shape)
        self._tags[x] = Tag(label.expand(x.shape), constant.expand(x.shape))

    def tracked(self, x: Any) -> bool:
        """Whether any channel of x may go."""
        return isinstance(x, Tensor) and x in self._tags and bool((shortest(self.label(x)) != RIGID).any())

    def name(self, x: Any) -> str | None:
        """The parameter or buffer that x is."""
        return self._names.get(id(x)) if isinstance(x, Tensor) else None

    def owner(self, name: str) -> tuple[str, nn.Module] | None:
        """The module whose own code is now reading its own parameter."""
        module, *more = (*self._owners[name],)
        parent = self.model.get_submodule(module.rpartition(".")[0])
        # these look at their layers' weights, too
        seen = isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        return None if more or seen or module != self.place else (module, self.model.get_submodule(module))

    def pin(self, values: Any, why: str) -> None:
        """All channels of these tensors must stay."""
        pinned = [x for x in tensors_in(values) if self.tracked(x)]
        for x in pinned:
            self.trace.units.pin(shortest(self.label(x)))
        if pinned:
            self.trace.tell(self.place, why)

    def leave(self, name: str, module: nn.Module, given: Any, why: str) -> None:
        """A module stays as it is, and so do the channels that it is given."""
        self.pin(given, why)
        for number in held_by(module):  # what its code does with them is not seen
            number.must_stay()
        for p, _ in [*module.named_parameters(), *module.named_buffers()]:
            self.refuse(f"{name}.{p}" if name else p)

    def written(self, x: Any, understood: bool) -> None:
        """x was changed in place, and with it all that shares its memory: no constant there is one any more."""
        if not isinstance(x, Tensor):
            return
        memory = x.untyped_storage().data_ptr()
        for y, tag in list(self._tags.items()):
            if y.untyped_storage().data_ptr() == memory and not (y is x and understood):
                self._tags[y] = Tag(tag.label, tag.constant & False)
                if not understood or y.shape != x.shape:
                    self.pin([y], "changed in place")

    def refuse(self, name: str, why: str = "") -> None:
        """A parameter is used in a way that is not understood."""
        if why and isinstance(self.parameter(name), nn.Parameter) and self.parameter(name).dim() > 1:
            module, _, leaf = name.rpartition(".")
            self.trace.tell(module, f"{leaf} is {why}")
        for dim in range(self.parameter(name).dim()):
            self.slot(name, dim, torch.tensor([RIGID]).expand(self.parameter(name).shape[dim]))

    def parameter(self, name: str) -> Tensor:
        return get(self.model, name)

    def slot(self, name: str, dim: int, label: Tensor | None = None) -> Tensor:
        """The units of a parameter along one of its dimensions, joined with those given; new where there are none."""
        slots, units = self.trace.slots, self.trace.units
        self.slotted.add(name)
        found = slots.get((name, dim))
        if found is None:
            found = slots[name, dim] = units.new(self.parameter(name).shape[dim]) if label is None else label.clone()
        elif label is not None:
            units.join(found, label)
        return found


class _Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the tracer the operations of code that goes past it, such as that of TorchScript's functions."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracer.noting or not torch._C._is_torch_function_enabled():
            return func(*args, **(kwargs or {}))
        return self._tracer.__torch_function__(func, types, args, kwargs)


def get(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name."""
    module, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), leaf)
    return found


def varies(label: Tensor) -> list[int]:
    """The dimensions along which it does."""
    return [
        d
        for d, (n, stride) in enumerate(zip(label.shape, label.stride(), strict=True))
        if n > 1 and stride != 0 and bool((label != label.narrow(d, 0, 1)).any())
    ]


def shortest(label: Tensor) -> Tensor:
    """One entry along each dimension in which it does not vary."""
    keep = varies(label)
    for d in range(label.dim()):
        if d not in keep and label.shape[d] > 1:
            label = label.narrow(d, 0, 1)
    return label
