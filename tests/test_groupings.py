"""How tensors are cut into groups: against plain loops, and against the layers that use the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Element, Heads, Input, Layout, Matrix, Output, Partition
from espalier.groupings import NAMED, Grouping, as_grouping

TRANSPOSED = Layout(input_dim=0, output_dim=1)


@dataclass(frozen=True)
class Case:
    grouping: Grouping
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        changed = [
            f"{f.name}={getattr(self.grouping.layout, f.name)}"
            for f in fields(Layout)
            if getattr(self.grouping.layout, f.name) != f.default
        ]
        own = [f"{k}={v}" for k, v in vars(self.grouping).items() if k != "layout"]
        return f"{type(self.grouping).__name__}({', '.join(own + changed)})-{'x'.join(map(str, self.shape))}"

    @property
    def partition(self) -> Partition:
        return self.grouping.partition(self.shape)


CASES = (
    Case(Input(), (4, 6)),
    Case(Input(), (4, 6, 3)),
    Case(Input(), (4, 6, 3, 2)),
    Case(Input(), (4, 3, 2, 3, 2)),
    # a tail long enough that `stretch` leaves it to broadcasting
    Case(Input(), (2, 3, 16, 17)),
    Case(Input(), (1, 5)),
    Case(Input(), (5, 1)),
    Case(Input(block=3), (4, 6, 3, 2)),
    Case(Input(block=6), (4, 6)),
    Case(Input(layout=Layout(parts=2)), (4, 3, 2, 2)),
    Case(Input(layout=Layout(parts=4)), (4, 1, 3, 3)),
    Case(Input(layout=Layout(parts=2), block=2), (6, 4, 3)),
    Case(Input(layout=TRANSPOSED), (6, 4)),
    Case(Input(layout=TRANSPOSED), (6, 4, 3, 3)),
    Case(Input(layout=Layout(input_dim=0, output_dim=1, parts=2)), (6, 4, 3)),
    Case(Output(), (5,)),
    Case(Output(), (4, 6, 3, 2)),
    Case(Output(block=2), (4, 6, 2, 1, 2)),
    Case(Output(layout=Layout(stacked=3)), (12, 5)),
    Case(Output(layout=Layout(stacked=3), block=2), (12, 5)),
    Case(Output(layout=TRANSPOSED), (6, 4, 3)),
    Case(Output(layout=Layout(input_dim=0, output_dim=1, parts=3)), (6, 4, 3, 3)),
    Case(Output(layout=Layout(parts=2)), (6, 4, 3)),
    Case(Heads(2), (4, 6)),
    Case(Heads(3), (4, 6, 2)),
    Case(Heads(2, side="output"), (6, 4)),
    Case(Heads(2, side="output", layout=Layout(parts=3, stacked=3)), (12, 4)),
    Case(Heads(2, layout=TRANSPOSED), (6, 4)),
    Case(Heads(2, side="output", layout=TRANSPOSED), (6, 4)),
    Case(Element(), ()),
    Case(Element(), (7,)),
    Case(Element(), (3, 4, 2)),
    Case(Matrix(), (4, 6)),
    Case(Matrix(), (4, 3, 2, 2)),
    Case(Matrix(layout=Layout(parts=3)), (6, 5)),
    Case(Matrix(layout=TRANSPOSED), (6, 4)),
    Case(Matrix(layout=TRANSPOSED), (6, 4, 2, 3)),
    Case(Matrix(layout=TRANSPOSED), (3, 4, 2, 2, 2)),
)

MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    ),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed_axes": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "sliced": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
}
NEEDS = {"channels_last": (4, 5), "transposed": (2, 3, 4, 5), "reversed_axes": (3, 4, 5)}

both = pytest.mark.parametrize(
    ("case", "memory"),
    [
        pytest.param(c, m, id=f"{c.name}-{m}")
        for c in CASES
        for m in MEMORY
        if len(c.shape) in NEEDS.get(m, (len(c.shape),))
    ],
)
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def group_of(grouping: Grouping, shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    """Which group an entry is in, from the definition."""
    at = grouping.layout
    match grouping:
        case Element():
            return index
        case Matrix():
            return (index[0] // (shape[0] // at.parts),) if at.output_dim == 0 else (0,)
        case Input(block=block):
            dim, stacked, parts = at.input_dim, 1, at.parts
        case Output(block=block):
            dim, stacked, parts = at.output_dim, at.stacked, at.parts
        case Heads(heads=heads, side=side):
            dim, stacked, parts = (at.input_dim, 1, 1) if side == "input" else (at.output_dim, at.stacked, 1)
            block = shape[dim] // stacked // heads
        case _:
            raise AssertionError(grouping)
    channels = shape[dim] // stacked
    part = index[0] // (shape[0] // parts) if dim != 0 else 0
    return part, index[dim] % channels // block


@cache
def members(case: Case) -> Tensor:
    """Where the entries of each group stand in the flattened tensor, groups in order: (count, size)."""
    found: dict[tuple[int, ...], list[int]] = {}
    for flat, index in enumerate(itertools.product(*map(range, case.shape))):
        found.setdefault(group_of(case.grouping, case.shape, index), []).append(flat)
    return torch.tensor([found[g] for g in sorted(found)])


def labels(partition: Partition, shape: tuple[int, ...]) -> Tensor:
    """The number of each entry's group, in the tensor's own shape."""
    numbers = torch.arange(partition.count).reshape(
        [n if a in partition.group_axes else 1 for a, n in enumerate(partition.shape)]
    )
    return partition.merge(numbers.expand(partition.shape), torch.Size(shape))


def random(case: Case, memory: str, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(case.shape, dtype=dtype)
    made = MEMORY[memory](x)
    assert torch.equal(made, x)
    return made


# ------------------------------------------------------------------------------------------------- reductions


@both
def test_reductions_agree_with_loops(case: Case, memory: str) -> None:
    x, groups = random(case, memory), case.partition
    view, values = groups.split(x), x.flatten()[members(case)]

    assert (groups.count, groups.size) == values.shape
    for reduction, reference in {
        groups.sum: values.sum(1),
        groups.max: values.amax(1),
        groups.min: values.amin(1),
        groups.norm: values.square().sum(1).sqrt(),
    }.items():
        result = reduction(view)
        torch.testing.assert_close(result.reshape(-1), reference, msg=lambda m, r=reduction: f"{r.__name__}: {m}")
        assert torch.broadcast_shapes(result.shape, view.shape) == view.shape


@both
def test_zero_agrees_with_loops(case: Case, memory: str) -> None:
    x, groups = random(case, "contiguous"), case.partition
    # every other group goes; of the rest all but one entry: nearly zero is not zero, and −0.0 is
    x.view(-1)[members(case)[::2]] = -0.0
    x.view(-1)[members(case)[:, 1:]] = -0.0
    assert groups.zero(groups.split(MEMORY[memory](x))).tolist() == [n % 2 == 0 for n in range(groups.count)]


def test_zero_is_exact() -> None:
    x = torch.tensor([[0.0, 1e-45, torch.nan, torch.inf, -0.0]])
    assert NAMED["input"].partition((1, 5)).zero(x).tolist() == [True, False, False, False, True]


@both
def test_stretched_values_reach_their_group(case: Case, memory: str) -> None:
    x, groups = random(case, memory), case.partition
    per_group = groups.sum(groups.split(torch.zeros_like(x)))
    per_group += torch.arange(1.0, groups.count + 1).reshape(per_group.shape)
    result = groups.merge(groups.split(x) * groups.stretch(per_group), x.shape)
    at, numbers = members(case), torch.arange(1, groups.count + 1)[:, None]
    assert torch.equal(result.flatten()[at], x.flatten()[at] * numbers)


def test_stretch_leaves_scalars_alone() -> None:
    number = torch.tensor(3.0)
    assert NAMED["input"].partition((2, 3, 3, 3)).stretch(number).shape == ()


@both
def test_merge_undoes_split(case: Case, memory: str) -> None:
    x, groups = random(case, memory), case.partition
    assert groups.split(x).shape == groups.shape
    assert torch.equal(groups.merge(groups.split(x), x.shape), x)


@pytest.mark.parametrize("case", [c for c in CASES if not c.partition.swapped], ids=lambda c: c.name)
def test_split_shares_memory(case: Case) -> None:
    # work on the view of a parameter must reach the parameter
    x = random(case, "contiguous")
    case.partition.split(x).zero_()
    assert not x.any()


@both
def test_reductions_never_alias_or_change_their_argument(case: Case, memory: str) -> None:
    x, groups = random(case, memory), case.partition
    view, before = groups.split(x), x.clone()
    for reduction in (groups.sum, groups.max, groups.min, groups.norm):
        reduction(view).fill_(7.0)
        assert torch.equal(x, before), reduction.__name__
    groups.zero(view).fill_(True)
    assert torch.equal(x, before)


@cases
@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, 30), (torch.float64, 300)])
def test_norm_neither_overflows_nor_underflows(case: Case, dtype: torch.dtype, exponent: int) -> None:
    torch.manual_seed(0)
    groups = case.partition
    # huge and tiny groups beside each other, each far beyond the root of the type's range
    exponents = torch.where(labels(groups, case.shape) % 2 == 0, exponent, -exponent)
    plain = torch.randn(case.shape, dtype=torch.float64)
    x = (plain * 10.0 ** exponents.double()).to(dtype)
    result = groups.norm(groups.split(x)).reshape(-1)
    # scaled by the same powers of ten in float64, the norm is that of ordinary numbers
    scaled = x.double() * 10.0 ** -exponents.double()
    values = scaled.flatten()[members(case)]
    back = result.double() * 10.0 ** -exponents.flatten()[members(case)[:, 0]].double()
    torch.testing.assert_close(back, values.square().sum(1).sqrt(), rtol=groups.size * torch.finfo(dtype).eps, atol=0)


def test_norm_of_zero_and_subnormal_groups() -> None:
    x = torch.tensor([[0.0, 3e-42], [0.0, 4e-42]])
    norm = NAMED["input"].partition((2, 2)).norm(x)
    assert norm[0, 0] == 0
    torch.testing.assert_close(norm[0, 1], torch.tensor(5e-42), rtol=1e-3, atol=0)


def test_a_nan_stays_in_its_group() -> None:
    x = torch.tensor([[torch.nan, 3.0], [1.0, 4.0]])
    norm = NAMED["input"].partition((2, 2)).norm(x)
    assert norm[0, 0].isnan()
    assert norm[0, 1] == 5


@pytest.mark.parametrize(("grouping", "shape"), [("input", (0, 5)), ("output", (5, 0)), ("matrix", (0, 5))])
def test_groups_without_entries_are_zero(grouping: str, shape: tuple[int, ...]) -> None:
    # what shrinking can leave of a layer: the empty sum is 0, and nothing in the group differs from 0
    groups = NAMED[grouping].partition(shape)
    x = groups.split(torch.empty(shape))
    assert groups.sum(x).eq(0).all()
    assert groups.norm(x).eq(0).all()
    assert groups.zero(x).tolist() == [True] * groups.count


# ------------------------------------------------------------------------------------------------- blocks


@cases
def test_blocks_cover_each_group_exactly_once(case: Case) -> None:
    whole = case.partition
    view = whole.split(labels(whole, case.shape))
    x = whole.split(random(case, "contiguous"))
    total = view.numel()
    for elements in sorted({1, 2, 3, 7, 16, total // 3, total // 2, total - 1, total, total + 1, 10**9} - {0, -1}):
        seen: list[int] = []
        norms: list[Tensor] = []
        axes = set()
        for axis, start, length, part in ((b.axis, b.start, b.length, b.groups) for b in whole.blocks(elements)):
            axes.add(axis)
            if view.dim() == 0:
                piece, values = view, x
            else:
                piece, values = view.narrow(axis, start, length), x.narrow(axis, start, length)
            assert piece.shape == part.shape
            assert part.size == whole.size
            assert part.group_axes == whole.group_axes
            assert part.swapped == whole.swapped
            mine = part.min(piece).reshape(-1)
            # every entry of the piece belongs to the group that its piece's partition says
            assert torch.equal(part.max(piece).reshape(-1), mine)
            seen += mine.tolist()
            norms.append(part.norm(values))
            one_slice = total // whole.shape[axis] if whole.shape else 1
            assert whole.count == 1 or piece.numel() <= max(elements, one_slice)
        assert sorted(seen) == list(range(whole.count)), elements
        assert len(axes) == 1
        joined = torch.cat(norms, axes.pop()) if view.dim() else norms[0]
        torch.testing.assert_close(joined, whole.norm(x), rtol=0, atol=0)


# ------------------------------------------------------------------------------------- what layers do with it


def partition_by_regularize(layer: nn.Module, name: str, grouping: str | Grouping = "input") -> Partition:
    """The partition of a parameter under the grouping that `regularize` binds to the layer."""
    groups = espalier.regularize(layer, espalier.GroupLasso(1.0), grouping=grouping)
    for group in groups:
        for n, p in group["params"]:
            if n == name:
                return group["grouping"].partition(p.shape)
    raise AssertionError(f"{name} is in no group")


def zero_group(p: nn.Parameter, partition: Partition, number: int) -> None:
    with torch.no_grad():
        p.masked_fill_(labels(partition, tuple(p.shape)) == number, 0.0)


@torch.no_grad()
def channels_read(f: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> set[int]:
    """The channels of x, a batch of one, that f depends on."""
    moved = x.repeat(1 + x.shape[dim], *[1] * (x.dim() - 1))
    for c in range(x.shape[dim]):
        # row 0 stays; row c + 1 differs from it in channel c alone
        moved[c + 1 : c + 2].select(dim, c).add_(torch.randn_like(x.select(dim, c)))
    y = f(moved)
    # in float64, and what does not depend on the channel is equal up to the order of its sums
    return {c for c in range(x.shape[dim]) if (y[c + 1] - y[0]).abs().max() > 1e-9}


def channels_nonzero(y: Tensor, dim: int) -> set[int]:
    return {c for c in range(y.shape[dim]) if y.select(dim, c).count_nonzero()}


@dataclass(frozen=True)
class LayerCase:
    """A layer without bias, the shape of an input, and the axis of the channels in input and output."""

    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    dim: int
    channels: int
    outputs: int

    @property
    def name(self) -> str:
        return str(self.build()).replace(", bias=False", "")


def hf_conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


LAYERS = (
    LayerCase(lambda: nn.Linear(6, 4, bias=False), (1, 6), 1, 6, 4),
    LayerCase(lambda: nn.Linear(6, 4, bias=False), (1, 3, 6), 2, 6, 4),
    LayerCase(lambda: nn.Conv1d(6, 4, 3, bias=False), (1, 6, 5), 1, 6, 4),
    LayerCase(lambda: nn.Conv1d(6, 4, 3, groups=2, bias=False), (1, 6, 5), 1, 6, 4),
    LayerCase(lambda: nn.Conv2d(3, 4, 3, bias=False), (1, 3, 5, 5), 1, 3, 4),
    LayerCase(lambda: nn.Conv2d(6, 4, 1, groups=2, bias=False), (1, 6, 3, 3), 1, 6, 4),
    LayerCase(lambda: nn.Conv2d(6, 9, 3, groups=3, bias=False), (1, 6, 4, 4), 1, 6, 9),
    LayerCase(lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (1, 4, 4, 4), 1, 4, 4),
    LayerCase(lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (1, 4, 4, 4), 1, 4, 8),
    LayerCase(lambda: nn.Conv3d(4, 6, 2, groups=2, bias=False), (1, 4, 3, 3, 3), 1, 4, 6),
    LayerCase(lambda: nn.Conv3d(3, 2, 2, bias=False), (1, 3, 3, 3, 3), 1, 3, 2),
    LayerCase(lambda: nn.ConvTranspose1d(6, 4, 3, bias=False), (1, 6, 5), 1, 6, 4),
    LayerCase(lambda: nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False), (1, 6, 5), 1, 6, 4),
    LayerCase(lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False), (1, 4, 3, 3), 1, 4, 6),
    LayerCase(lambda: nn.ConvTranspose2d(6, 9, 3, groups=3, bias=False), (1, 6, 3, 3), 1, 6, 9),
    LayerCase(lambda: nn.ConvTranspose2d(4, 8, 3, groups=4, bias=False), (1, 4, 3, 3), 1, 4, 8),
    LayerCase(lambda: nn.ConvTranspose3d(4, 6, 2, groups=2, bias=False), (1, 4, 2, 2, 2), 1, 4, 6),
    LayerCase(lambda: hf_conv1d(6, 4), (1, 3, 6), 2, 6, 4),
    LayerCase(lambda: hf_conv1d(5, 5), (1, 3, 5), 2, 5, 5),
)
layers = pytest.mark.parametrize("case", LAYERS, ids=lambda c: c.name)


@layers
def test_an_input_group_is_an_input_channel(case: LayerCase) -> None:
    everything = set(range(case.channels))
    groups = partition_by_regularize(case.build(), "weight", "input")
    assert groups.count == case.channels
    for channel in range(case.channels):
        torch.manual_seed(channel)
        layer, x = case.build().double(), torch.randn(case.input, dtype=torch.float64)
        assert channels_read(layer, x, case.dim) == everything
        zero_group(layer.weight, groups, channel)
        assert channels_read(layer, x, case.dim) == everything - {channel}


@layers
def test_an_output_group_is_an_output_channel(case: LayerCase) -> None:
    everything = set(range(case.outputs))
    groups = partition_by_regularize(case.build(), "weight", "output")
    assert groups.count == case.outputs
    for channel in range(case.outputs):
        torch.manual_seed(channel)
        layer, x = case.build().double(), torch.randn(case.input, dtype=torch.float64)
        zero_group(layer.weight, groups, channel)
        # Conv1D has a bias, zero at the start
        assert channels_nonzero(layer(x), case.dim) == everything - {channel}


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(8, 12, bias=False), (1, 8)),
        (lambda: nn.Conv2d(8, 12, 3, groups=2, bias=False), (1, 8, 4, 4)),
        (lambda: nn.ConvTranspose2d(8, 12, 3, groups=2, bias=False), (1, 8, 3, 3)),
    ],
    ids=["linear", "conv", "transposed"],
)
def test_a_block_is_so_many_neighbouring_channels(
    build: Callable[[], nn.Module], shape: tuple[int, ...], side: str
) -> None:
    channels = 8 if side == "input" else 12
    groups = partition_by_regularize(build(), "weight", Input(block=2) if side == "input" else Output(block=2))
    assert groups.count == channels // 2
    for block in range(channels // 2):
        layer, x = build().double(), torch.randn(shape, dtype=torch.float64)
        zero_group(layer.weight, groups, block)
        left = channels_read(layer, x, 1) if side == "input" else channels_nonzero(layer(x), 1)
        assert left == set(range(channels)) - {2 * block, 2 * block + 1}


def test_channels_last_weights_have_the_same_groups() -> None:
    layer = nn.Conv2d(6, 4, 3, groups=2, bias=False).double().to(memory_format=torch.channels_last)
    groups = partition_by_regularize(layer, "weight", "input")
    x = torch.randn(1, 6, 4, 4, dtype=torch.float64)
    zero_group(layer.weight, groups, 4)
    assert groups.zero(groups.split(layer.weight)).nonzero().flatten().tolist() == [4]
    assert channels_read(layer, x, 1) == {0, 1, 2, 3, 5}


# ------------------------------------------------------------------------------------------------- recurrent

INPUTS, HIDDEN, PROJECTION = 3, 4, 2


@dataclass(frozen=True)
class RecurrentCase:
    build: Callable[[], nn.Module]
    gates: int
    suffix: str = ""
    cell: bool = False
    projected: bool = False

    @property
    def name(self) -> str:
        return str(self.build())

    @property
    def width(self) -> int:
        """Of h."""
        return PROJECTION if self.projected else HIDDEN

    def step(self, m: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the new h and, for an LSTM, the new c."""
        lstm = self.gates == 4
        x, h, c = (s.expand(max(len(x), len(h), len(c)), -1).contiguous() for s in (x, h, c))
        if self.cell:
            out = m(x, (h, c)) if lstm else m(x, h)
            return out if lstm else (out, out)
        _, out = m(x[None], (h[None], c[None])) if lstm else m(x[None], h[None])
        return (out[0][0], out[1][0]) if lstm else (out[0], out[0])


