"""Attention with fewer heads computes what the dense module does whose other heads give nothing."""

import copy
import itertools

import pytest
import torch
from torch import nn

from espalier.compact.attention import HeadAttention

EMBED, HEADS, BATCH, LENGTH, SOURCE = 24, 6, 3, 5, 7
DIM = EMBED // HEADS


def dense(keep, seed=0, **options):
    """A module whose heads other than `keep` give nothing, because out_proj does not read them."""
    torch.manual_seed(seed)
    mha = nn.MultiheadAttention(EMBED, HEADS, **options).double().eval()
    with torch.no_grad():
        for p in mha.parameters():  # biases begin at zero
            p.copy_(torch.randn_like(p) / 3)
        gone = [h for h in range(HEADS) if h not in keep]
        mha.out_proj.weight.unflatten(1, (HEADS, DIM))[:, gone] = 0
    return mha


def inputs(mha, batched, self_attention=False):
    torch.manual_seed(1)
    q = torch.randn(BATCH, LENGTH, EMBED).double()
    k, v = (torch.randn(BATCH, SOURCE, d).double() for d in (mha.kdim, mha.vdim))
    if self_attention:
        k = v = q
    if not batched:
        return q[0], k[0], v[0]
    return (q, k, v) if mha.batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))


def masks(kind, batched, source=SOURCE):
    """key_padding_mask and attn_mask."""
    torch.manual_seed(2)
    padding = torch.zeros(BATCH, source, dtype=torch.bool)
    padding[1, -2:] = padding[2, :1] = True
    if not batched:
        padding = padding[1]
    square = torch.rand(LENGTH, source) < 0.3
    square[:, 3] = False  # no row is masked altogether
    each = torch.rand((BATCH if batched else 1) * HEADS, LENGTH, source) < 0.3
    each[:, :, 3] = False
    floating = torch.randn(LENGTH, source).double()
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "attn": {"attn_mask": square},
        "floating": {"attn_mask": floating},
        "heads": {"attn_mask": each},
        "both": {"key_padding_mask": padding, "attn_mask": square},
        "both heads": {"key_padding_mask": padding, "attn_mask": each},
    }[kind]


KINDS = ("none", "padding", "attn", "floating", "heads", "both", "both heads")
OPTIONS = ({}, {"bias": False}, {"kdim": 10, "vdim": 14}, {"kdim": 10, "bias": False})


@pytest.mark.parametrize("keep", [[2], [0, 3, 5], [5, 1], list(range(HEADS))])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_it_computes_what_the_dense_module_does(keep, options, batch_first):
    mha = dense(keep, batch_first=batch_first, **options)
    small = HeadAttention.from_dense(mha, keep)
    assert small.q_weight.shape == (len(keep) * DIM, EMBED)
    for batched, kind, weights in itertools.product((True, False), KINDS, (True, False)):
        args = inputs(mha, batched)
        more = dict(masks(kind, batched), need_weights=weights, average_attn_weights=False)
        expected, got = mha(*args, **more), small(*args, **more)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
        if weights:
            torch.testing.assert_close(got[1], expected[1].index_select(-3, torch.tensor(keep)), rtol=1e-12, atol=1e-12)
            average = small(*args, **masks(kind, batched))[1]
            torch.testing.assert_close(average, got[1].mean(-3), rtol=1e-12, atol=1e-12)
        else:
            assert got[1] is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_self_attention_and_causal_masks(grad, weights):
    mha = dense([0, 4], batch_first=True)
    small = HeadAttention.from_dense(mha, [0, 4])
    args = inputs(mha, True, self_attention=True)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    padding = masks("padding", True, LENGTH)["key_padding_mask"]
    padding = torch.zeros_like(padding, dtype=torch.float64).masked_fill(padding, -1e9)
    with torch.set_grad_enabled(grad):
        for more in ({}, {"is_causal": True}, {"is_causal": True, "key_padding_mask": padding}):
            more = dict(more, attn_mask=causal, need_weights=weights)
            torch.testing.assert_close(small(*args, **more)[0], mha(*args, **more)[0], rtol=1e-12, atol=1e-12)


def test_heads_are_removed_twice():
    mha = dense([1, 4], batch_first=True)
    once = HeadAttention.from_dense(mha, [1, 2, 4])
    twice = HeadAttention.from_dense(once, [0, 2])
    assert twice.head_index.tolist() == [1, 4]
    args = inputs(mha, True)
    for kind in KINDS:
        more = masks(kind, True)
        torch.testing.assert_close(twice(*args, **more)[0], mha(*args, **more)[0], rtol=1e-12, atol=1e-12)


def test_what_it_takes_over():
    mha = nn.MultiheadAttention(EMBED, HEADS, dropout=0.3, batch_first=True, dtype=torch.bfloat16).train()
    mha.in_proj_weight.requires_grad_(False)
    mha.out_proj.bias.requires_grad_(False)
    for small in (HeadAttention.from_dense(mha, [1, 2]), HeadAttention.empty(mha, 2)):
        assert all(m.training for m in small.modules())
        assert small.dropout == 0.3
        assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
        assert {n for n, p in small.named_parameters() if not p.requires_grad} == {
            "q_weight",
            "k_weight",
            "v_weight",
            "out_proj.bias",
        }
        assert small.spec() == {"heads": 2}
        assert small.out_proj.weight.shape == (EMBED, 2 * DIM)
    assert HeadAttention.empty(mha.to("meta"), 2).out_proj.weight.is_meta


