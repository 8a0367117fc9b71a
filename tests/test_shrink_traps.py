"""Models on which shrinking could go wrong in silence, or fail without need: each was found by looking for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier

QUICK = {"latency": False, "low_rank": False}


class Net(nn.Module):
    """Layers by name, and a forward given as a function."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def quiet(layer: Any, channel: int = 2, value: float = 1.0) -> Any:
    """A layer with a channel that is a constant."""
    with torch.no_grad():
        layer.weight[channel] = 0
        layer.bias[channel] = value
    return layer


def unread(layer: Any, *channels: int) -> Any:
    with torch.no_grad():
        layer.weight[:, list(channels)] = 0
    return layer


def same(model: nn.Module, example: Any, *others: Any, **options: Any) -> nn.Module:
    """Shrink, and compare on other inputs than those that shrink() saw."""
    model = model.double().eval()
    small = espalier.shrink(model, example, **{**QUICK, **options}).model
    for args in ((example if isinstance(example, tuple) else (example,)), *others):
        with torch.no_grad():
            torch.testing.assert_close(small(*args), model(*args), rtol=1e-9, atol=1e-11)
    return small


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------------- constants


def test_a_unit_that_is_only_quiet_on_the_examples_stays() -> None:
    a = nn.Linear(4, 8)
    a.bias.data[3] = -20
    mask = torch.ones(8)
    mask[0] = 0
    net = Net(lambda s, x: s.b(F.relu(s.a(x)) * s.m), a=a, b=nn.Linear(8, 3), m=nn.Parameter(mask))
    small = same(net, r(256, 4), (100 * r(5, 4),))
    assert small.a.out_features == 7, "what the mask takes away goes"


def test_a_batch_of_one_shows_no_constants() -> None:
    same(Net(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 3)), r(1, 4), (r(7, 4),))


def test_padding_that_the_examples_do_not_need() -> None:
    def run(s: Any, x: Tensor) -> Any:
        h = s.c(x)
        return s.d(F.pad(h, (0, -h.shape[-1] % 2, 0, -h.shape[-2] % 2)))

    net = Net(run, c=quiet(nn.Conv2d(3, 8, 1)), d=nn.Conv2d(8, 4, 1))
    same(net, r(2, 3, 4, 4), (r(2, 3, 5, 5),))


@pytest.mark.parametrize("size", [1, 2])
def test_borders_of_small_maps(size: int) -> None:
    net = nn.Sequential(quiet(nn.Conv2d(3, 8, 3, padding=1)), nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 6, 1))
    same(net, r(2, 3, size, size), (r(2, 3, 8, 8),))