RECURRENT = (
    RecurrentCase(lambda: nn.RNN(INPUTS, HIDDEN), 1, "_l0"),
    RecurrentCase(lambda: nn.GRU(INPUTS, HIDDEN), 3, "_l0"),
    RecurrentCase(lambda: nn.LSTM(INPUTS, HIDDEN), 4, "_l0"),
    RecurrentCase(lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=PROJECTION), 4, "_l0", projected=True),
    RecurrentCase(lambda: nn.RNNCell(INPUTS, HIDDEN), 1, cell=True),
    RecurrentCase(lambda: nn.GRUCell(INPUTS, HIDDEN), 3, cell=True),
    RecurrentCase(lambda: nn.LSTMCell(INPUTS, HIDDEN), 4, cell=True),
)
recurrent = pytest.mark.parametrize("case", RECURRENT, ids=lambda c: c.name)


def one_step(case: RecurrentCase, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    new = {"dtype": torch.float64}
    m = case.build().double()
    return m, torch.randn(1, INPUTS, **new), torch.randn(1, case.width, **new), torch.randn(1, HIDDEN, **new)


@recurrent
def test_recurrent_input_groups(case: RecurrentCase) -> None:
    name = f"weight_ih{case.suffix}"
    groups = partition_by_regularize(case.build(), name)
    assert groups.count == INPUTS
    for j in range(INPUTS):
        m, x, h, c = one_step(case, j)
        zero_group(m.get_parameter(name), groups, j)
        read = channels_read(lambda v, m=m, h=h, c=c: torch.cat(case.step(m, v, h, c), 1), x, 1)
        assert read == set(range(INPUTS)) - {j}


@recurrent
def test_recurrent_hidden_input_groups(case: RecurrentCase) -> None:
    name = f"weight_hh{case.suffix}"
    groups = partition_by_regularize(case.build(), name)
    assert groups.count == case.width
    for j in range(case.width):
        m, x, h, c = one_step(case, j)
        zero_group(m.get_parameter(name), groups, j)

        def others(v: Tensor, m: nn.Module = m, x: Tensor = x, c: Tensor = c, j: int = j) -> Tensor:
            new = case.step(m, x, v, c)[0]
            # a GRU carries h_j on to itself, whatever its weights: look at the other units
            return new[:, [i for i in range(case.width) if i != j]] if case.gates == 3 else new

        assert channels_read(others, h, 1) == set(range(case.width)) - {j}


@recurrent
def test_recurrent_output_groups_hold_all_gates_of_a_unit(case: RecurrentCase) -> None:
    groups = partition_by_regularize(case.build(), f"weight_ih{case.suffix}", "output")
    assert (groups.count, groups.size) == (HIDDEN, case.gates * INPUTS)
    for unit in range(HIDDEN):
        m, x, h, c = one_step(case, unit)
        zero_group(m.get_parameter(f"weight_ih{case.suffix}"), groups, unit)
        last = case.step(m, x, h, c)[1]
        moved = case.step(m, torch.randn_like(x), h, c)[1]
        # c of an LSTM and h otherwise: every unit but this one still reads the input
        assert channels_nonzero(moved - last, 1) == set(range(HIDDEN)) - {unit}


@recurrent
def test_recurrent_hidden_output_groups_hold_all_gates_of_a_unit(case: RecurrentCase) -> None:
    groups = partition_by_regularize(case.build(), f"weight_hh{case.suffix}", "output")
    assert (groups.count, groups.size) == (HIDDEN, case.gates * case.width)
    for unit in range(HIDDEN):
        m, x, h, c = one_step(case, unit)
        zero_group(m.get_parameter(f"weight_hh{case.suffix}"), groups, unit)
        other = torch.randn_like(h)
        if case.gates == 3:
            other[:, unit] = h[:, unit]  # what a GRU carries on whatever its weights
        last, moved = case.step(m, x, h, c)[1], case.step(m, x, other, c)[1]
        assert channels_nonzero(moved - last, 1) == set(range(HIDDEN)) - {unit}


def test_lstm_projection_groups() -> None:
    case = RECURRENT[3]
    inputs = partition_by_regularize(case.build(), "weight_hr_l0", "input")
    outputs = partition_by_regularize(case.build(), "weight_hr_l0", "output")
    assert (inputs.count, outputs.count) == (HIDDEN, PROJECTION)
    for j in range(HIDDEN):
        m, x, h, c = one_step(case, j)
        zero_group(m.weight_hr_l0, inputs, j)
        assert channels_read(lambda v, m=m, x=x, h=h: case.step(m, x, h, v)[0], c, 1) == set(range(HIDDEN)) - {j}
    for j in range(PROJECTION):
        m, x, h, c = one_step(case, j)
        zero_group(m.weight_hr_l0, outputs, j)
        assert channels_nonzero(case.step(m, x, h, c)[0], 1) == set(range(PROJECTION)) - {j}


def test_upper_and_backward_layers_are_cut_alike() -> None:
    m = nn.GRU(3, 4, num_layers=2, bidirectional=True)
    for name, inputs in (("weight_ih_l0_reverse", 3), ("weight_ih_l1", 8), ("weight_hh_l1_reverse", 4)):
        assert partition_by_regularize(m, name).count == inputs
        assert partition_by_regularize(m, name, "output").count == 4


# ------------------------------------------------------------------------------------------------- attention

EMBED, HEADS, KDIM, VDIM = 6, 2, 4, 5


def attention(packed: bool, *, bias: bool = False) -> nn.MultiheadAttention:
    widths = {} if packed else {"kdim": KDIM, "vdim": VDIM}
    m = nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=True, **widths).double()
    return m.eval()


