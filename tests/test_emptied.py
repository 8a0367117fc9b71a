"""A layer that the penalty set to zero as a whole is said, once, wherever structure is looked at."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import GroupLasso, Rule, StructureMonitor, StructureWarning, regularize, structure
from tables import OPTIMIZERS, OptimizerCase, names


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def stepped(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def enter(optimizer: Any) -> None:
    with optimizer.structured():
        pass


def look(optimizer: Any) -> None:
    StructureMonitor(optimizer).look()


LOOKS: dict[str, Callable[[Any], object]] = {"structure": structure, "look": look, "structured": enter}


def said(look: Callable[[Any], object], optimizer: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StructureWarning)
        look(optimizer)
    assert {w.filename for w in caught} <= {__file__}  # the user's line, not one of the library's
    return [str(w.message) for w in caught if issubclass(w.category, StructureWarning)]


def one_zero(model: nn.Sequential, *empty: int) -> Any:
    """ProxSGD, which holds its point in the weights, after a step; then these layers at zero."""
    optimizer = stepped(espalier.ProxSGD(regularize(model, GroupLasso(1e-3)), lr=1e-6))
    with torch.no_grad():
        for i in empty:
            model[i].weight.zero_()
    return optimizer


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_layer_without_a_group_left_is_named_with_what_to_try(look: Callable[[Any], object]) -> None:
    (line,) = said(look, one_zero(net(), 1))
    assert line == (
        "every group of 1.weight is zero. Unless the model has a path around a zero layer, its output does not "
        "depend on what comes before it. If that lasts and the quality suffers, λ = 0.001 is too large. "
        "Try λ / 10: GroupLasso(0.0001)."
    )


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_all_gone_under_every_optimizer(case: OptimizerCase, look: Callable[[Any], object]) -> None:
    optimizer = case(regularize(net(), GroupLasso(1e3)))
    for _ in range(3):
        stepped(optimizer)
    with optimizer.structured():
        pass  # which warned
    fresh = copy.deepcopy(optimizer)
    (line,) = said(enter, fresh)
    assert line == (
        "every group of all 3 penalised layers is zero. If that lasts and the quality suffers, λ = 1000 is too large. "
        "Try λ / 10: GroupLasso(100)."
    )
    assert said(look, fresh) == []


@pytest.mark.parametrize("again", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_each_layer_is_warned_of_once(look: Callable[[Any], object], again: Callable[[Any], object]) -> None:
    model = net()
    optimizer = one_zero(model, 1)
    assert len(said(look, optimizer)) == 1
    assert said(again, optimizer) == []
    with torch.no_grad():
        model[0].weight.zero_()
    (second,) = said(again, optimizer)
    assert second.startswith("every group of 0.weight is zero.")
    with torch.no_grad():
        model[2].weight.zero_()
    (last,) = said(look, optimizer)
    assert last.startswith("every group of all 3 penalised layers is zero.")
    assert said(look, optimizer) == []
    # another optimizer warns for itself
    assert len(said(look, one_zero(net(), 1))) == 1


def test_a_wrapped_optimizer_warns_as_the_one_inside() -> None:
    accelerate = pytest.importorskip("accelerate")
    optimizer = one_zero(net(), 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert len(said(structure, wrapped)) == 1
    assert said(structure, optimizer) == said(look, wrapped) == []
    assert structure(wrapped).warnings == structure(optimizer).warnings != ()


def test_the_report_says_it_each_time() -> None:
    optimizer = one_zero(net(), 0, 1)
    (line,) = said(structure, optimizer)
    report = structure(optimizer)
    assert report.warnings == (line,)
    assert line.startswith("every group of 2 layers (0.weight, 1.weight) is zero.")
    assert f"warning: {line}" in str(report).splitlines()
    assert structure(one_zero(net())).warnings == ()


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_the_penalty_did_not_do_is_not_warned_of(look: Callable[[Any], object]) -> None:
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    # a layer that starts at zero, before any step
    assert said(look, espalier.RAMDA(regularize(model, GroupLasso(1e-3)))) == []
    # layers without a penalty, biases, and λ = 0
    rules = [Rule("1", penalty=None), Rule("2", penalty=GroupLasso(0.0))]
    optimizer = espalier.ProxSGD(regularize(model, GroupLasso(1e-9), rules), lr=0.1)
    stepped(optimizer)
    with torch.no_grad():
        for p in [*model[1].parameters(), *model[2].parameters(), model[0].bias]:
            p.zero_()
    assert said(look, optimizer) == []
    # weights that another optimizer trains: no λ of it was at work
    other = stepped(torch.optim.SGD(regularize(model, GroupLasso(1e-3)), lr=0.0, momentum=0.9))
    if look is not enter:
        assert said(look, other) == []


class Own(espalier.Penalty):
    """A user's penalty that keeps its strength under a name of its own."""

    def value(self, x: Tensor, groups: espalier.Partition) -> Tensor:
        return x.abs().sum()

    def prox(self, x: Tensor, step: Any, groups: espalier.Partition) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize(
    ("penalty", "advice"),
    [
        (GroupLasso(3e-4), "λ = 0.0003 is too large. Try λ / 10: GroupLasso(3e-05)."),
        (espalier.L1(0.5), "λ = 0.5 is too large. Try λ / 10: L1(0.05)."),
        (espalier.NuclearNorm(2), "λ = 2 is too large. Try λ / 10: NuclearNorm(0.2)."),
        (espalier.GroupMCP(1e-2, gamma=5.0), "λ = 0.01 is too large. Try λ / 10: GroupMCP(0.001)."),
        (Own(), "the penalty is too strong."),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, espalier.Penalty) else "",
)
def test_the_advice_has_the_number_to_type(penalty: espalier.Penalty, advice: str) -> None:
    layer = nn.Linear(3, 3, bias=False)
    optimizer = stepped(espalier.ProxSGD(regularize(layer, penalty), lr=1e-9))
    with torch.no_grad():
        layer.weight.zero_()
    (line,) = said(structure, optimizer)
    assert line == f"every group of weight is zero. If that lasts and the quality suffers, {advice}"