@pytest.mark.parametrize(
    "between",
    [
        lambda h, x: h * x.shape[1],
        lambda h, x: h / x.shape[0],
        lambda h, x: h + x.shape[0],
        lambda h, x: h * torch.tensor(float(x.shape[1])),
        lambda h, x: h + x.mean(),
        lambda h, x: h * float(x.abs().max()),
        lambda h, x: h.clamp(max=x.shape[0]),
    ],
)
def test_numbers_that_depend_on_the_input(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(lambda s, x: s.b(between(s.a(x), x)), a=quiet(nn.Linear(4, 8)), b=nn.Linear(8, 3))
    same(net, r(6, 5, 4), (r(3, 9, 4),))


def test_a_number_given_as_a_tensor() -> None:
    net = Net(lambda s, x, t: s.b(s.a(x) + t), a=quiet(nn.Linear(4, 8)), b=nn.Linear(8, 3))
    same(net, (r(6, 4), torch.tensor(0.3).double()), (r(6, 4), torch.tensor(0.9).double()))


@pytest.mark.parametrize("how", ["masked_fill_", "setitem", "view"])
@pytest.mark.parametrize("gather", ["never", "always"])
def test_what_is_written_in_place_is_no_constant(how: str, gather: str) -> None:
    def run(s: Any, x: Tensor, mask: Tensor) -> Any:
        h = s.a(x)
        if how == "masked_fill_":
            h.masked_fill_(mask.unsqueeze(-1), -1.0)
        elif how == "setitem":
            h[mask] = -1.0
        else:
            h.unsqueeze(1).mul_(mask.double()[:, None, None] + 1)
        return s.c(F.relu(s.b(h)))

    net = Net(run, a=quiet(nn.Linear(4, 8)), b=nn.Linear(8, 8), c=nn.Linear(8, 3))
    net.b.weight.data[1, :] = 0
    net.b.weight.data[1, 2] = 1
    none, some = torch.zeros(5, dtype=torch.bool), torch.tensor([True, False, True, True, False])
    same(net, (r(5, 4), none), (r(5, 4), some), gather=gather)
    same(net, (r(5, 4), some), (r(5, 4), none), gather=gather)


def test_different_multiples_of_a_constant() -> None:
    def run(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        return s.b(torch.cat([h, 2 * h], 1)) + s.b(torch.stack([h, h.tanh()], 1).sum(1))

    same(Net(run, a=quiet(nn.Linear(4, 8)), b=nn.Linear(8, 3)), r(2, 1, 4), (r(3, 1, 4),))


# ---------------------------------------------------------------------------------------------------- sizes in the code


class HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.f = nn.Conv2d(1, 8, 3), nn.Linear(8 * 16, 10)
        self.u, self.v = nn.Linear(10, 12), nn.Linear(12, 2)
        self.f.weight.data.view(10, 8, 16)[:, ::2] = 0
        unread(self.v, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.v(self.u(self.f(F.relu(self.c(x)).view(-1, 8 * 16))))
        return y


def test_a_hard_coded_view_keeps_its_channels_and_the_rest_goes() -> None:
    small = same(HardCoded(), r(2, 1, 6, 6))
    assert small.c.out_channels == 8
    assert small.u.out_features == 10


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h * h.mean((2, 3)).view(h.shape[0], 8, 1, 1),
        lambda h: h + torch.ones(1, 1, 1, 1).double().expand(-1, 8, -1, -1),
        lambda h: h * h.mean((2, 3), keepdim=True).expand(-1, 8, -1, -1),
        lambda h: h.reshape(shape=(h.shape[0], 8, -1)).tanh().reshape(h.shape),
        lambda h: h * h.shape[1] ** -0.5,
        lambda h: F.conv2d(h, torch.ones(8, 1, 1, 1).double(), groups=8),
        lambda h: torch.vmap(torch.sin)(h),
        lambda h: torch.flatten(input=h, start_dim=2).unflatten(dim=2, sizes=h.shape[2:]),
        lambda h: torch.cat((h, h), axis=1)[:, :8],
        lambda h: torch.mean(input=h, dim=1, keepdim=True) + h,
        lambda h: torch.cat(tensors=[h, h], dim=2),
        lambda h: F.relu(input=h).permute(dims=(0, 1, 3, 2)),
        lambda h: h.to(torch.zeros(1, dtype=torch.float64)),
        lambda h: torch.add(h, h, out=torch.empty_like(h)),
    ],
)
def test_nothing_between_two_layers_makes_it_fail(between: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda s, x: s.b(between(s.a(x))), a=nn.Conv2d(3, 8, 1), b=unread(nn.Conv2d(8, 4, 1), 1, 5))
    same(net, r(2, 3, 5, 5), (r(3, 3, 5, 5),))


# ---------------------------------------------------------------------------------------------------- calls and outputs


def test_arguments_by_name_only() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), unread(nn.Linear(8, 3), 1)

        def forward(self, *, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x))
            return y

    assert espalier.shrink(Named(), {"x": torch.randn(3, 4)}, **QUICK).model.a.out_features == 7


def test_bert_by_name() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config)
    unread(model.encoder.layer[0].output.dense, *range(10))
    ids = torch.randint(50, (2, 7))
    small = espalier.shrink(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **QUICK).model
    assert small.encoder.layer[0].intermediate.dense.out_features == 54


@dataclass
class Out:
    y: Tensor
    h: Tensor


class Odd(dict[str, Any]):
    pass