def sources(packed: bool) -> list[Tensor]:
    """A query, keys and values that have nothing in common."""
    widths = (EMBED, EMBED, EMBED) if packed else (EMBED, KDIM, VDIM)
    return [torch.randn(1, 3, w, dtype=torch.float64) for w in widths]


def reads(m: nn.MultiheadAttention, given: list[Tensor]) -> list[set[int]]:
    """The channels of query, keys and values that the output depends on."""

    def run(at: int, v: Tensor) -> Tensor:
        q, k, v = (v if at == i else s.expand(len(v), -1, -1) for i, s in enumerate(given))
        return m(q, k, v, need_weights=False)[0]

    return [channels_read(lambda v, at=at: run(at, v), given[at], 2) for at in range(3)]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_cross_attention_input_groups(packed: bool) -> None:
    torch.manual_seed(0)
    given = sources(packed)
    full = [set(range(s.shape[2])) for s in given]
    assert reads(attention(packed), given) == full
    for part, name in enumerate(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
        for j in range(given[part].shape[2]):
            m = attention(packed)
            name, number = ("in_proj_weight", part * EMBED + j) if packed else (name, j)
            zero_group(m.get_parameter(name), partition_by_regularize(m, name), number)
            assert reads(m, given) == [f - {j} if i == part else f for i, f in enumerate(full)]


def test_packed_self_attention_reads_a_channel_until_q_k_and_v_drop_it() -> None:
    torch.manual_seed(0)
    m, x = attention(packed=True), sources(packed=True)[0]
    groups = partition_by_regularize(m, "in_proj_weight")
    assert (groups.count, groups.size) == (3 * EMBED, EMBED)
    everything, channel = set(range(EMBED)), 2
    for part in range(3):
        assert channels_read(lambda v: m(v, v, v, need_weights=False)[0], x, 2) == everything
        zero_group(m.in_proj_weight, groups, part * EMBED + channel)
        projections = m.in_proj_weight.chunk(3)
        assert [not p[:, channel].any() for p in projections] == [i <= part for i in range(3)]
    assert channels_read(lambda v: m(v, v, v, need_weights=False)[0], x, 2) == everything - {channel}


def test_packed_output_groups_hold_a_row_of_q_k_and_v() -> None:
    x = torch.randn(4, EMBED, dtype=torch.float64)
    for j in range(EMBED):
        m = attention(packed=True)
        groups = partition_by_regularize(m, "in_proj_weight", "output")
        assert (groups.count, groups.size) == (EMBED, 3 * EMBED)
        zero_group(m.in_proj_weight, groups, j)
        for projected in F.linear(x, m.in_proj_weight).chunk(3, dim=1):
            assert channels_nonzero(projected, 1) == set(range(EMBED)) - {j}


def test_unpacked_output_groups() -> None:
    for name, width in (("q_proj_weight", EMBED), ("k_proj_weight", KDIM), ("v_proj_weight", VDIM)):
        m = attention(packed=False)
        zero_group(m.get_parameter(name), partition_by_regularize(m, name, "output"), 4)
        projected = F.linear(torch.randn(4, width, dtype=torch.float64), m.get_parameter(name))
        assert channels_nonzero(projected, 1) == set(range(EMBED)) - {4}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_head_of_the_output_projection(packed: bool) -> None:
    torch.manual_seed(0)
    given, width = sources(packed), EMBED // HEADS
    for head in range(HEADS):
        m = attention(packed, bias=True)
        groups = partition_by_regularize(m.out_proj, "weight", Heads(HEADS))
        assert groups.count == HEADS
        zero_group(m.out_proj.weight, groups, head)
        values = m.in_proj_weight[2 * EMBED :] if packed else m.v_proj_weight
        before = m(*given, need_weights=False)[0]
        for other in range(HEADS):
            kept = values.detach().clone()
            with torch.no_grad():
                values[other * width : (other + 1) * width] += 1.0
            after = m(*given, need_weights=False)[0]
            assert torch.equal(after, before) == (other == head)
            with torch.no_grad():
                values.copy_(kept)


def test_a_head_of_the_packed_projection() -> None:
    torch.manual_seed(0)
    given, width = sources(packed=True), EMBED // HEADS
    for head in range(HEADS):
        m = attention(packed=True)
        groups = partition_by_regularize(m, "in_proj_weight", Heads(HEADS, side="output"))
        assert (groups.count, groups.size) == (HEADS, 3 * width * EMBED)
        kept = {k: v.clone() for k, v in m.state_dict().items()}
        zero_group(m.in_proj_weight, groups, head)
        silenced = m(*given, need_weights=False)[0]
        for rows in m.in_proj_weight.chunk(3):
            assert channels_nonzero(rows, 0) == set(range(EMBED)) - set(range(head * width, (head + 1) * width))
        # the same as a head whose output nobody reads
        m.load_state_dict(kept)
        with torch.no_grad():
            m.out_proj.weight[:, head * width : (head + 1) * width] = 0.0
        torch.testing.assert_close(silenced, m(*given, need_weights=False)[0])


@pytest.mark.parametrize("name", ["q_proj_weight", "k_proj_weight", "v_proj_weight"])
def test_a_head_of_an_unpacked_projection(name: str) -> None:
    m, width = attention(packed=False), EMBED // HEADS
    zero_group(m.get_parameter(name), partition_by_regularize(m, name, Heads(HEADS, side="output")), 1)
    assert channels_nonzero(m.get_parameter(name), 0) == set(range(width))


# ------------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize(
    ("build", "matrices", "shape"),
    [
        (lambda: nn.Linear(6, 4), 1, (4, 6)),
        (lambda: nn.Conv2d(6, 4, 3), 1, (4, 54)),
        (lambda: nn.Conv2d(6, 4, 3, groups=2), 2, (2, 27)),
        (lambda: nn.ConvTranspose2d(6, 4, 3), 1, (4, 54)),
        (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2), 2, (2, 27)),
        (lambda: hf_conv1d(6, 4), 1, (4, 6)),
    ],
    ids=["linear", "conv", "conv-grouped", "transposed", "transposed-grouped", "hf-conv1d"],
)
def test_matrix_is_out_by_rest(build: Callable[[], nn.Module], matrices: int, shape: tuple[int, int]) -> None:
    # parts of a grouped layer share nothing, neither inputs nor outputs: each is a matrix of its own
    layer = build().double()
    bound = espalier.regularize(layer, espalier.NuclearNorm(1.0))[0]["grouping"]
    partition = bound.partition(layer.weight.shape)
    assert partition.shape == (matrices, *shape)
    assert partition.count == matrices


