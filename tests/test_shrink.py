"""shrink(): smaller models that compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import espalier
import zoo
from espalier.app.models.vgg import VGG19
from espalier.compact import timing
from espalier.compact.attention import HeadAttention
from espalier.compact.layers import Gather, LowRank
from espalier.compact.layout import channels_last, select, to_channels_last
from espalier.compact.trace import Trace

QUICK = {"latency": False, "gather": "never"}


def structured(
    case: zoo.ModelCase, rate: float, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = case.build()
    zoo.randomise(model, 0)
    zoo.zero_inputs(model, rate, 1, case.blocks)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs(3))
    return model.to(dtype).eval(), inputs


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def error(dense: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Relative to the largest output, on other inputs than shrink() saw."""
    torch.manual_seed(7)
    fresh = tuple(torch.randn_like(x) if x.is_floating_point() else x.flip(-1) for x in inputs)
    with torch.no_grad():
        a, b = zoo.logits(dense.eval(), fresh), zoo.logits(small.eval(), fresh)
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("case", zoo.ZOO, ids=lambda case: case.name)
def test_outputs_are_the_same_and_twice_changes_nothing(case: zoo.ModelCase, rate: float, dtype: torch.dtype) -> None:
    model, inputs = structured(case, rate, dtype)
    before = copy.deepcopy(model.state_dict())
    gather = "always" if rate == 0.6 else "never"
    found = espalier.shrink(model, inputs, latency=False, gather=gather, low_rank=False)
    small = found.model
    assert zoo.unforced(found.report)
    assert error(model, small, inputs) <= (1e-5 if dtype == torch.float32 else 1e-10)
    assert count(small) < count(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()), "the given model was changed"
    again = espalier.shrink(small, inputs, latency=False, gather=gather, low_rank=False).model
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in small.state_dict().items()}
    assert all(torch.equal(v, small.state_dict()[k]) for k, v in again.state_dict().items())


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.86])
def test_vgg_loses_all_that_the_graph_allows(rate: float) -> None:
    torch.manual_seed(0)
    model = VGG19(0.5).eval()
    zoo.randomise(model, 0)
    zoo.zero_inputs(model, rate, 3)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    weights = [*(m.weight.detach().flatten(2) for m in layers), model.classifier.weight.detach().unsqueeze(2)]
    # a channel stays when the next layer reads it
    read = [(w != 0).any(2).any(0) for w in weights]
    read[0][:] = True
    allowed = 0
    for i, w in enumerate(weights):
        rows = int(read[i + 1].sum()) if i + 1 < len(weights) else len(w)
        allowed += rows * (int(read[i].sum()) * w.shape[2] + 1)  # and its bias
        allowed += 2 * rows if i + 1 < len(weights) else 0  # batch norm
    found = count(espalier.shrink(model, torch.randn(2, 3, 32, 32), **QUICK, low_rank=False).model)
    assert abs(found - allowed) <= 0.01 * allowed


