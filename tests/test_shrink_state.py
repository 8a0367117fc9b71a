"""The model that shrink hands out is fresh; what a model returns or leaves behind is compared, whatever holds it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import espalier
from espalier.compact.runs import run

QUICK: dict[str, Any] = {"latency": False, "gather": "never", "low_rank": "never"}


class Net(nn.Module):
    """Two layers, of which the second reads half of the first, and what a case does around them."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.run = nn.Linear(6, 16), nn.Linear(16, 4), run
        self.register_buffer("seen", torch.zeros(()))
        self.scale: Tensor | None = None
        self.past: list[Tensor] = []
        self.cache: dict[int, Tensor] = {}
        with torch.no_grad():
            self.second.weight[:, :8] = 0

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def hidden(net: Any, x: Tensor) -> Tensor:
    h: Tensor = net.first(x).relu()
    return h


def plain(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.second(hidden(net, x))
    return y


def shrunk(net: nn.Module, **options: Any) -> Any:
    return espalier.shrink(net, torch.randn(3, 6), **QUICK | options)


# ---------------------------------------------------------------------------------------------------- outputs


class Slots:
    __slots__ = ("boxes",)

    def __init__(self, boxes: Tensor) -> None:
        self.boxes = boxes


@dataclass
class Record:
    boxes: Tensor


Pair = namedtuple("Pair", ["name", "boxes"])


class Out(OrderedDict[str, Any]):
    """As the outputs of diffusers: a node of pytree without keys."""


_pytree.register_pytree_node(Out, lambda d: (list(d.values()), list(d)), lambda v, k: Out(zip(k, v, strict=True)))


class Owner:
    def __init__(self, model: nn.Module, boxes: Tensor) -> None:
        self.model, self.boxes, self.me = model, boxes, self


HOLDERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "plain object": lambda net, h: SimpleNamespace(boxes=h),
    "slots": lambda net, h: Slots(h),
    "dataclass": lambda net, h: Record(h),
    "named tuple": lambda net, h: Pair("a", h),
    "nested": lambda net, h: [{"a": (Record(h),)}],
    "pytree without keys": lambda net, h: Out(boxes=h),
    "with the model and itself": Owner,
    "distribution": lambda net, h: torch.distributions.Normal(h, 1.0),
    "closure": lambda net, h: lambda: h + 1,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_in_any_object_keep_their_channels(kind: str) -> None:
    net = Net(lambda net, x: (plain(net, x), HOLDERS[kind](net, hidden(net, x))))
    found = shrunk(net)
    x = torch.randn(5, 6)
    dense, small = (run(model, ((x,), {})).returned for model in (net, found.model))
    assert len(dense) >= 2
    assert {k: v.shape for k, v in dense.items()} == {k: v.shape for k, v in small.items()}
    assert len(found.report.difference.comparisons) >= 8


def test_what_reaches_no_output_goes() -> None:
    found = shrunk(Net(lambda net, x: Out(sample=plain(net, x))))
    assert found.model.first.out_features == 8


@pytest.mark.parametrize(
    "hold", [lambda h: (x for x in [h]), lambda h: map(abs, [h]), lambda h: {h}], ids=["generator", "map", "set"]
)
def test_what_cannot_be_opened_is_refused(hold: Callable[[Tensor], Any]) -> None:
    with pytest.raises(espalier.ShrinkError, match=r"returns a \w+ as \[1\].*Return a tensor"):
        shrunk(Net(lambda net, x: (plain(net, x), hold(hidden(net, x)))))


def test_arrays_and_whole_numbers_are_compared() -> None:
    found = shrunk(Net(lambda net, x: (plain(net, x), plain(net, x).numpy(), plain(net, x).argmax(-1))))
    assert {c.output for c in found.report.difference.comparisons} == {"[0]", "[1]"}
    net = Net(lambda net, x: (plain(net, x), plain(net, x).argmax(-1)))
    other = copy.deepcopy(net)
    other.run = lambda net, x: (plain(net, x), plain(net, x).argmin(-1))
    with pytest.raises(espalier.ShrinkError, match="of its entries differ"):
        espalier.compact.verify.check(net, other, [((torch.randn(9, 6),), {})])
    other.run = lambda net, x: (plain(net, x), plain(net, x).argmax(-1)[:2])
    with pytest.raises(espalier.ShrinkError, match="of shape"):
        espalier.compact.verify.check(net, other, [((torch.randn(9, 6),), {})])
    other.run = lambda net, x: (plain(net, x).double(), plain(net, x).argmax(-1))
    with pytest.raises(espalier.ShrinkError, match="of float64, not float32"):
        espalier.compact.verify.check(net, other, [((torch.randn(9, 6),), {})])


# ---------------------------------------------------------------------------------------------------- results


def _leave(where: str) -> Callable[[Any, Tensor], Tensor]:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = hidden(net, x)
        if where == "attribute":
            net.aux = h
        elif where == "on a layer":
            net.first.aux = {"h": [h]}
        elif where == "history":
            net.past.append(h)
        elif where == "buffer":
            net.seen = h.mean(0)
        y: Tensor = net.second(h)
        return y

    return forward


@pytest.mark.parametrize("where", ["attribute", "on a layer", "history", "buffer"])
def test_results_left_on_modules_keep_their_channels(where: str) -> None:
    found = shrunk(Net(_leave(where)))
    assert found.model.first.out_features == 16
    assert any("left on the model" in c.output for c in found.report.difference.comparisons)


def test_a_hook_that_collects_sees_all_channels() -> None:
    net, seen = Net(plain), {}
    net.first.register_forward_hook(lambda module, args, out: seen.update(h=out))
    small = shrunk(net).model
    small(torch.randn(2, 6))
    assert seen["h"].shape == (2, 16)


def test_a_cache_of_what_depends_on_weights_alone_holds_nothing_back() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        if 0 not in net.cache:
            net.cache[0] = net.first.weight + 0.0
        y: Tensor = net.second(torch.nn.functional.linear(x, net.cache[0], net.first.bias).relu())
        return y

    small = shrunk(Net(forward)).model
    assert small.cache == {}


# ---------------------------------------------------------------------------------------------------- fresh


def _first_call(net: Any, x: Tensor) -> Any:
    """Data-dependent initialisation, a history, a cache, a count, and a hook put in place at the first call."""
    if net.scale is None:
        net.scale = x.std()
        net.second.register_forward_hook(lambda module, args, out: out)
    net.past.append(x.sum())
    net.cache[0] = net.second.bias.detach() + 0
    net.seen += 1
    net.calls = getattr(net, "calls", 0) + 1
    return plain(net, x / net.scale) + net.cache[0]


@pytest.mark.parametrize("options", [{}, {"gather": "always", "low_rank": "always", "latency": True}], ids=str)
def test_the_model_handed_out_has_not_been_run(options: dict[str, Any]) -> None:
    net = Net(_first_call).eval()
    before = copy.deepcopy(vars(net))
    state = torch.get_rng_state()
    found = shrunk(net, **options)
    # shrunk() draws the example inputs itself
    torch.set_rng_state(state)
    torch.randn(3, 6)
    for model in (net, found.model):
        assert (model.scale, model.past, model.cache, float(model.seen)) == (None, [], {}, 0)
        assert not hasattr(model, "calls")
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert vars(net).keys() == before.keys()
    x = 100 * torch.randn(3, 6)
    torch.testing.assert_close(found.model.eval()(x), net(x))
    assert any("changes its state (" in why for why in found.report.kept)


def test_a_model_with_a_cache_becomes_bfloat16_as_the_dense_one_does() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        if 0 not in net.cache:
            net.cache[0] = net.second.bias.detach() + 0
        return torch.nn.functional.linear(hidden(net, x), net.second.weight, net.cache[0])

    small = shrunk(Net(forward)).model.bfloat16()
    assert small(torch.randn(2, 6).bfloat16()).dtype is torch.bfloat16


def _hooked_at_first_call(net: Any, x: Tensor) -> Any:
    if not net.first._forward_hooks:
        net.first.register_forward_hook(lambda module, args, out: out)
    return plain(net, x)


def test_a_model_that_pickles_still_does() -> None:
    net = Net(_hooked_at_first_call)
    small = shrunk(net).model
    small.run = net.run = None  # a test's own function
    pickle.loads(pickle.dumps(small))


def test_the_given_model_and_the_random_numbers_are_left_alone() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.seen += 1
        return plain(net, x) + 0 * torch.rand(())

    net = Net(forward).train()
    net.second.eval()
    net.aux = net.first(torch.randn(2, 6))  # as a step of training leaves it, with its graph
    x, aux = torch.randn(3, 6), net.aux
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    espalier.shrink(net, x, **QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.aux is aux
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))
    assert (net.training, net.first.training, net.second.training) == (True, True, False)


