"""From a model to parameter groups: which weights carry a penalty, and how they are cut into groups."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from espalier.checks import refuse_dtensor, refuse_flat
from espalier.groupings import Element, Grouping, Layout, as_grouping, partition_of
from espalier.penalties.base import Penalty

Weights = Iterator[tuple[str, Layout]]


def _linear(_: nn.Module) -> Weights:
    yield "weight", Layout()


def _conv(m: nn.Module) -> Weights:
    assert isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    # (out, in/g, k…): row block j of axis 0 reads the input channels j·in/g to (j + 1)·in/g
    yield "weight", Layout(parts=m.groups)


def _conv_transposed(m: nn.Module) -> Weights:
    assert isinstance(m, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    yield "weight", Layout(input_dim=0, output_dim=1, parts=m.groups)  # (in, out/g, k…)


def _recurrent(m: nn.Module) -> Weights:
    gates = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
    stacked = next((n for kind, n in gates.items() if isinstance(m, kind)), 1)
    for name, _ in m.named_parameters(recurse=False):
        if name.startswith(("weight_ih", "weight_hh")):
            yield name, Layout(stacked=stacked)  # (gates · hidden, in)
        elif name.startswith("weight_hr"):
            yield name, Layout()  # (projection, hidden)


def _attention(m: nn.Module) -> Weights:
    assert isinstance(m, nn.MultiheadAttention)
    # q, k and v may read different inputs, and do as three tensors when their widths differ: three layers either way
    yield "in_proj_weight", Layout(parts=3, stacked=3)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        yield name, Layout()


LAYERS: dict[type[nn.Module], Callable[[nn.Module], Weights]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.ConvTranspose1d: _conv_transposed,
    nn.ConvTranspose2d: _conv_transposed,
    nn.ConvTranspose3d: _conv_transposed,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _recurrent,
    nn.MultiheadAttention: _attention,
}
"""The layers whose weights are penalised unless a rule says otherwise, and how each stores them."""


def weights_of(module: nn.Module) -> Weights:
    """Attributes of a layer that hold its weights, with their layouts; none for a module that is no known layer."""
    for kind, weights in LAYERS.items():
        if isinstance(module, kind):
            yield from weights(module)
            return
    # Hugging Face's Conv1D is a Linear stored as (in, out); a model that has one has loaded its module
    hf = sys.modules.get("transformers.pytorch_utils")
    if hf is not None and isinstance(module, hf.Conv1D):
        yield "weight", Layout(input_dim=0, output_dim=1)


def _axes(module: nn.Module) -> int:
    """How many axes the weights of a layer known to Espalier have: two, and those of a convolution's kernel."""
    return 2 + len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else 2


@dataclass(frozen=True)
class _Same:
    def __repr__(self) -> str:
        return "SAME"


SAME = _Same()


@dataclass(frozen=True)
class Rule:
    """What to do with the parameters that `match` reaches.

    Args:
        match: a pattern such as `"encoder.*.attention"`, compared with the names of parameters and of all modules
            around them (`*` crosses dots), or a module type or a tuple of them: everything inside such a module.
        penalty: another penalty than the one given to `regularize`; None for no penalty.
        grouping: another grouping; by default that of `regularize`, or the penalty's own.
        any_parameter: reach every parameter that matches, be it a bias, a norm's scale or an embedding; a grouping must
            then be given. By default a rule reaches only the weights of layers that Espalier knows.
    """

    match: str | type[nn.Module] | tuple[type[nn.Module], ...]
    penalty: Penalty | _Same | None = SAME
    grouping: str | Grouping | None = None
    any_parameter: bool = False

    def __post_init__(self) -> None:
        kinds = self.match if isinstance(self.match, tuple) else (self.match,)
        if not isinstance(self.match, str) and not all(isinstance(k, type) for k in kinds):
            raise TypeError(f"match must be a pattern, a module type or a tuple of types, not {self.match!r}.")
        if not (self.penalty is None or isinstance(self.penalty, Penalty | _Same)):
            raise TypeError(
                "penalty must be an espalier.Penalty such as espalier.GroupLasso(1e-4), or None for none, "
                f"not {self.penalty!r}."
            )
        if self.any_parameter and self.grouping is None and self.penalty is not None:
            raise ValueError(f"{self}: any_parameter=True needs a grouping, since the layer is not known.")

    def matches(self, name: str, around: dict[str, nn.Module]) -> bool:
        """Whether a parameter of this name, inside these modules, is meant."""
        if isinstance(self.match, str):
            return any(fnmatchcase(n, self.match) for n in (name, *around))
        return any(isinstance(m, self.match) for m in around.values())


@dataclass(frozen=True)
class _Found:
    """A parameter of the model, under the first name that it has."""

    name: str
    around: dict[str, nn.Module]  # the modules that it is inside of, by name
    parameter: nn.Parameter
    layout: Layout | None  # None where no layer known to Espalier stores it
    axes: int | None  # that the weight of such a layer has