class Chain(nn.Module):
    """A producer, something between, and a reader; on images or on vectors."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], width: int = 8, images: bool = True, out: int | None = None
    ) -> None:
        super().__init__()
        read = out or width
        self.a: nn.Module = nn.Conv2d(3, width, 3, padding=1) if images else nn.Linear(5, width)
        self.b: nn.Module = nn.Conv2d(read, 4, 1) if images else nn.Linear(read, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.between(self.a(x)))
        return y


PERM = torch.tensor([3, 1, 0, 2, 7, 5, 4, 6])
# what lies between a layer and its reader, which does not read channels 1 and 5
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "softmax over channels": lambda x: F.softmax(x, 1),
    "softmax over pixels": lambda x: F.softmax(x.flatten(2), 2).view_as(x),
    "normalize": lambda x: F.normalize(x, dim=1),
    "minus the mean of channels": lambda x: x - x.mean(1, keepdim=True),
    "minus the mean of pixels": lambda x: x - x.mean((2, 3), keepdim=True),
    "gate of pixels": lambda x: x * torch.sigmoid(x.sum(1, keepdim=True)),
    "squeeze and excite": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "largest channel": lambda x: x - x.amax(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "functional layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "local response": lambda x: F.local_response_norm(x, 3),
    "permuted": lambda x: x[:, PERM],
    "index_select": lambda x: x.index_select(1, PERM),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(2, 1),
    "shuffle": lambda x: x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
    "hard-coded view": lambda x: x.view(x.shape[0], 8, -1).view(x.shape),
    "hard-coded heads": lambda x: x.view(x.shape[0], 2, 4, -1).tanh().view(x.shape),
    "computed view": lambda x: x.reshape(x.shape[0], x.shape[1], -1).relu().view(x.shape),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "slices": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "twice": lambda x: torch.cat([x, -x], 1)[:, : x.shape[1]],
    "einsum": lambda x: torch.einsum("bchw,bdhw->bdhw", x, x),
    "matmul": lambda x: (x.flatten(2) @ x.flatten(2).transpose(1, 2) @ x.flatten(2)).view_as(x),
    "detached": lambda x: x.detach() + x,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "in place": lambda x: x.add_(1).mul_(2).relu_(),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2),
    "padded": lambda x: F.pad(x, (1, 1, 2, 0)),
    "padded channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1))[:, 1:-1],
    "pooled": lambda x: F.avg_pool2d(F.max_pool2d(x, 2, 1, 1), 3, 1, 1),
    "clamped": lambda x: x.clamp(-1, 1) ** 2,
    "sorted": lambda x: x.sort(1).values,
    "max": lambda x: x.max(1, keepdim=True).values + x,
    "argmax": lambda x: x + x.argmax(1, keepdim=True),
    "repeated": lambda x: x.repeat(1, 1, 2, 1),
    "stacked": lambda x: torch.stack([x, x.relu()]).sum(0),
    "data-dependent": lambda x: x.relu() if bool(x.sum() > 0) else x.tanh(),
    "glu": lambda x: F.glu(torch.cat([x, x], 1), 1),
    "out of place sum": lambda x: sum([x, x.relu(), 1.0], torch.zeros(())),
    "half and back": lambda x: x.double().relu().to(x.dtype),
    "ones of its shape": lambda x: x * torch.ones_like(x) + torch.zeros_like(x),
    "zeros of one channel": lambda x: x + x.new_zeros(x.shape[0], 1, 1, 1),
    "zeros of all channels": lambda x: x + x.new_zeros(x.shape),
    "zeros beside it": lambda x: torch.cat([x, x.new_zeros(x.shape)], 1)[:, : x.shape[1]],
    "full of a sum": lambda x: x + x.new_full((1, 1, 1, 1), x.sum()),
}
REMOVABLE = {
    "relu", "softmax over pixels", "minus the mean of pixels", "squeeze and excite", "computed view", "detached",
    "in place", "interpolated", "padded", "pooled", "clamped", "repeated", "half and back", "ones of its shape",
    "zeros of one channel",
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_lies_between_is_understood_or_left_alone(name: str) -> None:
    torch.manual_seed(0)
    model = Chain(BETWEEN[name]).eval()
    with torch.no_grad():
        model.b.weight[:, [1, 5]] = 0
    inputs = (torch.randn(2, 3, 6, 6),)
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False).model
    assert error(model, small, inputs) < 1e-5
    if name in REMOVABLE:
        assert small.a.weight.shape[0] == 6


def test_new_tensors_whose_sizes_follow_the_channels() -> None:
    """As in shortcuts that are padded with zeros: these channels stay, and the others need not."""
    torch.manual_seed(0)
    model = Chain(lambda x: torch.cat([x, x.new_zeros(x.shape)], 1), out=16)
    more = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 6, 1))
    with torch.no_grad():
        model.b.weight[:, :3] = more[1].weight[:, 1:] = 0
    whole = nn.Sequential(model, more).eval()
    found = espalier.shrink(whole, torch.randn(2, 3, 6, 6), **QUICK)
    assert zoo.unforced(found.report)
    assert found.model[0].b.weight.shape == (1, 16, 1, 1)


@pytest.mark.parametrize("seed", range(200))
def test_random_graphs(seed: int) -> None:
    """Hundreds of small networks of all kinds of layers: no output changes."""
    torch.manual_seed(seed)
    model = RandomNet(seed).double().eval()
    zoo.randomise(model, seed)
    zoo.zero_inputs(model, (0.3, 0.6, 0.9)[seed % 3], seed)
    inputs = (torch.randn(2, 3, 8, 8, dtype=torch.float64),)
    gather = "always" if seed % 4 > 1 else "never"
    options = {"low_rank": seed % 2 == 0, "gather": gather, "align": 1 + seed % 2}
    small = espalier.shrink(model, inputs, latency=False, **options).model
    assert error(model, small, inputs) <= (1e-5 if seed % 2 == 0 else 1e-10)


class RandomNet(nn.Module):
    """A random graph: each node takes one or two earlier ones."""

    def __init__(self, seed: int, nodes: int = 9) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def pick(n: int) -> int:
            return int(torch.randint(n, (), generator=draw))

        self.plan: list[tuple[str, int, int]] = []
        self.layers = nn.ModuleList()
        widths = [3]
        for _ in range(nodes):
            i, j = pick(len(widths)), pick(len(widths))
            kinds = ["conv", "conv", "norm", "relu", "cat", "pool", "depthwise", "valid", "gate", "sigmoid"]
            kind = kinds[pick(len(kinds))]
            same = [k for k, w in enumerate(widths) if w == widths[i]]
            if len(same) > 1 and pick(2):
                kind, j = "add", same[pick(len(same))]
            layer: nn.Module = nn.Identity()
            width = widths[i]
            if kind in ("conv", "valid"):
                width = (4, 6, 8)[pick(3)]
                layer = nn.Conv2d(
                    widths[i], width, 3 if kind == "conv" else 1, padding=int(kind == "conv"), bias=bool(pick(2))
                )
            elif kind == "norm":
                layer = nn.BatchNorm2d(width)
            elif kind == "depthwise":
                layer = nn.Conv2d(width, width, 3, padding=1, groups=width)
            elif kind == "cat":
                width += widths[j]
            self.plan.append((kind, i, j))
            self.layers.append(layer)
            widths.append(width)
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, i, j), layer in zip(self.plan, self.layers, strict=True):
            a, b = values[i], values[j]
            if kind == "add":
                a = a + b
            elif kind == "cat":
                a = torch.cat([a, b], 1)
            elif kind == "relu":
                a = F.relu(a)
            elif kind == "sigmoid":
                a = torch.sigmoid(a)
            elif kind == "pool":
                a = F.avg_pool2d(a, 3, 1, 1)
            elif kind == "gate":
                a = a * torch.sigmoid(a.mean((2, 3), keepdim=True))
            else:
                a = layer(a)
            values.append(a)
        out: Tensor = self.head(values[-1].mean((2, 3)))
        return out


# ---------------------------------------------------------------------------------------------------- constants


@pytest.mark.parametrize(("padding", "folded"), [(0, True), (1, False)])
def test_constants_go_into_the_bias_where_that_is_exact(padding: int, folded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=padding, bias=False)
    ).eval()
    zoo.randomise(model, 0)
    with torch.no_grad():
        model[0].weight[2] = 0  # its channel is what batch norm makes of zero
        model[1].bias[2] = 5
    inputs = (torch.randn(2, 3, 8, 8),)
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False).model
    assert error(model, small, inputs) < 1e-5
    assert small[0].weight.shape[0] == (5 if folded else 6)
    assert (small[3].bias is not None) == folded


def test_half_precision_takes_up_no_constants() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(torch.bfloat16)
    with torch.no_grad():
        model[0].weight[1:3] = 0
        model[0].bias[1] = 0
    small = espalier.shrink(model, torch.randn(3, 4, dtype=torch.bfloat16), **QUICK, low_rank=False).model
    assert small[0].weight.shape[0] == 5, "the channel that is zero goes, the constant one stays"


# ---------------------------------------------------------------------------------------------------- options


def test_align_keeps_multiples() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "vgg19"), 0.6)
    shrunk = espalier.shrink(model, inputs, **QUICK, align=8, low_rank=False)
    small = shrunk.model
    assert any("multiples of 8" in line for line in shrunk.report.kept)
    assert error(model, small, inputs) < 1e-5
    for dense, layer in zip(model.modules(), small.modules(), strict=True):
        if isinstance(layer, nn.Conv2d):
            assert layer.out_channels % 8 == 0 or layer.out_channels == dense.out_channels


@pytest.mark.parametrize(
    ("device", "channels"),
    [
        ("cpu", 10),
        pytest.param("cuda", 16, marks=[
            pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ]),
    ],
)  # fmt: skip
def test_numbers_that_suit_the_device(device: str, channels: int) -> None:
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).to(device)
    with torch.no_grad():
        model[2].weight[:, :10] = 0
    shrunk = espalier.shrink(model, torch.randn(5, 4, device=device), **QUICK, low_rank=False)
    assert shrunk.model[0].out_features == channels
    assert any("multiples of 8" in line for line in shrunk.report.kept) == (device == "cuda")


def test_gather_reads_only_what_it_needs() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "resnet50"), 0.6)
    plain, gathered = (
        espalier.shrink(model, inputs, latency=False, low_rank=False, gather=g) for g in ("never", "always")
    )
    assert count(gathered.model) < 0.9 * count(plain.model)
    assert any(isinstance(m, Gather) for m in gathered.model.modules())
    assert len(gathered.report.gathers) == sum(isinstance(m, Gather) for m in gathered.model.modules())
    auto = espalier.shrink(model, inputs, latency=False, low_rank=False)
    assert all(row.ms_after is not None and row.ms_after < row.ms_before for row in auto.report.gathers)


@pytest.mark.parametrize("rank", [1, 4, 10, 20])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_low_rank_never_makes_it_bigger(kind: str, rank: int) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(30, 20) if kind == "linear" else nn.Conv2d(6, 20, 3, padding=1)
    matrix = torch.randn(20, rank) @ torch.randn(rank, layer.weight[0].numel())
    with torch.no_grad():
        layer.weight.copy_(matrix.view_as(layer.weight))
    model = nn.Sequential(layer, nn.ReLU())
    inputs = (torch.randn(3, 30) if kind == "linear" else torch.randn(2, 6, 5, 5),)
    found = espalier.shrink(model, inputs, **QUICK)
    m, n = 20, matrix.shape[1]
    pays = rank * (m + n) < m * n
    assert isinstance(found.model[0], LowRank) == pays
    assert count(found.model) == (rank * (m + n) + m if pays else count(model))
    assert error(model, found.model, inputs) < 1e-5
    assert not pays or (found.report.low_rank[0].rank == rank and found.report.low_rank[0].bound < 1e-3)


class ReadsWeight(nn.Module):
    """As code of transformers does: a layer's weight says in which type its input must be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(7))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.randn(30, 4) @ torch.randn(4, 30) / 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x.to(layer.weight.dtype) if i in (1, 4) else x).tanh()
        return x