@pytest.mark.parametrize("wrap", [Out, lambda y, h: Odd(y=y, h=h), lambda y, h: (y, None, [h])])
def test_all_outputs_keep_their_channels(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    def run(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        return wrap(s.b(h), h)

    net = Net(run, a=nn.Linear(4, 8), b=unread(nn.Linear(8, 3), 1, 2))
    assert espalier.shrink(net, torch.randn(3, 4), **QUICK).model.a.out_features == 8


def test_a_learned_bias_of_attention() -> None:
    def run(s: Any, x: Tensor) -> Any:
        q, k, v = (f(x).view(2, 5, 4, 4).transpose(1, 2) for f in (s.q, s.k, s.v))
        bias = s.rel(torch.arange(5)[:, None] - torch.arange(5) + 4).permute(2, 0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return s.o(out.transpose(1, 2).reshape(2, 5, -1))

    parts = {name: nn.Linear(16, 16) for name in "qkvo"}
    same(Net(run, rel=nn.Embedding(9, 4), **parts), r(2, 5, 16))


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x, y: s.b(torch.stack([s.a(x), s.c(x)], 1).sum(1)),
        lambda s, x, y: s.b(torch.cat([y, s.a(x)], 1)),
        lambda s, x, y: s.b(torch.cat([s.a(x), s.c(x), y], 1)),
        lambda s, x, y: s.b(s.a(x) * s.w) + F.softmax(s.w, 0)[:3],
        lambda s, x, y: s.b(s.a(x) * s.w) + s.w.chunk(2)[0].sum(),
    ],
)
def test_joins_and_parameters_with_two_uses(run: Callable[..., Any]) -> None:
    parts = {"a": nn.Linear(4, 8), "c": nn.Linear(4, 8), "b": unread(nn.Linear(8, 3), 1, 2)}
    same(Net(run, w=nn.Parameter(torch.randn(8)), **parts), (r(2, 5, 4), r(2, 5, 8)), (r(2, 5, 4), r(2, 5, 8)))


# ---------------------------------------------------------------------------------------------------- modules


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class OnlyOutput(nn.GRU):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[0]


def test_subclasses_with_a_forward_of_their_own() -> None:
    attention = Doubled(16, 4, batch_first=True)
    attention.out_proj.weight.data[:, :8] = 0
    same(Net(lambda s, x: s.a(x, x, x)[0], a=attention), r(2, 5, 16))
    same(Net(lambda s, x: s.b(s.a(x)), a=OnlyOutput(4, 8), b=unread(nn.Linear(8, 3), 1)), r(2, 5, 4))


def test_attention_weights_that_are_given_out_are_of_all_heads() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    attention.out_proj.weight.data[:, :8] = 0
    assert same(Net(lambda s, x: s.a(x, x, x), a=attention), r(2, 5, 16)).a.num_heads == 4
    assert same(Net(lambda s, x: s.a(x, x, x)[0], a=copy.deepcopy(attention)), r(2, 5, 16)).a.num_heads == 2


def test_ignored_containers_are_left_alone_whole() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    attention.out_proj.weight.data[:, :8] = 0
    inner = Net(lambda s, x: s.a(x, x, x)[0], a=attention)
    small = same(nn.Sequential(nn.Linear(4, 16), inner), r(2, 5, 4), ignore=["1"])
    assert type(small[1].a) is nn.MultiheadAttention


def test_code_that_looks_at_a_layers_weight() -> None:
    def run(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        return s.f(h.to(s.f.weight.dtype)) + h.sum(-1, keepdim=True)

    same(Net(run, a=nn.Linear(4, 8), f=unread(nn.Linear(8, 3), 1, 2)), r(3, 4), gather="always")


def test_hooks_stay_with_their_layers() -> None:
    f = nn.Linear(30, 30)
    f.weight.data.copy_(torch.randn(30, 2) @ torch.randn(2, 30))
    f.register_forward_hook(lambda m, i, o: 2 * o)
    same(nn.Sequential(nn.Linear(4, 30), f), r(3, 4), low_rank=True)


def test_nothing_given_is_changed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            y: Tensor = self.a(F.relu_(x))
            return y

    model, x = Counting(), torch.randn(3, 4)
    before, state = x.clone(), torch.get_rng_state()
    espalier.shrink(model, x, latency=False)
    assert model.seen == 0
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------------- optimizers


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_all_that_trained_trains_on() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model.self_attn.out_proj.weight.data[:, :8] = 0
    found = espalier.shrink(model, torch.randn(2, 5, 16), **QUICK)
    assert found.model.self_attn.num_heads == 2
    assert _held(found.optimizer(torch.optim.AdamW(model.parameters()))) == {id(p) for p in found.model.parameters()}


def test_what_did_not_train_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), unread(nn.Linear(8, 8), 1, 2), nn.Linear(8, 3))
    found = espalier.shrink(model, torch.randn(2, 4), latency=False, gather="always")
    assert _held(found.optimizer(torch.optim.SGD(model[3].parameters(), lr=0.1))) == {
        id(p) for p in found.model[3].parameters()
    }