def _walk(model: nn.Module) -> list[_Found]:
    embedded = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        for p in m.parameters(recurse=False)
    }
    found: dict[int, _Found] = {}
    modules = dict(model.named_modules())
    for owner, module in modules.items():
        parts = owner.split(".") if owner else []
        around = {n: modules[n] for n in (".".join(parts[:i]) for i in range(len(parts) + 1))}
        layouts = dict(weights_of(module))
        for short in layouts:
            if is_parametrized(module, short):
                warnings.warn(
                    f"{owner}.{short} is computed by a parametrization and carries no penalty. Call "
                    "torch.nn.utils.parametrize.remove_parametrizations on it first if it should.",
                    stacklevel=3,
                )
        for short, p in module.named_parameters(recurse=False):
            name = f"{owner}.{short}" if owner else short
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ValueError(f"{name} has no shape yet. Run the model once on a batch first.")
            layout = None if id(p) in embedded else layouts.get(short)
            # a tensor that two layers share counts once, as the first of them that is known
            if id(p) not in found or (found[id(p)].layout is None and layout is not None):
                found[id(p)] = _Found(name, around, p, layout, None if layout is None else _axes(module))
    return list(found.values())


def regularize(
    model: nn.Module,
    penalty: Penalty,
    rules: Rule | Sequence[Rule] = (),
    *,
    grouping: str | Grouping | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups, named, with the penalty on every weight that should carry it.

    By default that is the weights of Linear, (transposed) convolutions, LSTM, GRU and RNN, the projections of
    MultiheadAttention and Hugging Face's Conv1D, in groups of one input channel; not biases, norms and embeddings, nor
    any tensor shared with an embedding. Parameters that do not require a gradient are left out.

    Args:
        model: any module.
        penalty: for example `espalier.GroupLasso(1e-4)`.
        rules: exceptions; the first that matches a parameter decides.
        grouping: "input", "output", "element", "matrix" or an object; by default the penalty's own.
    """
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be an espalier.Penalty such as espalier.GroupLasso(1e-4), not {penalty!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    rules = (rules,) if isinstance(rules, Rule) else tuple(rules)
    walked = _walk(model)
    parameters = [f for f in walked if f.parameter.requires_grad]
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must be espalier.Rule objects, not {rule!r}.")
        _check_rule(rule, parameters, [f for f in walked if not f.parameter.requires_grad])

    groups: dict[tuple[int, Grouping] | None, dict[str, Any]] = {}
    for f in parameters:
        first = next((r for r in rules if _reaches(r, f)), None)
        chosen = _choose(f, first, penalty, grouping)
        settings = {} if chosen is None else {"penalty": chosen[0], "grouping": chosen[1]}
        key = None if chosen is None else (id(chosen[0]), chosen[1])  # a penalty need not be hashable
        groups.setdefault(key, {"params": [], **settings})["params"].append((f.name, f.parameter))

    penalised = [g for g in groups.values() if "penalty" in g]
    if not penalised:
        raise ValueError(
            "the model has no weight to penalise: no trainable Linear, convolution, LSTM, GRU, RNN or attention "
            "projection that the rules leave. Name parameters with "
            'espalier.Rule("...", grouping="output", any_parameter=True), or pass model.parameters() to the optimizer.'
        )
    return penalised + [g for g in groups.values() if "penalty" not in g]


def _reaches(rule: Rule, f: _Found) -> bool:
    return (rule.any_parameter or f.layout is not None) and rule.matches(f.name, f.around)


def _check_rule(rule: Rule, parameters: list[_Found], frozen: list[_Found]) -> None:
    if any(_reaches(rule, f) for f in parameters):
        return
    if any(_reaches(rule, f) for f in frozen):
        raise ValueError(
            f"{rule} matches only frozen weights (requires_grad is False). Drop it, or unfreeze them first."
        )
    if any(rule.matches(f.name, f.around) for f in parameters):
        if rule.penalty is None:  # it asks for what holds anyway
            return
        raise ValueError(
            f"{rule} matches only parameters that are no layer's weight known to Espalier. To penalise them all the "
            "same, give it any_parameter=True and a grouping."
        )
    owners = sorted({f.name for f in parameters})
    raise ValueError(f"{rule} matches nothing. The parameters are: {', '.join(owners)}.")


def _choose(
    f: _Found, rule: Rule | None, penalty: Penalty, grouping: str | Grouping | None
) -> tuple[Penalty, Grouping] | None:
    """The penalty and grouping of a parameter, or None for neither."""
    if rule is None and f.layout is None:
        return None
    if rule is not None and rule.penalty is None:
        return None
    if rule is not None and isinstance(rule.penalty, Penalty):
        # a penalty of another kind brings its own grouping rather than the one meant for the first
        penalty, grouping = rule.penalty, grouping if isinstance(rule.penalty, type(penalty)) else None
    if rule is not None and rule.grouping is not None:
        grouping = rule.grouping
    bound = as_grouping(grouping or penalty.default_grouping)
    if bound.layout == Layout() and f.layout is not None:  # a layout given by hand is meant
        bound = replace(bound, layout=f.layout)
    if f.axes is not None and not isinstance(bound, Element):
        refuse_flat(f.parameter, f.name, f.axes)
    refuse_dtensor(f.parameter, f.name, type(penalty).__name__)
    try:
        penalty.check(bound)
        partition_of(bound, f.parameter.shape)
    except ValueError as error:
        raise ValueError(f"{f.name}: {error}") from None
    return penalty, bound
