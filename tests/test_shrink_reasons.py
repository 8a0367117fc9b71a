"""What stays, stays for a reason that the report gives; and it costs its own channels, not those of other layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import espalier
from espalier.compact import rules
from test_shrink_traps import Net

QUICK = {"latency": False, "low_rank": False, "gather": "never"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def unread(layer: Any, *channels: int) -> Any:
    with torch.no_grad():
        layer.weight[:, list(channels)] = 0
    return layer


def shrunk(model: nn.Module, x: Tensor, **options: Any) -> espalier.Shrunk:
    model = model.double().eval()
    found = espalier.shrink(model, x.double(), **{**QUICK, **options})
    for size in (1, 5):
        y = torch.randn(size, *x.shape[1:], dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(found.model(y), model(y), rtol=1e-9, atol=1e-11)
    return found


def scripted(code: str) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        made: Callable[[Tensor], Tensor] = torch.jit.CompilationUnit(f"def f(x):\n  return {code}\n").f
    return made


# ---------------------------------------------------------------------------------------------------- its own channels

# name: (what is between two layers, whether their channels can go, words of the report)
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], bool, str]] = {
    "TorchScript's function": (
        scripted("torch.softmax(x, 1) * x"),
        False,
        "softmax, in code that goes past",
    ),
    "entry by entry in TorchScript": (scripted("x * torch.sigmoid(1.702 * x)"), True, ""),
    "vmap": (torch.vmap(torch.sin), False, "sin, under vmap"),
    "scale by the width": (lambda h: h * h.shape[-1] ** -0.5, False, "does not compute what the dense one does"),
    "the width in an error": (lambda h: h if h.shape[-1] == 8 else h[:, :, None], False, "because without them"),
    "written in the code": (lambda h: h.view(-1, 8).tanh(), False, "because without them"),
    "mapped by numpy": (lambda h: torch.from_numpy(h.numpy()) * 1, False, "numpy is not understood"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_not_seen_costs_its_own_channels(name: str) -> None:
    between, goes, words = BETWEEN[name]
    net = Net(
        lambda s, x: s.f(F.relu(s.e(F.relu(s.d(s.c(s.b(between(s.a(x)))).tanh()))))),
        a=nn.Linear(4, 8), b=unread(nn.Linear(8, 6), 1, 3), c=unread(nn.Linear(6, 8), 2), d=unread(nn.Linear(8, 8), 1),
        e=unread(nn.Linear(8, 9), 0, 1, 2), f=unread(nn.Linear(9, 2), 4, 5),
    )  # fmt: skip
    found = shrunk(net, torch.randn(3, 4))
    small = found.model
    assert [getattr(small, k).out_features for k in "bcdef"] == [5, 7, 5, 7, 2]
    assert small.a.out_features == (6 if goes else 8)
    assert words in str(found.report)


def test_attention_whose_heads_cannot_go_costs_no_other_layer() -> None:
    """Its heads are said by another of its attributes, too."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), unread(nn.Linear(16, 16), 3)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.attention.out_proj.weight.data[:, :8] = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(F.relu(self.a(x)))
            y: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return y * self.attention.num_heads

    small = shrunk(Asks(), torch.randn(2, 5, 16)).model
    assert small.attention.num_heads == 4
    assert small.a.out_features == 15