def test_a_layer_that_cannot_become_two_leaves_the_others_theirs() -> None:
    torch.manual_seed(0)
    model, inputs = ReadsWeight(), (torch.randn(5, 30),)
    found = espalier.shrink(model, inputs, **QUICK)
    assert [row.name for row in found.report.low_rank] == [f"layers.{i}" for i in (0, 2, 3, 5, 6)]
    assert [isinstance(layer, LowRank) for layer in found.model.layers] == [i not in (1, 4) for i in range(7)]
    assert count(found.model) == 5 * (4 * 60 + 30) + 2 * (900 + 30)
    assert error(model, found.model, inputs) < 1e-5
    for i in (1, 4):
        (why,) = [line for line in found.report.kept if line.startswith(f"layers.{i}:")]
        assert "stays one layer, for otherwise" in why
        assert "'LowRank' object has no attribute 'weight'" in why


class Forked(ReadsWeight):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](x).tanh()
        return self.layers[1](x.to(self.layers[1].weight.dtype)), self.layers[2](x)


def test_a_layer_has_all_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = Forked(), torch.randn(5, 30)
    with torch.no_grad():
        model.layers[1].weight[:, :3] = 0
    times: list[tuple[float, float]] = []
    monkeypatch.setattr(timing, "_milliseconds", lambda *_: times.append((1.0, 1.0)) or times[-1])
    found = espalier.shrink(model, inputs, latency=False)
    (why,) = [line for line in found.report.kept if line.startswith("layers.1:")]
    assert "selecting them gains less than 5% (1 ms, then 1)" in why
    assert "stays one layer" in why
    assert len(times) == 1
    again = espalier.shrink(found.model, inputs, latency=False)
    assert len(times) == 1  # what was timed is remembered, and told
    assert [why.partition("; stays")[0]] == [x.partition("; stays")[0] for x in again.report.kept if "layers.1:" in x]
    espalier.shrink(found.model, torch.cat((inputs, inputs)), latency=False)
    assert len(times) == 2  # for other inputs it may be otherwise