# ---------------------------------------------------------------------------------------------------- state


def _counted(net: Any, x: Tensor) -> Any:
    net.seen += 1
    return plain(net, x) + net.seen


def _streaming(net: Any, x: Tensor) -> Any:
    h = hidden(net, x)
    past, net.scale = net.scale, h.mean(0)
    return net.second(h if past is None else h + past)


@pytest.mark.parametrize("forward", [_counted, _streaming])
def test_models_with_state_in_eval_are_compared_from_equal_states(forward: Any) -> None:
    net = Net(forward).eval()
    found = shrunk(net)
    assert any("second call" in c.output for c in found.report.difference.comparisons)
    assert any("changes its state (" in why for why in found.report.kept)
    small, x = found.model, torch.randn(3, 6)
    for _ in range(3):
        torch.testing.assert_close(small(x), net(x))


def test_an_attribute_that_is_nan_is_no_state() -> None:
    net: Any = Net(plain)
    net.best = float("nan")
    assert not any("changes its state" in why for why in shrunk(net).report.kept)


class Named(Net, dict[str, int]):  # type: ignore[misc]
    __eq__, __hash__ = object.__eq__, nn.Module.__hash__


def test_a_module_that_is_a_dict_too_is_shrunk() -> None:
    net = Named(plain)
    net["of what it holds"] = 1
    small = shrunk(net).model
    assert small.first.out_features < 16
    assert dict(small) == dict(net)