# name: (what is between two layers, the width that it leaves); channels 1 and 5 of what it gives are not read
UNDERSTOOD: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "where": (lambda s, h: torch.where(h > 0, h, 0.1 * h), 8),
    "times a comparison": (lambda s, h: h * (h > 0) * ~(h >= 1), 8),
    "masked_fill": (lambda s, h: h.masked_fill(h < 0, -1.0), 8),
    "masked_fill in place": (lambda s, h: h.masked_fill_((h < 0) | (h > 1), 0.5), 8),
    "split": (lambda s, h: torch.mul(*h.split(h.shape[-1] // 2, -1)), 16),
    "split by an attribute": (lambda s, h: torch.mul(*h.split(s.half, dim=-1)), 16),
    "split by a list": (lambda s, h: torch.mul(*h.split([s.half, s.half], -1)), 16),
    "split in another dimension": (lambda s, h: torch.mul(*h[:, None].split(split_size=[s.half] * 2, dim=2))[:, 0], 16),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_these_operations_are_understood(name: str) -> None:
    between, width = UNDERSTOOD[name]
    net = Net(lambda s, x: s.b(between(s, s.a(x))), a=nn.Linear(4, width), b=unread(nn.Linear(8, 3), 1, 5), half=8)
    found = shrunk(net, torch.randn(6, 4))
    assert found.model.a.out_features == width * 6 // 8
    assert found.model.half == (6 if "attribute" in name or "list" in name or "dimension" in name else 8)


@pytest.mark.parametrize("half", [4, 8])
def test_pieces_whose_sizes_are_written_in_the_code_stay(half: int) -> None:
    """Of different sizes, or of one: which the code gives as a number."""
    net = Net(lambda s, x: s.b(s.a(x).split([half, 12 - half], -1)[0]).relu(), a=nn.Linear(4, 12),
              b=unread(nn.Linear(half, 3), 1))  # fmt: skip
    assert shrunk(net, torch.randn(6, 4)).model.b.in_features == half


# ---------------------------------------------------------------------------------------------------- parameters

W = nn.Parameter


def weights(*shapes: tuple[int, ...]) -> dict[str, Any]:
    made = {f"w{i}": W(torch.randn(shape)) for i, shape in enumerate(shapes, 1)}
    for w in made.values():
        w.data[..., :2] = 0
    return made


# name: (model, words of the report)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transposed": (lambda: Net(lambda s, x: (x @ s.w1.T) @ s.w2, **weights((6, 8), (6, 3))), "w1 is read by T"),
    "einsum": (
        lambda: Net(lambda s, x: torch.einsum("bi,io->bo", x, s.w1).relu(), **weights((8, 6))), "w1 is read by einsum"
    ),
    "bmm": (
        lambda: Net(lambda s, x: torch.bmm(x[None], s.w1)[0], **weights((1, 8, 6))), "w1 is read by bmm",
    ),
    "tensordot": (
        lambda: Net(lambda s, x: torch.tensordot(x, s.w1, 1).relu(), **weights((8, 6))), "w1 is read by tensordot"
    ),
    "index": (lambda: Net(lambda s, x: x @ s.w1[0], **weights((2, 8, 6))), "w1 is read by __getitem__"),
    "in a layer": (
        lambda: nn.Sequential(nn.Linear(8, 8), Net(lambda s, x: x @ s.w1.t(), **weights((6, 8)))), "1: w1 is read by t"
    ),
    "also elsewhere": (
        lambda: Net(lambda s, x: s.b(s.a(x)) + s.a.weight.sum(), a=nn.Linear(8, 6), b=nn.Linear(6, 6)),
        "a: weight is read by sum",
    ),
    "weight norm": (lambda: nn.Sequential(nn.Linear(8, 8), weight_norm(nn.Linear(8, 2))), "original1 is read by"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_is_read_in_another_way_is_told(name: str) -> None:
    build, words = REFUSED[name]
    found = shrunk(build(), torch.randn(3, 8))
    assert any(words in line for line in found.report.kept), found.report.kept
    assert "λ" not in str(found.report) or "See what was kept" in str(found.report)


def test_a_module_has_all_its_reasons() -> None:
    net = Net(lambda s, x: s.b(s.a(x).sort(-1).values) + s.d(s.c(x).cumsum(-1)),
              a=nn.Linear(4, 6), b=nn.Linear(6, 3), c=nn.Linear(4, 6), d=nn.Linear(6, 3))  # fmt: skip
    (line,) = [line for line in shrunk(net, torch.randn(3, 4)).report.kept if line.startswith("the model: ")]
    assert "sort is not understood" in line
    assert "cumsum over channels" in line


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_zero_columns_of_recurrent_layers_are_told(kind: Any, options: dict[str, Any]) -> None:
    """Groups of inputs leave units that nothing reads through time, and the next layer reads all the same."""
    net = Net(lambda s, x: s.f(s.r(x)[0]), r=kind(4, 8, batch_first=True, **options),
              f=nn.Linear(16 if "bidirectional" in options else 8, 3))  # fmt: skip
    net.r.weight_hh_l0.data[:, :7] = 0
    (line,) = shrunk(net, torch.randn(3, 5, 4)).report.kept
    assert line.startswith("r: 7 of 8 columns of weight_hh_l0 are zero, but a hidden unit leaves only if")


def test_zero_columns_of_other_layers_are_told() -> None:
    net = nn.Sequential(unread(nn.Linear(4, 8), 1), nn.ReLU(), Net(lambda s, x: s.b(x) + s.c(x),
                        b=unread(nn.Linear(8, 3), 2, 3), c=nn.Linear(8, 3)))  # fmt: skip
    kept = shrunk(net, torch.randn(3, 4)).report.kept
    assert "0: 1 of 4 columns of weight are zero, but they read inputs of the model, or channels that must stay" in kept
    assert any(line.startswith("2.b: 2 of 8 columns of weight are zero, but other layers read") for line in kept)


# ---------------------------------------------------------------------------------------------------- projections


@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize("ignore", [[], ["r"]])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}])
def test_an_lstm_with_a_projection_stays_whole(options: dict[str, Any], ignore: list[str], zeros: int) -> None:
    width = 6 if "bidirectional" in options else 3
    net = Net(lambda s, x: s.f(s.e(s.r(x)[0])), r=nn.LSTM(5, 6, proj_size=3, **options), e=nn.Linear(width, 8),
              f=unread(nn.Linear(8, 2), *range(zeros)))  # fmt: skip
    small = shrunk(net, torch.randn(4, 2, 5), ignore=ignore).model
    assert (small.r.hidden_size, small.r.proj_size, small.e.out_features) == (6, 3, 8 - zeros)


def test_a_recurrent_layer_is_given_its_input_by_name() -> None:
    net = Net(lambda s, x: s.f(s.r(input=s.e(x))[0]), e=nn.Linear(4, 8), r=nn.GRU(8, 6), f=nn.Linear(6, 2))
    net.r.weight_ih_l0.data[:, :3] = 0
    assert shrunk(net, torch.randn(3, 5, 4)).model.e.out_features == 5


def test_layers_of_low_rank_answer_for_their_sizes() -> None:
    """Code may ask on a branch that the examples do not take."""
    net = Net(lambda s, x: s.a(x) if len(x) != 5 else s.a(x) * s.a.out_features, a=nn.Linear(30, 20))
    net.double().a.weight.data = torch.randn(20, 2).double() @ torch.randn(2, 30).double()
    small = shrunk(net, torch.randn(3, 30), low_rank=True).model
    assert (type(small.a).__name__, small.a.in_features, small.a.out_features) == ("LowRank", 30, 20)


# ---------------------------------------------------------------------------------------------------- not used in eval


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.mu, self.lv, self.d = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 8)
        with torch.no_grad():
            self.mu.weight[:, :6] = 0
            self.lv.weight[:, 3:9] = 0

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.e(x).relu()
        return self.mu(h), self.lv(h)

    def forward(self, x: Tensor) -> Tensor:
        mu, lv = self.encode(x)
        y: Tensor = self.d(mu + lv.exp() * torch.randn_like(mu) if self.training else mu)
        return y