def test_two_layers_only_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(3)))
    with torch.no_grad():
        for layer, rank in zip(model, (4, 5, 20), strict=True):
            layer.weight.copy_(torch.randn(30, rank) @ torch.randn(rank, 30) / 30)
    seen: list[tuple[int, ...]] = []

    def times(plain: nn.Module, made: LowRank, x: torch.Tensor) -> tuple[float, float]:
        seen.append((made.spec()["rank"], *x.shape))
        return (1.0, 0.5) if seen[-1][0] == 5 else (1.0, 0.96)

    monkeypatch.setattr(timing, "_milliseconds", times)
    inputs, batch = torch.randn(2, 30), torch.randn(7, 30)
    found = espalier.shrink(model, inputs, latency=False, low_rank="auto", timed=batch)
    assert seen == [(4, 7, 30), (5, 7, 30)]  # rank 20 would have more weights
    assert [(row.name, row.rank) for row in found.report.low_rank] == [("1", 5)]
    assert [isinstance(layer, LowRank) for layer in found.model] == [False, True, False]
    assert error(model, found.model, (inputs,)) < 1e-5
    row = found.report.low_rank[0]
    assert (row.ms_before, row.ms_after) == (1.0, 0.5)
    why = '0: has rank 4; making it two layers gains less than 5% (1 ms, then 0.96): low_rank="always" does it anyway'
    assert why in found.report.kept
    seen.clear()
    again = espalier.shrink(model, inputs, latency=False, low_rank="auto", timed=batch).report
    assert (again.kept, again.low_rank) == (found.report.kept, found.report.low_rank)
    assert not seen  # what was timed is remembered
    model, inputs, batch = model.double(), inputs.double(), batch.double()
    tolerant = {"latency": False, "rank_tol": 1e-5}  # of what float32 left
    espalier.shrink(model, inputs, **tolerant, low_rank="auto", timed=batch)
    assert len(seen) == 2  # another type may do otherwise
    for words, ranks in ((("always", True), [4, 5]), (("never", False), [])):
        for word in words:
            report = espalier.shrink(model, inputs, **tolerant, low_rank=word).report
            assert [row.rank for row in report.low_rank] == ranks
    assert len(seen) == 2


class Both(nn.Module):
    """A convolution of low rank that reads some channels of another, and one that reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.some, self.every = nn.Conv2d(3, 20, 1), nn.Conv2d(20, 24, 3, padding=1), nn.Conv2d(20, 2, 1)
        with torch.no_grad():
            self.some.weight.copy_((torch.randn(24, 4) @ torch.randn(4, 180)).view(24, 20, 3, 3))
            self.some.weight[:, :5] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.some(x).sum((1, 2, 3)) + self.every(x).sum((1, 2, 3))


@pytest.mark.parametrize("gone", [False, True])
def test_two_layers_are_timed_with_what_they_will_read(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection of the channels, or those that are left of them; of a batch as it is served."""
    torch.manual_seed(0)
    model, inputs, batch = Both().eval(), torch.randn(2, 3, 8, 6), torch.randn(7, 3, 9, 5)
    if gone:
        with torch.no_grad():
            model.every.weight[:, :5] = 0
    seen: list[tuple[str, tuple[int, ...]]] = []

    def times(plain: nn.Module, made: nn.Module, x: torch.Tensor) -> tuple[float, float]:
        assert plain(x).shape == made(x).shape
        seen.append((type(plain).__name__, tuple(x.shape)))
        return 2.0, 1.0

    monkeypatch.setattr(timing, "_milliseconds", times)
    found = espalier.shrink(model, inputs, latency=False, gather="always", low_rank="auto", timed=batch)
    assert seen == [("Conv2d", (7, 15, 9, 5))]
    assert [row.name for row in found.report.gathers] == ([] if gone else ["some"])
    assert [(row.rank, row.ms_before) for row in found.report.low_rank] == [(4, 2.0)]
    assert error(model, found.model, (inputs,)) < 1e-5


