"""A wrong removal is told from rounding, and what is reported is what is there."""

import copy
import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from espalier.compact.attention import HeadAttention
from espalier.compact.examples import random_like
from espalier.compact.report import GatherRow, LowRankRow, ShrinkReport, Sizes, measure
from espalier.compact.verify import ShrinkError, check, difference, outputs


class Net(nn.Module):
    """Linear layers with what a case does to their output."""

    def __init__(self, after=lambda x: x, before=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.after, self.before = after, before

    def forward(self, x):
        return self.after(self.second(F.relu(self.first(self.before(x)))))


def narrower(net):
    """The same function without the last hidden units, which the second layer of both does not read."""
    with torch.no_grad():
        net.second.weight[:, 10:] = 0
    small = copy.deepcopy(net)
    small.first.weight = nn.Parameter(net.first.weight[:10].detach().clone())
    small.first.bias = nn.Parameter(net.first.bias[:10].detach().clone())
    small.second.weight = nn.Parameter(net.second.weight[:, :10].detach().clone())
    return small


def example(dtype=torch.float32):
    return (torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype),)


@dataclass
class Record:
    value: torch.Tensor
    count: int = 3


class Named(dict):
    pass


AFTER = {
    "tensor": (lambda x: x, 1),
    "tuple": (lambda x: (x, x[0]), 2),
    "nested": (lambda x: {"a": [x, (x, None)], "b": 3}, 2),
    "integers": (lambda x: (x, x.argmax(-1)), 1),
    "dataclass": (lambda x: Record(x), 1),
    "subclass of dict": (lambda x: Named(a=x, b=(x,)), 2),
    "packed": (lambda x: nn.utils.rnn.pack_sequence([x]), 1),
    "complex": (lambda x: torch.complex(x, x), 1),
    "nan": (lambda x: torch.where(x > 0, x, torch.nan), 1),
    "inf": (lambda x: torch.where(x > 0, x, -torch.inf), 1),
    "zeros": (lambda x: x * 0, 1),
    "empty": (lambda x: x[:0], 1),
}


@pytest.mark.parametrize("kind", AFTER)
def test_all_that_a_model_returns_is_compared(kind):
    after, count = AFTER[kind]
    net = Net(after)
    small = narrower(net)
    assert len(outputs(net, example())) == count
    found = check(net, small, [example(), random_like(example(), 0)])
    assert found.skipped is None
    assert len(found.comparisons) == 4 * count
    assert found.exact < 1e-10
    assert found.largest < 1e-5
    assert found.exact <= found.largest


def test_model_outputs_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = transformers.BertModel(config)
    ids = torch.randint(50, (2, 7))
    assert [tuple(x.shape) for x in outputs(model, (ids,))] == [(2, 7, 16), (2, 16)]
    by_keyword = outputs(model, ((), {"input_ids": ids}))
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, (ids,)), by_keyword, strict=True))
    found = check(model, copy.deepcopy(model), [(ids,)])
    assert {c.output for c in found.comparisons} == {"['last_hidden_state']", "['pooler_output']"}
    assert found.exact == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_removal_raises_in_every_dtype(dtype):
    net = Net().to(dtype)
    small = narrower(net)
    found = check(net, small, [example(dtype)])
    assert {c.dtype for c in found.comparisons} == {dtype, torch.float64}
    with torch.no_grad():
        small.first.bias.mul_(1.01)
    if dtype is torch.bfloat16:  # there it passes for rounding
        assert {c.dtype: c.ok for c in difference(net, small, [example(dtype)]).comparisons} == {
            torch.bfloat16: True,
            torch.float64: False,
        }
    with pytest.raises(ShrinkError, match=r"output of the model on inputs 0 in float64.*1e-10 allowed"):
        check(net, small, [example(dtype)])