def test_a_second_call_that_differs_is_found() -> None:
    net, other = Net(_streaming), Net(_streaming)
    other.run = lambda net, x: net.second(hidden(net, x))
    with pytest.raises(espalier.ShrinkError, match="second call"):
        espalier.compact.verify.check(net, other, [((torch.randn(3, 6),), {})])


# ---------------------------------------------------------------------------------------------------- refusals


def _pruned(net: Any) -> None:
    from torch.nn.utils import prune

    prune.ln_structured(net.first, "weight", 0.5, n=2, dim=0)


def _fails_to_copy(net: Any) -> None:
    net.lines = (x for x in [1])


def _raises(net: Any, x: Tensor) -> Any:
    if x.abs().max() < 100:
        raise KeyError("no such key")


UNFIT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pruned": (_pruned, r'first: its weight is pruned.*torch.nn.utils.prune.remove\(module, "weight"\)'),
    "weight norm": (
        lambda net: torch.nn.utils.weight_norm(net.second),
        r'second: .*torch.nn.utils.remove_weight_norm\(module, "weight"\)',
    ),
    "spectral norm": (
        lambda net: torch.nn.utils.spectral_norm(net.first)(torch.randn(2, 6)),
        r'first: .*torch.nn.utils.remove_spectral_norm\(module, "weight"\)',
    ),
    "no copy": (_fails_to_copy, "cannot be copied: copy.deepcopy fails with TypeError"),
    "a bare exception": (lambda net: setattr(net, "run", _raises), "fails on the example inputs: KeyError"),
    "not initialised": (lambda net: setattr(net, "second", nn.LazyLinear(4)), "second.weight is not initialised"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_shrunk_is_told_in_one_line(kind: str) -> None:
    net = Net(plain)
    spoil, words = UNFIT[kind]
    spoil(net)
    with pytest.raises(espalier.ShrinkError, match=words):
        shrunk(net)


def test_a_fault_anywhere_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("espalier.compact.shrink")

    def fault(*_: Any, **__: Any) -> Any:
        raise IndexError("out of range")

    monkeypatch.setattr(module, "measure", fault)
    with pytest.raises(espalier.ShrinkError, match="IndexError: out of range") as caught:
        shrunk(Net(plain))
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_cache_of_keys_and_values_holds_no_head_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=30, hidden_size=32, ffn_dim=16, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.OPTModel(config).eval()
    attention = model.decoder.layers[0].self_attn
    with torch.no_grad():
        attention.out_proj.weight[:, :16] = 0
    ids = torch.randint(30, (2, 6))
    small = espalier.shrink(model, ids, **QUICK).model
    assert small.decoder.layers[0].self_attn.out_proj.in_features == 16
    # one more token, with the keys and values of those before
    steps = []
    for each in (model, small):
        with torch.no_grad():
            past = each(ids, use_cache=True).past_key_values
            steps.append(each(ids[:, :1], past_key_values=past).last_hidden_state)
    torch.testing.assert_close(*steps)


def _with_values(rank: int, rest: float, dtype: torch.dtype) -> nn.Linear:
    """256 × 256, with singular values of 1 and some other."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(256, 256, dtype=torch.float64))[0] for _ in range(2))
    values = torch.full((256,), rest, dtype=torch.float64)
    values[:rank] = 1
    layer = nn.Linear(256, 256, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_((u * values) @ v.T)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_rounding(dtype: torch.dtype) -> None:
    eps, x = torch.finfo(dtype).eps, torch.randn(20, 256).to(dtype)
    # what is twice the rounding of its entries is no rounding, and stays
    assert not espalier.shrink(nn.Sequential(_with_values(60, eps, dtype)), x, latency=False).report.low_rank
    layer = nn.Linear(256, 256, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(256, 16) @ torch.randn(16, 256) / 64)
    found = espalier.shrink(nn.Sequential(layer), x, latency=False)
    (row,) = found.report.low_rank
    assert row.rank == 16
    wide, small = (model.double()(x.double()) for model in (copy.deepcopy(layer), copy.deepcopy(found.model)))
    assert (small - wide).abs().max() < eps * wide.abs().max()


# ---------------------------------------------------------------------------------------------------- training


def _running_mean(net: Any, x: Tensor) -> Any:
    h = hidden(net, x)
    if net.training:
        net.mean.lerp_(h.detach().mean(0), 0.1)
    return net.second(h)


def _head_in_training(net: Any, x: Tensor) -> Any:
    h = hidden(net, x)
    return (net.second(h), h) if net.training else net.second(h)


@pytest.mark.parametrize("forward", [_running_mean, _head_in_training])
def test_what_only_training_uses_keeps_its_channels(forward: Any) -> None:
    net = Net(forward)
    net.register_buffer("mean", torch.zeros(16))
    found = shrunk(net)
    x = torch.randn(3, 6)
    dense, small = (run.train()(x) for run in (net, found.model))
    shapes = [[y.shape for y in espalier.compact.walk.tensors_in(out)] for out in (dense, small)]
    assert shapes[0] == shapes[1]


def test_a_result_that_is_the_same_for_all_inputs_keeps_its_channels() -> None:
    net = Net(_leave("attribute"))
    with torch.no_grad():
        net.first.weight.zero_()
        net.first.bias[:] = torch.arange(16.0)
    small = shrunk(net).model
    small(torch.randn(5, 6))
    assert small.aux.shape == (5, 16)


def test_the_report_says_how_to_save_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model, ids = transformers.BertModel(config), torch.randint(30, (2, 5))
    words = "use espalier.save and espalier.load"
    assert words not in str(espalier.shrink(model, ids, **QUICK).report)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[:, :8] = 0
    assert words in str(espalier.shrink(model, ids, **QUICK).report)
