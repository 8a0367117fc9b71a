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
    assert any("first: a state from elsewhere keeps all units" in line for line in found.report.kept)


def test_a_selection_that_is_slower_is_not_made_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sparse(Speaker()), torch.randn(2, 5, 4)
    for times, made in (((1.0, 2.0), 0), ((2.0, 1.0), 2)):
        monkeypatch.setattr("espalier.compact.gather._milliseconds", lambda *_, t=times: t)
        found = espalier.shrink(model, x, latency=False)
        assert len(found.report.gathers) == sum(isinstance(m, GatherCell) for m in found.model.modules()) == made
        assert any("first: reads 8 of 36 channels" in line for line in found.report.kept) == (made == 0)


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


def test_cells_that_share_their_weights_or_have_hooks_stay() -> None:
    x = torch.randn(2, 5, 4)
    found = espalier.shrink(sparse(Speaker(shared=True)), x, gather="always", latency=False)
    assert not found.report.gathers
    hooked = sparse(Speaker())
    hooked.first.register_forward_hook(lambda *_: None)
    assert [r.name for r in espalier.shrink(hooked, x, gather="always", latency=False).report.gathers] == ["second"]


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
    # 20 inputs, for the others were no one's; 10 of 24 units
    assert (small.cell.spec(), small.cell.input_size) == ({"inputs": 20, "units": 10}, 20)
    with torch.no_grad():
        small.cell.weight_hh[:, 3] = small.cell.weight_ih[:, 5:8] = 0
        for lost in (3, 8, 15):
            small.head.weight[:, lost] = 0
    for gather in ("always", "auto", "never"):
        again: Any = espalier.shrink(small, tokens, latency=False, gather=gather).model
        torch.testing.assert_close(again(tokens), small(tokens))
        # 3 and 15 are read by nobody now, 8 by the cell
        assert (again.cell.input_size, again.cell.hidden_size) == (17, 22)
        assert again.cell.unit_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert again.cell.weight_hh.shape == (88, 9)
