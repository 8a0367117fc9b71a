"""Recurrent cells that read only some of their inputs, and of their own units."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cell: TypeAlias = nn.LSTMCell | nn.GRUCell | nn.RNNCell
State: TypeAlias = Tensor | tuple[Tensor, Tensor]
# exactly these: a subclass may compute something else
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


class GatherCell(nn.Module):
    """A cell whose weights have columns only for `input_index` of its inputs and `unit_index` of its units.

    It is called as the dense cell is: inputs, state and output are as wide as before.
    """

    input_size: int
    hidden_size: int
    input_index: Tensor
    unit_index: Tensor
    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(self, cell: Cell | GatherCell, inputs: Tensor, units: Tensor) -> None:
        """Of a cell, these columns of its two weights."""
        super().__init__()
        if type(cell) not in (*CELLS, GatherCell):
            raise ValueError(f"a {type(cell).__name__} cannot select: only LSTMCell, GRUCell and RNNCell can.")
        self.input_size, self.hidden_size = cell.input_size, cell.hidden_size
        self.gates = cell.weight_hh.shape[0] // cell.hidden_size  # 4 of an LSTM, 3 of a GRU, 1
        self.bias = cell.bias_ih is not None
        self.nonlinearity = getattr(cell, "nonlinearity", "tanh")
        for kind, selects, index in (("ih", "input_index", inputs), ("hh", "unit_index", units)):
            weight, bias = getattr(cell, f"weight_{kind}"), getattr(cell, f"bias_{kind}")
            index = index.to(weight.device)
            narrow = nn.Parameter(weight.detach().index_select(1, index), weight.requires_grad)
            self.register_parameter(f"weight_{kind}", narrow)
            self.register_parameter(f"bias_{kind}", bias)
            self.register_buffer(selects, getattr(cell, selects)[index] if isinstance(cell, GatherCell) else index)
        self.train(cell.training)

    @classmethod
    def empty(cls, cell: Cell, inputs: int, units: int) -> GatherCell:
        """Of a dense cell, reading so many inputs and units that are not known yet."""
        return cls(cell, torch.zeros(inputs, dtype=torch.int64), torch.zeros(units, dtype=torch.int64))

    def spec(self) -> dict[str, int]:
        """What `empty` needs."""
        return {"inputs": len(self.input_index), "units": len(self.unit_index)}

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """As the dense cell's."""
        lstm = self.gates == 4
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros) if lstm else zeros
        h = hx[0] if lstm else hx
        assert isinstance(h, Tensor)
        from_x = F.linear(input.index_select(-1, self.input_index), self.weight_ih, self.bias_ih)
        from_h = F.linear(h.index_select(-1, self.unit_index), self.weight_hh, self.bias_hh)
        if lstm:
            enter, forget, new, leave = (from_x + from_h).chunk(4, -1)
            c = torch.sigmoid(forget) * hx[1] + torch.sigmoid(enter) * torch.tanh(new)
            return torch.sigmoid(leave) * torch.tanh(c), c
        if self.gates == 3:
            (x_reset, x_update, x_new), (h_reset, h_update, h_new) = from_x.chunk(3, -1), from_h.chunk(3, -1)
            update = torch.sigmoid(x_update + h_update)
            new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
            return new + update * (h - new)
        return torch.tanh(from_x + from_h) if self.nonlinearity == "tanh" else torch.relu(from_x + from_h)

    def extra_repr(self) -> str:
        inputs, units = self.spec().values()
        return f"{inputs} of {self.input_size} inputs, {units} of {self.hidden_size} units"