def test_it_is_built_again_from_its_spec():
    mha = dense([1, 4], kdim=10)
    small = HeadAttention.from_dense(mha, [1, 4])
    again = HeadAttention.empty(mha, **small.spec())
    again.load_state_dict(small.state_dict())
    for other in (again, copy.deepcopy(small)):
        args, more = inputs(mha, True), masks("heads", True)
        assert torch.equal(other(*args, **more)[0], small(*args, **more)[0])


def test_dropout_drops_in_training_only():
    mha = dense([0, 1], dropout=0.5)
    small = HeadAttention.from_dense(mha, [0, 1])
    args = inputs(mha, True)
    for weights in (True, False):
        assert torch.equal(small(*args, need_weights=weights)[0], small(*args, need_weights=weights)[0])
        small.train()
        assert not torch.equal(small(*args, need_weights=weights)[0], small(*args, need_weights=weights)[0])
        torch.manual_seed(0)
        mean = torch.stack([small(*args, need_weights=weights)[0] for _ in range(2000)]).mean(0)
        torch.testing.assert_close(mean, mha(*args)[0], rtol=0, atol=0.2)
        small.eval()


def test_gradients_are_those_of_the_dense_module():
    mha = dense([0, 3])
    small = HeadAttention.from_dense(mha, [0, 3])
    args = inputs(mha, True)
    for module in (mha, small):
        module(*args, need_weights=False)[0].square().sum().backward()
    rows = torch.arange(EMBED).view(HEADS, DIM)[[0, 3]].flatten()
    for i, (weight, bias) in enumerate(
        ((small.q_weight, small.q_bias), (small.k_weight, small.k_bias), (small.v_weight, small.v_bias))
    ):
        torch.testing.assert_close(weight.grad, mha.in_proj_weight.grad.chunk(3)[i][rows])
        torch.testing.assert_close(bias.grad, mha.in_proj_bias.grad.chunk(3)[i][rows])
    torch.testing.assert_close(small.out_proj.weight.grad, mha.out_proj.weight.grad[:, rows])


@pytest.mark.parametrize(
    ("options", "heads", "match"),
    [
        ({"add_bias_kv": True}, [0], "add_bias_kv"),
        ({"add_zero_attn": True}, [0], "add_zero_attn"),
        ({}, [], "1 to 6"),
        ({}, [0, 0], "different"),
        ({}, [6], "0 to 5"),
        ({}, [-1], "0 to 5"),
    ],
)
def test_refusals(options, heads, match):
    with pytest.raises(ValueError, match=match):
        HeadAttention.from_dense(nn.MultiheadAttention(EMBED, HEADS, **options), heads)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"attn_mask": torch.zeros(1, SOURCE)}, "attn_mask"),
        ({"attn_mask": torch.zeros(BATCH * 2, LENGTH, SOURCE)}, "attn_mask"),
        ({"key_padding_mask": torch.zeros(1, SOURCE)}, "key_padding_mask"),
        ({"is_causal": True}, "mask"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit(more, match):
    mha = dense([0, 1])
    with pytest.raises(RuntimeError, match=match):
        HeadAttention.from_dense(mha, [0, 1])(*inputs(mha, True), **more)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("replaced", [(0,), (1,), (0, 1)])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_it_stands_in_a_transformer_encoder(norm_first, batch_first, replaced):
    """The encoder's nested tensors, which give zeros where there is padding, are those of the dense model too."""
    keep = [0, 2]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    for x in encoder.layers:
        x.self_attn = dense(keep, batch_first=batch_first)
    small = copy.deepcopy(encoder)
    for i in replaced:
        small.layers[i].self_attn = HeadAttention.from_dense(encoder.layers[i].self_attn, keep)
    x = torch.randn(BATCH, LENGTH, EMBED).double()
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, 3, 2])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    src = x if batch_first else x.transpose(0, 1)
    for grad, more in itertools.product(
        (False, True), ({}, {"src_key_padding_mask": padding}, {"mask": causal}, {"mask": causal, "is_causal": True})
    ):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(small(src, **more), encoder(src, **more), rtol=1e-11, atol=1e-11)
            one = {{"mask": "src_mask"}.get(k, k): v for k, v in more.items()}
            pair = (m.layers[replaced[0]](src, **one) for m in (small, encoder))
            torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-11)


def test_export_and_compile():
    mha = dense([0, 3], batch_first=True)
    small = HeadAttention.from_dense(mha, [0, 3])
    args = inputs(mha, True)
    more = {"key_padding_mask": masks("padding", True)["key_padding_mask"], "need_weights": False}
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {k: {0: batch} for k in ("query", "key", "value", "key_padding_mask")} | {"need_weights": None}
    program = torch.export.export(small, args, more, dynamic_shapes=shapes).module()
    larger = [torch.cat([x, x]) for x in args]
    wide = dict(more, key_padding_mask=more["key_padding_mask"].repeat(2, 1))
    torch.testing.assert_close(program(*larger, **wide)[0], mha(*larger, **wide)[0])
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args, **more)[0], mha(*args, **more)[0])