class Halves(VAE):
    """One layer gives both, as most do it."""

    def __init__(self) -> None:
        super().__init__()
        self.lv = nn.Linear(16, 8)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, lv = self.lv(self.e(x).relu()).chunk(2, -1)
        return mu, lv


@pytest.mark.parametrize("kind", [VAE, Halves])
def test_what_eval_does_not_use_stays_for_training(kind: type[VAE]) -> None:
    model = kind()
    with torch.no_grad():
        model.d.weight[:, 3] = 0  # a dimension of the code that is not read: its mean and variance go together
    small = shrunk(model, torch.randn(3, 8)).model
    x = torch.randn(2, 8, dtype=torch.float64)
    for ours, theirs in zip(small.encode(x), model.encode(x), strict=True):
        torch.testing.assert_close(ours, theirs[:, :3])
    assert small.e.out_features == (13 if kind is VAE else 16)  # three that neither reads
    torch.manual_seed(1)
    y = small.train()(x)
    torch.manual_seed(1)
    noise = torch.randn(2, 3, dtype=torch.float64)
    mean, log_variance = model.encode(x)
    torch.testing.assert_close(y, F.linear(mean[:, :3] + log_variance[:, :3].exp() * noise,
                                           model.d.weight[:, :3], model.d.bias))  # fmt: skip


