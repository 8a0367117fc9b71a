"""Recurrent cells that lose what they do not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
import zoo
from espalier.compact.cells import GatherCell

CELLS: dict[str, Callable[..., Any]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, **k, nonlinearity="relu"),
}
every_cell = pytest.mark.parametrize("kind", CELLS)
INPUTS, UNITS = torch.tensor([0, 2, 3]), torch.tensor([1, 4])


def parts(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def reading(cell: Any) -> Any:
    """The same, its other columns zero."""
    with torch.no_grad():
        for weight, index in ((cell.weight_ih, INPUTS), (cell.weight_hh, UNITS)):
            other = torch.ones(weight.shape[1], dtype=torch.bool)
            other[index] = False
            weight[:, other] = 0
    return cell


@every_cell
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), ()], ids=["batch", "one"])
@pytest.mark.parametrize("given", [True, False])
def test_computes_what_the_dense_cell_does(kind: str, bias: bool, shape: tuple[int, ...], given: bool) -> None:
    torch.manual_seed(0)
    cell = reading(CELLS[kind](6, 5, bias=bias).double())
    small = GatherCell(cell, INPUTS, UNITS)
    x, h, c = (torch.randn(*shape, n).double() for n in (6, 5, 5))
    state = None if not given else (h, c) if kind == "lstm" else h
    for a, b in zip(parts(cell(x, state)), parts(small(x, state)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in cell.parameters())


def test_only_cells_select() -> None:
    with pytest.raises(ValueError, match="a Linear cannot select"):
        GatherCell.empty(nn.Linear(2, 2), 1, 1)  # type: ignore[arg-type]


class Speaker(nn.Module):
    """One cell feeds another, which feeds it, and both feed the head: no unit can go."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTMCell(4 + 16, 16)
        self.second = self.first if shared else nn.LSTMCell(16 + 4, 16)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], self.first.hidden_size)
        a = b = (zeros, zeros)
        seen = []
        for step in x.unbind(1):
            a = self.first(torch.cat([step, b[0]], -1), hx=a)
            b = self.second(torch.cat([a[0], step], -1), b)
            seen.append(torch.cat([a[0], b[0]], -1))
        y: Tensor = self.head(torch.stack(seen, 1))
        return y


def sparse(model: Speaker) -> Speaker:
    with torch.no_grad():
        model.first.weight_ih[:, 7:] = 0
        model.first.weight_hh[:, :15] = 0
        model.second.weight_hh[:] = 0
    return model.eval()


def test_cells_select_where_others_need_the_channels() -> None:
    model, x = sparse(Speaker()), torch.randn(2, 5, 4)
    found = espalier.shrink(model, x, gather="always", latency=False)
    assert [(r.name, r.given, r.read) for r in found.report.gathers] == [("first", 36, 8), ("second", 36, 21)]
    small: Any = found.model
    assert small.first.input_index.tolist() == [*range(7)]
    assert small.first.unit_index.tolist() == [15]
    assert small.first.weight_ih.shape == (64, 7)
    # of a matrix that is all zero one column stays
    assert small.second.weight_hh.shape == (64, 1)
    assert "7 of 20 inputs, 1 of 16 units" in repr(small.first)
    assert espalier.shrink(model, x, gather="never", latency=False).report.parameters_ratio == 1
    assert "first's units: their state cannot lose any" in found.report.kept