def test_several_penalties_are_advised_each() -> None:
    model = net()
    optimizer = stepped(espalier.ProxSGD(regularize(model, GroupLasso(1e6), [Rule("1", espalier.L1(2e6))]), lr=1.0))
    (line,) = said(structure, optimizer)
    advice = "λ is too large. Try λ / 10: GroupLasso(100000), L1(200000)."
    assert line.endswith(f"is zero. If that lasts and the quality suffers, {advice}")


@pytest.mark.parametrize("look", [structure, look], ids=["structure", "look"])
@pytest.mark.parametrize(
    ("penalty", "advice"),
    [(GroupLasso(1e-12), "GroupLasso(3e-12)"), (espalier.NuclearNorm(1e-12), "NuclearNorm(3e-12)")],
    ids=["groups", "ranks"],
)
@pytest.mark.parametrize("kind", [espalier.RAMDA, espalier.RMDA])
def test_a_run_that_ends_without_a_zero_is_said_and_no_earlier(
    kind: Any, penalty: espalier.Penalty, advice: str, look: Callable[[Any], object]
) -> None:
    optimizer = kind(regularize(net(), penalty), total_steps=10)
    for _ in range(5):
        stepped(optimizer)
    assert said(look, optimizer) == []
    for _ in range(5):
        stepped(optimizer)
    (line,) = said(look, optimizer)
    assert line == (
        f"the run is over, and no group of the 3 penalised layers is zero: λ = 1e-12 is too small. Try λ × 3: {advice}."
    )
    assert said(look, optimizer) == []
    assert structure(optimizer).warnings == (line,)


def test_a_run_that_ends_with_one_zero_is_not_said() -> None:
    model = net()
    optimizer = espalier.RAMDA(regularize(model, GroupLasso(1e-12)), total_steps=3)
    for _ in range(3):
        stepped(optimizer)
    with torch.no_grad():
        model[1].weight[:, 0] = 0.0
    assert said(structure, optimizer) == []


# ------------------------------------------------------------------------------------------------- shrinking


class Residual(nn.Module):
    """A block that the model can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.relu(self.inner(x)))


def shrunk(model: nn.Module, example: Tensor) -> tuple[Any, list[str]]:
    found: list[Any] = []
    lines = said(lambda m: found.append(espalier.shrink(m, example, latency=False)), model)
    return found[0].report, lines


@pytest.mark.parametrize("empty", [(0, 1, 2), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("batch", [1, 3])
def test_shrinking_a_model_that_computes_a_constant_is_warned_of(empty: tuple[int, ...], batch: int) -> None:
    model = net()
    with torch.no_grad():
        for i in empty:
            model[i].weight.zero_()
    report, (line,) = shrunk(model, torch.randn(batch, 4))
    zero = ", ".join(f"{i}.weight" for i in empty)
    assert line.startswith(f"the model computes the same output for different inputs, because every weight of {zero} ")
    assert "train again with λ / 10" in line
    assert report.warnings == (line,)
    assert f"warnings:\n  {line}" in str(report)


def test_a_block_that_is_not_missed_is_only_reported() -> None:
    model = Residual()
    with torch.no_grad():
        model.inner.weight.zero_()
    report, lines = shrunk(model, torch.randn(2, 4))
    assert lines == []
    assert report.warnings == ("every weight of inner.weight is zero",)


def test_shrinking_says_nothing_of_layers_that_hold_something() -> None:
    model = net()
    with torch.no_grad():
        for layer in model:
            layer.bias.zero_()
            layer.weight[:, 0] = 0.0
    report, lines = shrunk(model, torch.randn(2, 4))
    assert (report.warnings, lines) == ((), [])


def test_one_input_alone_does_not_show_a_constant() -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
    # no other input is known to be one
    report, lines = shrunk(model, torch.ones(1, 1))
    assert lines == []
    assert report.warnings == ("every weight of weight is zero",)


def test_a_penalty_that_took_everything_is_said_from_training_to_shrinking() -> None:
    # the trial's case: 19,210 parameters shrank to 85 without a word
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = espalier.RAMDA(regularize(model, GroupLasso(10.0)), lr=1e-2, total_steps=40)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    for _ in range(40):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(said(structure, optimizer)) == 1
    report, lines = shrunk(model, x[:2])
    assert report.small.parameters < 20
    assert len(lines) == 1