class InSteps(nn.Module):
    """A layer that is called once on few rows, and on many more than once, in unlike parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(30, 4) @ torch.randn(4, 30) / 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split([1, len(x) - 3, 2]) if len(x) > 3 else [x]
        return torch.cat([self.layer(part) for part in parts])


def test_a_layer_is_timed_with_the_largest_of_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(timing, "_milliseconds", lambda _, __, x: seen.append(tuple(x.shape)) or (1.0, 1.0))
    espalier.shrink(InSteps(), torch.randn(2, 30), latency=False, low_rank="auto", timed=torch.randn(9, 30))
    assert seen == [(6, 30)]


class Skips(nn.Module):
    """Channels that one convolution does not read, and the sum does."""

    def __init__(self, conv: type[nn.Module] = nn.Conv2d) -> None:
        super().__init__()
        self.some = conv(12, 12, 3, padding=1)
        self.next = conv(12, 12, 1)
        with torch.no_grad():
            self.some.weight[:, 3:11] = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.next(self.some(x)) + x
        return y


@pytest.mark.parametrize("lies", [True, False], ids=["channels last", "as usual"])
@pytest.mark.parametrize("conv", [nn.Conv2d, nn.Conv3d])
def test_a_selection_lies_in_memory_as_what_it_is_of(conv: type[nn.Module], lies: bool) -> None:
    """Or all layers after it would run in the other layout."""
    torch.manual_seed(0)
    size = (2, 12, *((5,) * (2 if conv is nn.Conv2d else 3)))
    x, model = torch.randn(size), Skips(conv)
    if lies:
        x = to_channels_last(x)
    small = espalier.shrink(model, x, latency=False, gather="always").model
    read: list[Tensor] = []
    small.some.layer.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x))
    assert read[0].shape[1] == 4
    assert channels_last(read[0]) == lies
    assert read[0].is_contiguous() != lies


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.Conv3d])
def test_weights_stay_channels_last(conv: type[nn.Module]) -> None:
    """And their optimizer's state: removed inputs and outputs, selected ones, two layers for one."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(12, 9, 3), nn.ReLU(), conv(9, 12, 3), Skips(conv), conv(12, 20, 3, padding=1))
    with torch.no_grad():
        model[2].weight[:, :4] = 0
        flat = model[4].weight.flatten(1)
        model[4].weight.copy_((torch.randn(20, 2) @ flat[:2]).view_as(model[4].weight))
    model.to(memory_format=torch.channels_last if conv is nn.Conv2d else torch.channels_last_3d)
    x = torch.randn(2, 12, *((9,) * (2 if conv is nn.Conv2d else 3)))
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    found = espalier.shrink(model, x, latency=False, gather="always")
    assert found.model[2].weight.shape[1] == 5
    assert found.model[3].some.layer.weight.shape[1] == 4
    assert found.report.low_rank
    weights = [m.weight for m in found.model.modules() if isinstance(m, conv) and m.weight.shape[2] > 1]
    assert len(weights) == 4
    assert all(map(channels_last, weights))
    kept = found.optimizer(optimizer).state
    assert all(map(channels_last, (state["exp_avg"] for p, state in kept.items() if p.dim() > 1 and p.shape[2] > 1)))
    assert error(model, found.model, (x,)) < 1e-5


@pytest.mark.parametrize("sizes", [(3, 4, 5, 6), (3, 4, 5, 6, 7), (3, 4, 1, 1)])
def test_selections_of_every_dimension(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    usual, wide = torch.randn(sizes), to_channels_last(torch.randn(3, 8, *sizes[2:]))
    turned = usual.transpose(1, -1).contiguous().transpose(1, -1)
    alike = usual[:, :1].expand(sizes)
    parts = [(part, True) for part in (to_channels_last(usual), wide.chunk(2, 1)[1], wide[:, ::2], wide[::2])]
    for x, lies in ((usual, False), (turned, False), (alike, False), *parts):
        assert channels_last(x) == lies
        if len(sizes) == 4 and sizes[-1] > 1:  # torch agrees
            out = nn.functional.conv2d(x, torch.randn(5, x.shape[1], 3, 3))
            assert out.is_contiguous(memory_format=torch.channels_last) == lies
        for dim in range(-len(sizes), len(sizes)):
            index = torch.arange(x.shape[dim]).flip(0)[:3]
            found = select(x, dim, index)
            assert torch.equal(found, x.index_select(dim, index))
            assert channels_last(found) == channels_last(x)
        with pytest.raises(IndexError):
            select(x, len(sizes), torch.tensor([0]))
    # of sequences there is no such layout: torch takes them as they were transposed
    assert not channels_last(torch.randn(2, 5, 4).transpose(1, 2))


def test_a_model_that_selects_can_be_traced() -> None:
    torch.manual_seed(0)
    model = Skips()
    small = espalier.shrink(model, torch.randn(2, 12, 5, 5), latency=False, gather="always").model
    sizes = {"x": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}}
    x = torch.randn(3, 12, 6, 6)
    for shown in (x, to_channels_last(x)):
        exported = torch.export.export(small, (shown,), dynamic_shapes=sizes).module()
        calls = {str(node.target) for node in exported.graph.nodes}
        assert "aten.index_select.default" in calls
        assert "aten.gather.default" not in calls
        for traced in (torch.fx.symbolic_trace(small), exported):
            for other in (x, to_channels_last(x), to_channels_last(torch.randn(1, 12, 4, 9))):
                torch.testing.assert_close(traced(other), model(other))


class ByKeyword(Skips):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.next(self.some(input=x)) + x
        return y


@pytest.mark.parametrize("lies", [True, False], ids=["channels last", "as usual"])
@pytest.mark.parametrize("kind", [Skips, ByKeyword])
@pytest.mark.parametrize("served", [True, False])
def test_a_layer_is_timed_as_its_inputs_lie_in_memory(
    kind: type[nn.Module], lies: bool, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(timing, "_milliseconds", lambda _, __, x: seen.append((len(x), channels_last(x))) or (1.0, 1.0))
    shown, timed = torch.randn(2, 12, 5, 5), torch.randn(3, 12, 5, 5)
    if lies:
        shown, timed = (shown, to_channels_last(timed)) if served else (to_channels_last(shown), timed)
    espalier.shrink(kind(), shown, latency=False, gather="auto", timed=timed if served else None)
    assert seen == [(3 if served else 2, lies)]


def test_layers_whose_weights_lie_otherwise_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        timing, "_milliseconds", lambda layer, *_: seen.append(channels_last(layer.weight)) or (1.0, 1.0)
    )
    for lies in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        espalier.shrink(Skips().to(memory_format=lies), torch.randn(2, 12, 5, 5), latency=False, gather="auto")
    assert seen == [False, True]