@pytest.mark.parametrize(("times", "made"), [((1.0, 2.0), 0), ((2.0, 1.0), 2)])
def test_a_selection_that_is_slower_is_not_made_and_told(
    times: tuple[float, float], made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = sparse(Speaker()), torch.randn(2, 5, 4)
    monkeypatch.setattr("espalier.compact.timing._milliseconds", lambda *_: times)
    found = espalier.shrink(model, x, latency=False)
    assert len(found.report.gathers) == sum(isinstance(m, GatherCell) for m in found.model.modules()) == made
    assert any("first: reads 8 of 36 channels" in line for line in found.report.kept) == (made == 0)
    assert "first's units: their state cannot lose any" in found.report.kept


def test_units_go_where_nothing_reads_them() -> None:
    """Without a state from elsewhere the cell is as any layer."""
    torch.manual_seed(0)
    model: Any = zoo.CellTagger(nn.LSTMCell).eval()
    with torch.no_grad():
        model.cell.weight_hh[:, 10:] = model.head.weight[:, 10:] = model.cell.weight_ih[:, 20:] = 0
    tokens = torch.randint(50, (2, 6))
    small: Any = espalier.shrink(model, tokens, latency=False, gather="never").model
    assert (small.cell.input_size, small.cell.hidden_size) == (20, 10)
    assert small.embedding.weight.shape[1] == 20
    torch.testing.assert_close(small(tokens), model(tokens))


class Steps(nn.Module):
    """Each part of what a cell meets from a layer of its own: its first state, its first input, and the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.first, self.other = nn.Linear(4, 12), nn.Linear(4, 10), nn.Linear(4, 10)
        self.cell, self.head = nn.GRUCell(10, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x[:, 0])
        for i, step in enumerate(x.unbind(1)):
            h = self.cell(input=self.other(step) if i else self.first(step), hx=h)
        y: Tensor = self.head(h)
        return y


def test_what_a_cell_meets_loses_the_same_channels() -> None:
    model, x = Steps().eval(), torch.randn(2, 5, 4)
    with torch.no_grad():
        model.cell.weight_ih[:, [1, 7]] = model.cell.weight_hh[:, [0, 5, 6]] = model.head.weight[:, [0, 5, 6]] = 0
        model.first.weight[3] = 0  # a constant, at the first step only
    found = espalier.shrink(model, x, gather="never", latency=False)
    assert zoo.unforced(found.report)
    small: Any = found.model
    assert [len(m.weight) for m in (small.begin, small.first, small.other)] == [9, 8, 8]
    assert (small.cell.input_size, small.cell.hidden_size) == (8, 9)
    torch.testing.assert_close(small(x), model(x))


@pytest.mark.parametrize("training", [True, False])
def test_the_cell_in_its_place_is_as_it_was(training: bool) -> None:
    model, x = Steps().train(training), torch.randn(2, 5, 4)
    with torch.no_grad():
        model.cell.weight_hh[:, :7] = 0
    model.cell.weight_hh.requires_grad_(False)
    found = espalier.shrink(model, x, gather="always", align=4, latency=False)
    cell: Any = found.model.cell
    assert zoo.unforced(found.report)
    assert isinstance(cell, GatherCell)
    assert cell.weight_hh.shape == (36, 8)  # 5 are read
    assert (cell.training, cell.weight_ih.requires_grad, cell.weight_hh.requires_grad) == (training, True, False)


class NoMatrix(nn.GRUCell):
    """A subclass that has no weight_hh."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        del self.weight_hh
        self.product = nn.Linear(units, 3 * units)

    def forward(self, input: Tensor, hx: Any = None) -> Tensor:
        a, b = torch.nn.functional.linear(input, self.weight_ih, self.bias_ih), self.product(hx)
        y: Tensor = (a + b).chunk(3, -1)[0].tanh()
        return y


def _shared(model: Any) -> None:
    model.again = model.cell


def _tied(model: Any) -> None:
    model.more = nn.GRUCell(10, 12)
    model.more.weight_hh = model.cell.weight_hh


def _normed(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.cell, "weight_hh")


def _subclass(model: Any) -> None:
    model.cell = NoMatrix(10, 12)


def _hooked(model: Any) -> None:
    model.cell.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_shared, _tied, _normed, _subclass, _hooked])
def test_cells_of_other_kinds_stay_and_the_rest_does_not(change: Callable[[Any], None]) -> None:
    model, x = Steps(), torch.randn(2, 5, 4)
    with torch.no_grad():
        model.cell.weight_hh[:, :9] = model.cell.weight_ih[:, :8] = 0
    change(model)
    rest = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 3))
    with torch.no_grad():
        rest[2].weight[:, 3:] = 0
    whole = nn.Sequential(model, rest).eval()
    found = espalier.shrink(whole, x, gather="always", latency=False)
    assert zoo.unforced(found.report)
    assert not any(isinstance(m, GatherCell) for m in found.model.modules())
    assert dict(found.model.named_parameters())["1.0.weight"].shape == (3, 3)


def test_a_cell_that_is_looked_into_does_not_cost_the_others_their_selection() -> None:
    class Looks(Steps):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.cat([y, self.side(self.other(x[:, 0])), self.cell.weight_hh.mean().expand(len(y), 1)], -1)

    model, x = Looks(), torch.randn(2, 5, 4)
    model.side = nn.Linear(10, 20)
    with torch.no_grad():
        model.cell.weight_hh[:, :9] = model.side.weight[:, :6] = 0
    found = espalier.shrink(model.eval(), x, gather="always", latency=False)
    assert [row.name for row in found.report.gathers] == ["side"]