class Auxiliary(nn.Module):
    """Its second head is not run at all in eval mode."""

    def __init__(self, targets: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.targets = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2), targets
        with torch.no_grad():
            self.b.weight[:, :4] = 0
            self.aux.weight[:, 2:6] = 0

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).relu()
        if self.training and self.targets:
            raise ValueError("targets are needed")
        return (self.b(y), self.aux(y)) if self.training else self.b(y)


def test_what_only_training_runs_is_read_like_the_rest() -> None:
    model = Auxiliary()
    small = shrunk(model, torch.randn(3, 4)).model
    assert (small.a.out_features, small.aux.in_features) == (6, 6)  # two that neither head reads
    x = torch.randn(2, 4, dtype=torch.float64)
    for ours, theirs in zip(small.train()(x), model.train()(x), strict=True):
        torch.testing.assert_close(ours, theirs)


class Average(nn.Module):
    """Only training uses its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), unread(nn.Linear(8, 3), 1, 2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return self.b(y)


def test_buffers_that_only_training_uses_go_with_their_channels() -> None:
    small = shrunk(Average(), torch.randn(3, 4)).model
    assert (small.a.out_features, len(small.mean)) == (6, 6)
    small.train()(torch.randn(2, 4, dtype=torch.float64))


def test_training_mode_that_does_not_run_is_told() -> None:
    report = shrunk(Auxiliary(targets=True), torch.randn(3, 4)).report
    assert "some layers only training uses, and it fails on the examples, so that they may not fit: ShrinkError" in str(
        report
    )


class Idle(nn.Module):
    """A layer whose result neither mode uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(4, 8), unread(nn.Linear(8, 3), 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.idle(y.relu())
        return self.b(y)


def test_a_layer_that_nothing_uses_is_left_alone() -> None:
    found = shrunk(Idle(), torch.randn(3, 4))
    assert found.model.idle.weight.shape == (5, 8)
    assert "idle: not used in eval mode, and kept for training" in found.report.kept


def test_a_layer_that_is_not_run_is_told() -> None:
    net = Net(lambda s, x: s.b(s.a(x) if len(x) < 20 else s.c(x)), a=nn.Linear(4, 8), b=nn.Linear(8, 3),
              c=nn.Linear(4, 8))  # fmt: skip
    assert "c: not run on the examples: code that runs it may not fit" in shrunk(net, torch.randn(3, 4)).report.kept


def test_tensors_of_no_rows_show_nothing() -> None:
    """Where an expert is given nothing, its layers stay."""

    def run(s: Any, x: Tensor) -> Tensor:
        y, chosen = s.a(x), x[:, 0] > 50
        y[chosen] = s.c(y[chosen])
        return s.e(s.b(y)) + s.b(y[:0]).sum()

    net = Net(run, a=nn.Linear(4, 8), b=unread(nn.Linear(8, 6), 1), c=unread(nn.Linear(8, 8), 1),
              e=unread(nn.Linear(6, 2), 1))  # fmt: skip
    small = shrunk(net, torch.randn(3, 4)).model
    x = torch.full((2, 4), 60.0, dtype=torch.float64)
    torch.testing.assert_close(small(x), net(x))


# ---------------------------------------------------------------------------------------------------- faults of rules


@pytest.mark.parametrize("kind", [IndexError, TypeError, ValueError, RuntimeError])
def test_a_fault_of_a_rule_is_no_unknown_operation(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise kind("oh")

    monkeypatch.setitem(rules.RULES, "relu", broken)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    words = rf"rule for relu failed in 1 with {kind.__name__}: oh.*fault of the rule.*ignore=\['1'\]"
    with pytest.raises(espalier.ShrinkError, match=words):
        espalier.shrink(model, torch.randn(2, 4), **QUICK)
    assert espalier.shrink(model, torch.randn(2, 4), **QUICK, ignore=["1"]).model[0].out_features == 8