CHANGES = {
    "shape": (lambda x: x[:, :2], "of shape"),
    "missing": (lambda x: (x,), "only the"),
    "nan": (lambda x: x.masked_fill(x == x.max(), torch.nan), "NaN or infinite"),
    "inf": (lambda x: x.masked_fill(x == x.max(), torch.inf), "NaN or infinite"),
    "noise": (lambda x: x + 1e-3, "not rounding"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_differs_is_named(kind):
    change, match = CHANGES[kind]
    with pytest.raises(ShrinkError, match=match):
        check(Net(), Net(change), [example()])


@pytest.mark.parametrize("sign", [1, -1])
def test_infinities_have_a_sign(sign):
    nets = [Net(lambda x, s=s: x.masked_fill(x > 0, s * torch.inf)) for s in (1, sign)]
    assert difference(*nets, [example()]).ok == (sign == 1)


def test_zeros_must_stay_zeros():
    with pytest.raises(ShrinkError, match="gives zeros"):
        check(Net(lambda x: x * 0), Net(lambda x: x * 1e-20), [example()])


def test_rounding_inside_a_float64_model_is_allowed_for():
    """A model that casts to float32 within itself is compared as float32, whatever its weights are."""
    cast = Net(lambda x: (x.float() * 1.1).to(x.dtype))
    nudged = Net(lambda x: (x.float() * 1.1).to(x.dtype) * (1 + 1e-7))
    found = check(cast.double(), nudged.double(), [example(torch.float64)])
    assert {c.dtype for c in found.comparisons} == {torch.float32}


def test_rounding_that_the_dense_model_makes_itself_is_allowed_for():
    """(x + 1e4) − 1e4 leaves errors of 1e-3 in float32, which may fall differently in the two models."""
    net = Net(lambda x: (x + 1e4) - 1e4)
    other = Net(lambda x: (x + 7e3) - 7e3)
    found = check(net, other, [example()])
    assert max(c.error for c in found.comparisons if c.dtype is torch.float32) > 1e-4


def test_without_float64_the_reason_is_given():
    def only32(x):
        if x.dtype is torch.float64:
            raise TypeError("no float64 here")
        return x

    net = Net(before=only32)
    found = check(net, narrower(net), [example(), example()])
    assert found.skipped == "TypeError: no float64 here"
    assert found.exact is None
    assert len(found.comparisons) == 2
    assert "no float64 here" in str(found)
    with pytest.raises(ShrinkError, match=r"not compared in float64 \(TypeError"):
        check(net, Net(lambda x: x + 1e-3, only32), [example()])


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="no floating tensor"):
        check(Net(lambda x: x.argmax()), Net(lambda x: x.argmax()), [example()])


def test_models_inputs_and_random_numbers_stay_as_they_were():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    net[2].eval()
    small = copy.deepcopy(net)
    state, (x,) = copy.deepcopy(net.state_dict()), example()
    seen = x.clone()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    check(net, small, [(x,)])
    measure(net, small, (x,), seconds=0.01)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(x, seen)
    for model in (net, small):
        assert [m.training for m in model.modules()] == [True, True, True, False, True]
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_that_draw_see_the_same_random_numbers():
    net = Net(lambda x: x + torch.rand(x.shape, dtype=torch.float64).to(x.dtype))
    assert check(net, narrower(net), [example()]).ok


def test_random_inputs_are_like_the_examples():
    x = torch.randn(50, 40) * 3 + 5
    ids, flags = torch.arange(60).view(6, 10), torch.arange(60) < 20
    mask = torch.full((4, 4), -torch.inf).triu(1)
    given = (x, {"ids": ids, "more": [flags, mask]}, 7, torch.tensor(2.0), torch.ones(30, 30), x.bfloat16())
    y, inner, seven, scalar, ones, half = random_like(given, 0)
    assert abs(y.mean() - 5) < 0.3
    assert abs(y.std() - 3) < 0.3
    assert not torch.equal(y, x)
    assert not torch.equal(inner["ids"], ids)
    assert torch.equal(inner["ids"].flatten().sort()[0], ids.flatten())
    assert inner["more"][0].sum() == 20
    assert torch.equal(inner["more"][1], mask)
    assert (seven, scalar) == (7, 2.0)
    assert abs(ones.std() - 1) < 0.1
    assert half.dtype is torch.bfloat16
    assert torch.equal(random_like(given, 0)[0], y)
    assert not torch.equal(random_like(given, 1)[0], y)


class Product(nn.Module):
    """In place of a Linear: children of other names."""

    def __init__(self, rank):
        super().__init__()
        self.one, self.two = nn.Linear(16, rank, bias=False), nn.Linear(rank, 4)

    def forward(self, x):
        return self.two(self.one(x))


class Encoder(nn.Module):
    """Attention, a bare parameter, a recurrent layer, a shared one, and tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(16))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.shared = nn.Linear(16, 16)
        self.again = self.shared
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.shared.weight
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.rnn(self.encoder(x + self.token))[0]
        return self.head(self.norm((self.again(self.shared(x)) + self.tied(x)).mean(1)))


def test_sizes_of_layers_add_up_to_those_of_the_model():
    dense = Encoder()
    small = copy.deepcopy(dense)
    attention = dense.encoder.layers[0].self_attn
    small.encoder.layers[0].self_attn = HeadAttention.from_dense(attention, [1])
    small.head = Product(2)
    report = measure(dense, small, (torch.randn(2, 5, 16),), seconds=0.3)
    for model, side in ((dense, "dense"), (small, "small")):
        total = getattr(report, side)
        rows = [getattr(layer, side) for layer in report.layers]
        assert total.parameters == sum(p.numel() for p in model.parameters())
        assert total.bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        for field in ("parameters", "bytes", "flops"):
            assert getattr(total, field) == sum(getattr(row, field) for row in rows)
        assert total.ms > 0
    by_name = {layer.name: layer for layer in report.layers}
    assert [layer.name for layer in report.layers if layer.changed] == ["encoder.layers.0.self_attn", "head"]
    assert by_name[""].dense.parameters == 16
    assert by_name["head"].small.parameters == 16 * 2 + 2 * 4 + 4
    assert by_name["head"].dense.flops == 2 * 2 * 16 * 4
    assert by_name["head"].small.flops == 2 * 2 * (16 * 2 + 2 * 4)
    assert by_name["shared"].dense.flops == 2 * 2 * (2 * 5 * 16 * 16)
    assert by_name["rnn"].dense.flops == 2 * 10 * 2 * 64 * 16
    # projections in and out, scores and their product with the values
    heads = [2 * 10 * 16 * 4 * 4 * h + 2 * 2 * 2 * 5 * 5 * 4 * h for h in (4, 1)]
    attended = by_name["encoder.layers.0.self_attn"]
    assert [attended.dense.flops, attended.small.flops] == heads
    assert by_name["head"].dense.ms > 0


def test_a_report_prints_what_changed():
    dense, x = Encoder(), (torch.randn(2, 5, 16),)
    small = copy.deepcopy(dense)
    small.head = Product(2)
    report = measure(
        dense,
        small,
        x,
        difference(dense, copy.deepcopy(dense), [x]),
        ["norm: BatchNorm1d needs all 16 channels"],
        [LowRankRow("head", 2, 1e-7)],
        [GatherRow("tied", 16, 9, 0.25, None)],
        latency=False,
        removed=["head: 24 weights"],
    )
    text = str(report)
    for line in ("parameters", "norm: BatchNorm1d needs all", "head: 24 weights", "1.0e-07", "0.25", "in float64"):
        assert line in text
    assert "68 → 44" in text
    assert "encoder.layers" not in text
    assert report.latency_ratio is None
    assert report.parameters_ratio == pytest.approx(report.small.parameters / report.dense.parameters)
    assert report.flops_ratio < 1
    assert ShrinkReport(Sizes(ms=4.0), Sizes(ms=1.0), ()).latency_ratio == 0.25
    assert ShrinkReport(Sizes(), Sizes(), ()).parameters_ratio == 1


def test_a_model_of_one_layer():
    report = measure(nn.Linear(16, 4), Product(2), (torch.randn(3, 16),), seconds=0.01)
    (layer,) = report.layers
    assert (layer.name, layer.small.parameters) == ("", 44)


def test_latency_keeps_to_its_time(monkeypatch):
    now = 0.0

    def slow(x):
        nonlocal now
        now += 0.05
        return x

    # a clock that only the model moves: the machine may be busy
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    net = Net(slow)
    report = measure(net, net, example(), seconds=0.2)
    assert now < 0.5
    assert report.dense.ms == pytest.approx(50)