def test_new_parameters_have_the_options_of_their_layer() -> None:
    model = nn.Sequential(quiet(nn.Linear(4, 8)), nn.Linear(8, 3, bias=False))
    found = espalier.shrink(model, torch.randn(2, 4), **QUICK)
    assert found.model[1].bias is not None
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.01}]
    optimizer = found.optimizer(torch.optim.SGD(groups, lr=1.0))
    (rate,) = (g["lr"] for g in optimizer.param_groups if any(p is found.model[1].bias for p in g["params"]))
    assert rate == 0.01


def test_parameters_beside_the_model_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 8), unread(nn.Linear(8, 3), 1))
    temperature = nn.Parameter(torch.ones(()))
    found = espalier.shrink(model, torch.randn(2, 4), **QUICK)
    optimizer = found.optimizer(torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    assert id(temperature) in _held(optimizer)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_denormal_weights_are_zeros(kind: torch.dtype) -> None:
    """What the penalty leaves of weights that nothing pulls at."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), unread(nn.Linear(8, 3), 2, 5)).to(kind)
    tiny = torch.finfo(kind).tiny / 4
    assert tiny > 0
    with torch.no_grad():
        model[2].weight[:, 7] = tiny
    before = copy.deepcopy(model.state_dict())
    small = espalier.shrink(model, torch.randn(4, 6, dtype=kind), **QUICK).model
    assert small[0].out_features == 5
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_denormal_weights_of_what_is_ignored_stay() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight[:, 7] = 1e-39
    small = espalier.shrink(model, torch.randn(4, 6), ignore=["2"], **QUICK).model
    assert torch.equal(small[2].weight, model[2].weight)
    assert espalier.shrink(model, torch.randn(4, 6), **QUICK).model[0].out_features == 7


def test_denormal_numbers_of_float16_are_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), unread(nn.Linear(8, 3), 2, 5)).half()
    with torch.no_grad():
        model[2].weight[:, 7] = 3e-5
    assert model[2].weight[0, 7] < torch.finfo(torch.float16).tiny
    small = espalier.shrink(model, torch.randn(4, 6, dtype=torch.float16), **QUICK).model
    assert small[0].out_features == 6


def test_denormal_weights_stay_where_they_show() -> None:
    """Each row divided by its largest entry, as quantisers do."""
    model = Net(lambda net, x: net.last(F.linear(x, net.w / net.w.abs().amax(1, keepdim=True))), last=nn.Linear(4, 3))
    model.w = nn.Parameter(torch.randn(4, 6))
    with torch.no_grad():
        model.w[0] *= 1e-39
    assert ((model.w != 0) & (model.w.abs() < 1e-38)).any()
    x = torch.randn(5, 6)
    small = espalier.shrink(model, x, **QUICK).model
    torch.testing.assert_close(small(x), model(x))


class ByAList(nn.Module):
    """Layers called by a list that the model does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 40)
        self.order = [self.first, self.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.order[1](self.order[0](x).tanh())


@pytest.mark.parametrize("kind", ["low rank", "selection"])
def test_layers_called_by_another_name_stay(kind: str) -> None:
    model = ByAList()
    with torch.no_grad():
        if kind == "low rank":
            model.first.weight.copy_(torch.randn(40, 3) @ torch.randn(3, 40) / 40)
        else:
            model.first.weight[:, :30] = 0
    found = espalier.shrink(model, torch.randn(5, 40), gather="always", latency=False)
    assert isinstance(found.model.first, nn.Linear)
    assert not found.report.low_rank
    assert not found.report.gathers
    assert any("calls first by another name" in why for why in found.report.kept)


# ---------------------------------------------------------------------------------------------------- other sizes


def test_constants_are_not_folded_where_another_size_shows_that_they_are_none() -> None:
    """The trial inputs include the odd size here; then only what no reader has a weight on leaves."""

    def run(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        return s.b(F.pad(h, (0, 1, 0, 1)) if h.shape[-1] % 2 else h)

    net = Net(run, a=nn.Conv2d(3, 8, 1), b=unread(nn.Conv2d(8, 4, 2, 2), 0, 1))
    with torch.no_grad():
        net.a.weight[:4] = 0
    small = same(net, r(2, 3, 8, 8), (r(2, 3, 9, 9),), also=[r(2, 3, 9, 9)])
    assert small.a.out_channels == 6