def test_rows_of_a_transposed_matrix_are_outputs() -> None:
    layer = nn.ConvTranspose2d(3, 4, 2, bias=False).double()
    partition = espalier.regularize(layer, espalier.NuclearNorm(1.0))[0]["grouping"].partition(layer.weight.shape)
    view = partition.split(layer.weight.detach()).clone()
    view[0, 2] = 0.0
    with torch.no_grad():
        layer.weight.copy_(partition.merge(view, layer.weight.shape))
    y = layer(torch.randn(1, 3, 4, 4, dtype=torch.float64))
    assert channels_nonzero(y, 1) == {0, 1, 3}


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("grouping", "shape", "says"),
    [
        (Input(), (5,), r"input groups need an axis 1.*\(5,\).*\"output\" or \"element\""),
        (Input(), (), r"input groups need an axis 1"),
        (Output(), (), r"output groups need an axis 0"),
        (Output(layout=TRANSPOSED), (5,), r"output groups need an axis 1"),
        (Input(block=4), (5, 6), r"groups of 4 cannot cut the 6 channels.*divides 6"),
        (Output(block=4), (6, 5), r"groups of 4 cannot cut the 6 channels.*divides 6"),
        (Output(layout=Layout(stacked=4), block=2), (12, 5), r"groups of 2 cannot cut the 3 channels.*divides 3"),
        (Input(layout=Layout(parts=4)), (6, 5), r"axis 0 of shape \(6, 5\).*4 parts"),
        (Matrix(layout=Layout(parts=4)), (6, 5), r"axis 0 of shape \(6, 5\).*4 parts"),
        (Heads(4), (5, 6), r"4 heads do not divide axis 1.*\(5, 6\).*number of heads"),
        (Heads(4, side="output"), (6, 8), r"4 heads do not divide axis 0.*\(6, 8\)"),
        (Heads(2, side="output", layout=Layout(parts=3, stacked=3)), (9, 4), r"2 heads do not divide"),
        (Heads(2), (4,), r"2 heads do not divide axis 1"),
        (Matrix(), (5,), r"\(5,\) is no matrix.*\"element\""),
        (Matrix(), (), r"is no matrix"),
    ],
    ids=str,
)
def test_a_grouping_that_does_not_apply_says_what_to_do(grouping: Grouping, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grouping.partition(shape)


def test_a_stack_that_does_not_divide_names_the_stack() -> None:
    # "choose a number that divides 1" sends the reader after the block, which is not at fault
    with pytest.raises(ValueError, match=r"\b4\b"):
        Output(layout=Layout(stacked=4)).partition((7, 5))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Input(block=0).partition((4, 6)), "block"),
        (lambda: Input(block=-2).partition((4, 6)), "block"),
        (lambda: Output(block=0).partition((4, 6)), "block"),
        (lambda: Heads(0).partition((4, 6)), "heads"),
        (lambda: Heads(-2).partition((4, 6)), "heads"),
        (lambda: Heads(2, side="query").partition((4, 6)), "side"),
        (lambda: Input(layout=Layout(input_dim=-1)).partition((4, 6)), "input_dim"),
        (lambda: Output(layout=Layout(output_dim=-1)).partition((4, 6)), "output_dim"),
        (lambda: Matrix(layout=Layout(output_dim=2)).partition((2, 3, 4)), "output_dim"),
        (lambda: Input(layout=Layout(parts=0)).partition((4, 6)), "parts"),
    ],
    ids=[
        "block-0",
        "block<0",
        "output-block-0",
        "heads-0",
        "heads<0",
        "side",
        "input<0",
        "output<0",
        "axis-2",
        "parts",
    ],
)
def test_settings_without_meaning_are_refused(build: Callable[[], Partition], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize("name", ["inputs", "Input", "", "channel", 3, None, ["input"]])
def test_unknown_groupings_name_the_known(name: object) -> None:
    with pytest.raises(ValueError, match=r"no grouping is called .*'input', 'output', 'element', 'matrix'.*Heads\(8\)"):
        as_grouping(name)  # type: ignore[arg-type]


def test_a_class_in_place_of_a_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match="no grouping is called"):
        as_grouping(espalier.Input)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["input", "output", "element", "matrix"])
def test_names_stand_for_objects(name: str) -> None:
    assert type(as_grouping(name)).__name__.lower() == name
    assert as_grouping(as_grouping(name)) is as_grouping(name)