def test_what_is_kept_for_time_is_no_matter_of_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, why in (((1.0, 2.0), "selecting them is slower here (1 ms, then 2)"), ((2.0, 1.95), "less than 5%")):
        monkeypatch.setattr(timing, "_milliseconds", lambda *_, times=times: times)
        monkeypatch.setattr(timing, "_measured", {})
        report = espalier.shrink(Skips(), torch.randn(2, 12, 5, 5), latency=False).report
        assert why in str(report)
        assert 'gather="always" does it anyway' in str(report)
        assert "Nothing was removed. See what was kept, and why." in str(report)
        assert "λ" not in str(report)
    dense = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert "λ may be too small yet" in str(espalier.shrink(dense, torch.randn(2, 4), latency=False).report)


class Padded(nn.Module):
    """Its layers are given nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[0, -2:] = True
        y: Tensor = self.head(self.encoder(x, src_key_padding_mask=mask)).sum(1)
        return y


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("served", [True, False])
def test_layers_that_are_given_nested_tensors(served: bool) -> None:
    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(2, 6, 16)
    with torch.no_grad():
        model.head.weight[:, 3:9] = 0
    found = espalier.shrink(model, x, latency=False, timed=torch.randn(4, 6, 16) if served else None)
    assert error(model, found.model, (x,)) < 1e-5


def test_a_reason_is_told_once() -> None:
    trace = Trace()
    for why in ("has rank 4; two layers gain nothing", "is read", "has rank 4; two layers gain nothing"):
        trace.tell("fc", why)
    assert trace.kept == {"fc": "has rank 4; two layers gain nothing; is read"}


def test_a_layer_whose_bias_comes_before_its_weight() -> None:
    """As pruning leaves it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(20, 4) @ torch.randn(4, 30))
    prune.remove(prune.identity(model[0], "weight"), "weight")
    assert [name for name, _ in model.named_parameters()] == ["0.bias", "0.weight"]
    inputs = torch.randn(3, 30)
    assert error(model, espalier.shrink(model, inputs, latency=False, low_rank="auto").model, (inputs,)) < 1e-5


def test_what_was_timed_leaves_nothing_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchScript would stumble over it, and another machine believe it."""
    torch.manual_seed(0)
    monkeypatch.setattr(timing, "_milliseconds", lambda *_: (1.0, 1.0))
    model, inputs = ReadsWeight(), torch.randn(5, 30)
    found = espalier.shrink(model, inputs, latency=False, low_rank="auto")
    assert not found.report.low_rank
    assert all(vars(found.model.layers[i]).keys() == vars(nn.Linear(2, 2)).keys() for i in range(7))


def test_selections_stay_where_no_layer_can_become_two() -> None:
    torch.manual_seed(0)
    model, inputs = ReadsWeight(), torch.randn(5, 30)
    model.layers = model.layers[:2]
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.randn(30, 30))
        model.layers[0].weight[:, :20] = 0
    found = espalier.shrink(model, inputs, **{**QUICK, "gather": "always"})
    assert [row.name for row in found.report.gathers] == ["layers.0"]
    assert not found.report.low_rank
    assert error(model, found.model, (inputs,)) < 1e-5


def test_zero_columns_are_not_low_rank() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU())
    with torch.no_grad():
        model[0].weight[:, :25] = 0
    assert type(espalier.shrink(model, torch.randn(3, 30), **QUICK).model[0]) is nn.Linear


def test_heads_that_nothing_reads() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.no_grad():
        model.self_attn.out_proj.weight[:, 8:24] = 0
    inputs = (torch.randn(2, 5, 32),)
    found = espalier.shrink(model, inputs, **QUICK, low_rank=False)
    assert isinstance(found.model.self_attn, HeadAttention)
    assert found.model.self_attn.num_heads == 2
    assert error(model, found.model, inputs) < 1e-5


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_heads_of_transformers(name: str) -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == name), 0.1)
    out = next(m for n, m in model.named_modules() if n.endswith(("attention.output.dense", "attention.o_proj")))
    with torch.no_grad():
        out.weight[:, 8:24] = 0  # two of four heads
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False).model
    assert error(model, small, inputs) < 1e-5
    assert (
        next(
            m for n, m in small.named_modules() if n.endswith(("attention.output.dense", "attention.o_proj"))
        ).in_features
        == 16
    )


def test_inplace() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "lenet"), 0.6)
    dense = copy.deepcopy(model)
    found = espalier.shrink(model, inputs, **QUICK, inplace=True)
    assert found.model is model
    assert count(model) < count(dense)
    assert error(dense, model, inputs) < 1e-5


def test_report_says_what_was_gained() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "lenet"), 0.6)
    report = espalier.shrink(model, inputs).report
    assert report.small.parameters < report.dense.parameters
    assert report.parameters_ratio == report.small.parameters / report.dense.parameters
    assert 0 < report.flops_ratio < 1
    assert report.latency_ratio is not None
    text = str(report)
    assert "conv2" in text
    assert "fc1" in text


def test_measured_with_a_batch_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "resnet50"), 0.6)
    (x,) = inputs
    timed_with: list[int] = []
    real = timing._milliseconds
    monkeypatch.setattr(timing, "_milliseconds", lambda *a: timed_with.append(len(a[2])) or real(*a))
    few = espalier.shrink(model, inputs, latency=False, low_rank=False).report
    assert timed_with
    assert set(timed_with) == {len(x)}
    timed_with.clear()
    batch = torch.randn(3 * len(x), *x.shape[1:])
    many = espalier.shrink(model, inputs, latency=False, low_rank=False, timed=batch).report
    assert set(timed_with) == {3 * len(x)}
    assert many.dense.flops == 3 * few.dense.flops
    with pytest.raises(espalier.ShrinkError, match="fails on the inputs to time it with: "):
        espalier.shrink(model, inputs, **QUICK, timed=torch.randn(2, 7))


class Branching(nn.Module):
    """Large batches go another way than small ones, through a layer that needs all channels."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large = large
        self.first, self.few, self.many = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.few if len(x) < self.large else self.many)(self.first(x))
        return y