@every_cell
def test_a_cell_by_itself_stays(kind: str) -> None:
    cell = reading(CELLS[kind](6, 5)).eval()
    found = espalier.shrink(cell, torch.randn(2, 6), gather="always", latency=False)
    assert found.report.parameters_ratio == 1


def test_no_selection_takes_more_memory_than_it_saves() -> None:
    model, x = Steps().half().eval(), torch.randn(2, 5, 4).half()
    model.cell = nn.RNNCell(10, 12).half()
    with torch.no_grad():
        model.cell.weight_hh[:, 0] = 0
    found = espalier.shrink(model, x, gather="always", latency=False)
    assert not found.report.gathers
    assert found.report.bytes_ratio == 1


def test_a_state_that_is_learned() -> None:
    class Learned(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.randn(1, 12))

        def forward(self, x: Tensor) -> Tensor:
            h = self.start.expand(x.shape[0], -1)
            for step in x.unbind(1):
                h = self.cell(self.other(step), h)
            y: Tensor = self.head(h) + self.head(self.start)
            return y

    model, x = Learned().eval(), torch.randn(1, 5, 4)
    with torch.no_grad():
        model.cell.weight_hh[:, :9] = model.head.weight[:, :9] = model.cell.weight_ih[:, :4] = 0
    found = espalier.shrink(model, x, gather="always", latency=False)
    assert zoo.unforced(found.report)
    small: Any = found.model
    assert small.cell.spec() == {"inputs": 6, "units": 3}
    torch.testing.assert_close(small(x), model(x))
    assert model.start.requires_grad


@pytest.mark.parametrize("format", ["safetensors", "pt2", "onnx"])
def test_saved_and_exported(format: str, tmp_path: Path) -> None:
    model, x = sparse(Speaker()), torch.randn(2, 5, 4)
    small = espalier.shrink(model, x, gather="always", latency=False).model
    if format == "safetensors":
        espalier.save(small, tmp_path / "small")
        torch.testing.assert_close(espalier.load(tmp_path / "small", Speaker)(x), model(x))
    else:  # the file is run, and compared with the model
        assert espalier.export(small, tmp_path / f"small.{format}", x).exists()


@pytest.mark.parametrize("method", [espalier.RAMDA, torch.optim.AdamW])
def test_training_goes_on(method: Any) -> None:
    """With the state of the columns that are left."""
    model, x = sparse(Speaker()), torch.randn(8, 5, 4)
    groups = espalier.regularize(model, espalier.GroupLasso(1e-3))
    optimizer = method(groups if method is espalier.RAMDA else model.parameters(), lr=1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    sparse(model)
    found = espalier.shrink(model, x, gather="always", latency=False)
    small, weight = found.optimizer(optimizer), dict(model.named_parameters())["first.weight_hh"]
    left = dict(found.model.named_parameters())["first.weight_hh"]
    for key, value in small.state[left].items():
        if isinstance(value, Tensor) and value.shape == left.shape:
            assert torch.equal(value, optimizer.state[weight][key][:, [15]])
    assert any(v.shape == left.shape for v in small.state[left].values() if isinstance(v, Tensor))
    loss = found.model(x).square().mean()
    loss.backward()
    small.step()
    assert found.model(x).square().mean() < loss


def test_a_second_time() -> None:
    """What selects already reads still less, and counts anew what it selects from."""
    torch.manual_seed(0)
    model: Any = zoo.CellTagger(nn.LSTMCell).eval()
    tokens = torch.randint(50, (2, 6))
    with torch.no_grad():
        model.cell.weight_hh[:, 10:] = model.cell.weight_ih[:, 20:] = 0
    small: Any = espalier.shrink(model, tokens, latency=False, gather="always").model
    # 20 inputs, for the others were no one's; 10 of 20 units
    assert (small.cell.spec(), small.cell.input_size) == ({"inputs": 20, "units": 10}, 20)
    with torch.no_grad():
        small.cell.weight_hh[:, 3] = small.cell.weight_ih[:, 5:8] = 0
        for lost in (3, 8, 15):
            small.head.weight[:, lost] = 0
    for gather in ("always", "auto", "never"):
        again: Any = espalier.shrink(small, tokens, latency=False, gather=gather).model
        torch.testing.assert_close(again(tokens), small(tokens))
        # 3 and 15 are read by nobody now, 8 by the cell
        assert (again.cell.input_size, again.cell.hidden_size) == (17, 18)
        assert again.cell.unit_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert again.cell.weight_hh.shape == (72, 9)