def test_a_batch_that_goes_another_way_is_told() -> None:
    seen, model = Branching(4), Branching(7)  # 4 is among the batches that outputs are compared on
    with torch.no_grad():
        for few in (seen.few, model.few):
            few.weight[:, :4] = 0
    small = espalier.shrink(seen, torch.randn(2, 5), **QUICK, timed=torch.randn(9, 5)).model
    x = torch.randn(9, 5)
    assert torch.allclose(small(x), seen(x), atol=1e-6)
    espalier.shrink(model, torch.randn(2, 5), **QUICK)
    with pytest.raises(espalier.ShrinkError, match="another branch than on the examples"):
        espalier.shrink(model, torch.randn(2, 5), **QUICK, timed=torch.randn(9, 5))


# ---------------------------------------------------------------------------------------------------- unusual models


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.relu(self.again(F.relu(self.again(F.relu(self.first(x)))))))
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.mix(self.embed(x))))
        return y


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.register_buffer("shift", torch.randn(1, 8, 1, 1))
        self.map = nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.scale + self.shift + self.map)
        return y


class Computed(nn.Module):
    """Its weight is made when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2)
        self.mask = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.b.weight * self.mask, self.b.bias)


class Elsewhere(nn.Module):
    """A weight that is also read past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) + self.a.weight.sum()
        return y


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "shared": (Shared, (torch.randn(3, 5),)),
    "tied": (Tied, (torch.arange(11).reshape(1, -1),)),
    "bare": (Bare, (torch.randn(2, 3, 6, 6),)),
    "computed": (Computed, (torch.randn(3, 5),)),
    "elsewhere": (Elsewhere, (torch.randn(3, 5),)),
    "weight norm": (lambda: nn.Sequential(nn.Linear(5, 8), weight_norm(nn.Linear(8, 2))), (torch.randn(3, 5),)),
    "scalar output": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1), nn.Flatten(0)), (torch.randn(3, 5),)),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PReLU(8), nn.Conv2d(8, 2, 1)), (torch.randn(2, 3, 4, 4),)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 2, 1)),
        (torch.randn(2, 3, 9),),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 2, 1)),
        (torch.randn(2, 3, 4, 4),),
    ),
    "all dead": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(3, 5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_models(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = UNUSUAL[name]
    model = build().eval()
    with torch.no_grad():
        for layer in model.modules():
            if (
                isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
                and layer.weight.shape[1] == 8
                and not hasattr(layer, "parametrizations")
            ):
                layer.weight[:, [1, 4]] = 0
                if name == "all dead":
                    layer.weight.zero_()
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False).model
    with torch.no_grad():
        torch.testing.assert_close(small(*inputs), model(*inputs), rtol=1e-5, atol=1e-6)
    if name in ("shared", "tied", "bare", "prelu", "conv1d", "instance norm", "all dead"):
        assert count(small) < count(model)
    if name == "tied":
        assert small.out.weight is small.embed.weight


def test_mode_hooks_and_frozen_parameters_survive() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "vgg19"), 0.6)
    model.train()
    model.features[1].eval()
    model.features[0].weight.requires_grad_(False)
    seen: list[int] = []
    model.classifier.register_forward_hook(lambda *_: seen.append(1))
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False).model
    assert (small.training, small.features[1].training, model.training) == (True, False, True)
    assert not small.features[0].weight.requires_grad
    seen.clear()
    small.eval()(*inputs)
    assert seen == [1]


def test_keyword_inputs() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "bert"), 0.6)
    call = {"input_ids": inputs[0], "attention_mask": torch.ones_like(inputs[0])}
    small = espalier.shrink(model, call, **QUICK, low_rank=False).model
    assert count(small) < count(model)


def test_compiled_model_runs() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "resnet18"), 0.6)
    small = espalier.shrink(model, inputs, latency=False, gather="always").model
    compiled = torch.compile(small, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- bad input


def _fails(x: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


BAD: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], type[Exception], str]] = {
    "not a model": (lambda: "model", torch.ones(1), {}, TypeError, "torch.nn.Module"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), torch.ones(1, 2), {}, TypeError, "compile"),
    "wrapped": (lambda: nn.DataParallel(nn.Linear(2, 2)), torch.ones(1, 2), {}, TypeError, "model.module"),
    "gather": (lambda: nn.Linear(2, 2), torch.ones(1, 2), {"gather": "some"}, ValueError, "auto"),
    "low rank": (lambda: nn.Linear(2, 2), torch.ones(1, 2), {"low_rank": "some"}, ValueError, "low_rank must be"),
    "align": (lambda: nn.Linear(2, 2), torch.ones(1, 2), {"align": 0}, ValueError, "align"),
    "rank_tol": (lambda: nn.Linear(2, 2), torch.ones(1, 2), {"rank_tol": 2.0}, ValueError, "rank_tol"),
    "ignore": (lambda: nn.Linear(2, 2), torch.ones(1, 2), {"ignore": ["layer9"]}, ValueError, "layer9"),
    "device": (lambda: nn.Linear(2, 2), torch.ones(1, 2, device="meta"), {}, ValueError, "meta"),
    "untraceable": (lambda: Chain(_fails, images=False), torch.ones(1, 5), {}, RuntimeError, "no such thing"),
    "wrong shape": (lambda: nn.Linear(2, 2), torch.ones(1, 3), {}, RuntimeError, "shapes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    build, inputs, options, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        espalier.shrink(build(), inputs, **options)


def test_ignored_modules_stay() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "lenet"), 0.6)
    small = espalier.shrink(model, inputs, **QUICK, low_rank=False, ignore=["fc2"]).model
    assert small.fc2.weight.shape == model.fc2.weight.shape
    assert small.fc1.weight.shape[0] == model.fc1.weight.shape[0]
    assert small.conv2.weight.shape[1] < model.conv2.weight.shape[1]
    assert error(model, small, inputs) < 1e-5


# ---------------------------------------------------------------------------------------------------- training


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RAMDA": lambda groups: espalier.RAMDA(groups, lr=1e-2),
    "RMDA": lambda groups: espalier.RMDA(groups, lr=1e-1),
    "ProxSGD": lambda groups: espalier.ProxSGD(groups, lr=1e-2),
    "ProxGen": lambda groups: espalier.ProxGen(groups, lr=1e-3),
    "AdamW": lambda groups: torch.optim.AdamW([p for g in groups for p in g["params"]], lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD([p for g in groups for p in g["params"]], lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_on_the_dense_model(name: str) -> None:
    """... where what was removed is held at zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    optimizer = OPTIMIZERS[name](espalier.regularize(model, espalier.GroupLasso(1e-3)))
    x, y = torch.randn(64, 10).double(), torch.randint(3, (64,))
    masks: dict[Tensor, Tensor] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = _loss(model, x, y)
            loss.backward()
            for p, mask in masks.items():
                p.grad *= mask
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(model, optimizer, 10)
    # structure that RAMDA and its kin would find, given time: in weights and state alike
    with torch.no_grad():
        for layer, columns in ((model[2], slice(0, 20)), (model[4], slice(5, 20))):
            layer.weight[:, columns] = 0
            for v in optimizer.state[layer.weight].values():
                if v.shape == layer.weight.shape:
                    v[:, columns] = 0
    found = espalier.shrink(model, x[:2], **QUICK, low_rank=False)
    assert count(found.model) < 0.5 * count(model)
    small = found.optimizer(optimizer)
    assert type(small) is type(optimizer)
    # the dense model with what was removed at zero, and held there
    with torch.no_grad():
        for key, p in model.named_parameters():
            masks[p] = torch.zeros_like(p)
            index = found.kept.index.get(key, {})
            at = torch.meshgrid(*(index.get(d, torch.arange(n)) for d, n in enumerate(p.shape)), indexing="ij")
            masks[p][at] = 1
            for t in (p, *(v for v in optimizer.state[p].values() if v.shape == p.shape)):
                t *= masks[p]
    dense = train(model, optimizer, 20)
    masks.clear()
    assert torch.allclose(torch.tensor(train(found.model, small, 20)), torch.tensor(dense), rtol=1e-9, atol=1e-12)
    small.load_state_dict(small.state_dict())


def test_optimizer_of_another_model_is_refused() -> None:
    model, inputs = structured(next(c for c in zoo.ZOO if c.name == "mlp"), 0.6)
    found = espalier.shrink(model, inputs, **QUICK)
    with pytest.raises(ValueError, match="another model"):
        found.optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("method", [espalier.RAMDA, espalier.RMDA, espalier.ProxGen])
def test_trained_structure(method: Any) -> None:
    """From training to a small model, as a user would."""
    torch.manual_seed(0)
    model = zoo.LeNet()
    optimizer = method(
        espalier.regularize(model, espalier.GroupLasso(3e-2)), lr=0.05 if method is espalier.RMDA else 1e-2
    )
    x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    for _ in range(60):
        optimizer.zero_grad()
        _loss(model, x, y).backward()
        optimizer.step()
    with optimizer.structured():
        assert espalier.structure(optimizer).group_sparsity > 0.1
        small = espalier.shrink(model, x[:4], **QUICK).model
        assert count(small) < 0.9 * count(model)
        assert error(model, small, (x[:4],)) < 1e-5


@pytest.mark.parametrize("case", zoo.ZOO, ids=lambda case: case.name)
def test_trained_structure_of_all_models(case: zoo.ModelCase) -> None:
    torch.manual_seed(0)
    model = case.build()
    zoo.randomise(model, 0)
    optimizer = espalier.ProxGen(espalier.regularize(model, espalier.GroupLasso(0.1)), lr=5e-3)
    inputs = case.inputs(8)
    for _ in range(15):
        optimizer.zero_grad()
        zoo.logits(model, inputs).square().mean().backward()
        optimizer.step()
    assert espalier.structure(optimizer).group_sparsity > 0.02
    small = espalier.shrink(model, inputs, **QUICK).model
    assert count(small) < count(model)
    assert error(model, small, inputs) < 1e-5
